"""Forward: one program for each tile of rows of one head. The fast pass first where there is one; the careful one where that is not enough."""

from __future__ import annotations

import triton
import triton.language as tl

from .frozen import frozen
from .online import online
from .tile import ADDED, ARGMAX, ENTROPY, LN2, MEAN, NUMBERS, OUTPUT_LOW, P2, PEAK, VARIANCE, VISIBLE


@triton.jit
def lost_bits(b_out, b_short):
    """What rounding took from the output, as `contract.rounded_off` defines it."""
    b_wide = b_short.to(tl.float32)
    b_lost = b_out.to(tl.int32, bitcast=True) - b_wide.to(tl.int32, bitcast=True)
    if b_short.dtype == tl.float16:
        b_units = (b_out - b_wide) * 1099511627776.0  # 2^40
        b_near = tl.where(b_units < 0, b_units - 0.5, b_units + 0.5).to(tl.int32)
        b_lost = tl.where(tl.abs(b_wide) < 6.103515625e-05, b_near, b_lost)
    b_lost = tl.minimum(tl.maximum(b_lost, -32768), 32767)
    return tl.where(tl.abs(b_wide) < float("inf"), b_lost, 0).to(tl.int16)


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    p_query, p_key, p_value, p_mask, p_gain, p_sums, k_tiles, v_tiles,
    p_output, p_low, p_argmax, p_lse_low, p_visible, p_mean, p_variance, p_peak, p_lse, p_entropy, p_p2,
    step_qb, step_qh, step_qm, step_kb, step_kh, step_kn, step_vb, step_vh, step_vn,
    step_mb, step_mh, step_mm, step_mn, step_gb, step_gh, step_gm,
    scale, softcap, dropout, seed, heads, groups, rows, keys, left, right,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASK: tl.constexpr, GAIN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
    VALUES: tl.constexpr, EXACT: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr, BITS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    i_m = tl.program_id(0)
    if RIGHT:
        i_m = tl.num_programs(0) - 1 - i_m  # the longest rows of a causal call first
    i_head = tl.program_id(1).to(tl.int64)
    i_b, i_h = i_head // heads, i_head % heads
    i_g = i_h // (heads // groups)
    i_row = i_m * BM
    o_m = i_row + tl.arange(0, BM)
    o_e = tl.arange(0, BE)
    m_m = o_m < rows

    p_q = p_query + i_b * step_qb + i_h * step_qh + o_m.to(tl.int64)[:, None] * step_qm + o_e[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & (o_e[None, :] < E), other=0.0)
    b_scale = tl.full([BM], 1.0, tl.float32) * scale
    if GAIN:
        b_scale *= tl.load(p_gain + i_b * step_gb + i_h * step_gh + o_m.to(tl.int64) * step_gm, mask=m_m, other=0.0)
    b_base = tl.full([BM], 1.0, tl.float32)
    if not (CAP or MASK == ADDED):
        # a logit is a positive number times the score: a negative scale is taken into the query
        b_q = tl.where(b_scale[:, None] < 0, -b_q, tl.where(b_scale[:, None] == 0, 0.0, b_q)).to(b_q.dtype)
        b_base = tl.where(b_scale == 0, 1.0, tl.abs(b_scale))
    p_key += i_b * step_kb + i_g * step_kh
    p_value += i_b * step_vb + i_g * step_vh
    p_mask += i_b * step_mb + i_h * step_mh
    if SUMS > 0:
        p_sums += (i_b * groups + i_g) * tl.cdiv(keys, SUMS) * BE

    b_arg = tl.full([BM], -1, tl.int32)
    if FAST:
        trusted, m_empty, b_top, b_top_low, b_l, b_a, b_s, b_rounded, b_out, b_peak, b_count, b_mean, b_variance = frozen(
            b_q, b_base, p_key, p_value, p_sums, k_tiles, v_tiles, i_b.to(tl.int32), i_g.to(tl.int32), step_kn, step_vn,
            o_m, i_row, rows, keys, right, E, EV, BE, BEV, BM, BN, RIGHT, VALUES, TMA, BITS, SUMS,
        )  # fmt: skip
        if not trusted:
            m_empty, b_top, b_top_low, b_l, b_a, b_s, b_rounded, b_out, b_peak, b_arg, b_count, b_mean, b_variance = online(
                b_q, b_scale, b_base, p_key, p_value, p_mask, step_kn, step_vn, step_mm, step_mn,
                o_m, i_row, i_head, rows, keys, left, right, softcap, dropout, seed,
                E, EV, BE, BEV, BM, BN, MASK, LEFT, RIGHT, CAP, DROP, VALUES, EXACT, BITS,
            )  # fmt: skip
    else:
        m_empty, b_top, b_top_low, b_l, b_a, b_s, b_rounded, b_out, b_peak, b_arg, b_count, b_mean, b_variance = online(
            b_q, b_scale, b_base, p_key, p_value, p_mask, step_kn, step_vn, step_mm, step_mn,
            o_m, i_row, i_head, rows, keys, left, right, softcap, dropout, seed,
            E, EV, BE, BEV, BM, BN, MASK, LEFT, RIGHT, CAP, DROP, VALUES, EXACT, BITS,
        )  # fmt: skip

    o_row = i_head * rows + o_m
    m_endless = b_top == float("inf")  # inf / inf: the weights are NaN, the largest logit and lse are not
    b_log = tl.log(b_l)
    b_lse = b_top + b_log
    b_part = b_lse - b_top
    b_low = (b_top - (b_lse - b_part)) + (b_log - b_part) + b_top_low  # two-sum: what rounding took from lse
    b_lse = tl.where(m_empty, float("-inf"), tl.where(m_endless, float("inf"), b_lse))
    tl.store(p_lse + o_row, b_lse, mask=m_m)
    tl.store(p_lse_low + o_row, tl.where(m_empty | m_endless, 0.0, b_low), mask=m_m)
    if PEAK & BITS:
        tl.store(p_peak + o_row, b_peak, mask=m_m)
    if ENTROPY & BITS:
        tl.store(p_entropy + o_row, b_log - b_a / b_l * LN2, mask=m_m)
    if P2 & BITS:
        tl.store(p_p2 + o_row, b_s / (b_l * b_l), mask=m_m)
    if VISIBLE & BITS:
        tl.store(p_visible + o_row, b_count.to(tl.int32), mask=m_m)
    if MEAN & BITS:
        tl.store(p_mean + o_row, b_mean, mask=m_m)
    if VARIANCE & BITS:
        tl.store(p_variance + o_row, b_variance, mask=m_m)
    if ARGMAX & BITS:
        tl.store(p_argmax + o_row, b_arg.to(tl.int64), mask=m_m)
    if VALUES:
        o_v = tl.arange(0, BEV)
        m_out = m_m[:, None] & (o_v[None, :] < EV)
        o_out = o_row[:, None] * EV + o_v[None, :]
        b_over = b_rounded
        if DROP:
            b_over = b_over * (1.0 - dropout)
        b_out = tl.where(b_over[:, None] == 0.0, 0.0, b_out / b_over[:, None])
        b_short = b_out.to(p_output.dtype.element_ty)
        tl.store(p_output + o_out, b_short, mask=m_out)
        if OUTPUT_LOW & BITS:
            tl.store(p_low + o_out, lost_bits(b_out, b_short), mask=m_out)
