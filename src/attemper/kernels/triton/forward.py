"""Forward: online softmax over tiles of keys, and every vital sign from the same logits.

For each row, with a running reference M and e = exp(z - M): l = Σ e, a = Σ e (z - M), s = Σ e², and the count, mean and summed squares of
z, joined tile by tile (Chan), so that no shift of the logits can cancel the variance. A tile that raises M rescales the sums: with
d = M - M' and c = exp(d), a ← c (a + d l), l ← c l, s ← c² s.

Without softcap and bias a logit is a positive number per row, `unit`, times the score (a negative scale is taken into the query), and all
sums are taken of scores; with them the unit is 1. Logarithms are to base 2 until the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import ADDED, LN2, LOG2E, NO_MASK, kept, key_tiles, masked, tanh

VISIBLE: tl.constexpr = tl.constexpr(1)
MEAN: tl.constexpr = tl.constexpr(2)
VARIANCE: tl.constexpr = tl.constexpr(4)
PEAK: tl.constexpr = tl.constexpr(8)
LSE: tl.constexpr = tl.constexpr(16)
ENTROPY: tl.constexpr = tl.constexpr(32)
P2: tl.constexpr = tl.constexpr(64)
ARGMAX: tl.constexpr = tl.constexpr(128)
OUTPUT_LOW: tl.constexpr = tl.constexpr(256)


@triton.jit
def add_tile(
    b_ref, b_l, b_a, b_s, b_rounded, b_out, b_best, b_arg, b_count, b_met, b_mean, b_squares,
    b_q, b_scale, b_unit, i_n, p_key, p_value, p_mask, step_kn, step_vn, step_mm, step_mn,
    o_m, i_head, rows, keys, left, right, softcap, dropout, seed,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr, BN: tl.constexpr,
    MASK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
    VALUES: tl.constexpr, EXACT: tl.constexpr, BITS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Take in the keys from i_n on."""
    o_n = i_n + tl.arange(0, BN)
    o_e = tl.arange(0, BE)
    i_start = tl.full((), 0, tl.int64) + i_n
    p_k = p_key + i_start * step_kn + tl.arange(0, BN)[None, :] * step_kn + o_e[:, None]
    if EDGE:
        b_k = tl.load(p_k, mask=(o_n[None, :] < keys) & (o_e[:, None] < E), other=0.0)
    elif E != BE:
        b_k = tl.load(p_k, mask=o_e[:, None] < E, other=0.0)
    else:
        b_k = tl.load(p_k)
    b_z = tl.dot(b_q, b_k, input_precision="ieee")  # [BM, BN]
    if CAP or MASK == ADDED:
        b_z = b_z * b_scale[:, None]
    if CAP:
        b_z = softcap * tanh(b_z / softcap)
    OPEN: tl.constexpr = not EDGE and MASK == NO_MASK
    if not OPEN:
        b_z, m_seen = masked(
            b_z, o_m[:, None], o_n[None, :], p_mask, step_mm, step_mn, rows, keys, left, right, MASK, LEFT, RIGHT, EDGE
        )  # fmt: skip

    if (MEAN | VARIANCE | VISIBLE) & BITS:
        if OPEN:
            b_tile = tl.full(b_l.shape, BN, tl.float32)
            b_tile_met = b_tile
        else:
            b_tile = tl.sum(m_seen.to(tl.float32), 1)
    if (MEAN | VARIANCE) & BITS:
        if OPEN:
            b_tile_mean = tl.sum(b_z, 1) / BN
            b_d = b_z - b_tile_mean[:, None]
        else:
            m_adds = m_seen & (b_z != float("-inf"))  # a logit of -inf is counted, and adds nothing
            b_tile_met = tl.sum(m_adds.to(tl.float32), 1)
            b_tile_mean = tl.sum(tl.where(m_adds, b_z, 0.0), 1) / tl.maximum(b_tile_met, 1.0)
            b_d = tl.where(m_adds, b_z - b_tile_mean[:, None], 0.0)
        b_total = b_met + b_tile_met
        b_share = b_tile_met / tl.maximum(b_total, 1.0)
        b_step = b_tile_mean - b_mean
        b_squares += tl.sum(b_d * b_d, 1) + b_step * b_step * b_met * b_share
        b_mean += b_step * b_share
        b_met = b_total
    if (MEAN | VARIANCE | VISIBLE) & BITS:
        b_count += b_tile

    if ARGMAX & BITS:
        b_top, b_place = tl.max(b_z, 1, return_indices=True)
        better = (b_top > b_best) | ((b_top == b_best) & (b_place + i_n < b_arg) & (b_top != float("-inf")))
        b_arg = tl.where(better, b_place + i_n, b_arg)
        b_best = tl.where(better, b_top, b_best)
    else:
        b_top = tl.max(b_z, 1)

    b_new = tl.maximum(b_ref, b_top)
    b_finite = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_t = (b_z - b_finite[:, None]) * b_unit[:, None]
    b_e = tl.math.exp2(b_t)
    b_d_ref = tl.where(b_ref == float("-inf"), 0.0, b_ref - b_finite) * b_unit
    b_c = tl.math.exp2(b_d_ref)
    if ENTROPY & BITS:
        if not OPEN:
            b_t = tl.where(b_t < -1e4, 0.0, b_t)  # their weight is 0, and 0 · -inf is NaN
        b_a = b_c * (b_a + b_d_ref * b_l) + tl.sum(b_e * b_t, 1)
    if P2 & BITS:
        b_s = b_c * b_c * b_s + tl.sum(b_e * b_e, 1)
    b_l = b_c * b_l + tl.sum(b_e, 1)
    if VALUES:
        o_v = tl.arange(0, BEV)
        p_v = p_value + i_start * step_vn + tl.arange(0, BN)[:, None] * step_vn + o_v[None, :]
        if EDGE:
            b_v = tl.load(p_v, mask=(o_n[:, None] < keys) & (o_v[None, :] < EV), other=0.0)
        elif EV != BEV:
            b_v = tl.load(p_v, mask=o_v[None, :] < EV, other=0.0)
        else:
            b_v = tl.load(p_v)
        b_p = b_e.to(b_v.dtype)
        b_out = b_out * b_c[:, None]
        if DROP:
            m_kept = kept(seed, i_head, o_m[:, None], o_n[None, :], dropout)
        if EXACT:  # what rounding took from the weights is multiplied too
            b_rest = (b_e - b_p.to(tl.float32)).to(b_v.dtype)
            b_rounded = b_c * b_rounded + tl.sum(b_p.to(tl.float32) + b_rest.to(tl.float32), 1)
            if DROP:
                b_rest = tl.where(m_kept, b_rest, 0.0)
            b_out = tl.dot(b_rest, b_v, b_out, input_precision="ieee")
        else:
            # what is multiplied by the values is rounded, and must add up to one: the output is divided by the sum of these
            b_rounded = b_c * b_rounded + tl.sum(b_p.to(tl.float32), 1)
        if DROP:
            b_p = tl.where(m_kept, b_p, 0.0)
        b_out = tl.dot(b_p, b_v, b_out, input_precision="ieee")
    return b_new, b_l, b_a, b_s, b_rounded, b_out, b_best, b_arg, b_count, b_met, b_mean, b_squares


@triton.jit
def forward_kernel(
    p_query, p_key, p_value, p_mask, p_gain,
    p_output, p_low, p_argmax, p_lse_low, p_visible, p_mean, p_variance, p_peak, p_lse, p_entropy, p_p2,
    step_qb, step_qh, step_qm, step_kb, step_kh, step_kn, step_vb, step_vh, step_vn,
    step_mb, step_mh, step_mm, step_mn, step_gb, step_gh, step_gm,
    scale, softcap, dropout, seed, heads, groups, rows, keys, left, right,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASK: tl.constexpr, GAIN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
    VALUES: tl.constexpr, EXACT: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one head."""
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
    if CAP or MASK == ADDED:
        b_base = tl.full([BM], 1.0, tl.float32)
    else:
        b_q = tl.where(b_scale[:, None] < 0, -b_q, tl.where(b_scale[:, None] == 0, 0.0, b_q)).to(b_q.dtype)
        b_base = tl.where(b_scale == 0, 1.0, tl.abs(b_scale))
    b_unit = b_base * LOG2E
    p_key += i_b * step_kb + i_g * step_kh
    p_value += i_b * step_vb + i_g * step_vh
    p_mask += i_b * step_mb + i_h * step_mh

    b_ref = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_a, b_s, b_rounded, b_count, b_met, b_mean, b_squares = b_l, b_l, b_l, b_l, b_l, b_l, b_l
    b_best = b_ref
    b_arg = tl.full([BM], -1, tl.int32)
    b_out = tl.zeros([BM, BEV if VALUES else 16], tl.float32)

    first, whole_first, whole_stop, stop = key_tiles(i_row, rows, keys, left, right, LEFT, RIGHT, BM, BN)
    for i_n in tl.range(whole_first, whole_stop, BN):
        b_ref, b_l, b_a, b_s, b_rounded, b_out, b_best, b_arg, b_count, b_met, b_mean, b_squares = add_tile(
            b_ref, b_l, b_a, b_s, b_rounded, b_out, b_best, b_arg, b_count, b_met, b_mean, b_squares,
            b_q, b_scale, b_unit, i_n, p_key, p_value, p_mask, step_kn, step_vn, step_mm, step_mn,
            o_m, i_head, rows, keys, left, right, softcap, dropout, seed,
            E, EV, BE, BEV, BN, MASK, LEFT, RIGHT, CAP, DROP, VALUES, EXACT, BITS, False,
        )  # fmt: skip
    before = tl.maximum(whole_first - first, 0) // BN
    after = tl.cdiv(tl.maximum(stop - whole_stop, 0), BN)
    for i_t in tl.range(0, before + after):
        i_n = tl.where(i_t < before, first + i_t * BN, whole_stop + (i_t - before) * BN)
        b_ref, b_l, b_a, b_s, b_rounded, b_out, b_best, b_arg, b_count, b_met, b_mean, b_squares = add_tile(
            b_ref, b_l, b_a, b_s, b_rounded, b_out, b_best, b_arg, b_count, b_met, b_mean, b_squares,
            b_q, b_scale, b_unit, i_n, p_key, p_value, p_mask, step_kn, step_vn, step_mm, step_mn,
            o_m, i_head, rows, keys, left, right, softcap, dropout, seed,
            E, EV, BE, BEV, BN, MASK, LEFT, RIGHT, CAP, DROP, VALUES, EXACT, BITS, True,
        )  # fmt: skip

    # finish; a row without keys: l 1, so that its output and signs are 0
    o_row = i_head * rows + o_m
    m_empty = b_ref == float("-inf")
    m_endless = b_ref == float("inf")  # inf / inf: the weights are NaN, the largest logit and lse are not
    b_finite = tl.where(m_empty, 0.0, b_ref)
    b_l = tl.where(m_empty, 1.0, b_l)
    b_log = tl.log(b_l)
    b_top = b_finite * b_base
    b_lse = b_top + b_log
    b_part = b_lse - b_top
    b_low = (b_top - (b_lse - b_part)) + (b_log - b_part)  # two-sum: what rounding took from lse
    b_lse = tl.where(m_empty, float("-inf"), tl.where(m_endless, float("inf"), b_lse))
    tl.store(p_lse + o_row, b_lse, mask=m_m)
    tl.store(p_lse_low + o_row, tl.where(m_empty | m_endless, 0.0, b_low), mask=m_m)
    if PEAK & BITS:
        b_peak = tl.where(m_empty, b_ref, tl.where(m_endless | (b_l == b_l), b_ref * b_base, b_l))  # NaN where a logit was
        tl.store(p_peak + o_row, b_peak, mask=m_m)
    if ENTROPY & BITS:
        tl.store(p_entropy + o_row, b_log - b_a / b_l * LN2, mask=m_m)
    if P2 & BITS:
        tl.store(p_p2 + o_row, b_s / (b_l * b_l), mask=m_m)
    if VISIBLE & BITS:
        tl.store(p_visible + o_row, b_count.to(tl.int32), mask=m_m)
    if (MEAN | VARIANCE) & BITS:
        b_some = tl.maximum(b_count, 1.0)
        b_mean *= b_base
        b_squares *= b_base * b_base
        b_all = b_mean * (b_met / b_some)
        if MEAN & BITS:
            tl.store(p_mean + o_row, b_all, mask=m_m)
        if VARIANCE & BITS:
            b_off = tl.where(b_met == b_count, 0.0, b_met * (b_mean - b_all) * (b_mean - b_all))
            tl.store(p_variance + o_row, (b_squares + b_off) / b_some, mask=m_m)
    if ARGMAX & BITS:
        tl.store(p_argmax + o_row, b_arg.to(tl.int64), mask=m_m)
    if VALUES:
        o_v = tl.arange(0, BEV)
        m_out = m_m[:, None] & (o_v[None, :] < EV)
        o_out = o_row[:, None] * EV + o_v[None, :]
        b_over = tl.where(m_empty, 1.0, b_rounded)
        if DROP:
            b_over = b_over * (1.0 - dropout)
        b_out = tl.where(b_over[:, None] == 0.0, 0.0, b_out / b_over[:, None])
        b_short = b_out.to(p_output.dtype.element_ty)
        tl.store(p_output + o_out, b_short, mask=m_out)
        if OUTPUT_LOW & BITS:
            b_wide = b_short.to(tl.float32)
            b_lost = b_out.to(tl.int32, bitcast=True) - b_wide.to(tl.int32, bitcast=True)
            if p_output.dtype.element_ty == tl.float16:
                b_units = (b_out - b_wide) * 1099511627776.0  # 2^40
                b_near = tl.where(b_units < 0, b_units - 0.5, b_units + 0.5).to(tl.int32)
                b_lost = tl.where(tl.abs(b_wide) < 6.103515625e-05, b_near, b_lost)
            b_lost = tl.minimum(tl.maximum(b_lost, -32768), 32767)
            b_lost = tl.where(tl.abs(b_wide) < float("inf"), b_lost, 0)
            tl.store(p_low + o_out, b_lost.to(tl.int16), mask=m_out)
