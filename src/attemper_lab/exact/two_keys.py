"""two_keys: with two keys, how fast does the softmax's slope p(1−p) fall as d_k grows?"""

from __future__ import annotations

from typing import Any

import torch

from attemper import rule

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator
from ..figures import marks, theme
from ..maths import theory
from ..maths.stats import columns, expect_column, median_over_batches

BATCHES = 32
NUMBERS = 30_000_000


def measure(cell: Cell) -> Row:
    d = int(cell["d"])
    stream = generator(cell["device"], "two_keys", d, cell["samples"], cell["seed"])
    count = max(64, min(int(cell["samples"]), NUMBERS // (3 * d)) // BATCHES)
    slopes, gaps = [], []
    for _ in range(BATCHES):
        query, first, second = torch.randn(3, count, d, generator=stream, device=stream.device)
        apart = (query * (first - second)).sum(-1).double()
        gaps.append(apart.abs())
        slopes.append(torch.stack([_slope(apart), _slope(apart * rule("sqrt_dk").scale(head_dim=d))]))
    both = torch.stack(slopes)  # (batches, 2, count)
    return {
        **columns(slope=both[:, 0], scaled_slope=both[:, 1]),
        "slope_theory": theory.two_key_slope(d),
        **median_over_batches(torch.stack(gaps)).columns("gap"),
        "gap_theory": theory.two_key_gap(d),
        "median": float(both[:, 0].median()),
        "median_theory": theory.two_key_median(d),
    }


def _slope(difference: torch.Tensor) -> torch.Tensor:
    p = torch.sigmoid(difference)
    return p * (1 - p)


def expect(rows: Rows) -> list[Expectation]:
    expectations, form = [], "closed form: 1/(2√(π d_k)) for large d_k"
    why = "0.1/d_k of the value: the next term is (3/4 − π²/12)/d_k = −0.07/d_k"
    for row in (row for row in rows if row["d"] >= 16):
        quantity, mean = f"E p(1−p), two keys, unscaled, d_k = {row['d']}", row["slope_theory"]
        expectations.append(expect_column(row, "slope", quantity, mean, form, more=0.1 / row["d"] * mean, why=why))
    form = "closed form: the median of |N(0, 2|q|²)|, |q|² of χ²; about 0.954 √d_k"
    for row in rows:
        quantity = f"median distance of two logits, unscaled, d_k = {row['d']}"
        expectations.append(expect_column(row, "gap", quantity, row["gap_theory"], form))
    return expectations


def finding(rows: Rows) -> str:
    last = max(rows, key=lambda row: row["d"])
    return (
        f"Without the scale the mean slope falls like 1/√d_k, to {last['slope']:.3f} at d_k = {last['d']}, and the median "
        f"one exponentially, to {last['median']:.0e}"
    )


SLOPES = {"scaled_slope": "1/√d_k, mean", "slope": "no scale, mean", "median": "no scale, median"}


def draw(rows: Rows, finding: str) -> Any:
    """The softmax's slope with two keys, mean and median, against d_k."""
    shown = [
        {"d": row["d"], "which": name, **{f"slope{end}": row.get(f"{column}{end}") for end in ("", "_low", "_high")}}
        for row in rows
        for column, name in SLOPES.items()
    ]
    colour = theme.series("which", "p(1−p)", list(SLOPES.values()))
    x = theme.powers("d", "head dim d_k", [row["d"] for row in rows])
    chart = (
        marks.theory(rows, x, "slope_theory")
        + marks.theory(rows, x, "median_theory", dash=(5, 3), smooth=True)
        + marks.measured(shown, x, "slope", "p(1−p)", colour, log=True, nested=True)
    )
    note = (
        "Two keys. Lines: 1/(2√(π d_k)), the mean for large d_k, and the slope at the median distance of two logits, about "
        "0.954 √d_k (dashed). Points: measured, the means with 95 % intervals."
    )
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(globals())
