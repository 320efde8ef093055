"""gradients: the lengths of the gradients that reach the softmax's input and q, drawn without vectors of d_k entries.

q, k, v are unit normal and the upstream gradient has length 1, so g = dL/dp is N(0, 1) per key, independent of the weights p.
With J = diag(p) − p pᵀ the gradient at the softmax's input is Jg, and that at q is scale · Kᵀ J g. The keys along q, x = Kq/|q|,
are N(0, 1), and alone decide p; in the d_k − 1 other directions the keys are independent of p. Hence

    |dL/dq|² = scale² [(x·Jg)² + |Jg|² χ²],  χ² with d_k − 1 degrees of freedom,
    E|dL/dq|² = scale² [(d_k − 1) E‖J‖_F² + E|Jx|²].

One query takes n numbers, not n · d_k, and the means are integrals (moments.py).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..engine.experiment import generator
from . import moments
from .stats import Estimate, median_over_batches

UNITS = {"logits": "at the softmax's input", "query": "at q"}
"""Where a gradient is measured: |Jg|, which the textbooks speak of, and |dL/dq|, which has the scale as a further factor."""

NUMBERS = 1 << 23  # of x, and of g
BATCHES = 16
MOST = 1e5  # up to which a crossing is looked for


def rms(d: int, n: int, scale: float) -> dict[str, float] | None:
    """Unit → the root of the exact mean square; None where the logits are too wide for the integral."""
    moments_of = moments.of_dot_products(d, n, scale)
    if moments_of is None:
        return None
    at_query = scale * math.sqrt((d - 1) * moments_of.square + moments_of.along)
    return {"logits": math.sqrt(moments_of.square), "query": at_query}


class _Draws(NamedTuple):
    """What all d_k and scales share, (batches, queries, …) each: x and g by key, and two uniform numbers for |q|² and χ²."""

    x: Tensor
    g: Tensor
    uniform: Tensor


@functools.lru_cache(maxsize=1)
def _draws(n: int, seed: int) -> _Draws:
    stream = generator("cpu", "gradients", n, seed)
    shape = (BATCHES, max(8, NUMBERS // (n * BATCHES)))
    x, g = torch.randn(2, *shape, n, generator=stream, device="cpu")
    return _Draws(x, g, torch.rand(2, *shape, generator=stream, dtype=torch.float64, device="cpu"))


def lengths(d: float, n: int, scale: float, seed: int = 0) -> dict[str, Tensor]:
    """Unit → the gradients' lengths, (batches, queries): the same draws whatever d_k and the scale."""
    x, g, uniform = _draws(n, seed)
    p = torch.softmax((scale * chi_square(d, uniform[0]).sqrt()).float().unsqueeze(-1) * x, -1)
    to_logits = p * (g - (p * g).sum(-1, keepdim=True))
    square = to_logits.square().sum(-1).double()
    along = (to_logits * x).sum(-1).double()
    return {
        "logits": square.sqrt(),
        "query": scale * (along.square() + square * chi_square(d - 1, uniform[1])).sqrt(),
    }


def chi_square(freedom: float, uniform: Tensor) -> Tensor:
    """The quantiles of χ² at uniform numbers, by a table of its distribution that is read backwards."""
    if freedom <= 0:
        return torch.zeros_like(uniform)
    middle, spread = math.sqrt(max(freedom - 0.5, 0.0)), math.sqrt(0.5)  # of χ, nearly normal
    table = torch.linspace(max(0.0, middle - 9 * spread), middle + 9 * spread, 4001, dtype=torch.float64, device="cpu")
    below = torch.special.gammainc(torch.full_like(table, freedom / 2), table.square() / 2)
    right = torch.searchsorted(below, uniform).clamp(1, len(table) - 1)
    share = (uniform - below[right - 1]) / (below[right] - below[right - 1]).clamp(min=1e-300)
    return (table[right - 1] + share.clamp(0, 1) * (table[right] - table[right - 1])).square()


@functools.cache
def median(d: float, n: int, scale: float, seed: int = 0) -> dict[str, Estimate]:
    """Unit → the median query's length, with the error of these draws."""
    return {unit: median_over_batches(some) for unit, some in lengths(d, n, scale, seed).items()}


CROSSINGS = {(128, "logits"): 62.5, (128, "query"): 415.1, (1024, "logits"): 225.7, (1024, "query"): 1019.0}
CROSSING_ERRORS = {(128, "logits"): 0.06, (128, "query"): 0.5, (1024, "logits"): 0.7, (1024, "query"): 3.5}
"""(keys, unit) → the crossing, and its standard error, as `python -m research.crossings` prints them."""


def crossing(n: int, unit: str) -> float:
    """The d_k from which on the median query's gradient is smaller without the scale than with 1/√d_k, with n keys.

    There is one such number for each unit; whatever prints a crossing takes it from here. NaN where there is none.
    """
    return CROSSINGS.get((n, unit)) or estimate(n, unit)


@functools.cache
def estimate(n: int, unit: str, seed: int = 0) -> float:
    """The crossing from one set of draws."""

    def ratio(d: float) -> float:
        bare, scaled = (median(d, n, scale, seed)[unit].mean for scale in (1.0, 1 / math.sqrt(d)))
        return math.log(max(bare / scaled, 1e-30))

    low = high = 8.0  # doubled until the ratio is below 1 at the larger one
    above = below = ratio(low)
    while below >= 0:
        if high >= MOST:
            return math.nan
        low, above, high = high, below, 2 * high
        below = ratio(high)
    for _ in range(4):  # on the straight line between the ends, in logarithms
        middle = low * (high / low) ** (above / (above - below))
        at = ratio(middle)
        low, above, high, below = (middle, at, high, below) if at >= 0 else (low, above, middle, at)
        if abs(at) < 1e-3:
            break
    return float(low * (high / low) ** (above / (above - below)))
