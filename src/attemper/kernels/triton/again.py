"""Again: a call with the shapes, strides and options of an earlier one is started by the compiled launch of that."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...vitals import SIGNS
from ..contract import ALL_SIGNS, OUTPUT_LOW_BIT, PACKED, Problem, Results, bare_results, packed_signs, packed_size
from .arguments import facts, inputs, splits_of
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
_last: tuple[tuple[Any, ...], LaunchPlan | None] = ((), None)


def _plan_at(key: tuple[Any, ...]) -> LaunchPlan | None:
    """The plan of the forward with this key. Layers of a model mostly share one, and comparing takes less time than hashing."""
    global _last
    last, plan = _last
    if key != last or plan is None:
        plan = PLANS.get(key, _NO_PLANS).get("forward")
        _last = (key, plan)
    return plan


def forward_plan(problem: Problem, sign_bits: int) -> LaunchPlan | None:
    """The plan of an earlier call like this one; None if there was none, or the keys of each row are split over programs."""
    return None if splits_of(problem) > 1 else _plan_at(plan_key(problem, sign_bits))


# `forward_again` has them in this order
assert SIGNS == ("visible", "mean", "variance", "peak", "lse", "entropy", "p2")


class SignRows(NamedTuple):
    """The signs of a call, as addresses."""

    addresses: tuple[int, ...]  # of all signs and of `lse_low`
    shape: tuple[int, int, int]  # batch, heads, rows
    memory: tuple[Tensor, ...]  # what they are addresses in


def rows_again(query: Tensor, key: Tensor, scale: float, right: int | None) -> SignRows | None:
    """All signs of a call without values, by the launch of one with the same shapes; None if there was none.

    A call whose keys are split over programs has no plan of this name.
    """
    tensors = (facts(query), facts(key), None, None, None)
    numbers = (scale, None, right, None, 0.0)
    plan = _plan_at((query.get_device(), tensors, numbers, ALL_SIGNS))
    if plan is None:
        return None
    memory, addresses = _sign_memory(query, len(SIGNS) + 1)
    results = (0, 0, 0, addresses[-1], *addresses[:-1])  # as in Results
    q, k = query.data_ptr(), key.data_ptr()
    on_its_device(query, plan.run_at, (q, k, q, q, q, k, k, *results), (query, key, None, None, None, key, key))
    batch, heads, rows, _ = query.shape
    return SignRows((*addresses,), (batch, heads, rows), (memory,))


def forward_again(plan: LaunchPlan, problem: Problem, sign_bits: int) -> tuple[Results, SignRows]:
    """`bare_forward` with values and all signs, by the `forward_plan` of a call like it.

    One tensor holds the signs but for `lse`, which is among the results, as is `lse_low`.
    """
    query, key, value = problem[:3]
    assert value is not None
    saved = bare_results(query, value.shape[3], sign_bits & OUTPUT_LOW_BIT, saved=True, as_query=True)
    rows = packed_rows(saved.lse, saved.lse_low, _sign_memory(query, len(SIGNS) - 1)[0])
    *signs, lse_low = rows.addresses
    on_its_device(
        query, plan.run, (*inputs(problem), key, value, saved.output, saved.output_low, None, lse_low, *signs)
    )
    return saved, rows


def packed_rows(lse: Tensor, lse_low: Tensor, packed: Tensor) -> SignRows:
    """The rows of a call whose signs but for `lse` one tensor holds."""
    batch, heads, rows = lse.shape
    each, first = 4 * packed_size(batch * heads * rows), packed.data_ptr()
    visible, mean, variance, peak, entropy, p2 = [first + place * each for place in range(len(PACKED))]
    addresses = (visible, mean, variance, peak, lse.data_ptr(), entropy, p2, lse_low.data_ptr())
    return SignRows(addresses, (batch, heads, rows), (packed, lse, lse_low))


def _sign_memory(query: Tensor, count: int) -> tuple[Tensor, range]:
    """Memory for so many signs of a call, and their addresses. It takes less time than a tensor for each."""
    batch, heads, rows, _ = query.shape
    each = packed_size(batch * heads * rows)
    memory = query.new_empty_strided((count * each,), (1,), dtype=torch.float32)
    first = memory.data_ptr()
    return memory, range(first, first + 4 * count * each, 4 * each)


def sign_tensors(rows: SignRows) -> list[Tensor]:
    """The signs and `lse_low` of `packed_rows` as tensors."""
    packed, lse, lse_low = rows.memory
    signs = {"lse": lse, **packed_signs(packed, rows.shape)}
    return [*[signs[name] for name in SIGNS], lse_low]
