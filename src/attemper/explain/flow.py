"""Flow: an explanation as one picture, from words to context vectors, with every shape and the numbers of its corner; SVG.

Bands stand below one another: words, X, W_Q W_K W_V, Q K V, the scores of both lanes, their weights, the context. The
lane without a scale is on the left, the other on the right; the chosen one goes on to the context. Q, K and V have one
colour each throughout.
"""

from __future__ import annotations

import textwrap
from html import escape
from typing import TYPE_CHECKING

from rich.cells import cell_len

from .canvas import BIG, SMALL, Canvas
from .settings import fit
from .steps import LessonStep, Matrix, measured, short

if TYPE_CHECKING:
    from . import Explanation

WIDTH = 800
LEFT, RIGHT = 196, 768
"""Where the drawing begins and ends; what the bands are is said to its left."""
GAP = 34
MOST = 4  # rows and columns of a matrix
ROW, CELL, LABEL = 20, 44, 60
SLOT = (RIGHT - LEFT - 2 * 26) / 3
"""The width of one of three columns."""
LANE = (RIGHT - LEFT - 84) / 2
"""The width of one of two."""
COLUMNS = 108  # letters of the conclusion in a line
BYPASS = 784
"""Where V goes past the scores."""


def render(explanation: Explanation, dark: bool = True, inline: bool = False) -> str:
    """The picture: with colours for dark pages, which a program that turns it into pixels may not know; ``inline`` in HTML."""
    steps = {step.name: step for step in explanation.steps}
    canvas = Canvas(WIDTH)
    y = 24.0 if inline else _header(canvas, explanation)  # a page has its own
    y = _words(canvas, explanation, y)
    y, above = _embeddings(canvas, steps["embeddings"], y)
    y = _projections(canvas, steps["projections"], y, above)
    y, ends = _queries(canvas, steps["queries"], y)
    y, lanes = _scores(canvas, explanation, steps, y, ends)
    y, weights = _weights(canvas, explanation, steps["weights"], y, lanes)
    y, end = _context(canvas, explanation, steps, y, weights, ends["V"])
    if "output" in steps:
        y = _output(canvas, steps, y, end)
    for line in textwrap.wrap(explanation.conclusion, COLUMNS, break_on_hyphens=False):
        canvas.text(24, y, line, size=SMALL)
        y += 17
    y += 8
    return canvas.svg(y, f"Attention on {explanation.settings.title!r}, step by step", dark, inline)


def _header(canvas: Canvas, explanation: Explanation) -> float:
    asked = explanation.settings
    canvas.text(24, 36, fit(asked.title, 62), size=BIG, bold=True)
    canvas.text(24, 58, asked.facts, size=SMALL, style="dim")
    return 82


def _band(canvas: Canvas, y: float, title: str, formula: str, *lines: str) -> None:
    """What a band is, to its left."""
    canvas.text(24, y + 14, title, bold=True)
    canvas.text(24, y + 33, formula, size=SMALL, style="dim")
    for place, line in enumerate(lines):
        canvas.text(24, y + 51 + 16 * place, line, size=SMALL, style="dim")


def _words(canvas: Canvas, explanation: Explanation, y: float) -> float:
    _band(canvas, y, "Words", f"{explanation.settings.count:,} tokens")
    x = float(LEFT)
    for word in explanation.settings.shown:
        shown = fit(word, 14)
        wide = max(36.0, 22 + 7.6 * cell_len(shown))
        if x + wide > RIGHT - 24:
            break
        canvas.box(x, y, wide, 28, "chip")
        canvas.text(x + wide / 2, y + 19, shown, middle=True)
        x += wide + 10
    if explanation.settings.count > len(explanation.settings.shown) or x + 36 > RIGHT:
        canvas.text(x + 2, y + 18, "…", style="dim")
    canvas.arrow([(LEFT + 20, y + 28), (LEFT + 20, y + 24 + GAP)])
    return y + 24 + GAP


def _embeddings(canvas: Canvas, step: LessonStep, y: float) -> tuple[float, float]:
    (matrix,) = step.matrices
    _band(canvas, y, step.title, "one row per word")
    tall = _matrix(canvas, matrix, LEFT, y, RIGHT - LEFT, "plain", columns=8)
    return y + tall + GAP, y + tall


def _slots() -> list[float]:
    """The left ends of three columns."""
    return [LEFT + place * (SLOT + 26) for place in range(3)]


def _projections(canvas: Canvas, step: LessonStep, y: float, above: float) -> float:
    _band(canvas, y, step.title, "learned; here drawn")
    for x, matrix in zip(_slots(), step.matrices, strict=True):
        name, middle = matrix.name.removeprefix("W_"), x + SLOT / 2
        canvas.arrow([(middle, above), (middle, y)], name)
        canvas.box(x + 18, y, SLOT - 36, 32, f"fill{name}")
        canvas.symbol(middle, y + 21, matrix.name, matrix.size, name)
        canvas.arrow([(middle, y + 32), (middle, y + 32 + GAP)], name)
    return y + 32 + GAP


def _queries(canvas: Canvas, step: LessonStep, y: float) -> tuple[float, dict[str, tuple[float, float]]]:
    canvas.text(24, y + 14, "Queries, keys,", bold=True)
    _band(canvas, y + 18, "values", "Q = X W_Q,", "K = X W_K,", "V = X W_V")
    ends, tall = {}, 0.0
    for x, matrix in zip(_slots(), step.matrices, strict=True):
        tall = _matrix(canvas, matrix, x, y, SLOT, matrix.name, columns=2, labels=matrix.name == "Q")
        ends[matrix.name] = (x + SLOT / 2, y + tall)
    return y + tall + GAP + 8, ends


def _scores(
    canvas: Canvas,
    explanation: Explanation,
    steps: dict[str, LessonStep],
    y: float,
    ends: dict[str, tuple[float, float]],
) -> tuple[float, dict[int, tuple[float, float]]]:
    """The scores on the left, the scaled ones on the right; for additive scores, both from q and k. Where each lane ends."""
    left, right = _sides(explanation)
    logits = steps["logits"].lanes
    additive = "scores" not in steps
    first = logits[left] if additive else steps["scores"].matrices[0]
    _band(canvas, y, "Scores, scale", "S = Q Kᵀ" if not additive else "two kinds of scores")
    canvas.arrow([ends["Q"], (ends["Q"][0], y)], "Q")
    bend, at = y - GAP / 2 - 2, LEFT + LANE - 80
    canvas.arrow([ends["K"], (ends["K"][0], bend), (at, bend), (at, y)], "K")
    style = _lane_style(left) if additive else "plain"
    tall = _matrix(canvas, first, LEFT, y, LANE, style, title=explanation.lanes[left].label if additive else "S")
    x = RIGHT - LANE
    info = explanation.lanes[right]
    _matrix(canvas, logits[right], x, y, LANE, _lane_style(right), title=info.label if additive else "Z")
    if not additive:
        middle, at = (LEFT + LANE + x) / 2, y + tall / 2 + 8
        canvas.arrow([(LEFT + LANE + 3, at), (x - 3, at)], _lane_style(right))
        canvas.text(middle, at - 10, fit(_divisor(info.formula), 12), middle=True, bold=True)
        canvas.text(middle, at + 20, f"× {short(info.scale)}", size=SMALL, style="dim", middle=True)
    else:
        for name, to, lower in (("K", x + LANE / 2 + 30, 0.0), ("Q", x + LANE / 2 - 30, 8.0)):
            begin = ends[name][0] + 20
            canvas.arrow([(begin, ends[name][1]), (begin, bend + lower), (to, bend + lower), (to, y)], name)
    readings = [f"variance {measured(explanation.signs[side]['variance'])}" for side in (left, right)]
    canvas.text(LEFT, y + tall + 16, readings[0], size=SMALL, style=style if additive else "dim")
    canvas.text(x, y + tall + 16, readings[1], size=SMALL, style=_lane_style(right))
    return y + tall + 24 + GAP, {left: (LEFT + LANE / 2, y + tall + 22), right: (x + LANE / 2, y + tall + 22)}


def _sides(explanation: Explanation) -> tuple[int, int]:
    """Which lane is on the left, where nothing is scaled, and which on the right."""
    return (0, 1) if explanation.lanes[0].rule == "none" else (1, 0)


def _divisor(formula: str) -> str:
    """What is done to a score: q·k / √d_k divides it by √d_k."""
    return formula.replace("q·k /", "÷", 1) if formula.startswith("q·k / ") else formula


def _lane_style(place: int) -> str:
    return ("chosen", "other")[place]


def _weights(
    canvas: Canvas,
    explanation: Explanation,
    step: LessonStep,
    y: float,
    lanes: dict[int, tuple[float, float]],
) -> tuple[float, tuple[float, float]]:
    """The weights of both lanes; where those of the chosen one end."""
    _band(canvas, y, step.title, "rows sum to 1")
    tall, end = 0.0, (0.0, 0.0)
    for place, (at, above) in lanes.items():
        canvas.arrow([(at, above), (at, y)], _lane_style(place))
        canvas.text(at + 8, y - 12, "softmax", size=SMALL, style="dim")
        tall = _matrix(canvas, step.lanes[place], at - LANE / 2, y, LANE, _lane_style(place), title="P")
        canvas.text(
            at + LANE / 2 - 10, y + 18, explanation.lanes[place].label, size=SMALL, style=f"{_lane_style(place)} end"
        )
        signs = explanation.signs[place]
        said = f"top weight {measured(signs['top_weight'])} · {measured(signs['effective_keys'])} effective keys"
        canvas.text(at - LANE / 2, y + tall + 16, said, size=SMALL, style=_lane_style(place))
        end = (at, y + tall + 22) if place == 0 else end
    return y + tall + 24 + GAP, end


def _context(
    canvas: Canvas,
    explanation: Explanation,
    steps: dict[str, LessonStep],
    y: float,
    weights: tuple[float, float],
    values: tuple[float, float],
) -> tuple[float, tuple[float, float]]:
    """The weighted sum of the values."""
    step = steps["context"]
    _band(canvas, y, step.title, step.formula, "a weighted sum", "of the values")
    matrix = step.lanes[0]
    wide = RIGHT - LEFT
    canvas.arrow([weights, (weights[0], y)], "chosen")
    canvas.arrow(
        [
            (values[0], values[1]),
            (values[0], values[1] + 9),
            (BYPASS, values[1] + 9),
            (BYPASS, y + 28),
            (RIGHT + 1, y + 28),
        ],
        "V",
    )
    tall = _matrix(canvas, matrix, LEFT, y, wide, "chosen", columns=8, title="C" if "output" not in steps else "head 1")
    return y + tall + 30, (LEFT + wide / 2, y + tall)


def _output(canvas: Canvas, steps: dict[str, LessonStep], y: float, start: tuple[float, float]) -> float:
    """All heads side by side, times W_O."""
    step = steps["output"]
    y += GAP - 16
    _band(canvas, y, step.title, step.formula, "all heads joined", "and mixed")
    (matrix,) = step.matrices
    canvas.arrow([start, (start[0], y)], "chosen")
    canvas.box(start[0] - 90, y, 180, 32, "chip")
    canvas.symbol(start[0], y + 21, matrix.name, matrix.size, "plain")
    canvas.arrow([(start[0], y + 32), (start[0], y + 32 + GAP - 8)], "chosen")
    y += 32 + GAP - 8
    tall = _matrix(canvas, step.lanes[0], LEFT, y, RIGHT - LEFT, "chosen", columns=8, title="Y")
    return y + tall + 30


def _matrix(
    canvas: Canvas,
    matrix: Matrix,
    x: float,
    y: float,
    wide: float,
    style: str,
    columns: int = MOST,
    labels: bool = True,
    title: str | None = None,
) -> float:
    """A matrix as a card: its name and shape, the words of its rows and columns, the numbers of its corner. Its height."""
    rows = matrix.values[:MOST]
    label = (
        min(LABEL, 12 + 7.2 * max((cell_len(fit(word, 8)) for word in matrix.rows[: len(rows)]), default=0))
        if labels
        else 0
    )
    fits = int((wide - label - 28) // CELL)
    count = min(len(rows[0]), columns, fits)
    more = matrix.shape[-1] > count
    top = y + 26 + (16 if matrix.columns else 0)
    tall = top - y + ROW * len(rows) + (14 if matrix.shape[0] > len(rows) else 0) + 8
    canvas.box(x, y, wide, tall, f"card {style}")
    canvas.symbol(x + 10, y + 18, matrix.name if title is None else title, matrix.size, style, middle=False)
    room = (wide - label - (32 if more else 16)) / count
    each = min(54.0 if matrix.columns else 72.0 if wide > LANE else CELL, room)
    begin = x + 10 + label
    for place in range(count if matrix.columns else 0):
        canvas.text(
            begin + each * (place + 0.5),
            y + 37,
            fit(matrix.columns[place], int(each // 7)),
            size=SMALL,
            style="dim",
            middle=True,
        )
    for line, row in enumerate(rows):
        at = top + ROW * line
        if label:
            canvas.text(x + 10, at + 14, fit(matrix.rows[line], 8), size=SMALL, style="dim")
        for place, value in enumerate(row[:count]):
            left = begin + each * place
            if matrix.weights:
                canvas.heat(left + 1, at, each - 2, ROW - 2, value)
            said = matrix.format(value)
            canvas.number(
                left + (each / 2 if matrix.columns else each - 4),
                at + 14,
                said,
                value if matrix.weights else None,
                bool(matrix.columns),
            )
        if more:
            canvas.text(begin + each * count + 4, at + 14, "…", size=SMALL, style="dim")
    if matrix.shape[0] > len(rows):
        canvas.text(x + 10, top + ROW * len(rows) + 10, "⋮", size=SMALL, style="dim")
    return tall


def page(explanation: Explanation) -> str:
    """The picture and the steps as one HTML file that needs nothing else."""
    from .html import render as steps

    title = escape(explanation.settings.title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Attention on {title}</title><style>body {{ margin: 1.5rem auto; max-width: 62rem; padding: 0 1rem; "
        f"color-scheme: light dark; }}</style></head><body>{steps(explanation)}</body></html>\n"
    )
