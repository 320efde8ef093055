"""ranges: how much wider is the range of scores in 5 dimensions than in 2?

A widely copied example has scores from −23 to 23 for vectors of 2 numbers, and from −49 to 122 for vectors of 5. The range of a
sample depends on its size as well: three tokens have a table of 3 × 3 scores, nine in all, in which every query and every key is
used three times.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator
from ..figures import marks, theme
from ..maths.stats import CHANCE, RARE, t_quantile

FEW, MANY = 2, 5
SAID = (122 + 49) / (23 + 23)
"""The ratio of the two ranges in that example."""


def measure(cell: Cell) -> Row:
    tokens, draws = int(cell["tokens"]), int(cell["draws"])
    stream = generator(cell["device"], "ranges", tokens, draws, cell["seed"])

    def products(d: int) -> torch.Tensor:
        query, key = torch.randn(2, draws, tokens, d, generator=stream, device=stream.device)
        return (query @ key.mT).flatten(1).double()

    few, many = products(FEW), products(MANY)
    ratio = (many.amax(1) - many.amin(1)) / (few.amax(1) - few.amin(1))
    shares = torch.tensor([0.025, 0.5, 0.975], dtype=torch.float64, device=ratio.device)
    low, middle, high = ratio.quantile(shares).tolist()
    return {
        "scores": tokens**2,
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "as_said": float((ratio >= SAID).double().mean()),
        "std_ratio": float(many.square().mean().sqrt() / few.square().mean().sqrt()),
    }


def expect(rows: Rows) -> list[Expectation]:
    """The ratio of the stds. The relative error of a mean square comes from the kurtoses 3 + 6/d of the products, and from those
    that share a query or a key, 2 (tokens − 1) for each: their squares have the covariance 2 d."""
    expectations = []
    for row in rows:
        count, others = row["scores"] * row["draws"], 2 * (row["tokens"] - 1)
        error = 0.5 * math.sqrt(sum(2 + (6 + 2 * others) / d for d in (FEW, MANY)) / count) * math.sqrt(MANY / FEW)
        quantity = f"std of q·k at d_k = {MANY} over that at d_k = {FEW}, {row['scores']} scores"
        source = f"closed form: √({MANY}/{FEW})"
        within = t_quantile(10**4, RARE) * error
        expectations.append(Expectation(quantity, math.sqrt(MANY / FEW), row["std_ratio"], within, source, CHANCE))
    return expectations


def finding(rows: Rows) -> str:
    few, many = min(rows, key=lambda row: row["scores"]), max(rows, key=lambda row: row["scores"])
    never = f", and never of {many['scores']}" if many["as_said"] == 0 else ""
    return (
        f"The range in 5 dimensions is typically {few['ratio']:.1f} times that in 2; {SAID:.1f} times is reached in "
        f"{few['as_said']:.0%} of draws of {few['scores']} scores{never}"
    )


def draw(rows: Rows, finding: str) -> Any:
    """The ratio of the ranges against the number of scores, with the middle 95 % of draws."""
    x = theme.powers("scores", "number of scores", [row["scores"] for row in rows])
    points = marks.measured(rows, x, "ratio", "range in 5 dimensions / range in 2")
    chart = (
        marks.labelled_line(SAID, f"the common example: {SAID:.1f}", at=40)
        + marks.labelled_line(math.sqrt(MANY / FEW), "ratio of the stds: √(5/2)", at=40)
        + points
    )
    note = (
        f"All products of as many queries as keys, 3 × 3 and more; medians of {rows[0]['draws']} draws of normal q and k, and "
        "the middle 95 %."
    )
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(globals())
