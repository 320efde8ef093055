"""An explanation for a terminal: readable at 40 columns, better at 80 and at 120, and without colour.

Tables are side by side where there is room, and below one another where there is not.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ..notes.lines import ONE_LINE
from .settings import clean, fit
from .steps import HeadLine, LaneReading, LessonStep, Matrix, format_measured

if TYPE_CHECKING:
    from . import Explanation

NARROWEST, WIDEST = 40, 120
INDENT = 3
WIDEST_LANE = 54
CELL = 7
FEW = 3
"""A matrix with room for fewer columns than this gets a line of its own for its name, or for its lane."""
MOST_HEADS = 16
MOST_LABEL = 14
SAYS = 20
"""The narrowest column for the sentence of a reading; below it, the sentence gets a line of its own."""
LANES = ("bold cyan", "bold magenta")
COLOURS = {"Q": "bright_blue", "K": "bright_red", "V": "green"}
HEAT = ((22, 36, 61), (126, 63, 110), (253, 190, 92))
"""The backgrounds of the weights 0, 1/2 and 1; lightness rises all the way."""


def plain(explanation: Explanation, width: int = 80) -> str:
    """The explanation as text without colour."""
    width = max(width, NARROWEST)
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False)
    with console.capture() as written:
        console.print(render(explanation, width))
    return "\n".join(line.rstrip() for line in written.get().splitlines())


def render(explanation: Explanation, width: int) -> RenderableType:
    """What rich prints: as wide as the terminal, up to WIDEST."""
    width = min(width, WIDEST)
    return Constrain(Group(*_parts(explanation, width)), width)


def _parts(explanation: Explanation, width: int) -> Iterator[RenderableType]:
    labels = (explanation.lanes[0].label, explanation.lanes[1].label)
    yield from (_indented(line, indent=1) for line in _header(explanation, width - 1))
    for number, step in enumerate(explanation.steps, start=1):
        yield Text("")
        yield from _heading(number, step, width)
        yield _indented(Text(clean(step.words)))
        for part in tables(step, labels, width - INDENT):
            yield _indented(part)
        if step.note:
            yield _indented(Text(clean(step.note), style="dim"))
    yield Text("")
    yield _indented(Text("∴ ", style="bold").append(clean(explanation.conclusion)), indent=1)
    if explanation.settings.score == "dot":
        yield Text("")
        yield _indented(Text(f"Why √d_k: {ONE_LINE}", style="dim"), indent=1)


def _header(explanation: Explanation, width: int) -> Iterator[Text]:
    """The sentence, the settings, the two lanes."""
    settings = explanation.settings
    yield Text(fit(settings.title, width - 1), style="bold")
    yield Text(settings.facts, style="dim")
    lanes = [
        Text.assemble((lane.label, style), f"  {lane.formula}")
        for lane, style in zip(explanation.lanes, LANES, strict=True)
    ]
    together = Text.assemble(lanes[0], ("   and   ", "dim"), lanes[1])
    if together.cell_len <= width:
        yield together
    else:
        yield from lanes


def _heading(number: int, step: LessonStep, width: int) -> Iterator[RenderableType]:
    line, formula = Text(f"{number:>2} ").append(step.title, style="bold yellow"), Text(step.formula, style="cyan")
    if line.cell_len + INDENT + formula.cell_len <= width:
        yield line.append("   ").append_text(formula)
    else:
        yield line
        # two spaces stand between formulas, never within one
        yield from map(_indented, [formula] if formula.cell_len <= width - INDENT else formula.split(",  "))


def _indented(part: RenderableType, indent: int = INDENT) -> Padding:
    return Padding(part, (0, 0, 0, indent), expand=False)


def tables(step: LessonStep, labels: tuple[str, str], width: int) -> Iterator[RenderableType]:
    """Every number of a step, in at most `width` columns."""
    labels = fit(labels[0], MOST_LABEL), fit(labels[1], MOST_LABEL)
    if step.matrices:
        yield _stack(step.matrices, width)
    if step.lanes:
        yield _pair(step.lanes, width)
    if step.readings:
        yield _readings(step.readings, labels, width)
    if step.heads:
        yield _heads(step.heads, labels, width)


def _stack(matrices: tuple[Matrix, ...], width: int) -> RenderableType:
    """Matrices below one another: name and shape, the word, the first numbers of its row."""
    name = max(cell_len(f"{matrix.name} {matrix.size}") for matrix in matrices)
    label = max(1, *map(_label_width, matrices))
    if width - name - label - 2 < _few(matrices[0]):
        name = -1  # no column and no space after it: the name stands above
    columns, more = _columns(matrices[0], width - name - label - 2)
    parts: list[RenderableType] = []
    for matrix in matrices:
        style = COLOURS.get(matrix.name.removeprefix("W_"), "")
        title = Text(matrix.name, style=f"bold {style}").append(f" {matrix.size}", style="not bold")
        grid = _grid([*[name] * (name > 0), label, *[CELL - 1] * columns, 1], space=1)
        before: list[RenderableType] = [""] * (name > 0)
        if not before:
            parts.append(title)
        if matrix.columns:
            grid.add_row(*before, "", *(Text(_right(word), style="dim") for word in matrix.columns[:columns]))
        for index, row in enumerate(matrix.values):
            word = fit(matrix.rows[index], label) if matrix.rows else ""
            numbers = [Text(_right(matrix.format(value)), style=style) for value in row[:columns]]
            grid.add_row(*([title] if before and index == 0 else before), word, *numbers, "…" if more else "")
        if matrix.cut_below:
            grid.add_row(*before, "⋮")
        parts.append(grid)
    return Group(*parts)


def _pair(lanes: tuple[Matrix, ...], width: int) -> RenderableType:
    """The two lanes side by side, or the second below the first."""
    each = min((width - 3) // 2, WIDEST_LANE)
    beside = each >= _label_width(lanes[0]) + 1 + _few(lanes[0])
    tables = [_lane(matrix, style, each if beside else width) for matrix, style in zip(lanes, LANES, strict=True)]
    if not beside:
        return Group(*tables)
    grid = _grid([each, each], space=3)
    grid.add_row(*tables)
    return grid


def _lane(matrix: Matrix, style: str, width: int) -> RenderableType:
    """One lane's table; weights are shaded."""
    label = _label_width(matrix)
    columns, more = _columns(matrix, width - label - 1)
    grid = _grid([label + 1, *[CELL] * columns, 2], space=0)
    if matrix.columns:
        grid.add_row("", *(Text(_right(word), style="dim") for word in matrix.columns[:columns]))
    for index, row in enumerate(matrix.values):
        cells = (
            Text(_right(matrix.format(value)) + " " * matrix.weights, _heat(value) if matrix.weights else "")
            for value in row[:columns]
        )
        grid.add_row(fit(matrix.rows[index], label), *cells, "…" if more else "")
    if matrix.shape[0] > len(matrix.values):
        grid.add_row("⋮")
    return Group(Text(matrix.name, style=style).append(f" {matrix.size}", style="not bold"), grid)


def _readings(readings: tuple[LaneReading, ...], labels: tuple[str, str], width: int) -> RenderableType:
    """A line per reading, and one for its prediction; in a narrow terminal a line per lane."""
    lines = [(line, index > 0) for reading in readings for index, line in enumerate(reading.lines)]
    rows = [["", *labels, ""], *(["  " * predicted + label, *rest] for (label, *rest), predicted in lines)]
    widths = [max(cell_len(row[index]) for row in rows) for index in range(4)]
    if sum(widths[:3]) + 6 + min(SAYS, widths[3]) > width:
        return Group(*(line for reading in readings for line in _narrow_reading(reading, labels, width)))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for _ in labels:
        table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    table.add_row("", *(Text(label, style=style) for label, style in zip(labels, LANES, strict=True)), "")
    for (label, first, second, says), (_, predicted) in zip(rows[1:], lines, strict=True):
        own, style = ("dim", "dim") if predicted else ("bold", "")
        table.add_row(Text(label, style=style), Text(first, style=own), Text(second, style=own), says)
    return table


def _narrow_reading(reading: LaneReading, labels: tuple[str, str], width: int) -> Iterator[Text]:
    yield Text(reading.label).append(f": {reading.says}", style="dim")
    predicted: Sequence[str] = reading.predictions[0] if reading.predictions else ("", "")
    wide = max(map(cell_len, labels))
    for label, style, value, words in zip(labels, LANES, reading.values, predicted, strict=True):
        line = Text("  ").append(label + " " * (wide - cell_len(label)), style=style)
        line.append(f"  {format_measured(value):>7}", style="bold")
        expected = Text(f"  expected {words}" if words else "", style="dim")
        if line.cell_len + expected.cell_len <= width:
            yield line.append_text(expected)
        else:
            yield from (line, Text("  ").append_text(expected))
    if reading.predictions:
        yield Text(f"  expected: {reading.theory}", style="dim")


def _heads(lines: tuple[HeadLine, ...], labels: tuple[str, str], width: int) -> RenderableType:
    """A line per head: all signs of both lanes in one table, or a table for each sign."""
    shown = {
        line.head: {name: tuple(map(format_measured, pair)) for name, pair in line.signs.items()}
        for line in lines[:MOST_HEADS]
    }
    signs = list(lines[0].signs)
    sizes = [
        max(9, cell_len(label), *(len(cells[name][lane]) for cells in shown.values() for name in signs))
        for lane, label in enumerate(labels)
    ]
    sizes[0] = max(sizes[0], *map(len, signs))  # a sign's name stands above its first lane
    together = 4 + len(signs) * (sum(sizes) + 4) <= width
    parts: list[RenderableType] = []
    for names in [signs] if together else [[name] for name in signs]:
        table = Table.grid(padding=(0, 2, 0, 0))
        for size in (4, *sizes * len(names)):
            table.add_column(justify="right", width=size)
        if together:
            table.add_row("", *(word for name in names for word in (name, "")), style="bold")
        else:
            parts.append(Text(names[0], style="bold"))
        heads = [Text(label, style=style) for label, style in zip(labels, LANES, strict=True)]
        table.add_row("head", *heads * len(names))
        for head, cells in shown.items():
            table.add_row(str(head), *(cell for name in names for cell in cells[name]))
        parts.append(table)
    if len(lines) > MOST_HEADS:
        parts.append(Text(f"   ⋮  and {len(lines) - MOST_HEADS} more"))
    return Group(*parts)


def _grid(widths: Sequence[int], space: int) -> Table:
    """Columns of these widths without a frame, with this much space after each."""
    grid = Table.grid(padding=(0, space, 0, 0))
    for width in widths:
        grid.add_column(width=width)
    return grid


def _few(matrix: Matrix) -> int:
    """The smallest width at which a row is readable."""
    return min(FEW, len(matrix.values[0])) * CELL + 2


def _columns(matrix: Matrix, width: int) -> tuple[int, bool]:
    """The number of columns that fit, and whether some are left out."""
    have = len(matrix.values[0])
    columns = min(have, width // CELL)
    if columns == matrix.shape[-1]:
        return columns, False
    return max(1, min(have, (width - 2) // CELL)), True


def _label_width(matrix: Matrix) -> int:
    return min(10, max((cell_len(word) for word in matrix.rows), default=0))


def _heat(weight: float) -> Style:
    low, high, share = (*HEAT[:2], 2 * weight) if weight < 0.5 else (*HEAT[1:], 2 * weight - 1)
    background = "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high, strict=True))
    return Style(bgcolor=f"#{background}", color="#101010" if weight > 0.65 else "#f4f4f4")


def _right(word: str) -> str:
    """A word or a number, right-aligned in its column."""
    word = fit(word, CELL - 1)
    return " " * (CELL - 1 - cell_len(word)) + word
