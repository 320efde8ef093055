"""Draws an explanation as one SVG picture, from words to context vectors, with every shape and the corner of every matrix.

Bands stand below one another: words, X, W_Q W_K W_V, Q K V, the scores of both lanes, their weights, the context. The lane
without a scale is on the left, the other on the right; the arrow to the context comes from the chosen one. Q, K and V have one
colour each throughout.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from rich.cells import cell_len

from .canvas import BIG, SMALL, Canvas
from .settings import fit
from .steps import Matrix, format_exact, format_measured

if TYPE_CHECKING:
    from . import Explanation

WIDTH = 800
LEFT, RIGHT = 196, 768
"""Where the drawing begins and ends; the captions of the bands are to its left."""
GAP = 34
MOST = 4  # rows and columns of a matrix
ROW, CELL, LABEL = 20, 44, 60
SLOT = (RIGHT - LEFT - 2 * 26) / 3
"""The width of one of three columns."""
SLOTS = {name: LEFT + column * (SLOT + 26) for column, name in enumerate("QKV")}
"""Their left ends."""
LANE = (RIGHT - LEFT - 84) / 2
"""The width of one of two columns."""
LINE = 108  # letters of the conclusion in a line
BYPASS = 784
"""Where V goes past the scores."""
STYLES = ("chosen", "other")
Point = tuple[float, float]


def render(explanation: Explanation, dark: bool = True, inline: bool = False) -> str:
    """The picture as SVG.

    Args:
        explanation: what is drawn.
        dark: add colours for dark pages; programs that turn SVG into pixels may not know them.
        inline: for use within HTML, without a header.
    """
    flow = _Flow(explanation)
    if not inline:  # a page has its own header
        flow.header()
    flow.words()
    flow.projections(flow.embeddings())
    ends = flow.queries()
    weights = flow.weights(flow.scores(ends))
    context = flow.context(weights, ends["V"])
    if "output" in flow.steps:
        flow.output(context)
    return flow.conclusion(dark, inline)


class _Flow:
    """Draws the bands one after another; ``y`` is where the next one begins."""

    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation
        self.steps = {step.name: step for step in explanation.steps}
        self.canvas = Canvas(WIDTH)
        self.y = 24.0

    def header(self) -> None:
        settings = self.explanation.settings
        self.canvas.text(24, 36, fit(settings.title, 62), size=BIG, bold=True)
        self.canvas.text(24, 58, settings.facts, size=SMALL, style="dim")
        self.y = 82

    def caption(self, title: str, *lines: str, below: float = 0) -> None:
        """The title and the remarks of a band, to its left."""
        self.canvas.text(24, self.y + below + 14, title, bold=True)
        for index, line in enumerate(lines):
            lower = 33 if index == 0 else 35 + 16 * index
            self.canvas.text(24, self.y + below + lower, line, size=SMALL, style="dim")

    def words(self) -> None:
        settings, y, x = self.explanation.settings, self.y, float(LEFT)
        self.caption("Words", f"{settings.count:,} tokens")
        for word in settings.shown:
            shown = fit(word, 14)
            wide = max(36.0, 22 + 7.6 * cell_len(shown))
            if x + wide > RIGHT - 24:
                break
            self.canvas.box(x, y, wide, 28, "chip")
            self.canvas.text(x + wide / 2, y + 19, shown, middle=True)
            x += wide + 10
        if settings.count > len(settings.shown) or x + 36 > RIGHT:
            self.canvas.text(x + 2, y + 18, "…", style="dim")
        self.y += 24 + GAP
        self.canvas.arrow([(LEFT + 20, y + 28), (LEFT + 20, self.y)])

    def embeddings(self) -> float:
        """Draw X and return its lower edge."""
        (matrix,) = self.steps["embeddings"].matrices
        self.caption(self.steps["embeddings"].title, "one row per word")
        tall = _matrix(self.canvas, matrix, LEFT, self.y, RIGHT - LEFT, "plain", columns=8)
        self.y += tall + GAP
        return self.y - GAP

    def projections(self, above: float) -> None:
        step, y = self.steps["projections"], self.y
        self.caption(step.title, "learned; here drawn")
        self.y += 32 + GAP
        for (name, x), matrix in zip(SLOTS.items(), step.matrices, strict=True):
            middle = x + SLOT / 2
            self.canvas.arrow([(middle, above), (middle, y)], name)
            self.canvas.box(x + 18, y, SLOT - 36, 32, f"fill{name}")
            self.canvas.symbol(middle, y + 21, matrix.name, matrix.size, name)
            self.canvas.arrow([(middle, y + 32), (middle, self.y)], name)

    def queries(self) -> dict[str, Point]:
        """Draw Q, K and V and return where each ends."""
        ends, y = {}, self.y
        self.caption("Queries, keys,")
        self.caption("values", "Q = X W_Q,", "K = X W_K,", "V = X W_V", below=18)
        for (name, x), matrix in zip(SLOTS.items(), self.steps["queries"].matrices, strict=True):
            tall = _matrix(self.canvas, matrix, x, y, SLOT, name, columns=2, labels=name == "Q")
            ends[name] = (x + SLOT / 2, y + tall)
            self.y = y + tall + GAP + 8
        return ends

    def scores(self, ends: dict[str, Point]) -> dict[int, Point]:
        """Draw the scores on the left and the scaled ones on the right, and return where each lane ends.

        Additive scores are not scaled: both lanes come from q and k.
        """
        canvas, y, logits = self.canvas, self.y, self.steps["logits"].lanes
        left, right = (0, 1) if self.explanation.lanes[0].rule == "none" else (1, 0)
        info, x = self.explanation.lanes[right], RIGHT - LANE
        additive = "scores" not in self.steps
        self.caption("Scores, scale", "two kinds of scores" if additive else "S = Q Kᵀ")
        canvas.arrow([ends["Q"], (ends["Q"][0], y)], "Q")
        bend, at = y - GAP / 2 - 2, LEFT + LANE - 80
        canvas.arrow([ends["K"], (ends["K"][0], bend), (at, bend), (at, y)], "K")
        if additive:
            first, style, titles = logits[left], STYLES[left], (self.explanation.lanes[left].label, info.label)
        else:
            first, style, titles = self.steps["scores"].matrices[0], "plain", ("S", "Z")
        tall = _matrix(canvas, first, LEFT, y, LANE, style, title=titles[0])
        _matrix(canvas, logits[right], x, y, LANE, STYLES[right], title=titles[1])
        if additive:
            for name, to, lower in (("K", x + LANE / 2 + 30, 0.0), ("Q", x + LANE / 2 - 30, 8.0)):
                begin = ends[name][0] + 20
                canvas.arrow([(begin, ends[name][1]), (begin, bend + lower), (to, bend + lower), (to, y)], name)
        else:
            middle, at = (LEFT + LANE + x) / 2, y + tall / 2 + 8
            canvas.arrow([(LEFT + LANE + 3, at), (x - 3, at)], STYLES[right])
            canvas.text(middle, at - 10, fit(_divisor(info.formula), 12), middle=True, bold=True)
            canvas.text(middle, at + 20, f"× {format_exact(info.scale)}", size=SMALL, style="dim", middle=True)
        ends_of_lanes = {}
        for lane, start, colour in ((left, LEFT, style if additive else "dim"), (right, x, STYLES[right])):
            variance = f"variance {format_measured(self.explanation.signs[lane]['variance'])}"
            canvas.text(start, y + tall + 16, variance, size=SMALL, style=colour)
            ends_of_lanes[lane] = (start + LANE / 2, y + tall + 22)
        self.y += tall + 24 + GAP
        return ends_of_lanes

    def weights(self, lanes: dict[int, Point]) -> Point:
        """Draw the weights of both lanes and return where those of the chosen one end."""
        canvas, step, y, ends = self.canvas, self.steps["weights"], self.y, {}
        self.caption(step.title, "rows sum to 1")
        for lane, (middle, above) in lanes.items():
            left, style, signs = middle - LANE / 2, STYLES[lane], self.explanation.signs[lane]
            canvas.arrow([(middle, above), (middle, y)], style)
            canvas.text(middle + 8, y - 12, "softmax", size=SMALL, style="dim")
            tall = _matrix(canvas, step.lanes[lane], left, y, LANE, style, title="P")
            label = self.explanation.lanes[lane].label
            canvas.text(middle + LANE / 2 - 10, y + 18, label, size=SMALL, style=f"{style} end")
            top, keys = (format_measured(signs[name]) for name in ("top_weight", "effective_keys"))
            canvas.text(left, y + tall + 16, f"top weight {top} · {keys} effective keys", size=SMALL, style=style)
            ends[lane] = (middle, y + tall + 22)
            self.y = y + tall + 24 + GAP
        return ends[0]

    def context(self, weights: Point, values: Point) -> Point:
        """Draw the weighted sum of the values and return where it ends."""
        step, (x, above), y = self.steps["context"], values, self.y
        self.caption(step.title, step.formula, "a weighted sum", "of the values")
        self.canvas.arrow([weights, (weights[0], y)], "chosen")
        past = [(x, above + 9), (BYPASS, above + 9), (BYPASS, y + 28), (RIGHT + 1, y + 28)]
        self.canvas.arrow([values, *past], "V")
        title = "head 0" if "output" in self.steps else "C"
        tall = _matrix(self.canvas, step.lanes[0], LEFT, y, RIGHT - LEFT, "chosen", columns=8, title=title)
        self.y += tall + 30
        return LEFT + (RIGHT - LEFT) / 2, y + tall

    def output(self, start: Point) -> None:
        """All heads side by side, times W_O."""
        canvas, step, (x, above) = self.canvas, self.steps["output"], start
        (matrix,) = step.matrices
        self.y += GAP - 16
        self.caption(step.title, step.formula, "all heads joined", "and mixed")
        canvas.arrow([(x, above), (x, self.y)], "chosen")
        canvas.box(x - 90, self.y, 180, 32, "chip")
        canvas.symbol(x, self.y + 21, matrix.name, matrix.size, "plain")
        canvas.arrow([(x, self.y + 32), (x, self.y + 24 + GAP)], "chosen")
        self.y += 24 + GAP
        self.y += 30 + _matrix(canvas, step.lanes[0], LEFT, self.y, RIGHT - LEFT, "chosen", columns=8, title="Y")

    def conclusion(self, dark: bool, inline: bool) -> str:
        """The last lines, and the whole as SVG."""
        for line in textwrap.wrap(self.explanation.conclusion, LINE, break_on_hyphens=False):
            self.canvas.text(24, self.y, line, size=SMALL)
            self.y += 17
        return self.canvas.svg(
            self.y + 8, f"Attention on {self.explanation.settings.title!r}, step by step", dark, inline
        )


def _divisor(formula: str) -> str:
    """What is done to a score: q·k / √d_k divides it by √d_k."""
    return formula.replace("q·k /", "÷", 1) if formula.startswith("q·k / ") else formula


def _matrix(
    canvas: Canvas, matrix: Matrix, x: float, y: float, wide: float, style: str, columns: int = MOST, labels: bool = True,
    title: str | None = None,
) -> float:  # fmt: skip
    """Draw a matrix as a card with its name, shape, words and the numbers of its corner, and return its height."""
    rows, label = matrix.values[:MOST], 0.0
    if labels:
        longest = max((cell_len(fit(word, 8)) for word in matrix.rows[: len(rows)]), default=0)
        label = min(LABEL, 12 + 7.2 * longest)
    count = min(len(rows[0]), columns, int((wide - label - 28) // CELL))
    more, longer = matrix.shape[-1] > count, matrix.shape[0] > len(rows)
    top = y + 26 + (16 if matrix.columns else 0)
    tall = top - y + ROW * len(rows) + (14 if longer else 0) + 8
    canvas.box(x, y, wide, tall, f"card {style}")
    canvas.symbol(x + 10, y + 18, matrix.name if title is None else title, matrix.size, style, middle=False)
    room = (wide - label - (32 if more else 16)) / count
    each = min(54.0 if matrix.columns else 72.0 if wide > LANE else CELL, room)
    begin = x + 10 + label
    for column, word in enumerate(matrix.columns[:count]):
        middle = begin + each * (column + 0.5)
        canvas.text(middle, y + 37, fit(word, int(each // 7)), size=SMALL, style="dim", middle=True)
    for line, row in enumerate(rows):
        at = top + ROW * line
        if label:
            canvas.text(x + 10, at + 14, fit(matrix.rows[line], 8), size=SMALL, style="dim")
        for column, value in enumerate(row[:count]):
            left = begin + each * column
            if matrix.weights:
                canvas.heat(left + 1, at, each - 2, ROW - 2, value)
            right = left + (each / 2 if matrix.columns else each - 4)
            weight = value if matrix.weights else None
            canvas.number(right, at + 14, matrix.format(value), weight, middle=bool(matrix.columns))
        if more:
            canvas.text(begin + each * count + 4, at + 14, "…", size=SMALL, style="dim")
    if longer:
        canvas.text(x + 10, top + ROW * len(rows) + 10, "⋮", size=SMALL, style="dim")
    return tall
