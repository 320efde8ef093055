"""Sums over the rows of each head, as heads.py defines them: of all calls of a step in one launch, or of one call into a tally.

One program takes one head of one call and sums in float64. No program waits for another, and nothing is read back.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...heads import COLUMNS
from ...vitals import Vitals
from ..contract import are_as_written
from .launch import ALIGNED, Launch, on_its_device, plans_of, run
from .replay import SignRows, sign_tensors

N_SUMS = len(COLUMNS)
SLOTS: tl.constexpr = tl.constexpr(16)  # length of the block of sums, a power of 2
ROWS = 256
"""Rows of one step of a program."""
ROWS_ALONE, WARPS_ALONE = 1024, 16
"""Rows of one step, and warps, when one call is summed alone: few programs, each of which should be quick."""
FIELDS = 16
"""Numbers of a call in the table: addresses of seven signs and lse_low, address and strides of `keep`, sizes, first head."""


def serves(vitals: Vitals) -> bool:
    """Whether these are all signs of a call in float32, as this kernel writes them."""
    return are_as_written(vitals, "cuda")


def serves_each(signs: Sequence[Tensor] | SignRows) -> bool:
    """Whether signs and `lse_low` that one kernel wrote can be added: int32 `visible`, float32 others, all contiguous."""
    if isinstance(signs, SignRows):
        return True
    first = signs[0]
    for sign in signs[1:]:
        if sign.dtype is not torch.float32 or not sign.is_contiguous():
            return False
    return first.dtype is torch.int32 and first.is_contiguous() and first.dim() == 3


def by_head(
    calls: Sequence[tuple[tuple[int, ...], tuple[int, int, int], Tensor | None]],
    device: torch.device,
    saturable_keys: int,
    saturated_weight: float,
) -> Tensor:
    """The sums of each head of each call, as in ``heads.COLUMNS``, and its peak: (heads of all calls, columns + 1).

    Each call has the addresses of its signs and of ``lse_low`` (or 0), their shape (batch, heads, rows), and ``keep``: which
    rows count, or None for all.
    """
    table: list[int] = []
    head_calls: list[int] = []  # for each head the number of its call
    first = 0
    kept = []  # expanded masks, which must live until the launch
    for number, (addresses, (batch, heads, rows), keep) in enumerate(calls):
        if keep is not None:
            keep = keep.expand(batch, heads, rows)
            kept.append(keep)
        table += addresses
        table += (0, 0, 0, 0) if keep is None else (keep.data_ptr(), *keep.stride())
        table += (batch, heads, rows, first)
        head_calls += [number] * heads
        first += heads
    sums = torch.empty((first, N_SUMS + 1), dtype=torch.float64, device=device)
    tensors, numbers = (_on_device(table + head_calls, device), sums), (len(calls),)

    def launch() -> Launch:
        constants = {"SATURABLE": saturable_keys, "SATURATED": saturated_weight, "N_SUMS": N_SUMS, "ROWS": ROWS}
        return Launch(by_head_kernel, (first, 1), (*tensors, *numbers), constants | {"FIELDS": FIELDS}, {})

    run(plans_of((device, saturable_keys, saturated_weight)), "by_head", tensors, launch, numbers, (first, 1, 1))
    return sums


SMALL_TABLE = 1 << 13
"""Up to this many numbers (64 KiB) CUDA keeps a copy and returns at once. With more it may wait for the device, unless the
memory is pinned, and pinning takes longer than a small copy."""


def _on_device(numbers: list[int], device: torch.device) -> Tensor:
    on_host = torch.frombuffer(array("q", numbers), dtype=torch.int64)
    if device.type == "cuda" and len(numbers) > SMALL_TABLE:
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)


def add_to(
    tally: Tensor,
    entry: tuple[int, int],
    signs: Sequence[Tensor] | SignRows,
    keep: Tensor | None,
    number: int,
    saturable_keys: int,
    saturated_weight: float,
) -> None:
    """Add a call, all its signs and `lse_low`, to one entry of a contiguous tally (kinds, grades, H, columns + 3).

    The tally has for each head the sums, the peak, how many calls were added, and the number of the last one. All numbers are
    arguments of the launch, so a CUDA graph can hold it.
    """
    given, shape = (signs.addresses, signs.shape) if isinstance(signs, SignRows) else (signs, signs[0].shape)
    batch, heads, rows = shape
    step_kind, step_grade, step_head, _ = tally.stride()
    slot = entry[0] * step_kind + entry[1] * step_grade
    kept, strides, farthest = None, (0, 0, 0), 0
    if keep is not None:
        kept = keep.expand(batch, heads, rows).view(torch.int8)
        strides = kept.stride()  # type: ignore[assignment]
        farthest = sum((size - 1) * step for size, step in zip(kept.shape, strides, strict=True))
    numbers = (slot, step_head, *strides, batch, heads, rows, number, int(keep is not None))
    wide = max(batch * heads * rows, farthest) >= 1 << 31
    long = tuple([each >= 1 << 31 for each in numbers]) if max(numbers) >= 1 << 31 else ()  # compiled as 64 bits
    last = given[0] if kept is None else kept  # if all rows count, the kernel does not read this address
    addresses = [one if type(one) is int else one.data_ptr() for one in (tally, *given, last)]
    aligned = tuple([address % ALIGNED == 0 for address in addresses])

    def launch() -> Launch:
        tensors = sign_tensors(signs) if isinstance(signs, SignRows) else signs
        constants = {"SATURABLE": saturable_keys, "SATURATED": saturated_weight, "N_SUMS": N_SUMS, "ROWS": ROWS_ALONE}
        args = (tally, *tensors, tensors[0] if kept is None else kept, *numbers)
        return Launch(add_kernel, (heads, 1), args, constants | {"WIDE": wide}, {"num_warps": WARPS_ALONE})

    plans = plans_of((tally.device, kept is None, aligned, long, wide, saturable_keys, saturated_weight))
    on_its_device(tally, run, plans, "add", addresses, launch, numbers, (heads, 1, 1))


@triton.jit(do_not_specialize=["calls"])
def by_head_kernel(
    p_table, p_found, calls, SATURABLE: tl.constexpr, SATURATED: tl.constexpr,
    N_SUMS: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    i_out = tl.program_id(0)
    p_call = p_table + tl.load(p_table + calls * FIELDS + i_out) * FIELDS
    p_visible = tl.load(p_call).to(tl.pointer_type(tl.int32))
    p_mean = tl.load(p_call + 1).to(tl.pointer_type(tl.float32))
    p_variance = tl.load(p_call + 2).to(tl.pointer_type(tl.float32))
    p_peak = tl.load(p_call + 3).to(tl.pointer_type(tl.float32))
    p_lse = tl.load(p_call + 4).to(tl.pointer_type(tl.float32))
    p_entropy = tl.load(p_call + 5).to(tl.pointer_type(tl.float32))
    p_sum_p2 = tl.load(p_call + 6).to(tl.pointer_type(tl.float32))
    low = tl.load(p_call + 7)
    p_low = low.to(tl.pointer_type(tl.float32))
    keep = tl.load(p_call + 8)
    p_keep = keep.to(tl.pointer_type(tl.int8))
    step_b, step_h, step_r = tl.load(p_call + 9), tl.load(p_call + 10), tl.load(p_call + 11)
    batch, heads, rows = tl.load(p_call + 12), tl.load(p_call + 13), tl.load(p_call + 14)
    i_head = i_out - tl.load(p_call + 15)

    sums, peak = fold_rows(
        p_visible, p_mean, p_variance, p_peak, p_lse, p_entropy, p_sum_p2, p_low, p_keep, low, keep, step_b, step_h, step_r,
        batch, heads, rows, i_head, SATURABLE, SATURATED, ROWS,
    )  # fmt: skip
    p_out = p_found + i_out.to(tl.int64) * (N_SUMS + 1)
    o_sum = tl.arange(0, SLOTS)
    tl.store(p_out + o_sum, sums, mask=o_sum < N_SUMS)
    tl.store(p_out + N_SUMS, peak)


@triton.jit(
    do_not_specialize=["slot", "width", "step_b", "step_h", "step_r", "batch", "heads", "rows", "number", "keep"]
)
def add_kernel(
    p_tally, p_visible, p_mean, p_variance, p_peak, p_lse, p_entropy, p_sum_p2, p_low, p_keep,
    slot, width, step_b, step_h, step_r, batch, heads, rows, number, keep,
    SATURABLE: tl.constexpr, SATURATED: tl.constexpr, N_SUMS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    i_head = tl.program_id(0)
    if WIDE:  # offsets need 64 bits, whose division takes longer
        batch, heads, rows = batch.to(tl.int64), heads.to(tl.int64), rows.to(tl.int64)
    sums, peak = fold_rows(
        p_visible, p_mean, p_variance, p_peak, p_lse, p_entropy, p_sum_p2, p_low, p_keep, 1, keep, step_b, step_h, step_r,
        batch, heads, rows, i_head, SATURABLE, SATURATED, ROWS,
    )  # fmt: skip
    p_out = p_tally + slot + i_head * width
    calls = tl.load(p_out + N_SUMS + 1)
    before = tl.load(p_out + N_SUMS)
    o_sum = tl.arange(0, SLOTS)
    m_sum = o_sum < N_SUMS
    tl.store(p_out + o_sum, tl.load(p_out + o_sum, mask=m_sum, other=0.0) + sums, mask=m_sum)
    larger = tl.where((before != before) | (peak != peak), float("nan"), tl.maximum(before, peak))
    tl.store(p_out + N_SUMS, tl.where(calls == 0.0, peak, larger))
    tl.store(p_out + N_SUMS + 1, calls + 1.0)
    tl.store(p_out + N_SUMS + 2, number.to(tl.float64))


@triton.jit
def fold_rows(
    p_visible, p_mean, p_variance, p_peak, p_lse, p_entropy, p_sum_p2, p_low, p_keep, low, keep, step_b, step_h, step_r,
    batch, heads, rows, i_head, SATURABLE: tl.constexpr, SATURATED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sums of one head in the order of ``heads.COLUMNS``, then zeros, and its peak.

    ``low`` and ``keep`` are 0 where there is none.
    """
    b_rows = tl.zeros([ROWS], tl.float64)
    b_visible, b_mean, b_variance, b_lse, b_entropy, b_sum_p2, b_top = (
        b_rows,
        b_rows,
        b_rows,
        b_rows,
        b_rows,
        b_rows,
        b_rows,
    )
    b_keys, b_choices, b_even, b_trace, b_saturable, b_saturated = b_rows, b_rows, b_rows, b_rows, b_rows, b_rows
    b_peaks = tl.full([ROWS], float("-inf"), tl.float32)
    for start in tl.range(0, batch * rows, ROWS, loop_unroll_factor=2):
        o = start + tl.arange(0, ROWS)
        m_in = o < batch * rows
        i_b, i_r = o // rows, o % rows
        o_row = (i_b * heads + i_head) * rows + i_r
        # independent loads: none waits for another
        visible = tl.load(p_visible + o_row, mask=m_in, other=0)
        mean = tl.load(p_mean + o_row, mask=m_in, other=0.0)
        variance = tl.load(p_variance + o_row, mask=m_in, other=0.0)
        peak = tl.load(p_peak + o_row, mask=m_in, other=0.0)
        lse = tl.load(p_lse + o_row, mask=m_in, other=0.0)
        entropy = tl.load(p_entropy + o_row, mask=m_in, other=0.0)
        sum_p2 = tl.load(p_sum_p2 + o_row, mask=m_in, other=0.0)
        m = visible > 0
        if keep != 0:
            m &= tl.load(p_keep + i_b * step_b + i_head * step_h + i_r * step_r, mask=m_in, other=0) != 0
        below = peak - lse
        if low != 0:
            below -= tl.load(p_low + o_row, mask=m_in, other=0.0)
        top = tl.exp(tl.where(lse == float("-inf"), float("-inf"), below))
        m_choice = m & (visible > 1)
        m_saturable = m & (visible >= SATURABLE)
        b_rows += m.to(tl.float64)
        b_visible += tl.where(m, visible, 0).to(tl.float64)
        b_mean += tl.where(m, mean, 0.0).to(tl.float64)
        b_variance += tl.where(m, variance, 0.0).to(tl.float64)
        b_lse += tl.where(m, lse, 0.0).to(tl.float64)
        b_entropy += tl.where(m, entropy, 0.0).to(tl.float64)
        b_sum_p2 += tl.where(m, sum_p2, 0.0).to(tl.float64)
        b_top += tl.where(m, top, 0.0).to(tl.float64)
        b_keys += tl.where(m & (lse != float("-inf")), tl.exp(entropy), 0.0).to(tl.float64)
        b_choices += m_choice.to(tl.float64)
        b_even += tl.where(m_choice, entropy / tl.log(tl.where(m_choice, visible, 2).to(tl.float32)), 0.0).to(
            tl.float64
        )
        b_trace += tl.where(m & (sum_p2 != 0.0), 1.0 - sum_p2, 0.0).to(tl.float64)
        b_saturable += m_saturable.to(tl.float64)
        b_saturated += (m_saturable & (top > SATURATED)).to(tl.float64)
        # a NaN in any row makes the head's peak NaN, as amax does
        larger = tl.maximum(b_peaks, peak, propagate_nan=tl.PropagateNan.ALL)
        b_peaks = tl.where(m & (peak != peak), peak, tl.where(m, larger, b_peaks))
    bad = tl.sum((b_peaks != b_peaks).to(tl.int32), 0) > 0
    peak = tl.where(bad, float("nan"), tl.max(b_peaks, 0)).to(tl.float64)
    # Joined, all sums take one reduction; each sum by itself would wait for all threads. The outermost `join` gives the
    # lowest bit of a sum's index, the innermost one the highest.
    none = tl.zeros([ROWS], tl.float64)
    b_even_slots = tl.join(
        tl.join(tl.join(b_rows, b_keys), tl.join(b_lse, b_saturable)),
        tl.join(tl.join(b_mean, b_even), tl.join(b_sum_p2, none)),
    )
    b_odd_slots = tl.join(
        tl.join(tl.join(b_visible, b_choices), tl.join(b_entropy, b_saturated)),
        tl.join(tl.join(b_variance, b_trace), tl.join(b_top, none)),
    )
    b_all = tl.join(b_even_slots, b_odd_slots)
    return tl.reshape(tl.sum(b_all, 0), [SLOTS]), peak
