"""scores: as d grows, which score still learns to recall? The shape of table 5 in Britz et al. 2017.

Two cores reach d = 256 in the minutes that a default may take. Their table goes to 1024: `--preset full`, on a GPU.
"""

from __future__ import annotations

from typing import Any

from ..engine.experiment import Cell, Expectation, Row, Rows, define, pick
from ..figures import alt, marks, panels, theme
from . import recall
from .runs import at_best, survived

NAMES = {"dot": "the dot product", "scaled": "dot/√d", "additive": "additive", "cosine": "cosine"}
RULE = {"dot": "none", "scaled": "sqrt_dk", "additive": "additive", "cosine": "cosine"}

BRITZ = {
    "dot": {128: 22.03, 256: 22.33, 512: 21.78, 1024: 18.22},
    "additive": {128: 22.23, 256: 22.33, 512: 22.47, 1024: 22.10},
}
"""BLEU on newstest2013, Britz et al. 2017 (arXiv:1703.03906), table 5. Another task: only the shape can be compared."""


def measure(cell: Cell) -> list[Row]:
    return recall.train(cell, RULE[str(cell["score"])])


def expect(rows: Rows) -> list[Expectation]:
    """The shape: at the largest d the bare dot product is worst, as it is in the table."""
    best = recall.summary(rows, "score")
    d = max(row["d"] for row in rows)
    last = {row["score"]: row["accuracy"] for row in pick(best, d=d)}
    if len(last) < 2 or "dot" not in last:
        return []
    quantity = f"accuracy at d = {d}: the lowest of the other scores, minus the bare dot product's"
    apart = min(value for name, value in last.items() if name != "dot") - last["dot"]
    source = "Britz et al. 2017, table 5: at 1024 the dot product has 18.22 BLEU, the lowest"
    return [
        Expectation(quantity, 0.0, apart, 0.0, source, "a test of the sign: another task, the shape only", above=True)
    ]


def finding(rows: Rows) -> str:
    d = max(row["d"] for row in rows)
    best = {row["score"]: row for row in pick(recall.summary(rows, "score"), d=d)}
    lost = survived(rows, "score", "d", "lr", "seed")
    steps = max(row["steps"] for row in rows)
    said = recall.learned(best, NAMES)
    return f"Recall at d = {d} in {steps} steps: {said}{lost}"


LABELS = {"scaled": "dot / √d", "dot": "dot", "additive": "additive", "cosine": "cosine"}


def draw(rows: Rows, finding: str) -> Any:
    """Accuracy on recall against d for each score; and the largest d while it trains."""
    shown = [{**row, "name": LABELS[row["score"]]} for row in recall.summary(rows, "score")]
    largest = max(row["d"] for row in shown)
    best = at_best(pick(rows, d=largest), "score", "accuracy", True)
    present = [name for name in LABELS.values() if any(row["name"] == name for row in shown)]
    colour = theme.series("name", "score", present)
    x = theme.powers("d", "head dim d", [row["d"] for row in shown])
    points = marks.curve(shown, x, "accuracy", "accuracy", colour, nested=True, most=1.0)
    series = [{**row, "name": LABELS[row["score"]]} for row in best]
    below = panels.draw({f"d = {largest}": series}, colour, "name")
    edge = recall.at_the_edge(pick(shown, d=largest), "score", NAMES)
    bleu = ", ".join(f"{score:.1f}" for score in BRITZ["dot"].values())
    note = (
        f"Recall among {rows[0]['pairs']} keys, each score at its best of {len({row['lr'] for row in rows})} rates. {edge}"
        f"Top: median and range over seeds; Britz et al. 2017, table 5 (BLEU): dot {bleu} at 128 to 1024. {panels.NOTE}"
    )
    chart = alt.vconcat(alt.layer(points).properties(width=theme.WIDTH, height=180), below, spacing=24)
    return theme.finish(chart, finding, note)


EXPERIMENT = define(globals())
