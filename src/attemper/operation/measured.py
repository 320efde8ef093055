"""Measured: a call whose vitals are added to a tally. A compiled graph that needs nothing else of them has two ops for it.

`forward_packed` returns what a backward needs, and the other signs as one tensor; `tally_packed` adds them to the tally. As seven
tensors the signs would take longer on the host, without CUDA graphs, than their kernel on a GPU. They are two ops because a
backward may compute the first one again, and must not depend on a tally, which changes in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from .._torch_private import _AutoDispatchBelowAutograd, at_rest
from ..kernels.contract import (
    ALL_SIGNS,
    FOR_OUTPUT,
    INTEGERS,
    KEEP_LAYOUT,
    N_GRADS,
    N_TENSORS,
    OUTPUT_LOW_BIT,
    PACKED,
    NeedsGrad,
    Problem,
    Results,
    Upstream,
    empty_results,
    is_recording,
    packed_signs,
    packed_size,
)
from ..vitals import SIGNS, Vitals
from .listen import TallyTarget
from .ops import (
    N_PROBLEM,
    PROBLEM_SCHEMA,
    calling,
    differentiate,
    with_bits_of_gradients,
    with_distinct_tensors,
    without_autocast,
)
from .plain import are_plain
from .tally import CALL_SCHEMA, add_signs, add_vitals, call_arguments, check_tally, is_recomputed, surviving

torch.library.define(
    "attemper::forward_packed",
    f"({PROBLEM_SCHEMA}, int sign_bits, str kernel) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "attemper::tally_packed", f"(Tensor(a!) tally, Tensor lse, Tensor lse_low, Tensor packed, {CALL_SCHEMA}) -> ()"
)

FORWARD_PACKED = torch.ops.attemper.forward_packed.default


def _forward_packed(*args: Any) -> tuple[Tensor, ...]:
    """The results of FOR_OUTPUT, and the signs of PACKED. Of the bits, only the one of `output_low` is read."""
    problem, (sign_bits, kernel) = Problem(*args[:N_PROBLEM]), args[N_PROBLEM:]
    sign_bits, native = sign_bits & OUTPUT_LOW_BIT | ALL_SIGNS, kernels.load(kernel)
    with without_autocast(problem.query):
        if kernel == "triton":
            results, packed = native.forward_packed(problem, sign_bits)
        else:
            results = native.forward(problem, sign_bits)
            packed = _pack(results)
    output, low, lse_low, lse = [getattr(results, name) for name in FOR_OUTPUT]
    return output, problem.query.new_empty(0, dtype=torch.int16) if low is None else low, lse_low, lse, packed


torch.library.impl("attemper::forward_packed", "CompositeExplicitAutograd", _forward_packed)


def _pack(results: Results) -> Tensor:
    """The signs of another kernel, copied into one tensor."""
    lse = results.lse
    signs = [getattr(results, name).flatten() for name in PACKED]
    place = PACKED.index("visible")
    signs[place] = signs[place].to(INTEGERS[lse.dtype]).view(lse.dtype)
    more = packed_size(lse.numel()) - lse.numel()
    parts = [part for sign in signs for part in (sign, lse.new_zeros(more))] if more else signs
    return torch.cat(parts)


@torch.library.register_fake("attemper::forward_packed")
def _fake_forward_packed(*args: Any) -> tuple[Tensor, ...]:
    problem, (sign_bits, kernel) = Problem(*args[:N_PROBLEM]), args[N_PROBLEM:]
    results = empty_results(problem, sign_bits & OUTPUT_LOW_BIT, as_query=kernel in KEEP_LAYOUT)
    packed = results.lse.new_empty(len(PACKED) * packed_size(results.lse.numel()))
    return *[getattr(results, name) for name in FOR_OUTPUT], packed


@torch.library.impl("attemper::tally_packed", "CompositeExplicitAutograd")
@surviving
def _tally_packed(tally: Tensor, lse: Tensor, lse_low: Tensor, packed: Tensor, *args: Any) -> None:
    if is_recomputed():
        return
    check_tally(tally, lse)
    keep, grade, about = args[0], args[1], (*args[2:], tuple(lse.shape))
    is_whole = lse.is_contiguous() and lse_low.is_contiguous() and packed.is_contiguous()
    if tally.is_cuda and is_whole and packed.dtype is torch.float32 and kernels.triton_is_missing() is None:
        add_signs(tally, kernels.load("triton").packed_rows(lse, lse_low, packed), keep, grade, about)
        return
    signs = {"lse": lse, **packed_signs(packed, tuple(lse.shape))}
    signs["visible"] = signs["visible"].to(torch.int32)
    add_signs(tally, [*[signs[name] for name in SIGNS], lse_low], keep, grade, about)


@torch.library.register_fake("attemper::tally_packed")
def _fake_tally_packed(tally: Tensor, lse: Tensor, *args: Any) -> None:
    check_tally(tally, lse)


class _MeasuredAttention(torch.autograd.Function):
    """`forward_packed` with its derivative. Only the output has one: a graph would send zeros as gradients of the signs."""

    forward = calling(FORWARD_PACKED)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        problem = Problem(*inputs[:N_PROBLEM])
        ctx.save_for_backward(*problem.tensors, *output[: len(FOR_OUTPUT)])
        ctx.numbers, ctx.kernel = tuple(problem[N_TENSORS:]), inputs[-1]
        ctx.mark_non_differentiable(*output[1:])
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


# Tracers may look through the Function at its op (see ops.py), which needs the same rule. `torch.library.register_autograd` would
# add 15 µs to each call of a compiled graph, where nothing is differentiated any more.
@torch.library.impl("attemper::forward_packed", "Autograd")
def _differentiable(*args: Any) -> Any:
    if is_recording() and any(one is not None and one.requires_grad for one in args[:N_GRADS]):
        return _MeasuredAttention.apply(*args)
    if at_rest() and are_plain(args[:N_GRADS]):
        return _forward_packed(*args)
    with _AutoDispatchBelowAutograd():
        return torch.ops.attemper.forward_packed(*args)


def attend_and_tally(
    run: Callable[[Problem, tuple[str, ...], str], tuple[Tensor, Vitals]],
    problem: Problem,
    names: tuple[str, ...],
    kernel: str,
    target: TallyTarget,
) -> tuple[Tensor, Vitals]:
    """What `run` returns; all vitals are also added to the target. In a traced graph only the named signs have gradients."""
    if not names and kernel != "reference" and torch.compiler.is_compiling():
        sign_bits = with_bits_of_gradients(problem, ALL_SIGNS)
        found = _MeasuredAttention.apply(*with_distinct_tensors(problem), sign_bits, kernel)
        output, _, lse_low, lse, packed = found
        torch.ops.attemper.tally_packed(target.tally, lse, lse_low, packed, *call_arguments(problem, target))
        return output, Vitals()
    output, vitals = run(problem, SIGNS, kernel)
    low = vitals._lse_low
    low = torch.zeros_like(vitals.lse) if low is None else low
    if torch.compiler.is_compiling():
        add_vitals(problem, vitals, low, target)
    else:
        surviving(add_vitals)(problem, vitals, low, target)
    return output, Vitals(**{name: getattr(vitals, name) for name in names})._with_low(low, vitals._output_low)
