"""The careful pass over the keys: a running maximum, and logits of every kind.

For each row, with the largest logit so far M and e = exp(z - M): l = Σ e, a = Σ e (z - M), s = Σ e², and the count, mean
and summed squares of z, joined tile by tile (Chan), so that no shift of the logits can cancel the variance. A tile that
raises M rescales the sums: with d = M - M' and c = exp(d), a ← c (a + d l), l ← c l, s ← c² s.

Without softcap and bias a logit is a positive number per row, `unit`, times the score, and all sums are taken of scores;
with them the unit is 1. Logarithms are to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import (
    ADDED,
    ALL,
    ARGMAX,
    ENTROPY,
    LOG2E,
    MEAN,
    P2,
    VARIANCE,
    VISIBLE,
    dot_added,
    kept,
    load_rows,
    masked,
    tanh,
)


@triton.jit
def _two_sums_a_count_and_a_maximum(a, b, c, d, other_a, other_b, other_c, other_d):
    return a + other_a, b + other_b, c + other_c, tl.maximum(d, other_d)


@triton.jit
def _two_sums(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _five_sums(a, b, c, d, e, other_a, other_b, other_c, other_d, other_e):
    return a + other_a, b + other_b, c + other_c, d + other_d, e + other_e


@triton.jit
def add_logits(
    b_count, b_met, b_mean, b_squares, b_z, m_seen, TOGETHER: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Add a tile to count, mean and summed squares; return its squares about its own mean, to be added later, and its maximum."""
    b_square = tl.zeros_like(b_z)
    if (MEAN | VARIANCE) & BITS:
        m_adds = m_seen & (b_z != float("-inf"))  # a logit of -inf is counted, and adds nothing
        b_adds, b_added, b_seen = m_adds.to(tl.float32), tl.where(m_adds, b_z, 0.0), m_seen.to(tl.int32)
        if TOGETHER:
            b_tile_met, b_tile_sum, b_tile_count, b_top = tl.reduce(
                (b_adds, b_added, b_seen, b_z), 1, _two_sums_a_count_and_a_maximum
            )
        else:
            b_tile_met, b_tile_sum, b_tile_count = tl.sum(b_adds, 1), tl.sum(b_added, 1), tl.sum(b_seen, 1)
            b_top = tl.max(b_z, 1)
        b_count += b_tile_count
        b_tile_mean = tl.div_rn(b_tile_sum, tl.maximum(b_tile_met, 1.0))
        b_d = tl.where(m_adds, b_z - b_tile_mean[:, None], 0.0)
        b_square = b_d * b_d
        b_total = b_met + b_tile_met
        b_share = b_tile_met / tl.maximum(b_total, 1.0)
        b_step = b_tile_mean - b_mean
        b_squares += b_step * b_step * b_met * b_share
        b_mean += b_step * b_share
        b_met = b_total
    else:
        b_top = tl.max(b_z, 1)
        if VISIBLE & BITS:
            b_count += tl.sum(m_seen.to(tl.int32), 1)
    return b_count, b_met, b_mean, b_squares, b_square, b_top


@triton.jit
def add_weights(
    b_l, b_a, b_s, b_squares, b_rounded, b_e, b_t, b_square, b_c, b_d_ref, p_value,
    TOGETHER: tl.constexpr, VALUES: tl.constexpr, EXACT: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Add a tile's weights, and the squares of its logits, to the running sums."""
    if TOGETHER:
        b_p = b_e.to(p_value.dtype.element_ty)
        b_tile_l, b_tile_a, b_tile_s, b_tile_squares, b_tile_rounded = tl.reduce(
            (b_e, b_e * b_t, b_e * b_e, b_square, b_p.to(tl.float32)), 1, _five_sums
        )
        b_a = b_c * (b_a + b_d_ref * b_l) + b_tile_a
        b_s = b_c * b_c * b_s + b_tile_s
        b_squares += b_tile_squares
        b_l = b_c * b_l + b_tile_l
        b_rounded = b_c * b_rounded + b_tile_rounded
    else:
        if ENTROPY & BITS:
            b_a = b_c * (b_a + b_d_ref * b_l) + tl.sum(b_e * b_t, 1)
        if P2 & BITS:
            b_s = b_c * b_c * b_s + tl.sum(b_e * b_e, 1)
        if (MEAN | VARIANCE) & BITS:
            b_squares += tl.sum(b_square, 1)
        if VALUES and not EXACT:
            b_p = b_e.to(p_value.dtype.element_ty)
            b_tile_l, b_tile_rounded = tl.reduce((b_e, b_p.to(tl.float32)), 1, _two_sums)
            b_l, b_rounded = b_c * b_l + b_tile_l, b_c * b_rounded + b_tile_rounded
        else:
            b_l = b_c * b_l + tl.sum(b_e, 1)
    return b_l, b_a, b_s, b_squares, b_rounded


@triton.jit
def online_tile(
    b_ref, b_l, b_a, b_s, b_rounded, b_out, b_best, b_arg, b_count, b_met, b_mean, b_squares,
    b_q, b_scale, b_unit, i_n, p_key, p_value, p_mask, step_kn, step_vn, step_mm, step_mn,
    o_m, i_head, rows, keys, left, right, softcap, dropout, seed,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr, BN: tl.constexpr,
    MASK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
    VALUES: tl.constexpr, EXACT: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Add the tile of keys that begins at i_n to everything that runs."""
    o_n = i_n + tl.arange(0, BN)
    b_k = load_rows(p_key, i_n, step_kn, keys, E, BE, BN, True)
    b_z = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [BM, BN]
    if CAP or MASK == ADDED:
        b_z = b_z * b_scale[:, None]
    if CAP:
        b_z = softcap * tanh(b_z / softcap)
    b_z, m_seen = masked(
        b_z, o_m[:, None], o_n[None, :], p_mask, step_mm, step_mn, rows, keys, left, right, MASK, LEFT, RIGHT, True
    )  # fmt: skip

    # To sum a row, threads exchange numbers. If all signs are wanted, two joint reductions do it instead of one per sign.
    TOGETHER: tl.constexpr = (ALL & BITS) == ALL and VALUES and not EXACT
    b_count, b_met, b_mean, b_squares, b_square, b_top = add_logits(
        b_count, b_met, b_mean, b_squares, b_z, m_seen, TOGETHER, BITS
    )
    if ARGMAX & BITS:
        b_top, b_place = tl.max(b_z, 1, return_indices=True)
        better = (b_top > b_best) | ((b_top == b_best) & (b_place + i_n < b_arg) & (b_top != float("-inf")))
        b_arg = tl.where(better, b_place + i_n, b_arg)
        b_best = tl.where(better, b_top, b_best)

    b_new = tl.maximum(b_ref, b_top)
    b_finite = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_t = (b_z - b_finite[:, None]) * b_unit[:, None]
    b_e = tl.math.exp2(b_t)
    b_d_ref = tl.where(b_ref == float("-inf"), 0.0, b_ref - b_finite) * b_unit
    b_c = tl.math.exp2(b_d_ref)
    if ENTROPY & BITS:
        b_t = tl.where(b_t < -1e4, 0.0, b_t)  # their weight is 0, and 0 · -inf is NaN
    b_l, b_a, b_s, b_squares, b_rounded = add_weights(
        b_l, b_a, b_s, b_squares, b_rounded, b_e, b_t, b_square, b_c, b_d_ref, p_value, TOGETHER, VALUES, EXACT, BITS
    )  # fmt: skip
    if VALUES:
        b_v = load_rows(p_value, i_n, step_vn, keys, EV, BEV, BN, True)
        # these weights are rounded, and must add up to one: the output is divided by their sum
        b_p = b_e.to(b_v.dtype)
        b_out = b_out * b_c[:, None]
        if DROP:
            m_kept = kept(seed, i_head, o_m[:, None], o_n[None, :], dropout)
        if EXACT:  # what rounding took from the weights is multiplied too
            b_rest = (b_e - b_p.to(tl.float32)).to(b_v.dtype)
            b_rounded = b_c * b_rounded + tl.sum(b_p.to(tl.float32) + b_rest.to(tl.float32), 1)
            if DROP:
                b_rest = tl.where(m_kept, b_rest, 0.0)
            b_out = dot_added(b_rest, b_v, b_out)
        if DROP:
            b_p = tl.where(m_kept, b_p, 0.0)
        b_out = dot_added(b_p, b_v, b_out)
    return b_new, b_l, b_a, b_s, b_rounded, b_out, b_best, b_arg, b_count, b_met, b_mean, b_squares


@triton.jit
def online(
    b_q, b_scale, b_base, p_key, p_value, p_mask, step_kn, step_vn, step_mm, step_mn,
    o_m, first, stop, i_head, rows, keys, left, right, softcap, dropout, seed,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
    VALUES: tl.constexpr, EXACT: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """A row's sums over the keys from first to stop, in logits; `moments` computes mean and variance from the last four."""
    b_ref = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_a, b_s, b_rounded, b_met, b_mean, b_squares = b_l, b_l, b_l, b_l, b_l, b_l
    b_count = tl.zeros([BM], tl.int32)  # an integer, because float32 cannot count beyond 2^24
    b_best = b_ref
    b_arg = tl.full([BM], -1, tl.int32)
    b_out = tl.zeros([BM, BEV if VALUES else 16], tl.float32)
    b_unit = b_base * LOG2E
    for i_n in tl.range(first, stop, BN):
        b_ref, b_l, b_a, b_s, b_rounded, b_out, b_best, b_arg, b_count, b_met, b_mean, b_squares = online_tile(
            b_ref, b_l, b_a, b_s, b_rounded, b_out, b_best, b_arg, b_count, b_met, b_mean, b_squares,
            b_q, b_scale, b_unit, i_n, p_key, p_value, p_mask, step_kn, step_vn, step_mm, step_mn,
            o_m, i_head, rows, keys, left, right, softcap, dropout, seed,
            E, EV, BE, BEV, BN, MASK, LEFT, RIGHT, CAP, DROP, VALUES, EXACT, BITS,
        )  # fmt: skip
    m_empty = b_ref == float("-inf")
    b_finite = tl.where(m_empty, 0.0, b_ref)
    b_l = tl.where(m_empty, 1.0, b_l)
    b_rounded = tl.where(m_empty, 1.0, b_rounded)
    b_top = b_finite * b_base
    b_top_low = tl.fma(b_finite, b_base, -b_top)
    # NaN if a logit was NaN
    b_peak = tl.where(m_empty, b_ref, tl.where((b_ref == float("inf")) | (b_l == b_l), b_top, b_l))
    b_squares *= b_base * b_base
    return (
        m_empty,
        b_top,
        b_top_low,
        b_l,
        b_a,
        b_s,
        b_rounded,
        b_out,
        b_peak,
        b_arg,
        b_count,
        b_met,
        b_mean * b_base,
        b_squares,
    )
