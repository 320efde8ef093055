"""Factors: what multiplying by a number or a tensor does to vectors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .paths import SUMMED, Factor, Rotation, same


def multiplied(name: str, value: object, learned: bool) -> Factor | Rotation | None:
    """The factor of a `mul` or `div` by this value; a Rotation if a table may begin a rotation; None: nothing.

    `learned`: whether the value is a parameter, or made of parameters only.
    """
    invert = name == "div"
    if isinstance(value, (int, float)):
        number = float(value)
        return None if not number else Factor("multiplied by a number", 1 / number if invert else number)
    if not isinstance(value, Tensor) or not value.numel() or value.dtype == torch.bool:
        return None
    if value.is_complex():
        return Rotation(rms(value) ** 2, whole=True)
    used = few(value.detach()).double().flatten()
    used = used[used != 0]  # zeros hide padding
    if not len(used):
        return None
    low, high = (1 / float(used.max()), 1 / float(used.min())) if invert else (float(used.min()), float(used.max()))
    table = value.dim() > 0 and value.shape[-1] > 1
    if same(low, high, 1e-6) and (learned or not table or same(low, 1.0)):
        what = "multiplied by a learned number" if learned else "multiplied by a number"
        return Factor(what, low, learned=learned)
    if not table:
        number = float(used.reciprocal().mean() if invert else used.mean())
        what = "multiplied by learned numbers, one per head" if learned else "multiplied by a number per head or row"
        return Factor(what, number, low, high, learned=learned)
    if learned:
        return Factor("multiplied by learned weights per channel", rms(value), low, high, counts=False, learned=True)
    return Rotation(rms(few(value)) ** (-2 if invert else 2))


def averaged(name: str, args: tuple[Any, ...]) -> Factor | None:
    """The factor of an op that averages tokens, or adds them up, as many times the average.

    None: it is another op, or reduces their entries, which a projection leaves side by side.
    """
    if name not in ("mean", "sum") or len(args) < 2 or not args[1]:
        return None
    tensor, axes = args[0], [axis % args[0].dim() for axis in args[1]]
    if any(tensor.stride(axis) == 1 < tensor.shape[axis] for axis in axes):
        return None
    return Factor(SUMMED, 1.0 if name == "mean" else float(math.prod(tensor.shape[axis] for axis in axes)))


def rms(tensor: Tensor) -> float:
    """The root mean square of all entries."""
    wide = tensor.detach().abs().double() if tensor.is_complex() else tensor.detach().double()
    return math.sqrt(float(wide.square().mean())) if wide.numel() else 0.0


def few(tensor: Tensor, count: int = 1 << 20, keep: int = 0) -> Tensor:
    """About `count` entries, evenly spread; the last `keep` dimensions stay whole."""
    lead = tensor.dim() - keep
    for axis in range(lead):
        if tensor.stride(axis) == 0:
            tensor = tensor.narrow(axis, 0, 1)  # an expanded dimension repeats its entries
    for axis in sorted(range(lead), key=lambda axis: -tensor.shape[axis]):
        excess = math.prod(tensor.shape[:lead]) // count
        if excess > 1:
            tensor = tensor[(slice(None),) * axis + (slice(None, None, min(excess, tensor.shape[axis])),)]
    return tensor
