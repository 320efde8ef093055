"""two_keys: with two keys, how fast does the softmax's slope p(1−p) fall as d_k grows?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...scale import rule
from ..engine.experiment import SAMPLES, Cell, Expectation, Parameter, Row, Rows, define, generator
from ..maths import theory
from ..maths.stats import expect_column, over_batches

BATCHES = 32
NUMBERS = 30_000_000


def measure(cell: Cell) -> Row:
    d = int(cell["d"])
    stream = generator(cell["device"], "two_keys", d, cell["samples"], cell["seed"])
    count = max(64, min(int(cell["samples"]), NUMBERS // (3 * d)) // BATCHES)
    slopes = []
    for _ in range(BATCHES):
        query, first, second = torch.randn(3, count, d, generator=stream, device=stream.device)
        apart = (query * (first - second)).sum(-1).double()
        slopes.append(torch.stack([_slope(apart), _slope(apart * rule("sqrt_dk").scale(head_dim=d))]))
    both = torch.stack(slopes)  # (batches, 2, count)
    return {
        **over_batches(both[:, 0]).columns("slope"),
        **over_batches(both[:, 1]).columns("scaled_slope"),
        "slope_theory": theory.two_key_slope(d),
        "median": float(both[:, 0].median()),
    }


def _slope(difference: torch.Tensor) -> torch.Tensor:
    p = torch.sigmoid(difference)
    return p * (1 - p)


def expect(rows: Rows) -> list[Expectation]:
    return [
        expect_column(
            row,
            "slope",
            f"E p(1−p), two keys, unscaled, d_k = {row['d']}",
            row["slope_theory"],
            "closed form: 1/(2√(π d_k)) for large d_k",
            more=0.1 / row["d"] * row["slope_theory"],
            why="0.1/d_k of the value: the next term is (3/4 − π²/12)/d_k = −0.07/d_k",
        )
        for row in rows
        if row["d"] >= 16
    ]


def finding(rows: Rows) -> str:
    last = max(rows, key=lambda row: row["d"])
    return (
        f"The mean slope falls like 1/√d_k ({last['slope']:.4f} at d_k = {last['d']}), the median one to {last['median']:.1g}; "
        f"with 1/√d_k it stays at {last['scaled_slope']:.3f}"
    )


def draw(rows: Rows, finding: str) -> Any:
    """The softmax's slope with two keys, against d_k."""
    from ..figures import marks, theme

    slopes = {"slope": "none", "scaled_slope": "sqrt_dk"}
    shown = theme.labelled(theme.unpivoted(rows, "d", "rule", slopes, "slope"))
    colour = theme.by_rule(shown)
    x = theme.powers("d", "head dim d_k", [row["d"] for row in rows])
    chart = marks.theory(rows, x, "slope_theory") + marks.measured(
        shown, x, "slope", "mean p(1−p)", colour, log=True, nested=True
    )
    note = "Grey line: 1/(2√(π d_k)), for large d_k. Points: measured, with 95 % intervals. The median soon leaves the axis."
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(
    __name__,
    question="With two keys, how fast does the softmax's slope p(1−p) fall as d_k grows?",
    claims=("C6",),
    parameters=(
        Parameter("d", (1, 4, 16, 64, 256, 1024), "the head dim, d_k", least=1),
        replace(SAMPLES, says="pairs of keys per cell, at most"),
    ),
)
