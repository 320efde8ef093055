"""Rounding: what a sum, or a cast to half precision, took from a number; it is kept in a second number beside the first."""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
SMALL = torch.finfo(torch.float16).tiny


def rounding_of_sum(a: Tensor, b: Tensor) -> Tensor:
    """What a + b lost to rounding, exactly (Knuth's two-sum)."""
    total = a + b
    b_part = total - a
    return (a - (total - b_part)) + (b - b_part)


def rounded_off(wide: Tensor, output: Tensor) -> Tensor:
    """The rounding error of `output`, which is float32 `wide` in half precision: int16, in units in the last place of `wide`.

    Nothing is lost: the 16 bits of a bfloat16 and these 16 are the 32 of the float32. For float16 numbers below the normal range
    the unit is 2^-40. 0 where the output is inf or NaN.
    """
    short = output.float()
    lost = wide.view(torch.int32) - short.view(torch.int32)
    if output.dtype == torch.float16:
        lost = torch.where(short.abs() < SMALL, ((wide - short) * 2.0**40).round().to(torch.int32), lost)
    return lost.clamp(-(1 << 15), (1 << 15) - 1).masked_fill(~short.isfinite(), 0).to(torch.int16)


def unrounded(output: Tensor, low: Tensor) -> Tensor:
    """The output before rounding, in float32; `low` is what `rounded_off` returned."""
    short = output.float()
    whole = (short.view(torch.int32) + low).view(torch.float32)
    return torch.where(short.abs() < SMALL, short + low * 2.0**-40, whole) if output.dtype == torch.float16 else whole
