"""Tallied: attention whose vitals are added to the tally of its module.

In a compiled graph, a call whose signs nobody else asks for is one op, `attemper::attend_and_tally`. Its signs are not values of
the graph, and one op takes less time than two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.contract import (
    ARGMAX_BIT,
    KEEP_LAYOUT,
    N_GRADS,
    N_TENSORS,
    NeedsGrad,
    Problem,
    Results,
    Upstream,
    empty_results,
    is_recording,
)
from ..vitals import SIGNS, Vitals
from . import ops
from .listen import TallyTarget
from .ops import N_PROBLEM, PROBLEM, bits_of, differentiate, without_autocast
from .padding import kept_by_mask
from .tally import add, check

SAVED = ("output", "output_low", "lse", "lse_low")
"""What the op returns: the output, and what the backward needs besides."""
torch.library.define(
    "attemper::attend_and_tally",
    f"(Tensor(a!) tally, {PROBLEM}, int sign_bits, str kernel, Tensor? keep, int grade, str route, str kind, "
    "str implementation, float? declared, SymInt? window) -> (Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.impl("attemper::attend_and_tally", "CompositeExplicitAutograd")
def _attend_and_tally(tally: Tensor, *args: Any) -> tuple[Tensor, ...]:
    problem, (sign_bits, kernel, keep, grade, *known) = Problem(*args[:N_PROBLEM]), args[N_PROBLEM:]
    own = kernels.load(kernel)
    with without_autocast(problem.query):
        if hasattr(own, "bare_forward"):
            results = own.bare_forward(problem, sign_bits, saved=True)
        else:
            results = own.forward(problem, sign_bits)
        add(tally, ops._vitals_of(results, SIGNS), keep, grade, (*known, *_about(problem)))
    output, output_low, lse, lse_low = (getattr(results, name) for name in SAVED)
    return output, problem.query.new_empty(0, dtype=torch.int16) if output_low is None else output_low, lse, lse_low


@torch.library.register_fake("attemper::attend_and_tally")
def _fake_attend_and_tally(tally: Tensor, *args: Any) -> tuple[Tensor, ...]:
    sign_bits, kernel = args[N_PROBLEM : N_PROBLEM + 2]
    results = empty_results(Problem(*args[:N_PROBLEM]), sign_bits, as_query=kernel in KEEP_LAYOUT)
    check(tally, results.lse)
    return tuple(getattr(results, name) for name in SAVED)


def _about(problem: Problem) -> tuple[Any, ...]:
    """What `CallDescription` says of a problem, in its order."""
    key = problem.key
    _, groups, keys, dim = key.shape
    scale = None if problem.gain is not None else problem.scale
    numbers = (scale, problem.left, problem.right, problem.softcap, problem.dropout)
    return (_name_of(key.dtype), groups, keys, dim, *numbers, problem.mask is not None)


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def attend_and_tally(
    run: Callable[[Problem, tuple[str, ...], str], tuple[Tensor, Vitals]],
    problem: Problem,
    names: tuple[str, ...],
    kernel: str,
    target: TallyTarget,
) -> tuple[Tensor, Vitals]:
    """What `run` returns; the vitals are also added to the target. In a traced graph only the named signs have gradients."""
    known = (target.route, target.kind, target.implementation, target.declared, target.window)
    keep, grade = _kept(problem, target.kind), (1 + target.training) * is_recording()
    if not names and kernel != "reference" and torch.compiler.is_compiling():
        sign_bits = ops._with_gradient_bits(problem, bits_of(SIGNS)) & ~ARGMAX_BIT
        whole = ops.with_distinct_tensors(problem)
        return _TalliedAttention.apply(target.tally, *whole, sign_bits, kernel, keep, grade, *known)[0], Vitals()
    output, vitals = run(problem, SIGNS, kernel)
    low = vitals._lse_low
    low = torch.zeros_like(vitals.lse) if low is None else low
    signs = [getattr(vitals, name).detach() for name in SIGNS]
    torch.ops.attemper.tally(target.tally, *signs, low.detach(), keep, grade, *known, *_about(problem))
    return output, Vitals(**{name: getattr(vitals, name) for name in names})._with_low(low)


def _kept(problem: Problem, kind: str) -> Tensor | None:
    """Which queries are no padding, if the mask of self-attention shows it."""
    mask, queries, keys = problem.mask, problem.query.shape[2], problem.key.shape[2]
    if mask is None or kind == "cross" or queries != keys or mask.shape[-1] != keys:
        return None
    return kept_by_mask(mask.detach())


class _TalliedAttention(torch.autograd.Function):
    """`ops._Attention` with a tally, and with only the output differentiable: a graph would send zeros as gradients of signs."""

    # Dynamo counts the parameters of this signature, so they are spelled out
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        tally, query, key, value, mask, gain, weight, seed, scale, left, right, softcap, dropout, sign_bits, kernel,
        keep, grade, route, kind, implementation, declared, window,
    ) -> Any:  # fmt: skip
        return torch.ops.attemper.attend_and_tally(
            tally, query, key, value, mask, gain, weight, seed, scale, left, right, softcap, dropout, sign_bits, kernel,
            keep, grade, route, kind, implementation, declared, window,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        problem = Problem(*inputs[1 : 1 + N_PROBLEM])
        ctx.save_for_backward(*problem.tensors, *output)
        ctx.numbers, ctx.kernel, ctx.n_inputs = tuple(problem[N_TENSORS:]), inputs[2 + N_PROBLEM], len(inputs)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        problem = Problem(*saved[:N_TENSORS], *ctx.numbers)
        kept = dict(zip(SAVED, saved[N_TENSORS:], strict=True))
        results: Any = Results(*[kept.get(name) for name in Results._fields])  # type: ignore[arg-type]
        needs_grad = NeedsGrad(*[bool(needed) for needed in ctx.needs_input_grad[1 : 1 + N_GRADS]])
        upstream = Upstream(grads[0], *[None] * (len(Upstream._fields) - 1))
        found = differentiate(problem, results, upstream, list(needs_grad), ctx.kernel)
        return (None, *found, *[None] * (ctx.n_inputs - 1 - N_GRADS))
