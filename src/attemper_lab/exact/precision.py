"""precision: what does storing the scores in 16 bits do to the weights, and when does exp overflow?

`stored` rounds the scores to the dtype, as eager attention in 16 bits does; `fused` is attemper.attention on 16-bit inputs, which
keeps scores in float32, as FlashAttention does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attemper import attention, rule

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator, pick
from ..figures import marks, theme

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
POINTS = 4001

# by how much a weight moves when its logit, stored in bfloat16, is off by half a unit in the last place
TABLE = {32.0: 0.13, 64.0: 0.28, 128.0: 0.65, 1000.0: 6.4}


def measure(cell: Cell) -> Row:
    dtype, size = DTYPES[str(cell["dtype"])], float(cell["size"])
    device = str(cell["device"])
    near = torch.linspace(0.97 * size, size * 1.03, POINTS, dtype=torch.float64, device=device)
    exact_spacing = _spacing(size, dtype)
    at = torch.tensor([size], dtype=torch.float64, device=device) + torch.linspace(
        -exact_spacing / 2, exact_spacing / 2, POINTS, dtype=torch.float64, device=device
    )
    moved = (at.to(dtype).double() - at).abs().max()
    stored = near.to(dtype)
    plain = _plain_softmax(stored)
    return {
        "spacing": exact_spacing,
        "weight_moves": float(torch.expm1(moved)),
        "weight_moves_theory": _moves(exact_spacing / 2),
        "plain_finite": bool(plain.isfinite().all()),
        "softmax_finite": bool(torch.softmax(stored, 0).isfinite().all()),
        "stored_finite": bool(stored.isfinite().all()),
        **_attend(size, dtype, device),
        **_overflowing(str(cell["dtype"]), device, int(cell["seed"])),
        "plain_limit": largest(lambda x: _plain_softmax(torch.tensor([x, 0.0], device=device).to(dtype))),
        "stored_limit": largest(lambda x: _stored(_query(x, torch.float32, device), dtype)),
    }


HEAD, TOKENS = 64, 128  # of the draws on which a textbook softmax is tried


@functools.cache
def _overflowing(dtype: str, device: str, seed: int) -> dict[str, float]:
    """The share of rows that overflow in a softmax without max subtraction: unit normal q and k, scores stored in `dtype`."""
    stream = generator(device, "precision", HEAD, TOKENS, seed)
    query, key = torch.randn(2, 16, TOKENS, HEAD, generator=stream, device=stream.device)
    scores = query @ key.mT
    shares = {}
    for name in ("none", "sqrt_dk"):
        powers = (scores * rule(name).scale(head_dim=HEAD)).to(DTYPES[dtype]).exp()
        bad = ~(powers / powers.sum(-1, keepdim=True)).isfinite().all(-1) | powers.sum(-1).isinf()
        shares[f"plain_overflows_{name}"] = float(bad.double().mean())
    return shares


def largest(of: Callable[[float], Tensor]) -> float | None:
    """The largest score for which a softmax is finite, to 1e-6 of itself; None if even the largest float32 is fine."""
    low, high = 1.0, 2.0**127
    if bool(of(high).isfinite().all()):
        return None
    while high > low * (1 + 1e-6):
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (middle, high) if bool(of(middle).isfinite().all()) else (low, middle)
    return low


def _moves(off: float) -> float:
    """By how much a weight changes, relative to itself, when its logit is off by this much."""
    return math.expm1(off) if off < 700 else math.inf


def _spacing(size: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of a dtype near `size`."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(size))


def _plain_softmax(scores: Tensor) -> Tensor:
    """Softmax as a textbook writes it, without subtracting the maximum."""
    powers = scores.exp()
    return powers / powers.sum()


def _query(size: float, dtype: torch.dtype, device: str) -> Tensor:
    """Two queries whose largest score against the keys of :func:`_keys` is `size`, before any scale."""
    return torch.full((2, 64), math.sqrt(size / 64), device=device).to(dtype)


def _keys(query: Tensor) -> Tensor:
    return torch.stack([query[0], -query[0], query[0] / 2])


def _stored(query: Tensor, dtype: torch.dtype) -> Tensor:
    """Attention's weights through scores summed in float32 and stored in the dtype, as eager code does."""
    scores = (query.float() @ _keys(query).float().T).to(dtype)
    return torch.softmax(scores * 0.125, -1)


def _attend(size: float, dtype: torch.dtype, device: str) -> dict[str, bool]:
    """Attention whose largest score is `size`, through stored scores and through the fused form, from inputs of the dtype."""
    query = _query(size, dtype, device)
    value = torch.eye(3, 4, device=device).to(dtype)
    fused = attention(query, _keys(query), value, signs=()).output
    return {
        "inputs_finite": bool(query.isfinite().all()),
        "eager_finite": bool(_stored(query, dtype).isfinite().all()),
        "fused_finite": bool(fused.isfinite().all()),
    }


def expect(rows: Rows) -> list[Expectation]:
    expectations, source = [], "closed form: e^(half a unit in the last place) − 1"
    for size, number in TABLE.items():
        quantity = f"a weight moves by, bfloat16, |logit| = {size:g}"
        moved = [row["weight_moves"] for row in pick(rows, dtype="bfloat16", size=size)]
        expectations += [
            Expectation(quantity, number, value, 0.01 * (1 + number), source, "the digits given") for value in moved
        ]
    limits = {row["dtype"]: row for row in rows}
    for name, column, expected, what, source in (
        ("float32", "plain_limit", 128 * math.log(2), "textbook softmax overflows above", "ln of float32's end, 2^128"),
        ("float16", "plain_limit", 16 * math.log(2), "textbook softmax overflows above", "ln of float16's end, 2^16"),
        ("float16", "stored_limit", 65520.0, "stored scores overflow above", "65504 + 16, which rounds away"),
    ):
        if name in limits:
            within, measured = expected * max(torch.finfo(DTYPES[name]).eps, 2e-6), limits[name][column]
            why = "rounding of the dtype, and 2e-6 for the search"
            expectations.append(Expectation(f"{what}, {name}", expected, measured, within, f"IEEE 754: {source}", why))
    return expectations


def finding(rows: Rows) -> str:
    sizes = [row for row in rows if row["stored_finite"] and row["weight_moves"] < 1e4]
    if not sizes:
        return f"{sum(not row['softmax_finite'] for row in rows)} of {len(rows)} softmaxes overflowed"
    size = min((row["size"] for row in sizes), key=lambda size: abs(math.log(size / 128)))
    moved = [f"{row['weight_moves']:.2g} ({row['dtype']})" for row in pick(sizes, size=size)]
    return f"Relative change of a weight when its logit of {size:g} is stored: up to {', '.join(moved)}"


def draw(rows: Rows, finding: str) -> Any:
    """By how much a weight moves when its logit is stored in 16 bits, against the size of the logit."""
    shown = [row for row in rows if row["weight_moves_theory"] < 1e4 and row["stored_finite"]] or rows[:1]
    names = [name for name in ("float32", "float16", "bfloat16") if any(row["dtype"] == name for row in shown)]
    colour = theme.series("dtype", "scores stored in", names)
    sizes = [row["size"] for row in shown]
    x = theme.powers("size", "size of the logit", sizes)
    if min(sizes) >= 1:
        x = x.axis(values=sorted(set(sizes)), format="~s", labelOverlap="greedy", grid=False)
    chart = (
        marks.labelled_line(1.0, "the weight doubles")
        + marks.theory(_stairs(shown), x, "form", colour, stairs=True)
        + marks.measured(shown, x, "weight_moves", "largest relative change of a weight", colour, log=True)
    )
    note = (
        "Lines: e^(half a unit in the last place) − 1; the unit doubles at every power of two. Points: measured by rounding. "
        "Fused kernels keep float32 scores."
    )
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


def _stairs(shown: Rows) -> list[Row]:
    """The closed form at every power of two between the sizes of each dtype, where it steps."""
    steps_of: list[Row] = []
    for name in dict.fromkeys(row["dtype"] for row in shown):
        sizes = [row["size"] for row in shown if row["dtype"] == name]
        first, last = (math.floor(math.log2(size)) for size in (min(sizes), max(sizes)))
        steps = {min(sizes), max(sizes), *(2.0**power for power in range(first + 1, last + 1))}
        steps_of += [
            {"dtype": name, "size": size, "form": _moves(_spacing(size, DTYPES[name]) / 2)} for size in sorted(steps)
        ]
    return steps_of


EXPERIMENT = define(globals())
