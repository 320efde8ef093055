"""Write the signs and the output of rows, from their sums."""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import ARGMAX, ENTROPY, LN2, MEAN, OUTPUT_LOW, P2, PEAK, VARIANCE, VISIBLE


@triton.jit
def entropy_of(b_l, b_a):
    b_entropy = tl.log(b_l) - tl.div_rn(b_a, b_l) * LN2
    return tl.where(b_entropy < 0, 0.0, b_entropy)  # by rounding alone; NaN stays


@triton.jit
def moments(b_count, b_met, b_mean, b_squares):
    """Mean and variance over all keys that a row sees; a key with a logit of -inf is counted and adds nothing.

    `b_met` counts the other keys; `b_mean` and `b_squares` are their mean and their summed squares about it.
    """
    b_some = tl.maximum(b_count, 1).to(tl.float32)
    b_all = b_mean * tl.div_rn(b_met, b_some)
    b_off = tl.where(b_met == b_count.to(tl.float32), 0.0, b_met * (b_mean - b_all) * (b_mean - b_all))
    return b_all, tl.div_rn(b_squares + b_off, b_some)


@triton.jit
def lost_bits(b_out, b_short):
    """What rounding took from the output, as `vitals.rounded_off` defines it."""
    b_wide = b_short.to(tl.float32)
    b_lost = b_out.to(tl.int32, bitcast=True) - b_wide.to(tl.int32, bitcast=True)
    if b_short.dtype == tl.float16:
        b_units = (b_out - b_wide) * 1099511627776.0  # 2^40
        b_near = tl.where(b_units < 0, b_units - 0.5, b_units + 0.5).to(tl.int32)
        b_lost = tl.where(tl.abs(b_wide) < 6.103515625e-05, b_near, b_lost)
    b_lost = tl.minimum(tl.maximum(b_lost, -32768), 32767)
    return tl.where(tl.abs(b_wide) < float("inf"), b_lost, 0).to(tl.int16)


@triton.jit
def store_signs(
    o_row, m_row, m_entropy, m_moments, m_empty, b_top, b_top_low, b_l, b_s, b_entropy, b_peak, b_arg, b_count, b_mean,
    b_variance, p_argmax, p_lse_low, p_visible, p_mean, p_variance, p_peak, p_lse, p_entropy, p_sum_p2, BITS: tl.constexpr,
):  # fmt: skip
    """Write the signs of the rows of m_row, their entropies of m_entropy, their means and variances of m_moments."""
    m_endless = b_top == float("inf")  # inf / inf: the weights are NaN, the largest logit and lse are not
    b_log = tl.log(b_l)
    b_lse = b_top + b_log
    b_part = b_lse - b_top
    b_low = (b_top - (b_lse - b_part)) + (b_log - b_part) + b_top_low  # two-sum: what rounding took from lse
    b_lse = tl.where(m_empty, float("-inf"), tl.where(m_endless, float("inf"), b_lse))
    tl.store(p_lse + o_row, b_lse, mask=m_row)
    tl.store(p_lse_low + o_row, tl.where(m_empty | m_endless, 0.0, b_low), mask=m_row)
    if PEAK & BITS:
        tl.store(p_peak + o_row, b_peak, mask=m_row)
    if ENTROPY & BITS:
        tl.store(p_entropy + o_row, b_entropy, mask=m_entropy)
    if P2 & BITS:
        tl.store(p_sum_p2 + o_row, tl.div_rn(b_s, b_l * b_l), mask=m_row)
    if VISIBLE & BITS:
        tl.store(p_visible + o_row, b_count, mask=m_row)
    if MEAN & BITS:
        tl.store(p_mean + o_row, b_mean, mask=m_moments)
    if VARIANCE & BITS:
        tl.store(p_variance + o_row, b_variance, mask=m_moments)
    if ARGMAX & BITS:
        tl.store(p_argmax + o_row, b_arg.to(tl.int64), mask=m_row)


@triton.jit
def vector_index(i_b, i_h, o_m, heads, rows, BY_TOKEN: tl.constexpr):
    """The index of a row's vector in a tensor that is stored by head, (B, H, L, E), or by token, (B, L, H, E)."""
    if BY_TOKEN:
        return (i_b * rows + o_m) * heads + i_h
    return (i_b * heads + i_h) * rows + o_m


@triton.jit
def store_output(o_row, m_row, b_out, b_over, p_output, p_low, EV: tl.constexpr, BEV: tl.constexpr, BITS: tl.constexpr):
    """`o_row` is the `vector_index` of each row."""
    o_v = tl.arange(0, BEV)
    m_out = m_row[:, None] & (o_v[None, :] < EV)
    o_out = o_row[:, None] * EV + o_v[None, :]
    b_out = tl.where(b_over[:, None] == 0.0, 0.0, tl.div_rn(b_out, b_over[:, None] + tl.zeros_like(b_out)))
    b_short = b_out.to(p_output.dtype.element_ty)
    tl.store(p_output + o_out, b_short, mask=m_out)
    if OUTPUT_LOW & BITS:
        tl.store(p_low + o_out, lost_bits(b_out, b_short), mask=m_out)
