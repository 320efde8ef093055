"""three_scores: how do additive, bare and scaled dot-product scores compare as d grows, and what do they compute?

The additive score is wᵀ tanh(W_q q + W_k k), as Bahdanau et al. 2015 have it, with w drawn as a layer draws it (variance
1/d). What each score computes is counted while textbook code runs: multiplications inside matrix products, and tanh's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attemper import Vitals, additive_attention, attention
from attemper.extension.calls import TorchDispatchMode

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator, pick
from ..figures import marks, theme
from ..maths.stats import columns

SCORES = ("additive", "dot", "scaled")
LABELS = {"additive": "additive", "dot": "dot product", "scaled": "dot product / √d"}
BATCHES, QUERIES = 12, 32


class CountTanh(TorchDispatchMode):
    """Counts the numbers that tanh is taken of."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.tanh.default:
            self.count += result.numel()
        return result


def measure(cell: Cell) -> Row:
    d, n, score = int(cell["d"]), int(cell["n"]), str(cell["score"])
    stream = generator(cell["device"], "three_scores", d, n, cell["seed"])  # the same q and k for every score
    query = torch.randn(BATCHES, QUERIES, d, generator=stream, device=stream.device)
    key = torch.randn(BATCHES, n, d, generator=stream, device=stream.device)
    weight = torch.randn(BATCHES, d, generator=stream, device=stream.device) / math.sqrt(d)
    signs = _signs(score, query, key, weight)
    tokens = torch.randn(n, d, generator=stream, device=stream.device)
    flops, tanhs = counted(lambda: textbook(score, tokens, tokens))
    return {
        **columns(variance=signs.variance, effective_keys=signs.effective_keys, top_weight=signs.top_weight),
        "product_flops": flops,
        "tanhs": tanhs,
    }


def _signs(score: str, query: Tensor, key: Tensor, weight: Tensor) -> Vitals:
    wanted = ("variance", "effective_keys", "top_weight")
    if score == "additive":
        return additive_attention(query, key, key[..., :1], weight, signs=wanted).vitals
    scale = 1.0 if score == "dot" else query.shape[-1] ** -0.5
    return attention(query, key, key[..., :1], scale=scale, signs=wanted).vitals


def textbook(score: str, query: Tensor, key: Tensor) -> Tensor:
    """The scores (n, n) of projected queries and keys, as textbooks write them."""
    d = query.shape[-1]
    w_q, w_k, w = query.new_ones(d, d), query.new_ones(d, d), query.new_ones(d, 1)
    projected, offered = query @ w_q, key @ w_k
    if score == "additive":
        return (torch.tanh(projected[:, None] + offered[None]) @ w).squeeze(-1)
    return projected @ offered.T * (1.0 if score == "dot" else d**-0.5)


def counted(call: Callable[[], object]) -> tuple[int, int]:
    """The operations in matrix products (a multiplication and an addition are two), and the tanh's of a call."""
    with torch.no_grad(), FlopCounterMode(display=False) as products:
        call()
    with torch.no_grad(), CountTanh() as tanhs:
        call()
    return int(products.get_total_flops()), tanhs.count


def expect(rows: Rows) -> list[Expectation]:
    expectations = []
    for row in rows:
        n, d, additive = row["n"], row["d"], row["score"] == "additive"
        label = f"{LABELS[row['score']]}, d = {d}, n = {n}"
        products = 2 * 2 * n * d * d + 2 * n * n * d  # both projections; then wᵀ times n² vectors, or Q times Kᵀ
        for what, expected, counted_here in (
            ("operations in matrix products", products, row["product_flops"]),
            ("tanh's", n * n * d if additive else 0, row["tanhs"]),
        ):
            expectations.append(
                Expectation(f"{what}, {label}", expected, counted_here, 0.0, "counted by hand", "exact")
            )
    return expectations


def finding(rows: Rows) -> str:
    d, n = max(row["d"] for row in rows), max(row["n"] for row in rows)
    shown = {row["score"]: row for row in pick(rows, d=d, n=n)}
    keys = ", ".join(f"{shown[name]['effective_keys']:.3g} ({LABELS[name]})" for name in SCORES if name in shown)
    return f"Effective keys of {n} at d = {d}, by score: {keys}"


def draw(rows: Rows, finding: str) -> Any:
    """How many keys share a query's weight under each score, and the variance of the scores, against d."""
    n = max(row["n"] for row in rows)
    shown = [{**row, "label": LABELS[row["score"]]} for row in rows if row["n"] == n]
    present = [LABELS[name] for name in SCORES if any(row["score"] == name for row in rows)]
    colour = theme.series("label", "score", present)
    x = theme.powers("d", "d", [row["d"] for row in shown])
    keys = marks.curve(shown, x, "effective_keys", f"effective keys of {n}", colour, log=True)
    spread = marks.curve(shown, x, "variance", "variance of a query's scores", colour, log=True)
    chart = theme.side_by_side(keys, spread, theme.WIDTH // 2 - 20)
    return theme.finish(chart, finding, "Unit-variance q and k, w of variance 1/d, before training; 95 % intervals.")


EXPERIMENT = define(globals())
