"""Forward: one program for each tile of rows of one head; the fast pass, then the careful one where that is not enough."""

from __future__ import annotations

import triton
import triton.language as tl

from .frozen import frozen
from .online import online
from .store import entropy_of, moments, store_output, store_signs, vector_index
from .tile import ADDED, NUMBERS, key_tiles, load_rows, program, with_positive_scale


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    p_query, p_key, p_value, p_mask, p_gain, k_tiles, v_tiles,
    p_output, p_low, p_argmax, p_lse_low, p_visible, p_mean, p_variance, p_peak, p_lse, p_entropy, p_sum_p2,
    step_qb, step_qh, step_qm, step_kb, step_kh, step_kn, step_vb, step_vh, step_vn,
    step_mb, step_mh, step_mm, step_mn, step_gb, step_gh, step_gm,
    scale, softcap, dropout, seed, heads, groups, rows, keys, left, right,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASK: tl.constexpr, GAIN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
    VALUES: tl.constexpr, EXACT: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr, AHEAD: tl.constexpr,
    BITS: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    i_m, i_head, _ = program()
    if RIGHT:
        i_m = tl.cdiv(rows, BM) - 1 - i_m  # the longest rows of a causal call first
    i_b, i_h = i_head // heads, i_head % heads
    i_g = i_h // (heads // groups)
    i_row = i_m * BM
    o_m = i_row + tl.arange(0, BM)
    m_m = o_m < rows

    b_q = load_rows(p_query + i_b * step_qb + i_h * step_qh, i_row, step_qm, rows, E, BE, BM, True)
    b_scale = tl.full([BM], 1.0, tl.float32) * scale
    if GAIN:
        b_scale *= tl.load(p_gain + i_b * step_gb + i_h * step_gh + o_m.to(tl.int64) * step_gm, mask=m_m, other=0.0)
    b_base = tl.full([BM], 1.0, tl.float32)
    if FAST and not GAIN and (VALUES or BE <= 64):
        b_base = b_scale  # it is positive, see `is_fast`: products read the query from shared memory, where it lies
    elif not (CAP or MASK == ADDED):
        b_q, b_base = with_positive_scale(b_q, b_scale)
    p_key += i_b * step_kb + i_g * step_kh
    p_value += i_b * step_vb + i_g * step_vh
    p_mask += i_b * step_mb + i_h * step_mh

    o_row = i_head * rows + o_m
    o_out = vector_index(i_b, i_h, o_m, heads, rows, BY_TOKEN)
    weights_ok, entropy_ok, moments_ok = False, False, False
    if FAST:
        (
            weights_ok, entropy_ok, moments_ok, m_empty, b_top, b_top_low, b_l, b_s, b_entropy, b_rounded, b_out, b_peak, b_count,
            b_mean, b_variance,
        ) = frozen(
            b_q, b_base, p_key, p_value, k_tiles, v_tiles, i_b.to(tl.int32), i_g.to(tl.int32), step_kn, step_vn,
            o_m, i_row, rows, keys, right, E, EV, BE, BEV, BM, BN, RIGHT, VALUES, TMA, AHEAD, BITS,
        )  # fmt: skip
        store_signs(
            o_row, m_m, m_m, m_m, m_empty, b_top, b_top_low, b_l, b_s, b_entropy, b_peak, o_m, b_count, b_mean, b_variance,
            p_argmax, p_lse_low, p_visible, p_mean, p_variance, p_peak, p_lse, p_entropy, p_sum_p2, BITS,
        )  # fmt: skip
        if VALUES:
            store_output(o_out, m_m, b_out, b_rounded, p_output, p_low, EV, BEV, BITS)
    # What holds is not written again: its bits do not depend on which other signs were asked for. What does not is
    # overwritten, and nothing of the fast pass stays in registers for that.
    if not (weights_ok & entropy_ok & moments_ok):
        first, _whole_first, _whole_stop, stop = key_tiles(i_row, rows, keys, left, right, LEFT, RIGHT, BM, BN)
        c_empty, c_top, c_top_low, c_l, c_a, c_s, c_rounded, c_out, c_peak, c_arg, c_count, c_met, c_mean, c_squares = online(
            b_q, b_scale, b_base, p_key, p_value, p_mask, step_kn, step_vn, step_mm, step_mn,
            o_m, first, stop, i_head, rows, keys, left, right, softcap, dropout, seed,
            E, EV, BE, BEV, BM, BN, MASK, LEFT, RIGHT, CAP, DROP, VALUES, EXACT, BITS,
        )  # fmt: skip
        c_mean, c_variance = moments(c_count, c_met, c_mean, c_squares)
        m_weights = m_m & (weights_ok == 0)
        store_signs(
            o_row, m_weights, m_m & ((weights_ok & entropy_ok) == 0), m_m & (moments_ok == 0),
            c_empty, c_top, c_top_low, c_l, c_s, entropy_of(c_l, c_a), c_peak, c_arg, c_count, c_mean, c_variance,
            p_argmax, p_lse_low, p_visible, p_mean, p_variance, p_peak, p_lse, p_entropy, p_sum_p2, BITS,
        )  # fmt: skip
        if VALUES:
            c_over = c_rounded * (1.0 - dropout) if DROP else c_rounded
            store_output(o_out, m_weights, c_out, c_over, p_output, p_low, EV, BEV, BITS)
