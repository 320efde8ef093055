"""Again: a call with the shapes, strides and options of an earlier one is started by the compiled launch of that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...vitals import SIGNS
from ..contract import ALL_SIGNS, OUTPUT_LOW_BIT, Problem, Results, bare_results
from .arguments import cdiv, facts, inputs, splits_of
from .launch import PLANS, LaunchPlan, Plans, on_its_device


def plan_key(problem: Problem, sign_bits: int) -> tuple[Any, ...]:
    """All that a launch of the forward depends on; () for a call with dropout, whose seed is new each time."""
    if problem.dropout:
        return ()
    query, key, value, mask, gain = problem[:5]
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)  # as `readable` has it
    tensors = (facts(query), facts(key), facts(value), facts(mask), facts(gain))
    return (query.get_device(), tensors, problem[7:], sign_bits)


_NO_PLANS: Plans = {}


def forward_plan(problem: Problem, sign_bits: int) -> LaunchPlan | None:
    """The plan of an earlier call like this one; None if there was none, or the keys of each row are split over programs."""
    if splits_of(problem) > 1:
        return None
    return PLANS.get(plan_key(problem, sign_bits), _NO_PLANS).get("forward")


# `forward_again` has them in this order
assert SIGNS == ("visible", "mean", "variance", "peak", "lse", "entropy", "p2")
SignRows = tuple[tuple[int, ...], tuple[int, int, int], tuple[Tensor, ...]]
"""The addresses of all signs and of `lse_low`, their shape (batch, heads, rows), and the memory that they are in."""


def rows_again(query: Tensor, key: Tensor, scale: float, right: int | None) -> SignRows | None:
    """All signs of a call without values, by the launch of one with the same shapes; None if there was none.

    A call whose keys are split over programs has no plan of this name.
    """
    tensors = (facts(query), facts(key), None, None, None)
    numbers = (scale, None, right, None, 0.0)
    plan = PLANS.get((query.get_device(), tensors, numbers, ALL_SIGNS), _NO_PLANS).get("forward")
    if plan is None:
        return None
    block, addresses = _sign_block(query, len(SIGNS) + 1)
    results = (None, None, None, addresses[-1], *addresses[:-1])  # as in Results
    on_its_device(query, plan.run, (query, key, query, query, query, key, key, *results))
    batch, heads, rows, _ = query.shape
    return (*addresses,), (batch, heads, rows), (block,)


def forward_again(plan: LaunchPlan, problem: Problem, sign_bits: int) -> tuple[Results, SignRows]:
    """`bare_forward` with values and all signs, by the `forward_plan` of a call like it.

    The signs lie in one block; of them, only `lse` and `lse_low` are among the results.
    """
    query, key, value = problem[:3]
    assert value is not None
    saved = bare_results(query, value.shape[3], sign_bits & OUTPUT_LOW_BIT, saved=True, as_query=True)
    block, (visible, mean, variance, peak, entropy, p2) = _sign_block(query, len(SIGNS) - 1)
    output, output_low, _, lse_low, *_ = saved
    lse = saved.lse
    results = (output, output_low, None, lse_low, visible, mean, variance, peak, lse, entropy, p2)
    on_its_device(query, plan.run, (*inputs(problem), key, value, *results))
    addresses = (visible, mean, variance, peak, lse.data_ptr(), entropy, p2, lse_low.data_ptr())
    batch, heads, rows, _ = query.shape
    return saved, (addresses, (batch, heads, rows), (block, lse, lse_low))


def _sign_block(query: Tensor, count: int) -> tuple[Tensor, range]:
    """Memory for so many signs of a call, and their addresses. It takes less time than a tensor for each."""
    batch, heads, rows, _ = query.shape
    each = cdiv(batch * heads * rows, 4) * 4  # all addresses are aligned, as those of tensors are
    block = query.new_empty_strided((count * each,), (1,), dtype=torch.float32)
    first = block.data_ptr()
    return block, range(first, first + 4 * count * each, 4 * each)
