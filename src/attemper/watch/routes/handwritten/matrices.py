"""Matrices: what is known of a matrix of logits, and of one of weights, on its way from q·kᵀ to the values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....kernels.contract import HIDDEN_BIAS
from ...attach.running import Frame, Place
from ...call import without_autograd_and_modes
from .op_names import EXPONENTIALS, RESHAPING, SCALINGS, SELECTING

FAR = -1e6
"""Far enough below HIDDEN_BIAS that no score added to it comes back above."""

Count = Callable[[tuple[Frame, ...]], None]
"""Counts a call that waits for its values, once they come; it is given the modules around that product."""


@dataclass(frozen=True)
class Added:
    """A mask that was added to logits of this shape and these strides, or subtracted from them."""

    mask: Tensor
    sign: int
    shape: torch.Size
    stride: tuple[int, ...]

    def hides(self, logits: Tensor) -> Tensor | None:
        """Which logits it hides, where the sum does not show it: a score above 0 lifts −1e4 over the bar."""
        mask = self.mask if self.sign > 0 else -self.mask
        # on another device reading its numbers would wait for them
        if mask.device.type == "cpu" and (
            mask.amin() > HIDDEN_BIAS or not ((mask <= HIDDEN_BIAS) & (mask > FAR)).any()
        ):
            return None
        hidden = mask <= HIDDEN_BIAS
        if logits.shape == self.shape and logits.stride() == self.stride:
            return hidden
        if logits.numel() == self.shape.numel() and logits.is_contiguous():
            return hidden.expand(self.shape).reshape(logits.shape)
        return None


@dataclass(frozen=True)
class Scores:
    """A matrix that began as q·kᵀ, and what was done to it since."""

    query: Tensor  # the left factor, (..., Lq, E)
    key: Tensor  # the right factor, (..., E, Lk)
    frames: tuple[Frame, ...]
    shape: tuple[int, int]  # of the product
    scale: float | None = 1.0
    root: float | None = None  # the number that both factors were multiplied by before, as SDPA's own math does
    capped: bool = False
    cap: float | None = None
    masked: bool = False
    causal: bool = False
    strided: bool = True  # whether it lies in memory as the product left it
    in_order: bool = True  # whether its columns are the keys
    exponential: str = ""  # what was taken of it in place of a softmax
    beside: tuple[int, int] = (0, 0)  # columns put before and after the keys
    added: tuple[Added, ...] = ()
    places: tuple[Place, ...] = ()  # the products that made it, where somebody counts ops

    def after(self, name: str, args: tuple[Any, ...], tensor: Tensor, result: Tensor) -> Scores:
        """What is known of scores, here `tensor`, after one more step made `result` of them."""
        kept = self
        if name not in RESHAPING and (tensor.shape != result.shape or tensor.stride() != result.stride()):
            kept = replace(kept, strided=False)
        if name == "tanh":
            return replace(kept, capped=True)
        if name in EXPONENTIALS:
            return replace(kept, exponential=name)
        if name in ("cat", "constant_pad_nd"):
            return kept._widened(name, args, tensor, result)
        if name in SELECTING:
            return replace(kept, in_order=False)
        if name not in SCALINGS:
            if name in ("add", "sub") and len(args) > 1:
                other = args[1] if args[0] is tensor else args[0]
                if isinstance(other, Tensor) and other.is_floating_point() and other.numel():
                    sign = 1 if name == "add" else -1
                    kept = replace(kept, added=(*kept.added, Added(other, sign, result.shape, result.stride())))
            return replace(kept, masked=kept.masked or name in ("add", "sub", "masked_fill", "where"))
        factor = number(args[1] if len(args) > 1 else None)
        if factor is None or kept.scale is None or factor == 0:
            return replace(kept, scale=None)
        factor = factor if name == "mul" else 1 / factor
        cap = factor if kept.capped and kept.cap is None else kept.cap
        return replace(kept, scale=kept.scale * factor, cap=cap)

    def are_across(self, tensor: Tensor, axis: int) -> bool:
        """Whether whole matrices lie beside this axis of theirs, so that it is the heads: weights there mix these, and leave
        logits. Weights over any other axis make features, as an output projection does behind a linear attention."""
        matrix = self.shape[0] * (self.shape[1] + sum(self.beside))
        return matrix > 0 and tensor.numel() // tensor.shape[axis] % matrix == 0

    def made_at(self, place: Place, ratio: float) -> Scores:
        """These scores, with the op that made them, and what else it multiplied them by."""
        scale, root = self.scale, self.root
        return replace(
            self,
            places=(place,),
            scale=None if scale is None else scale * ratio,
            root=None if root is None else root * ratio**0.5,
        )

    def _widened(self, name: str, args: tuple[Any, ...], tensor: Tensor, result: Tensor) -> Scores:
        """Columns were put beside the keys: attention sinks."""
        more = result.shape[-1] - tensor.shape[-1]
        if result.shape[:-1] != tensor.shape[:-1]:
            return replace(self, in_order=False)
        before, after = self.beside
        first = args[1][0] == 0 if name == "constant_pad_nd" else args[0][0] is tensor
        return replace(self, masked=True, beside=(before, after + more) if first else (before + more, after))

    def hidden(self, logits: Tensor) -> Tensor:
        """The logits, with what an added mask hides hidden for certain."""
        with without_autograd_and_modes(logits.device.type):
            for added in self.added:
                hides = added.hides(logits)
                if hides is not None:
                    logits = logits.masked_fill(hides, -torch.inf)
        return logits


@dataclass(frozen=True)
class Weights:
    """What a softmax returned; its calls wait for values. Without calls: a softmax whose scores were not traced."""

    calls: tuple[Count, ...]
    frames: tuple[Frame, ...]
    sequence: int | None  # of the queries
    size: int  # of the softmax's dimension
    stride: int | None  # of it, in memory; None where the weights were laid out anew
    beside: int = 0  # of its entries, those that are no keys
    log: bool = False  # a log_softmax, of which the exponential is still to come

    def after(self, name: str, tensor: Tensor, result: Tensor) -> Weights:
        kept = replace(self, log=False) if name == "exp" else self
        if name in RESHAPING or (tensor.shape == result.shape and tensor.stride() == result.stride()):
            return kept
        return replace(kept, stride=None)

    def summed(self, tensor: Tensor, axis: int) -> bool:
        """Whether a product that sums over this axis sums over what the softmax normalised."""
        size = tensor.shape[axis]
        if self.log:
            return False
        if self.stride is None or size == 1:
            return size in (self.size, self.size - self.beside)
        return tensor.stride(axis) == self.stride and size <= self.size


def number(value: object) -> float | None:
    """A plain number, also as a tensor; reading one off another device would wait for it."""
    if isinstance(value, Tensor):
        value = value.item() if value.dim() == 0 and value.device.type == "cpu" and not value.is_meta else None
    return float(value) if isinstance(value, (int, float)) else None
