"""Hiding: which ops hide keys from a model's scores, how much weight those keys keep, and what changed weights after a softmax.

An op hides keys if it fills them with a number, multiplies them by 0, or adds one of two numbers. Whether they are hidden is then
measured: the largest weight that the softmax leaves on one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.contract import HIDDEN_BIAS
from ..attach.storages import Storages

ROWS = 64  # of the weights that are looked at
MASKING = {"masked_fill", "where", "tril", "triu"}
BOUNDING = {"tanh", "clamp", "hardtanh", "softsign"}  # what they return is no longer −inf


@dataclass(frozen=True)
class HidingOp:
    """An op that hides the keys where ``mask`` is True, in scores of this shape."""

    mask: Tensor
    shape: torch.Size
    how: str  # "masked_fill with −10"


@dataclass(frozen=True)
class WeakMask:
    """The largest weight of a row on a key that an op hides."""

    how: str
    weight: float


@dataclass(frozen=True)
class TwoValues:
    """The two numbers that a tensor holds."""

    low: float
    high: float


class Hiding:
    """What hides keys, by the storage of scores; and what happened to weights, by theirs."""

    def __init__(self) -> None:
        self.ops: Storages[tuple[HidingOp, ...]] = Storages()
        self.changes: Storages[frozenset[str]] = Storages()
        self._values: Storages[dict[tuple[int, ...], TwoValues | None]] = Storages()

    def hide(self, name: str, args: tuple[Any, ...], scores: Tensor, result: Tensor) -> None:
        """An op made scores of scores: keep what was hidden before, and what it hides itself."""
        before = self.ops.get(scores) or ()
        hidden = self._hides(name, args, scores, result)
        if before or hidden is not None:
            self.ops.put(result, before if hidden is None else (*before, hidden))

    def add_bias(self, bias: object, result: Tensor) -> None:
        """A product added a bias to the scores that it made (baddbmm)."""
        added = self._added(bias, 1.0, result) if isinstance(bias, Tensor) else None
        if added is not None:
            self.ops.put(result, (added,))

    def change(self, name: str, args: tuple[Any, ...], weights: Tensor, result: Tensor) -> None:
        """An op made weights of weights: "masked", "dropped", "gated", "divided" or "added"."""
        before = self.changes.get(weights) or frozenset()
        changed = self._changes(name, args, weights)
        if before or changed:
            self.changes.put(result, before | changed)

    def weak(self, scores: Tensor, weights: Tensor) -> WeakMask | None:
        """The largest weight that a softmax over the last dimension left on a key that was hidden before; None: nothing was."""
        weights_of = [self._weight(op, weights) for op in self.ops.get(scores) or ()]
        return max((mask for mask in weights_of if mask is not None), key=lambda mask: mask.weight, default=None)

    def _hides(self, name: str, args: tuple[Any, ...], scores: Tensor, result: Tensor) -> HidingOp | None:
        if name == "masked_fill" and isinstance(args[1], Tensor):
            number = _number(args[2])
            if number is None or number <= HIDDEN_BIAS:
                return None
            return HidingOp(args[1], result.shape, f"masked_fill with {_shown(number)}")
        if name == "where" and len(args) == 3:
            kept = args[1] is scores or (isinstance(args[1], Tensor) and args[1].shape == scores.shape)
            number = _number(args[2] if kept else args[1])
            if number is None or number <= HIDDEN_BIAS:
                return None
            return HidingOp(~args[0] if kept else args[0], result.shape, f"where with {_shown(number)}")
        if name in BOUNDING:
            hidden = scores.detach() <= HIDDEN_BIAS
            bounded = scores.shape == result.shape and bool(hidden.any()) and not bool((result <= HIDDEN_BIAS).any())
            return HidingOp(hidden, result.shape, f"a mask with {name}() behind it") if bounded else None
        if name in ("tril", "triu"):
            ones = torch.ones(result.shape[-2:], dtype=torch.bool, device=result.device)
            kept_ones = getattr(ones, name)(args[1] if len(args) > 1 else 0)
            return HidingOp(~kept_ones, result.shape, f"{name}(), which fills with 0")
        if name in ("add", "sub", "mul") and len(args) > 1:
            other = args[1] if args[0] is scores else args[0]
            if not isinstance(other, Tensor):
                return None
            if name == "mul":
                values = self._two_values(other)
                if values is None or (values.low, values.high) != (0.0, 1.0):
                    return None
                return HidingOp(other == 0, result.shape, "scores times a mask of 0 and 1")
            return self._added(other, 1.0 if name == "add" else -1.0, result)
        return None

    def _added(self, other: Tensor, sign: float, result: Tensor) -> HidingOp | None:
        values = self._two_values(other)
        if values is None or not other.is_floating_point():
            return None
        low, high = sorted((sign * values.low, sign * values.high))
        if low <= HIDDEN_BIAS or not (high == 0.0 or (low, high) == (0.0, 1.0)):
            return None
        return HidingOp(sign * other == low, result.shape, f"a mask of {_shown(low)} and {_shown(high)} that is added")

    def _two_values(self, tensor: Tensor) -> TwoValues | None:
        """As below, once for every tensor."""
        if tensor.dim() < 2 or tensor.numel() < 4 or tensor.is_complex():
            return None
        place = (tensor.storage_offset(), *tensor.shape, *tensor.stride())
        known = self._values.get(tensor) or {}
        if place not in known:
            known = {**known, place: two_values(tensor.detach())}
            self._values.put(tensor, known)
        return known[place]

    def _changes(self, name: str, args: tuple[Any, ...], weights: Tensor) -> frozenset[str]:
        if name in MASKING:
            return frozenset({"masked"})
        if name in ("native_dropout", "dropout", "feature_dropout"):
            return frozenset({"dropped"})
        other = args[1] if len(args) > 1 and args[0] is weights else args[0]
        if name in ("add", "sub", "rsub") and isinstance(other, Tensor) and other.dim() > 1:
            return frozenset({"added"})
        if name not in ("mul", "div") or not isinstance(other, Tensor) or other.dim() == 0:
            return frozenset()
        if name == "div":
            return frozenset({"divided"})
        values = self._two_values(other) if other.shape[-1] > 1 else None
        if values is None or values.low != 0.0:
            return frozenset({"gated"})
        return frozenset({"dropped" if values.high > 1.0 else "masked"})

    def _weight(self, op: HidingOp, weights: Tensor) -> WeakMask | None:
        mask = op.mask
        try:
            if weights.shape != op.shape:
                mask = mask.expand(op.shape).reshape(weights.shape)
            mask = torch.broadcast_to(mask, weights.shape)
        except RuntimeError:
            return None
        step = max(1, math.ceil(weights.shape[-2] / ROWS))
        mask, shown = mask[..., ::step, :], weights.detach()[..., ::step, :]
        chosen = mask & ~mask.all(-1, keepdim=True)  # a row that hides everything hides nothing from another key
        if not is_pattern(mask):
            return None
        largest = float(shown.where(chosen, 0.0).amax()) if chosen.any() else 0.0
        return WeakMask(op.how, largest)


def two_values(tensor: Tensor) -> TwoValues | None:
    """The two numbers of a tensor that holds no others; None: it holds fewer or more."""
    if tensor.dtype == torch.bool:
        return TwoValues(0.0, 1.0) if bool(tensor.any()) and not bool(tensor.all()) else None
    low, high = tensor.aminmax()
    if bool(low == high) or not bool(((tensor == low) | (tensor == high)).all()):
        return None
    return TwoValues(float(low), float(high))


def is_pattern(mask: Tensor) -> bool:
    """Whether it looks like a mask of keys: every row hides as many as the row before, or all more, or all fewer."""
    rows = mask.reshape(-1, *mask.shape[-2:])[:64].sum(-1)  # how many keys each row hides
    steps = rows.diff(dim=-1)
    return bool(((steps >= 0).all(-1) | (steps <= 0).all(-1)).all())


def _number(value: object) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_meta else None
    return float(value) if isinstance(value, (int, float)) else None


def _shown(number: float) -> str:
    return f"{number + 0.0:g}".replace("-", "−")  # no −0
