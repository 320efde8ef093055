"""by_head for many calls at once: the rows of every call of a step, summed by head in one launch; heads.py has the definition.

No program waits for another and nothing is read back: one program for each head of each call, sums in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...heads import COLUMNS
from ...vitals import SIGNS, Vitals
from ..contract import are_as_written

N_SUMS = len(COLUMNS)
ROWS = 256
"""Rows of one step of a program."""
FIELDS = 16
"""Numbers of a call in the table: addresses of seven signs and lse_low, address and strides of `keep`, sizes, first head."""


def serves(vitals: Vitals) -> bool:
    """Whether these are all signs of a call in float32, as this kernel writes them."""
    return are_as_written(vitals, "cuda")


def by_head(
    calls: Sequence[tuple[Vitals, Tensor | None]], saturable_keys: int, saturated_weight: float
) -> list[tuple[Tensor, Tensor]]:
    """For each call the sums of each head, (H, columns) as in ``heads.COLUMNS``, and its peak, (H,): parts of one block.

    Each call has vitals that this serves, all on one device, and ``keep``: which rows count, or None for all.
    """
    table: list[int] = []
    head_calls: list[int] = []
    kept = []  # what was expanded must live until the launch
    for number, (vitals, keep) in enumerate(calls):
        batch, heads, rows = vitals.lse.shape
        low = vitals._lse_low
        if keep is not None:
            keep = keep.expand(batch, heads, rows)
            kept.append(keep)
        table += [getattr(vitals, name).data_ptr() for name in SIGNS]
        table += [0 if low is None else low.data_ptr()]
        table += [0, 0, 0, 0] if keep is None else [keep.data_ptr(), *keep.stride()]
        table += [batch, heads, rows, len(head_calls)]
        head_calls += [number] * heads
    device = calls[0][0].lse.device
    found = torch.empty((len(head_calls), N_SUMS + 1), dtype=torch.float64, device=device)
    numbers = torch.tensor(table + head_calls, dtype=torch.int64, device="cpu")
    numbers = numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers
    by_head_kernel[(len(head_calls),)](
        numbers,
        found,
        len(calls),
        SATURABLE=saturable_keys,
        SATURATED=saturated_weight,
        N_SUMS=N_SUMS,
        ROWS=ROWS,
        FIELDS=FIELDS,
    )
    parts, first = [], 0
    for vitals, _ in calls:
        block = found[first : first + vitals.lse.shape[1]]
        first += len(block)
        parts.append((block[:, :N_SUMS], block[:, N_SUMS]))
    return parts


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
    p_p2 = tl.load(p_call + 6).to(tl.pointer_type(tl.float32))
    low = tl.load(p_call + 7)
    p_low = low.to(tl.pointer_type(tl.float32))
    keep = tl.load(p_call + 8)
    p_keep = keep.to(tl.pointer_type(tl.int8))
    step_b, step_h, step_r = tl.load(p_call + 9), tl.load(p_call + 10), tl.load(p_call + 11)
    batch, heads, rows = tl.load(p_call + 12), tl.load(p_call + 13), tl.load(p_call + 14)
    i_head = i_out - tl.load(p_call + 15)

    b_rows = tl.zeros([ROWS], tl.float64)
    b_visible, b_mean, b_variance, b_lse, b_entropy, b_p2, b_top = (
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
    for start in range(0, batch * rows, ROWS):
        o = start + tl.arange(0, ROWS)
        m = o < batch * rows
        i_b, i_r = o // rows, o % rows
        o_row = (i_b * heads + i_head) * rows + i_r
        visible = tl.load(p_visible + o_row, mask=m, other=0)
        m &= visible > 0
        if keep != 0:
            m &= tl.load(p_keep + i_b * step_b + i_head * step_h + i_r * step_r, mask=m, other=0) != 0
        mean = tl.load(p_mean + o_row, mask=m, other=0.0)
        variance = tl.load(p_variance + o_row, mask=m, other=0.0)
        peak = tl.load(p_peak + o_row, mask=m, other=float("-inf"))
        lse = tl.load(p_lse + o_row, mask=m, other=0.0)
        entropy = tl.load(p_entropy + o_row, mask=m, other=0.0)
        p2 = tl.load(p_p2 + o_row, mask=m, other=0.0)
        below = peak - lse
        if low != 0:
            below -= tl.load(p_low + o_row, mask=m, other=0.0)
        top = tl.where(m, tl.exp(tl.where(lse == float("-inf"), float("-inf"), below)), 0.0)
        m_choice = m & (visible > 1)
        m_saturable = m & (visible >= SATURABLE)
        b_rows += m.to(tl.float64)
        b_visible += tl.where(m, visible, 0).to(tl.float64)
        b_mean += mean.to(tl.float64)
        b_variance += variance.to(tl.float64)
        b_lse += lse.to(tl.float64)
        b_entropy += entropy.to(tl.float64)
        b_p2 += p2.to(tl.float64)
        b_top += top.to(tl.float64)
        b_keys += tl.where(m & (lse != float("-inf")), tl.exp(entropy), 0.0).to(tl.float64)
        b_choices += m_choice.to(tl.float64)
        b_even += tl.where(m_choice, entropy / tl.log(tl.where(m_choice, visible, 2).to(tl.float32)), 0.0).to(
            tl.float64
        )
        b_trace += tl.where(m & (p2 != 0.0), 1.0 - p2, 0.0).to(tl.float64)
        b_saturable += m_saturable.to(tl.float64)
        b_saturated += (m_saturable & (top > SATURATED)).to(tl.float64)
        # NaN of a row is the head's, as amax has it
        b_peaks = tl.where(m & (peak != peak), peak, tl.maximum(b_peaks, peak, propagate_nan=tl.PropagateNan.ALL))

    p_out = p_found + i_out.to(tl.int64) * (N_SUMS + 1)
    store_sums(
        p_out, b_rows, b_visible, b_mean, b_variance, b_lse, b_entropy, b_p2, b_top, b_keys, b_choices, b_even, b_trace,
        b_saturable, b_saturated,
    )  # fmt: skip
    bad = tl.sum((b_peaks != b_peaks).to(tl.int32), 0) > 0
    tl.store(p_out + N_SUMS, tl.where(bad, float("nan"), tl.max(b_peaks, 0)).to(tl.float64))


@triton.jit
def store_sums(
    p_out, rows, visible, mean, variance, lse, entropy, p2, top, keys, choices, even, trace, saturable, saturated
):
    """In the order of ``heads.COLUMNS``."""
    tl.store(p_out, tl.sum(rows, 0))
    tl.store(p_out + 1, tl.sum(visible, 0))
    tl.store(p_out + 2, tl.sum(mean, 0))
    tl.store(p_out + 3, tl.sum(variance, 0))
    tl.store(p_out + 4, tl.sum(lse, 0))
    tl.store(p_out + 5, tl.sum(entropy, 0))
    tl.store(p_out + 6, tl.sum(p2, 0))
    tl.store(p_out + 7, tl.sum(top, 0))
    tl.store(p_out + 8, tl.sum(keys, 0))
    tl.store(p_out + 9, tl.sum(choices, 0))
    tl.store(p_out + 10, tl.sum(even, 0))
    tl.store(p_out + 11, tl.sum(trace, 0))
    tl.store(p_out + 12, tl.sum(saturable, 0))
    tl.store(p_out + 13, tl.sum(saturated, 0))
