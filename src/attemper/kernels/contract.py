"""The seam: what every fused kernel is given, what it gives back, and the table in which it says what it serves.

A kernel is one module of this folder with

    forward(problem, signs) -> Measured                      output and vitals, one pass
    backward(problem, saved, upstream, wants) -> Gradients

and a line in ``kernels.KERNELS`` that says which calls it takes. It never sees autograd, 3-d shapes or bad input: `_ops.py`
and `_checks.py` stand before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..vitals import SIGNS

BIT = {sign: 1 << place for place, sign in enumerate(SIGNS)}
ARGMAX_BIT = 1 << len(SIGNS)
"""Ask for the arg-max of each row as well: the gradient of ``peak`` lands there."""
OUTPUT_LOW_BIT = 1 << len(SIGNS) + 1
"""Ask for what rounding took from a half-precision output: its gradient needs the output as it was summed."""

HALVES = (torch.float16, torch.bfloat16)
SMALL = torch.finfo(torch.float16).tiny

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST = torch.finfo(torch.float32).max
"""Numbers reach kernels as float32."""

HIDDEN_BIAS = -1e4
"""An additive mask value at or below this means the key is not seen (people write -1e9 and finfo.min)."""


class Problem(NamedTuple):
    """One attention call, checked and brought to 4 dimensions."""

    query: Tensor  # (B, H, Lq, E)
    key: Tensor  # (B, G, Lk, E)
    value: Tensor | None  # (B, G, Lk, Ev); None measures without an output
    mask: Tensor | None  # each dimension of (B, H, Lq, Lk) or 1; bool (True = keep) or additive
    gain: Tensor | None  # (B, H, Lq), multiplies the scale of a row
    seed: Tensor | None  # int64 scalar on the CPU, given when dropout > 0
    scale: float
    left: int | None  # key j is in the band of query i when i - left <= j <= i + right; None is no bound
    right: int | None
    softcap: float | None
    dropout: float


class Measured(NamedTuple):
    """What forward returns. A sign whose bit is not set is an empty tensor; ``lse`` is always there.

    The signs are float32 (float64 for float64 inputs), ``visible`` int32, ``argmax`` int64 with -1 for a row without keys.
    """

    output: Tensor  # (B, H, Lq, Ev)
    output_low: Tensor  # (B, H, Lq, Ev), int16: float32 bits that rounding took from output, see `rounded_off`
    argmax: Tensor  # (B, H, Lq), the key with the largest logit, the lowest on ties
    lse_low: Tensor  # (B, H, Lq), what rounding took from lse: at finfo.min, all of ln Σe. Zeros where a kernel knows of none
    visible: Tensor
    mean: Tensor
    variance: Tensor
    peak: Tensor
    lse: Tensor
    entropy: Tensor
    p2: Tensor


class Upstream(NamedTuple):
    """The gradients that arrive; None is zero."""

    output: Tensor | None
    mean: Tensor | None
    variance: Tensor | None
    peak: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    p2: Tensor | None


class Wants(NamedTuple):
    """Which gradients are asked for. The others may come back empty."""

    query: bool
    key: bool
    value: bool
    mask: bool
    gain: bool


class Gradients(NamedTuple):
    """What backward returns, each in the shape and dtype of its input."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor
    gain: Tensor


@dataclass(frozen=True)
class Call:
    """The facts of a call by which a kernel accepts or refuses it."""

    device: str
    dtype: torch.dtype  # of the output; the problem is wider where a gradient is a sum over what was repeated
    rows: int
    keys: int
    head_dim: int
    value_dim: int
    grouped: bool
    mask: str  # "none", "bool" or "additive"
    mask_gradient: bool
    banded: bool
    softcap: bool
    dropout: bool
    gain: bool


@dataclass(frozen=True)
class Serves:
    """What a kernel takes, in words that the documentation prints and the choice obeys."""

    devices: tuple[str, ...] | None = None  # None: any
    dtypes: tuple[torch.dtype, ...] = FLOATS
    max_head_dim: int | None = None
    grouped: bool = True
    masks: tuple[str, ...] = ("none", "bool", "additive")
    mask_gradient: bool = True
    banded: bool = True
    softcap: bool = True
    dropout: bool = True
    gain: bool = True
    unless: Callable[[Call], str | None] | None = None
    """What a table cannot say: "is not built here", "serves head dims that are multiples of 8". A clause, or None."""

    def refusal(self, call: Call) -> str | None:
        """Why this call is not served, as a clause that follows ``kernel='…' ``; None when it is."""
        if self.devices is not None and call.device not in self.devices:
            return f"needs {' or '.join(self.devices)} tensors; got {call.device}"
        if call.dtype not in self.dtypes:
            return f"serves {', '.join(_plain(d) for d in self.dtypes)}; got {_plain(call.dtype)}"
        if self.max_head_dim is not None and max(call.head_dim, call.value_dim) > self.max_head_dim:
            return f"serves head dims up to {self.max_head_dim}; got {max(call.head_dim, call.value_dim)}"
        if call.mask not in self.masks:
            return f"serves masks of kind {', '.join(self.masks)}; got {call.mask}"
        for name, words in _FEATURES.items():
            if getattr(call, name) and not getattr(self, name):
                return f"does not serve {words}"
        return None if self.unless is None else self.unless(call)

    def row(self) -> dict[str, str]:
        """One line of the documentation's table."""
        cells = {}
        for field in fields(self):
            if field.name == "unless":
                continue
            setting = getattr(self, field.name)
            if setting is None or isinstance(setting, bool):
                cells[field.name] = {None: "any", True: "yes", False: "no"}[setting]
            elif isinstance(setting, tuple):
                cells[field.name] = ", ".join(_plain(item) for item in setting)
            else:
                cells[field.name] = str(setting)
        return cells


_FEATURES = {
    "grouped": "grouped key/value heads",
    "mask_gradient": "the gradient of an additive mask",
    "banded": "causal or window",
    "softcap": "softcap",
    "dropout": "dropout",
    "gain": "a scale tensor",
}


def _plain(item: object) -> str:
    return str(item).removeprefix("torch.")


def room(problem: Problem, signs: int) -> Measured:
    """Where a kernel writes what it measures: memory not yet written for what was asked for, nothing for the rest."""
    query, value = problem.query, problem.value
    shape, wide = query.shape[:3], measuring_dtype(query.dtype)
    lse = query.new_empty(shape, dtype=wide)

    def rows(bit: int, dtype: torch.dtype) -> Tensor:
        # a tensor like another is the cheapest there is, and a small call is little more than these
        return torch.empty_like(lse, dtype=dtype) if signs & bit else query.new_empty(0, dtype=dtype)

    output = query.new_empty(0 if value is None else (*shape, value.shape[-1]))
    low = signs & OUTPUT_LOW_BIT and query.dtype in HALVES
    return Measured(
        output=output,
        output_low=torch.empty_like(output, dtype=torch.int16) if low else query.new_empty(0, dtype=torch.int16),
        argmax=rows(ARGMAX_BIT, torch.int64),
        lse_low=torch.empty_like(lse),
        visible=rows(BIT["visible"], torch.int32),
        lse=lse,
        **{name: rows(BIT[name], wide) for name in ("mean", "variance", "peak", "entropy", "p2")},
    )


def rounded_off(wide: Tensor, output: Tensor) -> Tensor:
    """What rounding float32 `wide` to half-precision `output` took, in units in the last place of `wide`, int16.

    That is all of it: 16 bits of bfloat16 and 16 of what is left are float32. Below the normal numbers of float16 it is in units
    of 2^-40, which 16 bits hold. 0 where the output is inf or NaN.
    """
    short = output.float()
    lost = wide.view(torch.int32) - short.view(torch.int32)
    if output.dtype == torch.float16:
        lost = torch.where(short.abs() < SMALL, ((wide - short) * 2.0**40).round().to(torch.int32), lost)
    return lost.clamp_(-(1 << 15), (1 << 15) - 1).masked_fill_(~short.isfinite(), 0).to(torch.int16)


def unrounded(output: Tensor, low: Tensor) -> Tensor:
    """The output as it was before rounding, float32; `low` is what `rounded_off` found."""
    short = output.float()
    whole = (short.view(torch.int32) + low).view(torch.float32)
    return torch.where(short.abs() < SMALL, short + low * 2.0**-40, whole) if output.dtype == torch.float16 else whole


def is_recording() -> bool:
    """Whether autograd records what is computed: in inference mode it does not, also under enable_grad."""
    # Dynamo cannot trace the question, and a compiled graph is never in inference mode
    return torch.is_grad_enabled() and (torch.compiler.is_compiling() or not torch.is_inference_mode_enabled())


def may_get_gradients(*tensors: Tensor | None) -> bool:
    """Whether a gradient may arrive at one of these; of a traced graph nobody knows, and its own check runs without."""
    if any(t is not None and t.requires_grad for t in tensors) and is_recording():
        return True
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None


def savable(*inputs: Any) -> tuple[Any, ...]:
    """With copies of tensors from inference mode, where a gradient may arrive: a backward must not keep those themselves.

    torch counts no writes into them. Its own SDPA keeps no boolean mask, and so takes one of these. In a compiled graph nobody
    can ask what a tensor is: there torch's own error remains.
    """
    tensors = [thing for thing in inputs if isinstance(thing, Tensor)]
    if torch.compiler.is_compiling() or not may_get_gradients(*tensors):
        return inputs
    return tuple(_copy(thing) if isinstance(thing, Tensor) and thing.is_inference() else thing for thing in inputs)


def _copy(tensor: Tensor) -> Tensor:
    """As large as the numbers in it: what was expanded is so again."""
    once = tensor[tuple(slice(None) if step else slice(1) for step in tensor.stride())]
    return once.clone().expand(tensor.shape)


def for_gradients(signs: int, *tracked: Tensor | None) -> int:
    """With what the gradients of the logits need, where one of these tensors may get one; finding it costs time and memory."""
    if not may_get_gradients(*tracked):
        return signs
    return signs | OUTPUT_LOW_BIT | (ARGMAX_BIT if signs & BIT["peak"] else 0)


def bare_room(query: Tensor, value_dim: int | None, signs: int, saved: bool) -> Measured:
    """`room` for a caller that is no op: None for nothing, which costs nothing, and `lse_low` only beside lse or for a backward.

    Every tensor has memory of its own: of views of one block, writing into a sign would count as writing into what is saved.
    """
    batch, heads, rows, dim = query.shape
    # a tensor like another is the cheapest there is, and a small call is little more than these
    like = torch.empty_like
    output: Any = None
    if value_dim == dim:
        output = like(query, memory_format=torch.contiguous_format)
    elif value_dim is not None:
        output = query.new_empty((batch, heads, rows, value_dim))
    if not (signs or saved):
        return Measured(output, *_NOTHING)
    steps, dtype = (heads * rows, rows, 1), measuring_dtype(query.dtype)
    lse: Any = torch.empty_strided((batch, heads, rows), steps, dtype=dtype, device=query.device)
    low = value_dim is not None and signs & OUTPUT_LOW_BIT and query.dtype in HALVES
    return Measured(
        output,
        like(output, dtype=torch.int16) if low else None,  # type: ignore[arg-type]
        like(lse, dtype=torch.int64) if signs & ARGMAX_BIT else None,  # type: ignore[arg-type]
        like(lse) if saved or signs & _LSE else None,  # type: ignore[arg-type]
        like(lse, dtype=torch.int32) if signs & _VISIBLE else None,  # type: ignore[arg-type]
        like(lse) if signs & _MEAN else None,  # type: ignore[arg-type]
        like(lse) if signs & _VARIANCE else None,  # type: ignore[arg-type]
        like(lse) if signs & _PEAK else None,  # type: ignore[arg-type]
        lse,
        like(lse) if signs & _ENTROPY else None,  # type: ignore[arg-type]
        like(lse) if signs & _P2 else None,  # type: ignore[arg-type]
    )


_VISIBLE, _MEAN, _VARIANCE, _PEAK, _LSE, _ENTROPY, _P2 = BIT.values()
_NOTHING: Any = (None,) * (len(Measured._fields) - 1)


def measuring_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of vitals and of every accumulation: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
