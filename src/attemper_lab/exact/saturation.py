"""saturation: at which spread of the logits does softmax put nearly all the weight on one key?

The logits are drawn as N(0, s²): given a query, its logits over normal keys are exactly that, with s = |q| × scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from attemper import measure as vitals_of

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator, pick
from ..figures import alt, marks, theme
from ..maths import moments, theory
from ..maths.stats import columns, expect_column

BATCHES = 16
ROUNDING = 1e-5  # float32 rounds the logits, and Σp² sums n of them
WIDE = 16.0  # the largest spread at which the mean top weight is integrated: the time grows with the square of it


def measure(cell: Cell) -> Row:
    n, s = int(cell["n"]), float(cell["s"])
    stream = generator(cell["device"], "saturation", n, s, cell["rows"], cell["seed"])
    shape = (BATCHES, max(1, int(cell["rows"]) // BATCHES), n, 1)
    logits = s * torch.randn(shape, generator=stream, device=stream.device)
    # one query of one entry, 1, against keys of one entry each: the logits are the keys
    signs = vitals_of(torch.ones_like(logits[:, :, :1]), logits, scale=1.0)
    top = signs.top_weight
    exact = moments.of_logits(s, n)
    return {
        "critical": theory.critical_std(n),
        "ratio": s / theory.critical_std(n),
        **columns(top_weight=top, entropy=signs.entropy),
        **columns(effective_keys=signs.effective_keys, jacobian_trace=signs.jacobian_trace),
        "one_hot": float((top > theory.NEARLY_ONE_HOT).double().mean()),
        "top_weight_theory": moments.top_weight(s, n) if s <= WIDE else None,
        "entropy_theory": exact.entropy if exact else None,
        "jacobian_trace_theory": exact.trace if exact else None,
        "jacobian_trace_limit": theory.jacobian_trace(s, n),
    }


def expect(rows: Rows) -> list[Expectation]:
    expectations = []
    for row in rows:
        for column, words, limit in (
            ("top_weight", "mean top weight", _top_limit(row)),
            ("entropy", "entropy of the weights", _entropy_limit(row)),
            ("jacobian_trace", "tr J = 1 − Σp²", _trace_limit(row)),
        ):
            if (mean := row[f"{column}_theory"]) is not None:
                quantity = f"{words}, n = {row['n']}, s = {row['s']:g}"
                source = f"exact mean by quadrature (attemper_lab/maths/moments.py); for large n {limit}"
                more = ROUNDING * abs(mean)
                expectations.append(expect_column(row, column, quantity, mean, source, more=more))
    return expectations


def _top_limit(row: Mapping[str, Any]) -> str:
    return "0" if row["ratio"] <= 1 else "that of the random energy model, frozen"


def _entropy_limit(row: Mapping[str, Any]) -> str:
    value = f"{theory.entropy(row['s'], row['n']):.3g}"
    return f"ln n − s²/2 = {value}" if row["ratio"] <= 1 else f"ψ(1) − ψ(1−m) = {value} (random energy model, frozen)"


def _trace_limit(row: Mapping[str, Any]) -> str:
    limit = row["jacobian_trace_limit"]
    if limit is None:
        return "no form is of use between s_c/2 and s_c"
    return f"{'m' if row['ratio'] > 1 else '1 − eˢ²/n'} = {limit:.3g} (random energy model)"


def spread_at(rows: Rows, n: int, level: float) -> float:
    """The logit std at which the measured mean top weight reaches a level, interpolated between rows; NaN if none enclose it.

    The exact one is `moments.spread_at`.
    """
    curve = sorted(pick(rows, n=n), key=lambda row: row["s"])
    for low, high in itertools.pairwise(curve):
        if low["top_weight"] < level <= high["top_weight"]:
            below, above = (moments.log_odds(row["top_weight"]) for row in (low, high))
            share = (moments.log_odds(level) - below) / (above - below)
            return float(low["s"] * (high["s"] / low["s"]) ** share)
    return math.nan


def width(n: int) -> float:
    """The factor by which the spread grows while the top weight goes from a quarter to three quarters; 1 would be a jump."""
    return moments.spread_at(n, 0.75) / moments.spread_at(n, 0.25)


def finding(rows: Rows) -> str:
    """Where the exact mean top weight is one half; what is measured has to agree with that mean."""
    sizes = sorted({row["n"] for row in rows})
    ratios = {n: f"{moments.spread_at(n, 0.5) / theory.critical_std(n):.2f}" for n in sizes}
    parts = [f"{ratios[n]} times that with {n} keys" if n == sizes[0] else f"{ratios[n]} with {n}" for n in sizes]
    return f"One key gets half the weight at a logit std near √(2 ln n): {', '.join(parts)}"


def draw(rows: Rows, finding: str) -> Any:
    """The top weight and tr J against the spread of the logits, in units of the threshold √(2 ln n)."""
    shown, colour = theme.by_keys(rows)
    scale, axis = alt.Scale(type="log", nice=False, padding=12), alt.Axis(values=[0.1, 0.3, 1, 3, 10])
    x = alt.X("ratio:Q", title="logit std ÷ √(2 ln n)", scale=scale, axis=axis)
    frozen = [{"ratio": 1.1**i, "form": 1.1**-i} for i in range(24)]
    threshold = marks.labelled_line(1.0, "threshold", axis="x")
    known = [row for row in shown if row["top_weight_theory"] is not None]
    top = (
        threshold
        + marks.theory(known, x, "top_weight_theory", colour, smooth=True)
        + marks.measured(shown, x, "top_weight", "mean top weight", colour, most=1.0)
    )
    trace = (
        threshold
        + marks.theory(frozen, x, "form", dash=(5, 3))
        + marks.theory(shown, x, "jacobian_trace_theory", colour, smooth=True)
        + marks.measured(shown, x, "jacobian_trace", "tr J = 1 − Σp²", colour, most=1.0)
    )
    chart = theme.side_by_side(top, trace, theme.WIDTH // 2 - 30)
    note = (
        "Points: measured, with 95 % intervals. Coloured lines: exact means. Right, grey line: their limit for many keys, "
        "√(2 ln n)/s (random energy model)."
    )
    return theme.finish(chart, finding, note)


EXPERIMENT = define(globals())
