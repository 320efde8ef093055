"""Backward: each tile's weights are recomputed from lse, so nothing of size Lq × Lk is ever kept.

One kernel goes over the keys of a tile of rows (dq, d(gain), d(mask)), one over the rows of a tile of keys (dk, dv). With
p = exp(z - lse) and what arrives at output and signs,

    dz = p [dP - δ + g_lse - g_H (ln p + H) + 2 g_sum_p2 (p - sum_p2)] + [g_mean + 2 g_var (z - mean)] / visible
         + g_peak at the arg-max

The terms that a row shares are summed up before, as `constant`; see row_terms.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .row_terms import (
    CONSTANT,
    ENTROPY,
    G_ENTROPY,
    G_MOMENTS,
    G_OUTPUT,
    G_P2,
    G_PEAK,
    LEVEL,
    LSE,
    P2,
    PEAK,
    REST,
    SLOPE,
    TOTAL,
    WIDTH,
)
from .store import vector_index
from .tile import (
    LN2,
    LOG2E,
    NO_MASK,
    NUMBERS,
    dot_rounded,
    kept,
    key_tiles,
    load_rows,
    load_tile,
    masked,
    program,
    row_tiles,
    tanh,
)

WEIGHT_LIFT: tl.constexpr = tl.constexpr(1024.0)  # times a weight of float16: small ones keep their digits


@triton.jit
def load_row(p_rows, place: tl.constexpr, n_rows, o_local, m_m, SIDE: tl.constexpr, EDGE: tl.constexpr):
    """One number for each row, along the side that rows have in the tile; `p_rows` points to its first row."""
    if EDGE:
        b = tl.load(p_rows + place * n_rows + o_local, mask=m_m, other=float("inf") if place == 0 else 0.0)
    else:
        b = tl.load(p_rows + place * n_rows + o_local)
    return b[:, None] if SIDE == 0 else b[None, :]


@triton.jit
def weights_tile(
    b_s, b_scale, o_i, o_j, p_rows, n_rows, o_local, m_m, p_mask, step_mm, step_mn, rows, keys, left, right, softcap,
    MASK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, LEAN: tl.constexpr,
    APPENDED: tl.constexpr, EDGE: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Weights without their last correction (`REST`), ln of them, logits, which of these a row sees, and the softcap's slope."""
    b_cap = 1.0
    if not APPENDED:
        b_lse = load_row(p_rows, LSE, n_rows, o_local, m_m, SIDE, EDGE)
    if LEAN:
        b_t = b_s * (b_scale * LOG2E)
        if not APPENDED:
            b_t -= b_lse * LOG2E  # in one instruction with the product; half precision needs no better
        m_seen = o_i + o_j >= 0
        if EDGE or MASK != NO_MASK:
            b_t, m_seen = masked(
                b_t, o_i, o_j, p_mask, step_mm, step_mn, rows, keys, left, right, MASK, LEFT, RIGHT, EDGE
            )
        b_p = tl.math.exp2(b_t)
        b_t = b_t * LN2
        b_z = b_s * b_scale
    else:
        b_z = b_s * b_scale
        if CAP:
            b_x = b_z / softcap
            b_z = softcap * tanh(b_x)
            b_u = tl.exp(-2.0 * tl.abs(b_x))
            b_cap = 4.0 * b_u / ((1.0 + b_u) * (1.0 + b_u))
        b_z, m_seen = masked(b_z, o_i, o_j, p_mask, step_mm, step_mn, rows, keys, left, right, MASK, LEFT, RIGHT, True)
        b_t = b_z - b_lse
        b_p = tl.math.exp2(b_t * LOG2E)
    return b_p, b_t, b_z, m_seen, b_cap


@triton.jit
def dz_tile(
    b_s, b_dp, b_scale, o_i, o_j, p_rows, p_argmax, n_rows, o_local, m_m, p_mask, step_mm, step_mn,
    i_head, rows, keys, left, right, softcap, dropout, seed,
    MASK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
    ARRIVED: tl.constexpr, LEAN: tl.constexpr, APPENDED: tl.constexpr, EDGE: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """The weights that multiplied the values, the gradient of the logits, and that of the scores.
    `b_s` is q·k, `b_dp` is g·v; APPENDED, q·k - lse / scale and g·v + constant."""
    tl.static_assert(LEAN or not APPENDED)
    b_p, b_t, b_z, m_seen, b_cap = weights_tile(
        b_s, b_scale, o_i, o_j, p_rows, n_rows, o_local, m_m, p_mask, step_mm, step_mn, rows, keys, left, right, softcap,
        MASK, LEFT, RIGHT, CAP, LEAN, APPENDED, EDGE, SIDE,
    )  # fmt: skip
    OPEN: tl.constexpr = LEAN and not EDGE and MASK == NO_MASK
    b_w = b_p
    if not LEAN:
        b_rest = load_row(p_rows, REST, n_rows, o_local, m_m, SIDE, EDGE)
        b_w = b_p * b_rest
    if DROP:
        m_kept = kept(seed, i_head, o_i, o_j, dropout)
        over = 1.0 / (1.0 - dropout)
        b_dp = tl.where(m_kept, b_dp * over, 0.0)
        b_w = tl.where(m_kept, b_w * over, 0.0)
    if APPENDED:
        b_dz = b_dp  # the constant is in it
    else:
        b_dz = load_row(p_rows, CONSTANT, n_rows, o_local, m_m, SIDE, EDGE) + tl.zeros_like(b_p)
        if G_OUTPUT & ARRIVED:
            b_dz += b_dp if LEAN else b_dp * b_rest
    if G_ENTROPY & ARRIVED:
        if not OPEN:
            b_t = tl.where(b_t < -1e4, 0.0, b_t)  # their weight is 0, and 0 · -inf is NaN
        b_dz -= load_row(p_rows, ENTROPY, n_rows, o_local, m_m, SIDE, EDGE) * b_t
    if G_P2 & ARRIVED:
        b_dz += load_row(p_rows, P2, n_rows, o_local, m_m, SIDE, EDGE) * b_p
    b_dz *= b_p
    if G_MOMENTS & ARRIVED:
        b_moments = load_row(p_rows, LEVEL, n_rows, o_local, m_m, SIDE, EDGE)
        b_slope = load_row(p_rows, SLOPE, n_rows, o_local, m_m, SIDE, EDGE)
        # a logit of -inf, or of a key that a row does not see, adds nothing
        m_adds = m_seen & (tl.abs(b_z) < float("inf"))
        b_dz += tl.where(m_adds, b_moments + b_slope * tl.where(m_adds, b_z, 0.0), 0.0)
    if G_PEAK & ARRIVED:
        b_arg = tl.load(p_argmax + o_local, mask=m_m, other=-1).to(tl.int32)
        b_arg = b_arg[:, None] if SIDE == 0 else b_arg[None, :]
        b_dz += tl.where(o_j == b_arg, load_row(p_rows, PEAK, n_rows, o_local, m_m, SIDE, EDGE), 0.0)
    b_ds = b_dz * b_cap if CAP else b_dz
    return b_w, b_dz, b_ds


@triton.jit
def rows_step(
    b_raw, b_dgain, b_all, b_sum, lift, b_q, b_g, b_scale, i_b, i_g, i_n, o_m, m_m, o_local, n_rows,
    p_key, p_value, k_tiles, v_tiles, p_mask, p_dmask, p_rows, p_argmax,
    step_kn, step_vn, step_mm, step_mn, step_dm, step_dn, i_head, rows, keys, left, right, softcap, dropout, seed,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr, BN: tl.constexpr,
    MASK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
    ARRIVED: tl.constexpr, DQ: tl.constexpr, DGAIN: tl.constexpr, DMASK: tl.constexpr, SHARED: tl.constexpr,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, LEAN: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """What the keys from i_n on give to a tile of rows: Σ dz k, and Σ dz q·k."""
    o_n = i_n + tl.arange(0, BN)
    b_k = load_tile(p_key, k_tiles, i_b, i_g, i_n, step_kn, keys, E, BE, BN, TMA, EDGE)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    b_dp = b_s
    if G_OUTPUT & ARRIVED:
        b_v = load_tile(p_value, v_tiles, i_b, i_g, i_n, step_vn, keys, EV, BEV, BN, TMA, EDGE)
        b_dp = tl.dot(b_g, tl.trans(b_v), input_precision="ieee")
    _w, b_dz, b_ds = dz_tile(
        b_s, b_dp, b_scale[:, None], o_m[:, None], o_n[None, :], p_rows, p_argmax, n_rows, o_local, m_m, p_mask, step_mm, step_mn,
        i_head, rows, keys, left, right, softcap, dropout, seed, MASK, LEFT, RIGHT, CAP, DROP, ARRIVED, LEAN, False, EDGE, 0,
    )  # fmt: skip
    if DMASK:
        p_d = p_dmask + o_m.to(tl.int64)[:, None] * step_dm + o_n.to(tl.int64)[None, :] * step_dn
        m_d = m_m[:, None] & (o_n[None, :] < keys)
        if SHARED:
            tl.atomic_add(p_d, b_dz.to(p_dmask.dtype.element_ty), mask=m_d)
        else:
            tl.store(p_d, b_dz, mask=m_d)
    if DGAIN:
        b_dgain += tl.sum(b_ds * b_s, 1)
        b_all += tl.sum(b_ds, 1)
    if DQ:
        b_lifted = b_ds * lift
        if b_k.dtype == tl.float32:
            # b_sum is what rounding has taken from b_raw so far
            b_part = tl.dot(b_lifted, b_k, input_precision="ieee") - b_sum
            b_next = b_raw + b_part
            b_sum = (b_next - b_raw) - b_part
            b_raw = b_next
        else:
            b_raw = dot_rounded(b_lifted, b_k, b_raw, SPLIT)
            if EVEN:
                b_sum = dot_rounded(b_lifted, tl.full([BN, 16], 1.0, b_k.dtype), b_sum, SPLIT)
    return b_raw, b_dgain, b_all, b_sum


@triton.jit
def keys_step(
    b_dk, b_dv, lift, b_k, b_v, i_row, i_b, i_h, i_head, o_n, n_rows, p_query, p_g, q_tiles, g_tiles, p_gain, p_mask,
    p_rows, p_argmax, p_appended,
    step_qm, step_om, step_gm, step_mm, step_mn, scale, rows, keys, left, right, softcap, dropout, seed,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr,
    MASK: tl.constexpr, GAIN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
    ARRIVED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, LIFT: tl.constexpr, SPLIT: tl.constexpr,
    LEAN: tl.constexpr, APPENDED: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """What the rows from i_row on give to a tile of keys: Σ dz scale q, and Σ p g. Tiles are [BN, BM] here."""
    o_local = tl.arange(0, BM)
    o_m = i_row + o_local
    m_m = o_m < rows
    p_rows += i_head * rows + i_row
    p_argmax += i_head * rows + i_row
    b_q = load_tile(p_query, q_tiles, i_b, i_h, i_row, step_qm, rows, E, BE, BM, TMA, EDGE)
    b_scale = tl.full([BM], 1.0, tl.float32) * scale
    if GAIN:
        b_scale *= tl.load(p_gain + o_m.to(tl.int64) * step_gm, mask=m_m, other=0.0)
    b_s = tl.zeros([b_k.shape[0], BM], tl.float32)
    b_dp = b_s
    if APPENDED:
        # Loaded as numbers of rows they would come late, and each thread would load what others load too.
        o_c = tl.arange(0, WIDTH)
        b_ones = tl.where(o_c[None, :] + o_n[:, None] * 0 < 3, 1.0, 0.0).to(b_k.dtype)
        p_appended += (i_head * rows + i_row + o_local[:, None]) * (2 * WIDTH) + o_c[None, :]
        b_s = tl.dot(b_ones, tl.trans(tl.load(p_appended)), b_s)
        b_dp = tl.dot(b_ones, tl.trans(tl.load(p_appended + WIDTH)), b_dp)
    b_s = tl.dot(b_k, tl.trans(b_q), b_s, input_precision="ieee")
    b_g = b_q
    if G_OUTPUT & ARRIVED:
        b_g = load_tile(p_g, g_tiles, i_b, i_h, i_row, step_om, rows, EV, BEV, BM, TMA, EDGE)
        b_dp = tl.dot(b_v, tl.trans(b_g), b_dp, input_precision="ieee")
    b_w, _dz, b_ds = dz_tile(
        b_s, b_dp, b_scale[None, :], o_m[None, :], o_n[:, None], p_rows, p_argmax, n_rows, o_local, m_m, p_mask, step_mm, step_mn,
        i_head, rows, keys, left, right, softcap, dropout, seed, MASK, LEFT, RIGHT, CAP, DROP, ARRIVED, LEAN, APPENDED, EDGE, 1,
    )  # fmt: skip
    if DV:
        b_dv = dot_rounded(b_w * WEIGHT_LIFT if LIFT else b_w, b_g, b_dv, SPLIT)
    if DK:
        if GAIN:
            b_ds *= b_scale[None, :]
        b_dk = dot_rounded(b_ds * lift, b_q, b_dk, SPLIT)
    return b_dk, b_dv


@triton.jit
def mean_key(p_key, first, step_kn, keys, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr):
    """The mean of a tile of keys. A row of dz adds up to what arrives at lse, mean and peak: what rounding makes of that sum
    would be multiplied by the part that all keys share, so it is put right along their mean."""
    b_sum = tl.sum(load_rows(p_key, first, step_kn, keys, E, BE, BN, True).to(tl.float32), 0)
    return b_sum / tl.maximum(tl.minimum(keys - first, BN), 1)


@triton.jit(do_not_specialize=NUMBERS)
def rows_kernel(
    p_query, p_key, p_value, p_mask, p_gain, p_g, p_rows, p_argmax, p_lift, k_tiles, v_tiles, p_dq, p_dgain, p_dmask,
    step_qb, step_qh, step_qm, step_kb, step_kh, step_kn, step_vb, step_vh, step_vn,
    step_mb, step_mh, step_mm, step_mn, step_gb, step_gh, step_gm, step_ob, step_oh, step_om, step_db, step_dh, step_dm, step_dn,
    scale, softcap, dropout, seed, heads, groups, rows, keys, left, right,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASK: tl.constexpr, GAIN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
    ARRIVED: tl.constexpr, DQ: tl.constexpr, DGAIN: tl.constexpr, DMASK: tl.constexpr, SHARED: tl.constexpr,
    EVEN: tl.constexpr, LIFT: tl.constexpr, SPLIT: tl.constexpr, LEAN: tl.constexpr, TMA: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """dq, d(gain) and d(mask) of a tile of rows of one head."""
    i_m, i_head, n_heads = program()
    if RIGHT:
        i_m = tl.cdiv(rows, BM) - 1 - i_m
    i_b, i_h = i_head // heads, i_head % heads
    i_g = i_h // (heads // groups)
    i_row = i_m * BM
    o_m = i_row + tl.arange(0, BM)
    o_e, o_local = tl.arange(0, BE), tl.arange(0, BM)
    m_m = o_m < rows
    o_row = i_head * rows + o_m
    n_rows = n_heads * rows
    p_rows += i_head * rows + i_row
    p_argmax += i_head * rows + i_row

    m_q = m_m[:, None] & (o_e[None, :] < E)
    b_q = load_rows(p_query + i_b * step_qb + i_h * step_qh, i_row, step_qm, rows, E, BE, BM, True)
    b_scale = tl.full([BM], 1.0, tl.float32) * scale
    if GAIN:
        b_scale *= tl.load(p_gain + i_b * step_gb + i_h * step_gh + o_m.to(tl.int64) * step_gm, mask=m_m, other=0.0)
    b_g = b_q
    if G_OUTPUT & ARRIVED:
        b_g = load_rows(p_g + i_b * step_ob + i_h * step_oh, i_row, step_om, rows, EV, BEV, BM, True)
    p_key += i_b * step_kb + i_g * step_kh
    p_value += i_b * step_vb + i_g * step_vh
    p_mask += i_b * step_mb + i_h * step_mh
    p_dmask += i_b * step_db + i_h * step_dh
    b_raw = tl.zeros([BM, BE], tl.float32)
    b_sum = tl.zeros([BM, BE if b_q.dtype == tl.float32 else 16], tl.float32)
    b_dgain, b_all = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    lift = tl.load(p_lift) if LIFT else 1.0

    first, whole_first, whole_stop, stop = key_tiles(i_row, rows, keys, left, right, LEFT, RIGHT, BM, BN)
    for i_n in tl.range(whole_first, whole_stop, BN):
        b_raw, b_dgain, b_all, b_sum = rows_step(
            b_raw, b_dgain, b_all, b_sum, lift, b_q, b_g, b_scale, i_b.to(tl.int32), i_g.to(tl.int32), i_n,
            o_m, m_m, o_local, n_rows, p_key, p_value, k_tiles, v_tiles, p_mask, p_dmask, p_rows, p_argmax,
            step_kn, step_vn, step_mm, step_mn, step_dm, step_dn, i_head, rows, keys, left, right, softcap, dropout, seed,
            E, EV, BE, BEV, BN, MASK, LEFT, RIGHT, CAP, DROP, ARRIVED, DQ, DGAIN, DMASK, SHARED, EVEN, SPLIT, LEAN, TMA, False,
        )  # fmt: skip
    before = tl.maximum(whole_first - first, 0) // BN
    after = tl.cdiv(tl.maximum(stop - whole_stop, 0), BN)
    for i_t in tl.range(0, before + after):
        i_n = tl.where(i_t < before, first + i_t * BN, whole_stop + (i_t - before) * BN)
        b_raw, b_dgain, b_all, b_sum = rows_step(
            b_raw, b_dgain, b_all, b_sum, lift, b_q, b_g, b_scale, i_b.to(tl.int32), i_g.to(tl.int32), i_n,
            o_m, m_m, o_local, n_rows, p_key, p_value, k_tiles, v_tiles, p_mask, p_dmask, p_rows, p_argmax,
            step_kn, step_vn, step_mm, step_mn, step_dm, step_dn, i_head, rows, keys, left, right, softcap, dropout, seed,
            E, EV, BE, BEV, BN, MASK, LEFT, RIGHT, CAP, DROP, ARRIVED, DQ, DGAIN, DMASK, SHARED, EVEN, SPLIT, LEAN, TMA, True,
        )  # fmt: skip
    if EVEN:
        b_shared = mean_key(p_key, first, step_kn, keys, E, BE, BN)
        b_total = tl.load(p_rows + TOTAL * n_rows + o_local, mask=m_m & (stop > first), other=0.0)
        if DGAIN:
            b_dgain += (b_total - b_all) * tl.sum(b_q.to(tl.float32) * b_shared[None, :], 1)
    if DGAIN:
        tl.store(p_dgain + o_row, b_dgain * scale, mask=m_m)
    if DQ:
        if LIFT:
            b_raw = b_raw / lift  # a power of 2
        if EVEN and b_q.dtype != tl.float32:
            b_raw += (b_total - tl.max(b_sum, 1) / lift)[:, None] * b_shared[None, :]
        o_out = vector_index(i_b, i_h, o_m, heads, rows, BY_TOKEN)[:, None] * E + o_e[None, :]
        tl.store(p_dq + o_out, (b_raw * b_scale[:, None]).to(p_dq.dtype.element_ty), mask=m_q)


@triton.jit(do_not_specialize=NUMBERS)
def keys_kernel(
    p_query, p_key, p_value, p_mask, p_gain, p_g, p_rows, p_argmax, p_lift, p_appended, q_tiles, g_tiles, p_dk, p_dv,
    step_qb, step_qh, step_qm, step_kb, step_kh, step_kn, step_vb, step_vh, step_vn,
    step_mb, step_mh, step_mm, step_mn, step_gb, step_gh, step_gm, step_ob, step_oh, step_om,
    scale, softcap, dropout, seed, heads, groups, rows, keys, left, right,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASK: tl.constexpr, GAIN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
    ARRIVED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, LIFT: tl.constexpr, SPLIT: tl.constexpr, LEAN: tl.constexpr,
    APPENDED: tl.constexpr, TMA: tl.constexpr, KEYS_BY_TOKEN: tl.constexpr, VALUES_BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys of one key/value head: over the rows of every query head that shares it."""
    i_n, i_pair, n_pairs = program()
    i_n *= BN
    i_b, i_g = i_pair // groups, i_pair % groups
    repeat = heads // groups
    o_n = i_n + tl.arange(0, BN)
    o_e, o_v = tl.arange(0, BE), tl.arange(0, BEV)
    m_n = o_n < keys
    o_n64 = o_n.to(tl.int64)
    m_k = m_n[:, None] & (o_e[None, :] < E)
    b_k = tl.load(p_key + i_b * step_kb + i_g * step_kh + o_n64[:, None] * step_kn + o_e[None, :], mask=m_k, other=0.0)
    b_v = b_k
    if G_OUTPUT & ARRIVED:
        m_v = m_n[:, None] & (o_v[None, :] < EV)
        b_v = tl.load(
            p_value + i_b * step_vb + i_g * step_vh + o_n64[:, None] * step_vn + o_v[None, :], mask=m_v, other=0.0
        )
    b_dk = tl.zeros([BN, BE], tl.float32)
    b_dv = tl.zeros([BN, BEV], tl.float32)
    lift = tl.load(p_lift + 1) if LIFT else 1.0
    n_rows = n_pairs // groups * heads * rows

    first, whole_first, whole_stop, stop = row_tiles(i_n, rows, keys, left, right, LEFT, RIGHT, BM, BN)
    whole = tl.maximum(whole_stop - whole_first, 0) // BM
    before = tl.maximum(whole_first - first, 0) // BM
    edges = before + tl.cdiv(tl.maximum(stop - whole_stop, 0), BM)
    for i_r in tl.range(0, repeat):
        i_h = i_g * repeat + i_r
        p_q = p_query + i_b * step_qb + i_h * step_qh
        p_o = p_g + i_b * step_ob + i_h * step_oh
        p_s = p_gain + i_b * step_gb + i_h * step_gh
        p_m = p_mask + i_b * step_mb + i_h * step_mh
        for i_t in tl.range(0, whole):
            b_dk, b_dv = keys_step(
                b_dk, b_dv, lift, b_k, b_v, whole_first + i_t * BM, i_b.to(tl.int32), i_h.to(tl.int32),
                i_b * heads + i_h, o_n, n_rows, p_q, p_o, q_tiles, g_tiles, p_s, p_m, p_rows, p_argmax, p_appended,
                step_qm, step_om, step_gm, step_mm, step_mn, scale, rows, keys, left, right, softcap, dropout, seed,
                E, EV, BE, BEV, BM, MASK, GAIN, LEFT, RIGHT, CAP, DROP, ARRIVED, DK, DV, LIFT, SPLIT, LEAN, APPENDED, TMA, False,
            )  # fmt: skip
        for i_t in tl.range(0, edges):
            i_row = tl.where(i_t < before, first + i_t * BM, whole_stop + (i_t - before) * BM)
            b_dk, b_dv = keys_step(
                b_dk, b_dv, lift, b_k, b_v, i_row, i_b.to(tl.int32), i_h.to(tl.int32), i_b * heads + i_h, o_n, n_rows,
                p_q, p_o, q_tiles, g_tiles, p_s, p_m, p_rows, p_argmax, p_appended,
                step_qm, step_om, step_gm, step_mm, step_mn, scale, rows, keys, left, right, softcap, dropout, seed,
                E, EV, BE, BEV, BM, MASK, GAIN, LEFT, RIGHT, CAP, DROP, ARRIVED, DK, DV, LIFT, SPLIT, LEAN, False, TMA, True,
            )  # fmt: skip
    if DK:
        if LIFT:
            b_dk = b_dk / lift
        if not GAIN:
            b_dk *= scale
    if DV and LIFT:
        b_dv = b_dv / WEIGHT_LIFT
    if DK:
        o_out = vector_index(i_b, i_g, o_n64, groups, keys, KEYS_BY_TOKEN)
        tl.store(p_dk + o_out[:, None] * E + o_e[None, :], b_dk.to(p_dk.dtype.element_ty), mask=m_k)
    if DV:
        m_v = m_n[:, None] & (o_v[None, :] < EV)
        o_out = vector_index(i_b, i_g, o_n64, groups, keys, VALUES_BY_TOKEN)
        tl.store(p_dv + o_out[:, None] * EV + o_v[None, :], b_dv.to(p_dv.dtype.element_ty), mask=m_v)
