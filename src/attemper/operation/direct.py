"""The direct path: a plain call runs on a native kernel without a torch op, and its autograd Function calls the kernel too.

A call that is not plain (plain.py) goes through the op of ops.py, which torch can trace and transform.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from .._torch_private import apply_of, at_rest
from ..kernels.contract import (
    FLOATS,
    FOR_OUTPUT,
    HALVES,
    N_TENSORS,
    NeedsGrad,
    Problem,
    Results,
    Upstream,
    with_gradient_bits,
)
from ..vitals import SIGNS, Vitals
from . import ops
from .listen import TallyTarget, current_target, listening
from .measured import attend_and_tally
from .ops import differentiate
from .plain import all_plain, are_plain, plain_problem, unchecked_problem

_bits_of = cache(ops.bits_of)
assert Results._fields[-len(SIGNS) :] == SIGNS
OUTPUT_ALONE = ("output",)
_NO_GRADIENT = ("visible", "lse_low", "output_low")
_NO_SIGNS = (None,) * (len(Upstream._fields) - 1)
_IS_FOR_OUTPUT = [name in FOR_OUTPUT for name in Results._fields]
NATIVE = ("cpu", "triton")
"""Kernels that can be called without an op: they have `bare_forward` and `bare_backward`."""


def attend(
    problem: Problem, names: tuple[str, ...], kernel: str, target: TallyTarget | None = None
) -> tuple[Tensor, Vitals]:
    """Run a checked problem on a kernel; output (B, H, Lq, Ev), empty without values, and the signs named, (B, H, Lq) each.

    The vitals are also added to `target`, or to the target of the module that runs. Calls with additive scores or without
    values are not added.
    """
    target = current_target() if target is None else target
    if target is None or problem.value is None or problem.weight is not None:
        attended = _attend(problem, names, kernel)
    else:
        attended = attend_and_tally(_attend, problem, names, kernel, target)
    listener = None if torch.compiler.is_compiling() else listening.listener
    if listener is not None:
        try:
            listener.computed(problem)
        except Exception as error:
            listener.failed(error)
    return attended


def _attend(problem: Problem, names: tuple[str, ...], kernel: str) -> tuple[Tensor, Vitals]:
    if kernel in NATIVE and all_plain(problem):
        output, *found = attend_plain(problem, names, kernel)
        return problem.query.new_empty(0) if output is None else output, plain_vitals(names, found)
    return ops.attend(problem, names, kernel)


def attend_plain(problem: Problem, names: tuple[str, ...], kernel: str, detached: bool = False) -> list[Any]:
    """Run a plain call on a native kernel; inside an autograd Function if a gradient is needed.

    Returns the output (None without values), then the named signs, then `lse_low` if lse is among them, and `output_low` if it is
    known. With `detached`, the signs of a call with values have no gradients, which takes less time and memory.
    """
    query, key, value, mask, gain = problem[:5]
    sign_bits = _bits_of(names)
    if torch.is_grad_enabled() and any(map(_tracked, problem[:5])) and (names or value is not None):
        if detached and value is not None:
            sign_bits |= with_gradient_bits(0, query, key, mask, gain)
            results: list[Results] = []
            call = _PlainCall(problem, sign_bits, OUTPUT_ALONE, kernel, results)
            output = _apply_plain(query, key, value, mask, gain, call)
            return [output[0], *_named(results[0], names)[1:]]
        sign_bits = with_gradient_bits(sign_bits, query, key, mask, gain)
        low = ("lse_low", "output_low") if value is not None and query.dtype in HALVES else ("lse_low",)
        fields = (*names, *low) if "lse" in names else names
        outputs = fields if value is None else ("output", *fields)
        call = _PlainCall(problem, sign_bits, outputs, kernel, None)
        found = _apply_plain(query, key, value, mask, gain, call)
        return [*found] if value is not None else [None, *found]
    return _named(kernels.load(kernel).bare_forward(problem, sign_bits), names)


def attend_unchecked(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: Tensor | None,
    causal: bool | str,
    scale: Any,
    window: int | None,
    softcap: float | None,
    names: tuple[str, ...],
    kernel: str,
    grouped: bool = True,
    detached: bool = False,
) -> list[Any] | None:
    """`attend_plain` for a plain call whose shapes and dtypes are unchecked; None if they may be invalid.

    Also None if another kernel than the native one was asked for. `grouped` allows fewer key heads than query heads.
    """
    native = kernels.takes_plain(kernel, query.is_cuda)
    if native is None:
        return None
    tracked = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or _tracked(value))
    fast = native == "cpu" and value is not None and mask is None and not tracked
    if fast and key.dtype is value.dtype is query.dtype in FLOATS:  # type: ignore[union-attr] # DLPack knows no others
        numbers = (_bits_of(names), grouped, causal, window, scale, softcap)
        results = kernels.load("cpu").plain_forward(query, key, value, *numbers)
        if results is not None:
            return _named(results, names)
    problem = plain_problem(query, key, value, mask, causal, scale, window, softcap)
    if problem is None or not (grouped or query.shape[1] == key.shape[1]) or not kernels.KERNELS[native].takes(problem):
        return None
    if (tracked or _tracked(mask)) and any(t is not None and t.is_inference() for t in problem[:4]):
        return None  # `prepare` copies inference tensors, which a backward may not save
    return attend_plain(problem, names, native, detached)


def attend_again(
    query: Tensor, key: Tensor, value: Tensor, causal: bool | str, scale: float | None, softcap: float | None
) -> tuple[Tensor, Any] | None:
    """A plain call like an earlier one on a GPU, by the same launch: its output, and all signs as rows of memory.

    The signs have no gradients. None if there was no such call. One with the shapes, strides and dtypes of a call that ran is
    valid as that was.
    """
    if kernels.takes_plain("auto", cuda=True) is None:
        return None
    if not query.dim() == key.dim() == value.dim() == 4 or 0 in query.shape:
        return None
    problem = unchecked_problem(query, key, value, None, causal, scale, None, softcap)
    native, sign_bits = kernels.load("triton"), _bits_of(SIGNS)
    tracked = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if tracked:
        if query.is_inference() or key.is_inference() or value.is_inference():
            return None  # see attend_unchecked
        sign_bits |= with_gradient_bits(0, query, key)
    plan = native.forward_plan(problem, sign_bits)
    if plan is None:
        return None
    if not tracked:
        results, rows = native.forward_again(plan, problem, sign_bits)
        return results.output, rows
    detached: list[Any] = []
    call = _PlainCall(problem, sign_bits, OUTPUT_ALONE, "triton", detached, plan)
    return _apply_plain(query, key, value, None, None, call)[0], detached[0]


def _tracked(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _named(results: Results, names: tuple[str, ...]) -> list[Any]:
    # the last fields of Results are SIGNS, in the same order
    signs = results[-len(SIGNS) :] if names is SIGNS else [getattr(results, name) for name in names]
    return [results.output, *signs, results.lse_low] if "lse" in names else [results.output, *signs]


def plain_vitals(names: tuple[str, ...], tensors: Sequence[Tensor]) -> Vitals:
    """Vitals of signs whose names were checked, from what `attend_plain` returns after the output."""
    vitals = Vitals.__new__(Vitals)
    vitals.__dict__ = dict(zip(names, tensors, strict=False))
    return vitals._with_low(*tensors[len(names) :]) if "lse" in names else vitals


class _PlainCall(NamedTuple):
    """What `_PlainAttention` gets besides the tensors that may get a gradient: torch looks at each argument in turn."""

    problem: Problem
    sign_bits: int
    outputs: tuple[str, ...]  # the fields of Results that it returns
    kernel: str
    detached: list[Any] | None  # a list gets the results that have no gradient
    plan: Any = None  # of the launch of an earlier call: the list then gets the rows of its signs


class _PlainAttention(torch.autograd.Function):
    """`_Attention` for a plain call: it runs the native kernel without an op and returns only the outputs that were asked for."""

    @staticmethod
    def forward(ctx: Any, query, key, value, mask, gain, call: _PlainCall) -> Any:  # type: ignore[no-untyped-def]
        problem, sign_bits, outputs, kernel, detached, plan = call
        ctx.numbers, ctx.outputs, ctx.kernel = problem[N_TENSORS:], outputs, kernel
        ctx.set_materialize_grads(False)
        if plan is None:
            results = without_gradient = kernels.load(kernel).bare_forward(problem, sign_bits, saved=True)
        else:
            results, without_gradient = kernels.load(kernel).forward_again(plan, problem, sign_bits)
        if detached is not None:
            detached.append(without_gradient)
            kept = [
                tensor if is_for_output else None for tensor, is_for_output in zip(results, _IS_FOR_OUTPUT, strict=True)
            ]
            ctx.save_for_backward(*problem[:N_TENSORS], *kept)
            return (results.output,)
        ctx.save_for_backward(*problem[:N_TENSORS], *results)
        ctx.mark_non_differentiable(*[getattr(results, name) for name in _NO_GRADIENT if name in outputs])
        return tuple([getattr(results, name) for name in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        problem, results = Problem(*saved[:N_TENSORS], *ctx.numbers), Results(*saved[N_TENSORS:])
        needs_grad = NeedsGrad(*ctx.needs_input_grad[:5])  # no weight: additive scores have no native kernel
        if ctx.outputs == OUTPUT_ALONE:
            upstream = Upstream(*grads, *_NO_SIGNS)
        else:
            arrived = dict(zip(ctx.outputs, grads, strict=True))
            if not needs_grad.logits:
                arrived = {"output": arrived.get("output")}  # no sign depends on the values
            upstream = Upstream(*[arrived.get(name) for name in Upstream._fields])
        if _plain_backward(saved, grads):
            found = kernels.load(ctx.kernel).bare_backward(problem, results, upstream, needs_grad)
        else:
            found = differentiate(problem, results, upstream, list(needs_grad), ctx.kernel)
        return (*found[:5], None)


_apply_plain = apply_of(_PlainAttention)


def _plain_backward(saved: Any, grads: Any) -> bool:
    """Whether a backward can go straight to its kernel: nothing differentiates it again, traces it, or batches it."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not at_rest():
        return False
    # the saved tensors were plain, but saved-tensor hooks may return others
    return are_plain((*grads, *saved))
