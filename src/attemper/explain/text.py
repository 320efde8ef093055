"""An explanation for a terminal: readable at 80 columns, better at 120, and without colour."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from .steps import HeadLine, Matrix, Reading, Step, measured

if TYPE_CHECKING:
    from . import Explanation

WIDEST, WIDEST_LANE = 120, 54
INDENT = 3
CELL = 7
MOST_HEADS = 16
LANES = ("bold cyan", "bold magenta")
COLOURS = {"Q": "bright_blue", "K": "bright_red", "V": "green"}
HEAT = ((22, 36, 61), (126, 63, 110), (253, 190, 92))
"""The backgrounds of the weights 0, 1/2 and 1; lightness rises all the way."""


def plain(explanation: Explanation, width: int = 80) -> str:
    """The whole as text without colour."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False)
    with console.capture() as written:
        console.print(render(explanation, width))
    return "\n".join(line.rstrip() for line in written.get().splitlines())


def render(explanation: Explanation, width: int) -> RenderableType:
    """What rich prints, no wider than reads well."""
    width = min(width, WIDEST)
    return Constrain(Group(*_parts(explanation, width)), width)


def _parts(explanation: Explanation, width: int) -> Iterator[RenderableType]:
    labels = (explanation.lanes[0].label, explanation.lanes[1].label)
    yield _header(explanation, width)
    for number, step in enumerate(explanation.steps, start=1):
        yield Text("")
        yield _heading(number, step)
        yield _indented(Text(_clean(step.words)))
        for part in _numbers(step, labels, width - INDENT):
            yield _indented(part)
    yield Text("")
    yield _indented(Text("∴ ", style="bold").append(_clean(explanation.conclusion)), indent=1)


def _header(explanation: Explanation, width: int) -> RenderableType:
    asked = explanation.settings
    words = f"{asked.count:,} {'words' if asked.count > 1 else 'word'}"
    several = f" · {asked.heads} heads" if asked.heads else ""
    facts = f"{words} · d_model {asked.d_model}{several} · d_k {asked.d_k} · score {asked.score} · seed {asked.seed}"
    if "layer" in asked.rule.needs:
        facts += f" · layer {asked.layer}"
    lanes = Text(" ")
    for place, (lane, style) in enumerate(zip(explanation.lanes, LANES, strict=True)):
        lanes.append("   beside   " if place else "", style="dim").append(lane.label, style=style)
        lanes.append(f"  {lane.formula}")
    title = Text(f" {_fit(_clean(asked.text), width - 2)}", style="bold")
    return Group(title, Text(f" {facts}", style="dim"), lanes)


def _heading(number: int, step: Step) -> Text:
    line = Text(f"{number:>2} ").append(step.title, style="bold yellow")
    return line.append(f"   {step.formula}", style="cyan")


def _numbers(step: Step, labels: tuple[str, str], width: int) -> Iterator[RenderableType]:
    if step.matrices:
        yield _stack(step.matrices, width)
    if step.lanes:
        each = min((width - 3) // 2, WIDEST_LANE)
        grid = Table.grid(padding=(0, 3, 0, 0))
        grid.add_column(width=each)
        grid.add_column(width=each)
        grid.add_row(*(_lane(matrix, style, each) for matrix, style in zip(step.lanes, LANES, strict=True)))
        yield grid
    if step.readings:
        yield _readings(step.readings, labels)
    if step.heads:
        yield _heads(step.heads, labels)
    if step.note:
        yield Text(_clean(step.note), style="dim")


def _stack(matrices: tuple[Matrix, ...], width: int) -> Table:
    """Matrices below one another: name and shape, the word, the first numbers of its row."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    name = max(cell_len(f"{matrix.name} {matrix.size}") for matrix in matrices)
    label = max(_label_width(matrix) for matrix in matrices)
    grid.add_column(width=name)
    grid.add_column(width=max(label, 1))
    columns, more = _columns(matrices[0], width - name - label - 2)
    for _ in range(columns):
        grid.add_column(width=CELL - 1, justify="right")
    grid.add_column(width=1)
    for matrix in matrices:
        style = COLOURS.get(matrix.name.removeprefix("W_"), "")
        if matrix.columns:
            grid.add_row("", "", *(Text(_fit(word, CELL - 1), style="dim") for word in matrix.columns[:columns]))
        for place, row in enumerate(matrix.values):
            title = (
                Text(matrix.name, style=f"bold {style}").append(f" {matrix.size}", style="not bold")
                if place == 0
                else ""
            )
            word = _fit(matrix.rows[place], label) if matrix.rows else ""
            numbers = [Text(matrix.format(value), style=style) for value in row[:columns]]
            grid.add_row(title, word, *numbers, "…" if more else "")
        if len(matrix.values) > 1 and matrix.shape[0] > len(matrix.values):
            grid.add_row("", "⋮")
    return grid


def _lane(matrix: Matrix, style: str, width: int) -> RenderableType:
    """One of two tables side by side; weights are shaded."""
    label = _label_width(matrix)
    columns, more = _columns(matrix, width - label - 1)
    grid = Table.grid(padding=(0, 0, 0, 0))
    grid.add_column(width=label + 1)
    for _ in range(columns):
        grid.add_column(width=CELL)
    grid.add_column(width=2)
    if matrix.columns:
        heads = [Text(_right(word), style="dim") for word in matrix.columns[:columns]]
        grid.add_row("", *heads)
    for place, row in enumerate(matrix.values):
        cells = [
            Text(
                f"{matrix.format(value):>{CELL - 1}}" + " " * matrix.weights,
                style=_heat(value) if matrix.weights else "",
            )
            for value in row[:columns]
        ]
        grid.add_row(_fit(matrix.rows[place], label), *cells, "…" if more else "")
    if matrix.shape[0] > len(matrix.values):
        grid.add_row("⋮")
    return Group(Text(matrix.name, style=style).append(f" {matrix.size}", style="not bold"), grid)


def _readings(readings: tuple[Reading, ...], labels: tuple[str, str]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for _ in labels:
        table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    table.add_row("", *(Text(label, style=style) for label, style in zip(labels, LANES, strict=True)), "")
    for reading in readings:
        table.add_row(reading.label, *(Text(measured(value), style="bold") for value in reading.values), reading.says)
        for predicted in reading.predictions:
            table.add_row(
                Text("  expected", style="dim"), *(Text(words, style="dim") for words in predicted), reading.theory
            )
    return table


def _heads(lines: tuple[HeadLine, ...], labels: tuple[str, str]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    for _ in range(6):
        table.add_column(justify="right", no_wrap=True, min_width=9)
    titles = (word for name in ("variance", "top weight", "entropy") for word in (name, ""))
    table.add_row("", *titles, style="bold")
    table.add_row("head", *[Text(label, style=style) for label, style in zip(labels, LANES, strict=True)] * 3)
    for line in lines[:MOST_HEADS]:
        pairs = (line.variance, line.top_weight, line.entropy)
        table.add_row(str(line.head), *(measured(value) for pair in pairs for value in pair))
    if len(lines) > MOST_HEADS:
        table.add_row("⋮", f"and {len(lines) - MOST_HEADS} more")
    return table


def _columns(matrix: Matrix, width: int) -> tuple[int, bool]:
    """How many columns fit, and whether some are left out."""
    have = len(matrix.values[0])
    fit = min(have, width // CELL)
    if fit == matrix.shape[-1]:
        return fit, False
    return max(1, min(have, (width - 2) // CELL)), True


def _label_width(matrix: Matrix) -> int:
    return min(10, max((cell_len(_clean(word)) for word in matrix.rows), default=0))


def _heat(weight: float) -> Style:
    low, high, share = (*HEAT[:2], 2 * weight) if weight < 0.5 else (*HEAT[1:], 2 * weight - 1)
    background = "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high, strict=True))
    return Style(bgcolor=f"#{background}", color="#101010" if weight > 0.65 else "#f4f4f4")


def _indented(part: RenderableType, indent: int = INDENT) -> Padding:
    return Padding(part, (0, 0, 0, indent), expand=False)


def _fit(word: str, width: int) -> str:
    """A word in at most this many cells; what was cut shows as an ellipsis."""
    word = _clean(word)
    return word if cell_len(word) <= width else set_cell_size(word, width - 1).rstrip() + "…"


def _right(word: str) -> str:
    """A word above its column of numbers."""
    word = _fit(word, CELL - 1)
    return " " * (CELL - 1 - cell_len(word)) + word


def _clean(text: str) -> str:
    """Without what a terminal would obey instead of showing."""
    return "".join(letter for letter in text if letter.isprintable()) or "·"
