"""Tally: an attention call adds its vitals, summed by head, to a tensor of its module, by an op that a compiled graph can hold.

The op always runs, so nothing in a graph depends on whether a watch is open: a watch reads the tensors when a step ends. A
tally is (2 kinds, 3 grades, heads, WIDTH) in float64: the sums of ``heads.COLUMNS``, the peak, how many calls were added, and
the number of the last call's description. All zeros is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from .._torch_private import _current_graph_task_id
from ..errors import InputError
from ..heads import COLUMNS, SATURABLE_KEYS, SATURATED_WEIGHT, HeadSummary
from ..kernels.contract import (
    ARGMAX_BIT,
    FOR_OUTPUT,
    N_GRADS,
    N_TENSORS,
    NeedsGrad,
    Problem,
    Results,
    Upstream,
    is_recording,
)
from ..vitals import SIGNS, Vitals
from . import ops
from .listen import TallyTarget
from .ops import N_PROBLEM, bits_of, differentiate
from .padding import kept_by_mask

KINDS = ("self", "cross")
GRADES = 3
"""Passes without gradients, with gradients in evaluation mode, and in training mode."""
N_SIGNS, N_SUMS = len(SIGNS), len(COLUMNS)
PEAK, CALLS, NUMBER, WIDTH = N_SUMS, N_SUMS + 1, N_SUMS + 2, N_SUMS + 3


class CallDescription(NamedTuple):
    """A call, apart from its vitals, as the op gets it. Only its number is stored on the device."""

    route: str
    kind: str
    implementation: str
    declared: float | None
    window: int | None
    dtype: str
    kv_heads: int
    keys: int
    head_dim: int
    scale: float | None
    left: int | None
    right: int | None
    softcap: float | None
    dropout: float
    masked: bool
    shape: tuple[int, ...] = ()  # (B, H, Lq)


DESCRIPTIONS: list[CallDescription] = []
_NUMBERS: dict[tuple[Any, ...], tuple[int, str]] = {}
"""By description, as a tuple: its number in the list, and self- or cross-attention."""
_NUMBERING = Lock()

torch.library.define(
    "attemper::tally",
    "(Tensor(a!) tally, "
    + ", ".join(f"Tensor {name}" for name in SIGNS)
    + ", Tensor lse_low, Tensor? keep, int grade, str route, str kind, str implementation, float? declared, SymInt? window, "
    "str dtype, SymInt kv_heads, SymInt keys, SymInt head_dim, float? scale, SymInt? left, SymInt? right, float? softcap, "
    "float dropout, bool masked) -> ()",
)


@torch.library.impl("attemper::tally", "CompositeExplicitAutograd")
def _tally(tally: Tensor, *args: Any) -> None:
    if _current_graph_task_id() != -1:
        return  # inside a backward: a checkpoint that is recomputed, and was counted in the forward
    _check(tally, args[0])
    signs, (keep, grade), about = args[: N_SIGNS + 1], args[N_SIGNS + 1 : N_SIGNS + 3], args[N_SIGNS + 3 :]
    shape = tuple(args[0].shape)
    number, kind = _NUMBERS.get((*about, shape)) or _numbered(about, shape)
    place = (KINDS.index(kind), range(GRADES)[grade])  # the kernel gets an address: no other grade may be asked for
    rows = None if keep is None else keep[:, None, :]
    if tally.is_cuda and kernels.triton_is_missing() is None:
        native = kernels.load("triton").summary
        if native.serves_each(signs):
            native.add_to(tally, place, signs, rows, number, SATURABLE_KEYS, SATURATED_WEIGHT)
            return
    slot = tally[place][: shape[1]]
    summary = folded(Vitals(**dict(zip(SIGNS, signs, strict=False)))._with_low(signs[-1]), rows)
    peaks = torch.maximum(slot[:, PEAK], summary.peaks)
    slot[:, PEAK] = torch.where(slot[:, CALLS] == 0, summary.peaks, peaks)
    slot[:, :N_SUMS] += summary.sums
    slot[:, CALLS] += 1
    slot[:, NUMBER] = number


def _numbered(about: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, str]:
    """The number of a call that is described for the first time, and its kind."""
    call = CallDescription._make((*about, shape))
    with _NUMBERING:
        if call not in _NUMBERS:
            DESCRIPTIONS.append(call)
            _NUMBERS[call] = len(DESCRIPTIONS) - 1, call.kind or kind_by_lengths(shape[2], call.keys)
        return _NUMBERS[call]


@torch.library.register_fake("attemper::tally")
def _fake_tally(tally: Tensor, *args: Any) -> None:
    _check(tally, args[0])


def _check(tally: Tensor, sign: Tensor) -> None:
    heads = sign.shape[1]
    if heads > tally.shape[2]:
        raise InputError(
            f"instrument(): a module was found to have {tally.shape[2]} heads, but attends with {heads}. Set its attribute "
            f"`num_heads` to {heads} before attemper.instrument(model)."
        )
    if tally.device != sign.device:
        raise InputError(
            f"instrument(): the model was on {tally.device} then, and attends on {sign.device} now. Call "
            "attemper.instrument(model) again after model.to(…)."
        )


def folded(vitals: Vitals, rows: Tensor | None) -> HeadSummary:
    """``vitals.by_head(rows)``, by the native library if it is installed and serves them."""
    if kernels.cpu_is_missing() is None and (native := kernels.load("cpu").summary).serves(vitals):
        sums, peaks = native.by_head(vitals, rows, SATURABLE_KEYS, SATURATED_WEIGHT)
        return HeadSummary((*COLUMNS, "peak"), sums, peaks)
    return vitals.by_head(rows)


def kind_by_lengths(queries: int, keys: int) -> str:
    """Self- or cross-attention, if nothing else shows it. One query and many keys: a cache is being read."""
    return "cross" if 1 < queries != keys else "self"


def attend_and_tally(
    run: Callable[[Problem, tuple[str, ...], str], tuple[Tensor, Vitals]],
    problem: Problem,
    names: tuple[str, ...],
    kernel: str,
    target: TallyTarget,
) -> tuple[Tensor, Vitals]:
    """What `run` returns; the vitals are also added to the target. In a traced graph only the named signs have gradients."""
    if not names and kernel != "reference" and torch.compiler.is_compiling():
        output, vitals = _measured(problem, kernel)
    else:
        output, vitals = run(problem, SIGNS, kernel)
    low = vitals._lse_low
    low = torch.zeros_like(vitals.lse) if low is None else low
    _add(problem, vitals, low, target)
    return output, Vitals(**{name: getattr(vitals, name) for name in names})._with_low(low)


def _measured(problem: Problem, kernel: str) -> tuple[Tensor, Vitals]:
    """Output and all signs in a traced graph; only the output is differentiable."""
    sign_bits = ops._with_gradient_bits(problem, bits_of(SIGNS)) & ~ARGMAX_BIT
    results = Results(*_MeasuredAttention.apply(*ops.with_distinct_tensors(problem), sign_bits, kernel))
    return results.output, ops._vitals_of(results, SIGNS)


def _add(problem: Problem, vitals: Vitals, low: Tensor, target: TallyTarget) -> None:
    query, key, mask = problem.query, problem.key, problem.mask
    queries, keys = query.shape[2], key.shape[2]
    keep = None
    if mask is not None and target.kind != "cross" and queries == keys and mask.shape[-1] == keys:
        keep = kept_by_mask(mask.detach())
    signs = [getattr(vitals, name).detach() for name in SIGNS]
    grade = (1 + target.training) * is_recording()
    torch.ops.attemper.tally(
        target.tally,
        *signs,
        low.detach(),
        keep,
        grade,
        target.route,
        target.kind,
        target.implementation,
        target.declared,
        target.window,
        str(query.dtype).removeprefix("torch."),
        key.shape[1],
        keys,
        query.shape[3],
        None if problem.gain is not None else problem.scale,
        problem.left,
        problem.right,
        problem.softcap,
        problem.dropout,
        mask is not None,
    )


class _MeasuredAttention(torch.autograd.Function):
    """`ops._Attention` with only the output differentiable. A graph would otherwise send zeros as gradients of the signs."""

    forward = staticmethod(ops._Attention.forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        problem, results = Problem(*inputs[:N_PROBLEM]), Results(*output)
        ctx.save_for_backward(*problem.tensors, *[getattr(results, name) for name in FOR_OUTPUT])
        ctx.numbers, ctx.kernel = tuple(problem[N_TENSORS:]), inputs[-1]
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        problem = Problem(*saved[:N_TENSORS], *ctx.numbers)
        kept = dict(zip(FOR_OUTPUT, saved[N_TENSORS:], strict=True))
        results: Any = Results(*[kept.get(name) for name in Results._fields])  # type: ignore[arg-type]
        needs_grad = NeedsGrad(*[bool(needed) for needed in ctx.needs_input_grad[:N_GRADS]])
        upstream = Upstream(grads[0], *[None] * (len(Upstream._fields) - 1))
        found = differentiate(problem, results, upstream, list(needs_grad), ctx.kernel)
        return (*found, *[None] * (N_PROBLEM + 2 - N_GRADS))
