"""The contract: what every kernel is given, what it gives back, and which calls it refuses.

A kernel is one module of this folder with

    forward(problem, sign_bits, saved) -> output, signs          in one pass; `saved` says that a backward will read the signs
    backward(problem, saved, upstream, needs_grad) -> Gradients

and a line in ``kernels.KERNELS``. The signs are what `gathered` reads. A kernel gets 4-d tensors whose shapes, dtypes and
devices fit (operation/call.py, operation/shapes.py), and nothing that tracks gradients (operation/run.py, operation/ops.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch_private import _get_tracing_state, is_functionalizing
from ..vitals import HALVES as HALVES
from ..vitals import SIGNS, Vitals

BIT = {sign: 1 << index for index, sign in enumerate(SIGNS)}
"""The bit of each sign in ``sign_bits``."""
ALL_SIGNS = sum(BIT.values())
ARGMAX_BIT = 1 << len(SIGNS)
"""Ask for the arg-max of each row as well: the gradient of ``peak`` goes there."""
OUTPUT_LOW_BIT = 1 << len(SIGNS) + 1
"""Ask for the rounding error of a half-precision output: the gradients of the logits need the output before rounding."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST = torch.finfo(torch.float32).max
"""The largest number that every kernel can hold, also one that computes in float32."""

HIDDEN_BIAS = -1e4
"""An additive mask value at or below this hides its key (people write -1e9 and finfo.min)."""


class Problem(NamedTuple):
    """One attention call, checked and brought to 4 dimensions: (B, H, L, E). The tensors that may get a gradient come first."""

    query: Tensor  # (B, H, Lq, E)
    key: Tensor  # (B, G, Lk, E)
    value: Tensor | None  # (B, G, Lk, Ev)
    mask: Tensor | None  # broadcastable to (B, H, Lq, Lk), boolean or added to the logits
    gain: Tensor | None  # (B, H, Lq), multiplies the scale of a row
    weight: Tensor | None  # (B, H, E): the score is Σ weight · tanh(query + key), not query · key
    sink: Tensor | None  # (B, H, Lq): one more logit of each row, whose weight meets no value; operation/parts/sink.py
    # (1 or 2, 1 or B, N + 1): where documents begin, for queries and keys; operation/parts/documents.py
    documents: Tensor | None
    seed: Tensor | None  # int64 scalar on the CPU, given when dropout > 0
    scale: float
    left: int | None  # key j is in the band of query i when i - left <= j <= i + right; None is no bound
    right: int | None
    softcap: float | None
    dropout: float
    from_end: bool = False  # the band of a document is that of its last query and key, moved along; else of its first

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The first 9 fields: those that may get a gradient, the documents and the seed."""
        return self[:9]


def band(causal: bool | str, window: int | None, rows: int, keys: int) -> tuple[int | None, int | None]:
    """Causal and window as one band: query i sees keys i - left … i + right. As `read_band` of kernels/cpu/c/attend.c."""
    offset = keys - rows if causal == "lower_right" else 0
    right = offset if causal else None
    if window is None:
        return None, right
    window = min(int(window), rows + keys)  # a larger window shows no more keys
    return window - 1 - offset, (window - 1 if right is None else right)


class Results(NamedTuple):
    """Output and signs. A sign whose bit is not set is None, or an empty tensor in an op; ``lse`` is always there.

    The signs are float32 (float64 for float64 inputs), ``visible`` int32, ``argmax`` int64 with -1 for a row without keys.
    """

    output: Tensor  # (B, H, Lq, Ev)
    output_low: Tensor  # (B, H, Lq, Ev), int16: the rounding error of output, see vitals.py
    argmax: Tensor  # (B, H, Lq), the key with the largest logit, the lowest on ties
    lse_low: Tensor  # (B, H, Lq), the rounding error of lse: at finfo.min, all of ln Σe. Zeros: not known
    visible: Tensor
    mean: Tensor
    variance: Tensor
    peak: Tensor
    lse: Tensor
    entropy: Tensor
    sum_p2: Tensor


def gathered(output: Tensor | None, signs: Any) -> Results:
    """The output and the signs that a forward returned, as tensors.

    Its signs are anything with the fields of `Results` after the output as attributes, where each may become a tensor when it is
    read, and is None if not asked for: `Results` without an output, or a block of memory.
    """
    # of a block on a GPU, where an attribute would be a copy
    read = getattr(signs, "as_written", partial(getattr, signs))
    rest = signs[1:] if type(signs) is Results else [read(name) for name in Results._fields[1:]]
    return Results(output, *rest)  # type: ignore[arg-type]


def block_results(places: Any, memory: Tensor, query: Tensor, output: Tensor | None) -> Results:
    """The results of a call whose signs one tensor of bytes holds, each at its place; None has no place."""
    wide, tensors = measuring_dtype(query.dtype), []
    for place, dtype in zip(places, _DTYPES[1:], strict=True):
        shape = output.shape if dtype is torch.int16 and output is not None else query.shape[:3]
        tensors.append(None if place is None else memory[place].view(dtype or wide).view(shape))
    return Results(output, *tensors)  # type: ignore[arg-type]


FOR_OUTPUT = ("output", "output_low", "lse_low", "lse")
"""The results that a backward needs if a gradient arrives at the output alone."""


class Upstream(NamedTuple):
    """The gradients that arrive; None is zero."""

    output: Tensor | None
    mean: Tensor | None
    variance: Tensor | None
    peak: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    sum_p2: Tensor | None


class NeedsGrad(NamedTuple):
    """Which inputs need a gradient. The gradients of the others may come back empty."""

    query: bool
    key: bool
    value: bool
    mask: bool
    gain: bool
    weight: bool = False
    sink: bool = False

    @property
    def logits(self) -> bool:
        """Whether an input other than value needs a gradient: all of these come from the gradient of the logits."""
        return self.query or self.key or self.mask or self.gain or self.weight or self.sink


class Gradients(NamedTuple):
    """What backward returns, each in the shape and dtype of its input."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor
    gain: Tensor
    weight: Tensor
    sink: Tensor = None  # type: ignore[assignment]  # by operation/parts/sink.py, not by a kernel


N_GRADS, N_TENSORS = 7, 9
"""How many fields of a Problem may get a gradient, and how many are tensors: the first ones."""
assert NeedsGrad._fields == Gradients._fields == Problem._fields[:N_GRADS]


class Request(NamedTuple):
    """What a call asks of a kernel: the facts by which one accepts or refuses it."""

    device: str
    dtype: torch.dtype  # of the output; the problem may be in float32 instead, see operation/shapes.py
    rows: int
    keys: int
    head_dim: int
    value_dim: int
    additive: bool = False  # whether the score is additive, not a dot product


@dataclass(frozen=True)
class Capabilities:
    """Which calls a kernel takes. Every field is something that some kernel refuses; add one with the kernel that needs it."""

    devices: tuple[str, ...] | None = None  # None: any
    dtypes: tuple[torch.dtype, ...] = FLOATS
    head_dim: int | None = None  # the largest, of queries and values; None: any
    additive: bool = True
    unavailable_reason: Callable[[Request], str | None] | None = None
    """Any other reason to refuse a call, as a clause ("is not built here"); None if there is none."""

    def refusal(self, request: Request) -> str | None:
        """Why this call is not served, as a clause that follows ``kernel='…' ``; None when it is."""
        if self.devices is not None and request.device not in self.devices:
            return f"needs {' or '.join(self.devices)} tensors; got {request.device}"
        if request.dtype not in self.dtypes:
            return f"serves {_listed(self.dtypes)}; got {_short(request.dtype)}"
        widest = max(request.head_dim, request.value_dim)
        if self.head_dim is not None and widest > self.head_dim:
            return f"serves head dims up to {self.head_dim}; got {widest}"
        if request.additive and not self.additive:
            return "does not support additive scores"
        return None if self.unavailable_reason is None else self.unavailable_reason(request)

    def row(self) -> dict[str, str]:
        """One line of the documentation's table."""
        scores = "dot product, cosine, additive" if self.additive else "dot product, cosine"
        return {
            "devices": "any" if self.devices is None else ", ".join(self.devices),
            "dtypes": _listed(self.dtypes),
            "head dims": "any" if self.head_dim is None else f"up to {self.head_dim}",
            "scores": scores,
        }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(_short, dtypes))


def is_by_token(tensor: Tensor) -> bool:
    """Whether the heads of a token lie side by side in memory, (B, L, H, E), as a projection leaves them."""
    _, between_heads, between_rows, step = tensor.stride()
    return bool(step == 1 and between_heads < between_rows < FAR_APART)


FAR_APART = 1 << 23
"""Rows with a larger stride are copied by kernels that count in 32 bits within a tile."""


KEEP_LAYOUT = frozenset({"triton"})
"""Kernels whose output and gradients lie as the inputs do; others write them by head."""


def empty_vectors(like: Tensor, dim: int | None = None) -> Tensor:
    """Memory for the vectors of `like`, in its layout (by token or by head), so that the op after the call need not copy them."""
    batch, heads, rows, own = like.shape
    dim = own if dim is None else dim
    count = max(rows, 1)  # as torch counts the strides of a tensor without rows
    between_heads, between_rows = (dim, heads * dim) if is_by_token(like) else (count * dim, dim)
    strides = (heads * count * dim, between_heads, between_rows, 1)
    return like.new_empty_strided((batch, heads, rows, dim), strides)  # in half the time of new_empty


def empty_results(problem: Problem, sign_bits: int, as_query: bool = False) -> Results:
    """Uninitialised memory for the results that were asked for, and empty tensors for the others: an op cannot return None.

    The output is laid out by head; with `as_query`, as the query is.
    """
    query, value = problem.query, problem.value
    output = None
    if value is not None:
        dim = value.shape[-1]
        output = empty_vectors(query, dim) if as_query else query.new_empty((*query.shape[:3], dim))
    lse = query.new_empty(query.shape[:3], dtype=measuring_dtype(query.dtype))
    results: Any = _results(output, lse, sign_bits, saved=True)
    if output is None:
        results = results._replace(output=query.new_empty(0))
    pairs = zip(results, _DTYPES, strict=True)
    return Results(*[query.new_empty(0, dtype=dtype or lse.dtype) if one is None else one for one, dtype in pairs])


def bare_results(query: Tensor, value_dim: int | None, sign_bits: int, saved: bool, as_query: bool = False) -> Results:
    """`empty_results` for a caller that is not an op: None for the others, and ``lse_low`` only if lse or a backward needs it."""
    batch, heads, rows, dim = query.shape
    output = None
    # empty_like is the fastest way to make a tensor, and a small call spends most of its time here
    if as_query and value_dim is not None and is_by_token(query):
        output = empty_vectors(query, value_dim)
    elif value_dim == dim:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    elif value_dim is not None:
        output = query.new_empty((batch, heads, rows, value_dim))
    if not (sign_bits or saved):
        return Results(output, *_NOTHING)  # type: ignore[arg-type]
    between = max(rows, 1)  # as torch counts the strides of a tensor without rows
    steps, dtype = (max(heads, 1) * between, between, 1), measuring_dtype(query.dtype)
    lse = torch.empty_strided((batch, heads, rows), steps, dtype=dtype, device=query.device)
    return _results(output, lse, sign_bits, saved)


def _results(output: Any, lse: Tensor, sign_bits: int, saved: bool) -> Results:
    """The fields that were asked for, each allocated like `output` or `lse`; None for the others.

    Each tensor has its own memory. Views of one block share a version counter: writing into a sign would then look to autograd
    as if a saved tensor had been changed.
    """
    like = torch.empty_like
    low = output is not None and sign_bits & OUTPUT_LOW_BIT and output.dtype in HALVES
    tensors: Any = (
        output,
        like(output, dtype=torch.int16) if low else None,
        like(lse, dtype=torch.int64) if sign_bits & ARGMAX_BIT else None,
        like(lse) if saved or sign_bits & _LSE else None,
        like(lse, dtype=torch.int32) if sign_bits & _VISIBLE else None,
        like(lse) if sign_bits & _MEAN else None,
        like(lse) if sign_bits & _VARIANCE else None,
        like(lse) if sign_bits & _PEAK else None,
        lse,
        like(lse) if sign_bits & _ENTROPY else None,
        like(lse) if sign_bits & _P2 else None,
    )
    return Results(*tensors)


_VISIBLE, _MEAN, _VARIANCE, _PEAK, _LSE, _ENTROPY, _P2 = BIT.values()
_DTYPES = tuple(
    {"output_low": torch.int16, "argmax": torch.int64, "visible": torch.int32}.get(name) for name in Results._fields
)
"""The dtype of each result; None for the output, and for results that have the dtype of lse."""
_NOTHING: Any = (None,) * (len(Results._fields) - 1)


PACKED = tuple(name for name in SIGNS if name != "lse")
"""The signs that one tensor holds, one after another, where a call does not need a tensor for each.

The memory of `visible` holds integers: of 32 bits if the others are float32, of 64 bits if they are float64.
"""
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
"""Integer dtype that stores `visible` in the packed tensor, by the dtype of the others."""


def packed_size(rows: int) -> int:
    """How many numbers one sign of so many rows takes there: each begins at a multiple of 16 bytes, as a tensor does."""
    return (rows + 3) // 4 * 4


def packed_signs(packed: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The signs of such a tensor, as views of it."""
    rows = math.prod(shape)
    rows_of_signs = packed.view(len(PACKED), packed_size(rows))[:, :rows].unflatten(1, shape).unbind()
    signs = dict(zip(PACKED, rows_of_signs, strict=True))
    signs["visible"] = signs["visible"].view(INTEGERS[packed.dtype])
    return signs


_ALL_SIGNS = frozenset(SIGNS)


def are_as_written(vitals: Vitals, device: str) -> bool:
    """Whether these are all signs of a float32 or half-precision call, as kernels of this kind of device write them."""
    signs = vitals.__getstate__()
    if not signs.keys() >= _ALL_SIGNS:
        return False
    for name, sign in signs.items():  # including _lse_low
        real = torch.int32 if name == "visible" else torch.float32
        as_written = sign.dtype is real and sign.device.type == device and sign.dim() == 3 and sign.is_contiguous()
        if not as_written and name != "_output_low":
            return False
    return True


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Autocast has lowered the inputs already; the arithmetic inside is ours."""
    device = tensor.device.type
    off = device == "meta" or not torch.is_autocast_enabled(device)  # meta tensors know no autocast
    return nullcontext() if off else torch.autocast(device, enabled=False)


def is_recording() -> bool:
    """Whether autograd records what is computed. In inference mode it does not, even under enable_grad."""
    # Dynamo cannot trace is_inference_mode_enabled(), and a compiled graph is never in inference mode
    return torch.is_grad_enabled() and (torch.compiler.is_compiling() or not torch.is_inference_mode_enabled())


def may_get_gradients(*tensors: Tensor | None) -> bool:
    """Whether a gradient may arrive at one of these.

    While torch.jit.trace runs, always: it traces again without them. Inside functionalize they do not show it.
    """
    if any(t is not None and t.requires_grad for t in tensors) and is_recording():
        return True
    return not torch.compiler.is_compiling() and (_get_tracing_state() is not None or is_functionalizing())


def savable(*inputs: Any) -> tuple[Any, ...]:
    """The inputs, with tensors made in inference mode copied if a gradient may arrive: a backward must not save those.

    torch does not count writes into inference tensors, so it refuses to save them. Its own SDPA saves no boolean mask, and
    accepts one of those. In a compiled graph `is_inference()` cannot be called, and the user gets torch's own error.
    """
    tensors = [thing for thing in inputs if isinstance(thing, Tensor)]
    if torch.compiler.is_compiling() or not may_get_gradients(*tensors):
        return inputs
    return tuple(_copy(thing) if isinstance(thing, Tensor) and thing.is_inference() else thing for thing in inputs)


def _copy(tensor: Tensor) -> Tensor:
    """A copy in which expanded dimensions stay expanded, so that it takes no more memory than the original."""
    once = tensor[tuple(slice(None) if step else slice(1) for step in tensor.stride())]
    return once.clone().expand(tensor.shape)


def gradient_bits(sign_bits: int) -> int:
    """The bits, with those of what the backward of the logits needs. It costs time and memory."""
    return sign_bits | OUTPUT_LOW_BIT | (ARGMAX_BIT if sign_bits & _PEAK else 0)


def with_gradient_bits(sign_bits: int, *tracked: Tensor | None) -> int:
    """`gradient_bits`, if one of these tensors may get a gradient."""
    return gradient_bits(sign_bits) if may_get_gradients(*tracked) else sign_bits


def measuring_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of vitals and of every accumulation: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
