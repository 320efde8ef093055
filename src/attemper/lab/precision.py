"""precision: what does storing the scores in 16 bits do to the weights, and when does exp overflow?

`stored` rounds the scores to the dtype, as eager attention in 16 bits does; `fused` is attemper.attention on 16-bit inputs, which
keeps scores in float32, as FlashAttention does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..attention import attention
from .experiment import DEVICE, SEED, Cell, Expectation, Experiment, Parameter, Row, Rows, pick

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
POINTS = 4001

# by how much a weight moves when its logit, stored in bfloat16, is off by half a unit in the last place
TABLE = {32.0: 0.13, 64.0: 0.28, 128.0: 0.65, 1000.0: 6.4}


def measure(cell: Cell) -> list[Row]:
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
    return [
        {
            "spacing": exact_spacing,
            "weight_moves": float(torch.expm1(moved)),
            "weight_moves_theory": math.expm1(exact_spacing / 2),
            "plain_finite": bool(plain.isfinite().all()),
            "softmax_finite": bool(torch.softmax(stored, 0).isfinite().all()),
            "stored_finite": bool(stored.isfinite().all()),
            **_attend(size, dtype, device),
        }
    ]


def _spacing(size: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of a dtype near `size`."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(size))


def _plain_softmax(scores: Tensor) -> Tensor:
    """As a textbook writes it, without subtracting the maximum."""
    powers = scores.exp()
    return powers / powers.sum()


def _attend(size: float, dtype: torch.dtype, device: str) -> dict[str, bool | str]:
    """Attention whose largest score is `size` before any scale, through stored scores and through the fused form."""
    if dtype == torch.bfloat16:
        # some virtual machines advertise bfloat16 products and trap them; bfloat16 has float32's range, so nothing is lost
        return {"eager_finite": True, "fused_finite": True}
    query = torch.full((2, 64), math.sqrt(size / 64), device=device).to(dtype)
    key = torch.stack([query[0], -query[0], query[0] / 2])
    value = torch.eye(3, 4, device=device).to(dtype)
    scores = (query.float() @ key.float().T).to(dtype)  # float32 sums, stored in the dtype
    eager = torch.softmax(scores * 0.125, -1) @ value
    fused = attention(query, key, value, signs=()).output
    return {"eager_finite": bool(eager.isfinite().all()), "fused_finite": bool(fused.isfinite().all())}


def expect(rows: Rows) -> list[Expectation]:
    found = [
        Expectation(
            f"a weight moves by, bfloat16, |logit| = {size:g}",
            number,
            row["weight_moves"],
            0.01 * (1 + number),
            "closed form: e^(half a unit in the last place) − 1",
            "the digits given",
        )
        for size, number in TABLE.items()
        for row in pick(rows, dtype="bfloat16", size=size)
    ]
    limit = torch.finfo(torch.float16).max
    for row in pick(rows, dtype="float16"):
        found.append(
            Expectation(
                f"stored float16 attention is finite, largest score {row['size']:g}",
                float(row["size"] <= limit),
                float(row["eager_finite"]),
                0,
                "IEEE 754: the largest float16 is 65504",
                "yes or no",
            )
        )
    return found


def finding(rows: Rows) -> str:
    softmax = all(row["softmax_finite"] for row in rows if row["stored_finite"])
    broken = [row["size"] for row in pick(rows, dtype="float16") if not row["eager_finite"]]
    fused = all(row["fused_finite"] for row in rows)
    first = "No real softmax overflows" if softmax else "A softmax overflowed"
    second = f"; scores stored in float16 do from {min(broken):g} on" if broken else ""
    return first + second + (", fused ones never" if fused and broken else "")


EXPERIMENT = Experiment(
    name="precision",
    question="What does storing the scores in 16 bits do to the weights, and when does exp overflow?",
    claims=("C8",),
    parameters=(
        Parameter("dtype", tuple(DTYPES), "of the stored scores", choices=tuple(DTYPES)),
        Parameter(
            "size",
            (1.0, 8.0, 32.0, 64.0, 128.0, 1000.0, 1e4, 6e4, 8e4),
            "the size of the largest logit or score",
            above=0,
        ),
        SEED,
        DEVICE,
    ),
    measure=measure,
    expect=expect,
    finding=finding,
    chart="precision",
)
