"""jacobian: how large is the softmax's Jacobian, for q and k of unit variance, as d_k grows?"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from attemper import rule, weights

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator, pick
from ..figures import alt, marks, theme
from ..maths import moments, theory
from ..maths.stats import columns, expect_column
from ..maths.theory import SCALES

NUMBERS = 40_000_000  # entries of keys drawn per cell, at most
QUERIES = 64

SAID = {"trace": "tr J", "square": "E‖J‖_F²"}


def measure(cell: Cell) -> Row:
    d, n, name = int(cell["d"]), int(cell["n"]), str(cell["rule"])
    # the same queries and keys for every rule
    stream = generator(cell["device"], "jacobian", d, n, cell["batches"], cell["seed"])
    batches = max(8, min(int(cell["batches"]), NUMBERS // (n * d)))
    batches_of = []
    for _ in range(batches):
        query = torch.randn(QUERIES, d, generator=stream, device=stream.device)
        key = torch.randn(n, d, generator=stream, device=stream.device)
        p = weights(query, key, scale=rule(name).scale(head_dim=d)).double()
        p2, p3 = p.square().sum(-1), p.pow(3).sum(-1)
        square = (p2 - 2 * p3 + p2.square()).clamp(min=0)  # ‖diag p − p pᵀ‖_F²; rounding may take it below 0
        batches_of.append(torch.stack([square, square.sqrt(), 1 - p2, p.amax(-1)]))
    square, norm, trace, top = torch.stack(batches_of, dim=1)  # each (batches, queries)
    one_hot = top > theory.NEARLY_ONE_HOT
    scale = float(rule(name).scale(head_dim=d))
    m, exact = theory.frozen(scale * d**0.5, n), moments.of_dot_products(d, n, scale)
    return {
        **columns(square=square, norm=norm, trace=trace, top_weight=top, one_hot=one_hot.double()),
        "one_hot_square": float(square[one_hot].mean()) if one_hot.any() else None,
        "m": m,
        "square_theory": exact.square if exact else None,
        "trace_theory": exact.trace if exact else None,
        "square_limit": theory.jacobian_square(m) if m < 1 else None,
    }


def expect(rows: Rows) -> list[Expectation]:
    expectations = []
    for row in rows:
        if row["square_theory"] is None:
            continue
        limit = f"; for large n m(1−m)/3 = {row['square_limit']:.3g}" if row["square_limit"] is not None else ""
        for column, more in (("trace", ""), ("square", limit)):
            quantity = f"{SAID[column]} {SCALES[row['rule']]}, d_k = {row['d']}, {row['n']} keys"
            source = f"exact mean by quadrature (attemper_lab/maths/moments.py){more}"
            mean, why = row[f"{column}_theory"], "1e-5 for float32"
            expectations.append(expect_column(row, column, quantity, mean, source, 1e-5, why))
    return expectations


@functools.cache
def peak(n: int) -> tuple[int, float]:
    """The d_k at which E‖J‖_F² is largest without a scale, and its exact value: in the limit of many keys 8 ln n, and 1/12."""

    def square(d: int) -> float:
        exact = moments.of_dot_products(d, n, 1.0)
        return exact.square if exact else 0.0

    low, high = 1, 16 * math.ceil(math.log(n) + 1)
    while high - low > 2:  # it rises, then falls
        first, other = low + (high - low) // 3, high - (high - low) // 3
        low, high = (first, high) if square(first) < square(other) else (low, other)
    at = max(range(low, high + 1), key=square)
    return at, square(at)


def finding(rows: Rows) -> str:
    n = max(row["n"] for row in rows)
    bare = pick(rows, rule="none", n=n) or rows
    low, high = min(bare, key=lambda row: row["d"]), max(bare, key=lambda row: row["d"])
    if low["d"] >= high["d"] or low["rule"] != "none":
        return f"‖J‖_F² is {high['square']:.4f} at d_k = {high['d']} with {high['n']} keys, rule {high['rule']}"
    at, most = peak(n)
    return (
        f"Unscaled, ‖J‖_F² rises and then falls with d_k: {low['square']:.3f} at {low['d']}, {most:.3f} at its peak, d_k = {at}, "
        f"and {high['square']:.3f} at {high['d']}, with {n} keys"
    )


def draw(rows: Rows, finding: str) -> Any:
    """‖J‖_F² against d_k: a hump without the scale, a constant with it."""
    n = max(row["n"] for row in rows)
    shown = theme.labelled([row for row in rows if row["n"] == n])
    colour = theme.by_rule(shown)
    x = theme.powers("d", "head dim d_k", [row["d"] for row in shown])
    low, high = min(row["d"] for row in shown), max(row["d"] for row in shown)
    between = (low * (high / low) ** (i / 100) for i in range(101))
    grid = [{"d": d, "form": theory.jacobian_square(m)} for d in between if (m := theory.frozen(d**0.5, n)) < 1]
    chart = (
        marks.labelled_line(1 / 12, "1/12, the peak in the limit of many keys")
        + marks.theory(grid, x, "form", dash=(5, 3))
        + marks.theory(shown, x, "square_theory", colour, smooth=True)
        + marks.measured(shown, x, "square", "mean ‖J‖_F²", colour, axis=alt.Axis(format=".2f"))
    )
    note = (
        f"n = {n} keys. Points: measured, with 95 % intervals. Coloured lines: exact means for {n} keys. Grey line: their limit "
        "for many keys without a scale, m(1−m)/3 with m = √(2 ln n / d_k), which is reached slowly where m is near 1."
    )
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(globals())
