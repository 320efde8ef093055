"""Matrices: what is known of a matrix of scores, and of one of weights, between q·kᵀ and the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....kernels.contract import HIDDEN_BIAS
from ...attach.modes import without_autograd_and_modes
from ...attach.running import Frame, OpPlace
from ...attach.storages import address
from ...bias import adds
from .op_names import EXPONENTIALS, RESHAPING, SCALINGS, SELECTING
from .slices import Copy

if TYPE_CHECKING:
    from ...call import AttentionCall

SHIFTED = {
    "add",
    "sub",
    "masked_fill",
    "where",
    "_to_copy",
    "to",
    "clone",
    "copy",
    "contiguous",
    "dropout",
    "native_dropout",
}
"""Ops that keep what was subtracted from a row."""

FAR = -1e6
"""Far enough below HIDDEN_BIAS: no score that is added to it lifts it above."""


class Waiting:
    """A call that waits for its values. Called with the modules around that product, it is counted."""

    __slots__ = ("around", "axes", "call", "count", "over")

    def __init__(
        self,
        call: AttentionCall,
        count: Callable[[tuple[Frame, ...]], None],
        around: tuple[Frame, ...],
        over: str,
        axes: tuple[int, int | None, int],
    ) -> None:
        self.call, self.count, self.around = call, count, around
        self.axes = (
            axes  # the dimension of the softmax, that of the keys if it is another and known, and how many there are
        )
        self.over = over  # what the softmax runs over, if the product with the values does not add up over it

    def __call__(self, last: tuple[Frame, ...]) -> None:
        """Count the call, and mark the modules that made its scores and weights as accounted for."""
        for frame in (*self.around, *last):
            frame.accounted = True
        self.count(last)


@dataclass(frozen=True)
class AddedMask:
    """A mask or a bias that was added to logits of this shape and these strides, or subtracted from them."""

    mask: Tensor
    sign: int
    shape: torch.Size
    stride: tuple[int, ...]
    factor: float | None = 1.0  # by which it was multiplied, with the logits, since then; None: not known
    start: int | None = None  # in logits that hold others beside them: the first of their columns

    @property
    def signed(self) -> Tensor:
        return self.mask if self.sign > 0 else -self.mask

    @property
    def columns(self) -> slice:
        """The columns of the logits to which it was added."""
        return slice(None) if self.start is None else slice(self.start, self.start + self.shape[-1])

    def hidden(self, logits: Tensor) -> Tensor:
        """The logits, with -inf wherever it hides them."""
        if self.start is None or not logits.dim():
            hides = self.hides(logits)
            return logits if hides is None else logits.masked_fill(hides, -torch.inf)
        hides = self.hides(logits[..., self.columns])
        if hides is not None:
            logits = logits.clone()
            logits[..., self.columns].masked_fill_(hides, -torch.inf)
        return logits

    def hides(self, logits: Tensor) -> Tensor | None:
        """Which logits it hides; None if they are below HIDDEN_BIAS anyway. A score above 0 lifts a mask of −1e4 above it."""
        mask = self.signed
        # reading numbers of another device would wait for it
        if mask.device.type == "cpu" and (
            mask.amin() > HIDDEN_BIAS or not ((mask <= HIDDEN_BIAS) & (mask > FAR)).any()
        ):
            return None
        return self._over(mask <= HIDDEN_BIAS, logits)

    def values(self, logits: Tensor) -> Tensor | None:
        """What it adds to logits that it does not hide; None if that is not known."""
        if self.factor is None:
            return None
        values = self._over(self.signed.masked_fill(self.signed <= HIDDEN_BIAS, 0), logits)
        return values if values is None or self.factor == 1 else values * self.factor

    def _over(self, each: Tensor, logits: Tensor) -> Tensor | None:
        """Entries of the mask in a shape that broadcasts over these logits; None if their layout is another one now."""
        if logits.shape == self.shape and _order(logits.shape, logits.stride()) == _order(self.shape, self.stride):
            return each
        if logits.numel() == self.shape.numel() and logits.is_contiguous():
            return each.expand(self.shape).reshape(logits.shape)
        return None


@dataclass(frozen=True)
class ScoreMatrix:
    """A matrix that began as q·kᵀ, and the ops on it since."""

    query: Tensor  # the left factor, (..., Lq, E)
    key: Tensor  # the right factor, (..., E, Lk)
    frames: tuple[Frame, ...]
    shape: tuple[int, int]  # of the product
    scale: float | None = 1.0
    root: float | None = None  # the number that both factors were multiplied by before, as SDPA's math backend does
    copied: Copy | None = None  # what the queries are a copy of
    capped: bool = False
    cap: float | None = None
    masked: bool = False
    causal: bool = False
    strided: bool = True  # whether it is in memory as the product left it
    steps: tuple[int, int] | None = None  # in a copy with another layout: the strides of its rows and columns, if known
    in_order: bool = True  # whether its columns are the keys
    exponential: str = ""  # the op that replaces a softmax
    sink_columns: tuple[int, int] = (0, 0)  # columns added before and after the keys
    products: tuple[tuple[int, int], ...] = ()  # where others were added: the columns of each product of q and keys
    added: tuple[AddedMask, ...] = ()
    shift: Tensor | None = None  # what was subtracted from every key of a row, as gpt-oss does with its largest logit
    places: tuple[OpPlace, ...] = ()  # the products that made it, if ops are counted

    def after(self, name: str, args: tuple[Any, ...], tensor: Tensor, result: Tensor) -> ScoreMatrix:
        """What is known of the scores after one more op made `result` of `tensor`."""
        kept = self
        if name not in RESHAPING and (tensor.shape != result.shape or tensor.stride() != result.stride()):
            kept = replace(kept, strided=False, steps=self._steps_after(tensor, result))
        elif name in RESHAPING and self.steps is not None:
            kept = replace(kept, steps=None)
        if self.shift is not None:
            kept = replace(kept, shift=_shift_after(self.shift, name, args))
        if name == "tanh":
            return replace(kept.without_added_values(), capped=True)
        if name in EXPONENTIALS:
            return replace(kept, exponential=name)
        if name == "constant_pad_nd":
            before = args[1][0]
            return kept._widened(before, result.shape[-1] - tensor.shape[-1] - before, tensor, result)
        if name in SELECTING:
            return replace(kept, in_order=False)
        if name in SCALINGS:
            return kept._scaled(name, args)
        if name in ("add", "sub"):
            return kept._summed(name, args, tensor, result)
        return replace(kept, masked=True) if name in ("masked_fill", "where", "tril", "triu") else kept

    def _scaled(self, name: str, args: tuple[Any, ...]) -> ScoreMatrix:
        """The scores times or divided by a number; after a tanh, it is the cap. Anything else makes the scale unknown."""
        factor = number(args[1] if len(args) > 1 else None)
        if factor is None or factor == 0:
            return replace(self.without_added_values(), scale=None)
        factor = factor if name == "mul" else 1 / factor
        cap = factor if self.scale is not None and self.capped and self.cap is None else self.cap
        added = tuple(
            replace(bias, factor=None if bias.factor is None else bias.factor * factor) for bias in self.added
        )
        return replace(self, scale=None if self.scale is None else self.scale * factor, cap=cap, added=added)

    def without_added_values(self) -> ScoreMatrix:
        """The matrix after an op that changes what was added in an unknown way."""
        return replace(self, added=tuple(replace(bias, factor=None) for bias in self.added)) if self.added else self

    def _summed(self, name: str, args: tuple[Any, ...], tensor: Tensor, result: Tensor) -> ScoreMatrix:
        """A mask or a bias was added or subtracted, or one number from all keys of a row, which a softmax ignores."""
        kept = replace(self, masked=True)
        other = None if len(args) < 2 else args[1] if args[0] is tensor else args[0]
        if isinstance(other, (int, float)) and other:
            other = torch.tensor(float(other), dtype=torch.float64, device="cpu")
        if not isinstance(other, Tensor) or not other.is_floating_point() or not other.numel():
            return kept
        if name == "sub" and other is args[1] and other.shape[-1:] in ((), (1,)) and result.shape[-1] > 1:
            return replace(kept, shift=other if kept.shift is None else kept.shift + other)
        return kept.with_added(other, 1 if name == "add" else -1, result)

    def with_added(self, other: Tensor, sign: int, result: Tensor, factor: float | None = 1.0) -> ScoreMatrix:
        """The matrix after a mask or a bias was added to it, which made `result`."""
        factor = None if address(other) == address(result) else factor  # it was overwritten by the sum
        mask = AddedMask(other, sign, result.shape, result.stride(), factor)
        return replace(self, added=(*self.added, mask))

    def _steps_after(self, tensor: Tensor, result: Tensor) -> tuple[int, int] | None:
        rows, columns = (_stride_after(stride, tensor, result) for stride in self.strides or (None, None))
        return None if rows is None or columns is None else (rows, columns)

    @property
    def strides(self) -> tuple[int, int] | None:
        """The strides of its rows and columns; None: unknown."""
        return (self.shape[1], 1) if self.strided else self.steps

    def are_across(self, tensor: Tensor, axis: int) -> bool:
        """Whether this axis is the heads, since the other axes hold whole matrices: weights over it mix heads, and the result is
        logits. Weights over any other axis make features, as an output projection after a linear attention does."""
        matrix = self.shape[0] * (self.shape[1] + sum(self.sink_columns))
        return matrix > 0 and tensor.numel() // tensor.shape[axis] % matrix == 0

    def made_at(self, place: OpPlace, ratio: float) -> ScoreMatrix:
        """These scores, with the place of the op that made them and the ratio it applied."""
        scale, root = self.scale, self.root
        return replace(
            self,
            places=(place,),
            scale=None if scale is None else scale * ratio,
            root=None if root is None else root * ratio**0.5,
        )

    def _widened(self, before: int, after: int, tensor: Tensor, result: Tensor) -> ScoreMatrix:
        """So many columns were added before and after it: attention sinks, or the keys of other products."""
        if result.shape[:-1] != tensor.shape[:-1]:
            return replace(self, in_order=False)
        own = self.products or ((0, tensor.shape[-1]),)
        return replace(
            self,
            masked=True,
            sink_columns=(self.sink_columns[0] + before, self.sink_columns[1] + after),
            products=tuple((start + before, stop + before) for start, stop in own),
            added=tuple(replace(bias, start=(bias.start or 0) + before, stride=result.stride()) for bias in self.added),
        )

    def hidden(self, logits: Tensor, dim: int) -> Tensor:
        """The logits, with -inf wherever an added mask hides them, and without what was subtracted from all keys of a row."""
        with without_autograd_and_modes(logits.device.type):
            shift = self.shift
            if shift is not None and (not shift.dim() or (shift.dim() == logits.dim() and shift.shape[dim] == 1)):
                logits = torch.where(logits <= HIDDEN_BIAS, logits, logits + shift.to(logits.dtype))
            for added in self.added:
                logits = added.hidden(logits)
        return logits

    def without_added(self, logits: Tensor) -> tuple[Tensor | None, bool]:
        """Logits without what was added to visible ones, None if nothing was; and whether that is known."""
        adding = [bias for bias in self.added if adds(bias.signed)]
        if not adding:
            return None, True
        with without_autograd_and_modes(logits.device.type):
            scores = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device)
            scores.copy_(logits)
            for bias in adding:
                inner = scores[..., bias.columns]
                values = bias.values(inner)
                if values is None:
                    return None, False
                inner -= values
            return scores.masked_fill_(logits <= HIDDEN_BIAS, -torch.inf), True


def side_by_side(
    parts: Sequence[tuple[Tensor, ScoreMatrix | None]], learned: Sequence[bool], result: Tensor
) -> ScoreMatrix:
    """Scores beside others, which are sinks or the keys of other products. q and k come from the part as wide as the keys.

    ``learned`` are the parts that are products of q and a parameter.
    """
    parts_in_order, columns, place = [], [], 0
    for (tensor, scores), with_parameter in zip(parts, learned, strict=True):
        width = tensor.shape[-1]
        if scores is None and with_parameter:
            columns.append((place, place + width))
        if scores is not None:
            wider = scores.after("cat", (), tensor, result)
            parts_in_order.append((tensor, wider._widened(place, result.shape[-1] - width - place, tensor, result)))
        place += width
    first = next((part for tensor, part in parts_in_order if tensor.shape[-1] == part.shape[0]), parts_in_order[0][1])
    several = [part for _, part in parts_in_order]
    if len(several) == 1 and not columns:
        return first
    columns += [product for part in several for product in part.products]
    return replace(
        first,
        scale=first.scale if all(part.scale == first.scale for part in several) else None,
        shift=None,  # a softmax ignores a shift of a whole row, not of a part
        exponential=next((part.exponential for part in several if part.exponential), ""),
        products=tuple(sorted({*columns})),
        added=tuple(added for part in several for added in part.added),
    )


@dataclass(frozen=True)
class WeightMatrix:
    """What a softmax returned; its calls wait for values. Without calls: a softmax whose scores could not be followed."""

    calls: tuple[Waiting, ...]
    frames: tuple[Frame, ...]
    sequence: int | None  # of the queries
    size: int  # of the softmax's dimension
    stride: int | None  # of that dimension; None if an op changed the layout
    sizes: tuple[int, ...] = ()  # the sizes of its parts, where it may meet values in parts
    log: bool = False  # a log_softmax, before its exponential
    other: tuple[int, int] | None = None  # size and stride of the keys, if the softmax may not have run over them
    alone: bool = True  # whether no other matrix of scores or weights was added to it

    def after(self, name: str, tensor: Tensor, result: Tensor) -> WeightMatrix:
        kept = replace(self, log=False) if name == "exp" else self
        if name in RESHAPING or (tensor.shape == result.shape and tensor.stride() == result.stride()):
            return kept
        stride = _stride_after(self.stride, tensor, result)
        other = None if self.other is None else _stride_after(self.other[1], tensor, result)
        if stride is None or (self.other is not None and other is None):
            return replace(kept, stride=None)
        return replace(
            kept, stride=stride, other=None if self.other is None or other is None else (self.other[0], other)
        )

    def is_across(self, tensor: Tensor, axis: int) -> bool:
        """Whether a product that sums over this axis sums over the keys, and the softmax ran over another dimension."""
        if self.other is None or self.log or tensor.shape[axis] != self.other[0]:
            return False
        return tensor.stride(axis) == self.other[1] if self.stride is not None else self.size != self.other[0]

    def summed(self, tensor: Tensor, axis: int) -> bool:
        """Whether a product that sums over this axis sums over the dimension of the softmax."""
        size = tensor.shape[axis]
        if self.log:
            return False
        if self.stride is None or size == 1:
            return size in (self.size, *self.sizes)
        return tensor.stride(axis) == self.stride and size <= self.size


def _shift_after(shift: Tensor, name: str, args: tuple[Any, ...]) -> Tensor | None:
    """What one more op makes of the shift; None if it is not known any more."""
    factor = number(args[1]) if name in SCALINGS and len(args) > 1 else None
    if factor:
        return shift * factor if name == "mul" else shift / factor
    return shift if name in SHIFTED else None


def _order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions with more than one entry, as memory has them."""
    return sorted((axis for axis, size in enumerate(shape) if size > 1), key=lambda axis: -stride[axis])


def _stride_after(stride: int | None, tensor: Tensor, result: Tensor) -> int | None:
    """The stride in a copy of the dimension that has this stride in a tensor; None if it cannot be told."""
    if stride is None or tensor.shape != result.shape:
        return None
    axes = [axis for axis, size in enumerate(tensor.shape) if size > 1 and tensor.stride(axis) == stride]
    return result.stride(axes[0]) if len(axes) == 1 else None


def number(value: object) -> float | None:
    """A plain number, or a tensor that holds one on the CPU; reading one of another device would wait for it."""
    if isinstance(value, Tensor):
        value = value.item() if value.dim() == 0 and value.device.type == "cpu" and not value.is_meta else None
    return float(value) if isinstance(value, (int, float)) else None
