"""The fast pass over the keys: one reference for the whole row, the mean of a few logits, instead of a running maximum.

Softmax is the same whatever the reference is, as long as no exp overflows. With a fixed one there is no maximum to wait
for, nothing to rescale and nothing to share between threads inside the loop, and t = z - reference serves the weights,
entropy, mean and variance alike. A row whose sums show that the reference was too far from the largest logit or from the
mean, or that met inf or NaN, is computed again by `online`.

Sums are kept for every eighth key (`[BM, 8]`): those lie in the registers of one thread, so that they are added up without
shuffles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .store import entropy_of
from .tile import ENTROPY, LN2, LN2_LOW, LOG2E, MEAN, P2, PEAK, VARIANCE, dot_added, load_tile

SAMPLE: tl.constexpr = tl.constexpr(16)  # the keys that give the reference
LANES: tl.constexpr = tl.constexpr(8)
SHUT: tl.constexpr = tl.constexpr(-1000.0)  # 2 to this is 0, and 0 times it is 0, as 0 times -inf is not
WIDE: tl.constexpr = tl.constexpr(1152921504606846976.0)  # 2^60: what Σe may reach
NARROW: tl.constexpr = tl.constexpr(32768.0)  # what Σ e · down may reach in float16, so that no weight overflows
MANY: tl.constexpr = tl.constexpr(4096.0)  # with more keys `down` is smaller, since the sum grows with them
FAR: tl.constexpr = tl.constexpr(4.0)  # times the variance: the square of how far the reference may be from the mean


@triton.jit
def lanes(x, BM: tl.constexpr, BN: tl.constexpr):
    return tl.sum(tl.reshape(x, [BM, BN // LANES, LANES]), 1)


@triton.jit
def products(x, y, BM: tl.constexpr, BN: tl.constexpr, WIDE_INPUTS: tl.constexpr):
    """Σ x y of a tile."""
    if WIDE_INPUTS:
        return lanes(x * y, BM, BN)
    return with_products(tl.zeros([BM, LANES], tl.float32), x, y, BM, BN)


@triton.jit
def with_products(b_sum, x, y, BM: tl.constexpr, BN: tl.constexpr):
    """b_sum + Σ x y, one instruction for each product."""
    if BN == LANES:
        return tl.fma(x, y, b_sum)
    else:
        x_first, x_second = halves(x, BM, BN)
        y_first, y_second = halves(y, BM, BN)
        b_sum = with_products(b_sum, x_first, y_first, BM, BN // 2)
        return with_products(b_sum, x_second, y_second, BM, BN // 2)


@triton.jit
def with_lost(b_sum, b_lost, x, WIDE_INPUTS: tl.constexpr):
    """b_sum + x, and for float32 inputs what rounding took from it so far: a long sum would lose the digits of the mean."""
    if WIDE_INPUTS:
        x -= b_lost
        b_next = b_sum + x
        return b_next, (b_next - b_sum) - x
    return b_sum + x, b_lost


@triton.jit
def halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """The first and the second half of the columns; they stay in the registers where they are."""
    first, second = tl.split(tl.permute(tl.reshape(x, [BM, 2, BN // 2]), [0, 2, 1]))
    return first, second


@triton.jit
def reference(
    b_q, b_unit, p_key, step_kn, o_m, i_row, keys, right, E: tl.constexpr, BE: tl.constexpr, RIGHT: tl.constexpr
):  # fmt: skip
    """The mean of some logits of a row without their largest, which may be a sink; and that one, -inf where it sees none.

    Both times log2(e). The keys are spread evenly over those that the first row of the tile sees: in a model the first keys
    are unlike the others.
    """
    seen = tl.minimum(i_row + right + 1, keys) if RIGHT else keys
    o_n, o_e = tl.arange(0, SAMPLE) * tl.maximum(seen // SAMPLE, 1), tl.arange(0, BE)
    m_k = (o_n[None, :] < keys) & (o_e[:, None] < E)
    b_k = tl.load(p_key + o_n[None, :].to(tl.int64) * step_kn + o_e[:, None], mask=m_k, other=0.0)
    b_z = tl.dot(b_q, b_k, input_precision="ieee") * b_unit[:, None]
    m_seen = (o_n[None, :] < keys) & (o_m[:, None] >= 0)
    if RIGHT:
        m_seen &= o_n[None, :] <= o_m[:, None] + right
    b_seen = tl.sum(m_seen.to(tl.float32), 1)
    b_top = tl.max(tl.where(m_seen, b_z, float("-inf")), 1)
    b_sum = tl.sum(tl.where(m_seen, b_z, 0.0), 1)
    b_others = tl.where(b_seen > 1, (b_sum - b_top) / tl.maximum(b_seen - 1.0, 1.0), b_sum)
    return b_others, b_top


@triton.jit
def scores(
    b_q, i_b, i_g, i_n, p_key, k_tiles, step_kn, keys,
    E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    b_k = load_tile(p_key, k_tiles, i_b, i_g, i_n, step_kn, keys, E, BE, BN, TMA, EDGE)
    return tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [BM, BN]


@triton.jit
def frozen_tile(
    b_next, b_l, b_a, b_s, b_first, b_lost, b_second, b_rise, b_rounded, b_out,
    b_q, b_unit, b_ref, b_down, i_b, i_g, i_n, p_key, p_value, k_tiles, v_tiles, step_kn, step_vn, o_m, keys, right,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RIGHT: tl.constexpr, VALUES: tl.constexpr, TMA: tl.constexpr, AHEAD: tl.constexpr, BITS: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Take in the keys from i_n on; AHEAD, their scores are `b_next`, and those of the next keys are computed meanwhile."""
    o_n = i_n + tl.arange(0, BN)
    if AHEAD:
        b_z = b_next
        b_next = scores(b_q, i_b, i_g, i_n + BN, p_key, k_tiles, step_kn, keys, E, BE, BN, TMA, True)
    else:
        b_z = scores(b_q, i_b, i_g, i_n, p_key, k_tiles, step_kn, keys, E, BE, BN, TMA, EDGE)
    b_t = b_z * b_unit[:, None] - b_ref[:, None]
    if EDGE:
        m_seen = (o_n[None, :] < keys) & (o_m[:, None] >= 0)
        if RIGHT:
            m_seen &= o_n[None, :] <= o_m[:, None] + right
        b_t = tl.where(m_seen, b_t, SHUT)
    b_e = tl.math.exp2(b_t)
    b_l += lanes(b_e, BM, BN)
    # A tile is summed by itself: next to the sum of many keys, or a sink, all terms are small, and would be rounded one by one.
    if ENTROPY & BITS:
        b_a += products(b_e, b_t, BM, BN, b_q.dtype == tl.float32)
    if P2 & BITS:
        b_s += products(b_e, b_e, BM, BN, b_q.dtype == tl.float32)
    if PEAK & BITS:
        # numbers above 0 are ordered as their bits are
        b_bits = tl.reshape(b_t.to(tl.int32, bitcast=True), [BM, BN // LANES, LANES])
        b_rise = tl.maximum(b_rise, tl.max(b_bits, 1))
    if (MEAN | VARIANCE) & BITS:
        b_y = tl.where(m_seen, b_t, 0.0) if EDGE else b_t
        b_first, b_lost = with_lost(b_first, b_lost, lanes(b_y, BM, BN), b_q.dtype == tl.float32)
        b_second += products(b_y, b_y, BM, BN, b_q.dtype == tl.float32)
    if VALUES:
        b_v = load_tile(p_value, v_tiles, i_b, i_g, i_n, step_vn, keys, EV, BEV, BN, TMA, EDGE)
        if b_v.dtype == tl.float16:  # whose weights must not pass 65504
            b_e = b_e * b_down[:, None]
        b_p = b_e.to(b_v.dtype)
        # the weights that multiply the values are rounded: the output is divided by the sum of these
        b_rounded = tl.dot(b_p, tl.full([BN, 16], 1.0, b_v.dtype), b_rounded, input_precision="ieee")
        b_out = dot_added(b_p, b_v, b_out)
    return b_next, b_l, b_a, b_s, b_first, b_lost, b_second, b_rise, b_rounded, b_out


@triton.jit
def near_entropy(b_l, b_lanes, b_a, keys, WIDE_INPUTS: tl.constexpr):
    """The entropy from Σe, its lanes and those of Σet; and whether it holds.

    ln Σe and Σet / Σe grow with the distance between reference and logits, and nearly cancel. So the reference is moved by a
    whole k, lane by lane, to where Σe is in 1 … 2: that rounds nothing large. What lanes lost before is left: roundings of
    numbers as large as Σet / Σe, where those of the careful pass are of numbers up to ln(keys). For float32 inputs it may be
    twice that, as much as a sign may err; half-precision inputs have lost far more by their own rounding.
    """
    b_k = (b_l.to(tl.int32, bitcast=True) >> 23) - 127
    b_down = ((127 - b_k) << 23).to(tl.float32, bitcast=True)  # 2^-k
    b_k = b_k.to(tl.float32)
    b_rest = tl.sum(tl.fma(-b_k[:, None], b_lanes, b_a), 1)
    m_holds = b_rest == b_rest  # 0 · -inf is NaN
    if WIDE_INPUTS:
        m_holds &= tl.abs(tl.fma(b_k, b_l, b_rest)) <= 2.0 * b_l * tl.log2(keys + 1.0)
    return entropy_of(b_l * b_down, b_rest * b_down), m_holds


@triton.jit
def frozen(
    b_q, b_base, p_key, p_value, k_tiles, v_tiles, i_b, i_g, step_kn, step_vn, o_m, i_row, rows, keys, right,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RIGHT: tl.constexpr, VALUES: tl.constexpr, TMA: tl.constexpr, AHEAD: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Whether weights, entropy, and moments hold, for all rows of the tile; and what `online` returns, but the arg-max."""
    b_unit = b_base * LOG2E
    b_ref, b_sample_top = reference(b_q, b_unit, p_key, step_kn, o_m, i_row, keys, right, E, BE, RIGHT)
    b_count = tl.maximum(tl.minimum(o_m + right + 1, keys), 0) if RIGHT else tl.zeros_like(o_m) + keys
    m_empty = b_count == 0
    m_good = m_empty | (b_sample_top > float("-inf"))
    b_down = tl.where(m_empty, 1.0, tl.minimum(tl.math.exp2(b_ref - b_sample_top), MANY / keys))
    b_l = tl.zeros([BM, LANES], tl.float32)
    b_a, b_s, b_first, b_lost, b_second = b_l, b_l, b_l, b_l, b_l
    b_rise = tl.zeros([BM, LANES], tl.int32)
    b_rounded = tl.zeros([BM, 16], tl.float32)
    b_out = tl.zeros([BM, BEV if VALUES else 16], tl.float32)

    i_last = tl.minimum(i_row + BM, rows) - 1
    stop = tl.maximum(tl.minimum(i_last + right + 1, keys), 0) if RIGHT else keys
    whole = tl.maximum(tl.minimum(i_row + right + 1, keys), 0) // BN * BN if RIGHT else keys // BN * BN
    b_next = b_ref  # of no use
    if AHEAD:
        b_next = scores(b_q, i_b, i_g, 0, p_key, k_tiles, step_kn, keys, E, BE, BN, TMA, True)
    for i_n in tl.range(0, whole, BN):
        b_next, b_l, b_a, b_s, b_first, b_lost, b_second, b_rise, b_rounded, b_out = frozen_tile(
            b_next, b_l, b_a, b_s, b_first, b_lost, b_second, b_rise, b_rounded, b_out,
            b_q, b_unit, b_ref, b_down, i_b, i_g, i_n, p_key, p_value, k_tiles, v_tiles, step_kn, step_vn, o_m, keys, right,
            E, EV, BE, BEV, BM, BN, RIGHT, VALUES, TMA, AHEAD, BITS, False,
        )  # fmt: skip
    # the last keys of a wide tile's rows in narrow ones: fewer of the scores belong to keys that a row does not see
    LAST: tl.constexpr = BN // 2 if BN > 64 and not AHEAD else BN
    for i_n in tl.range(whole, stop, LAST):
        b_next, b_l, b_a, b_s, b_first, b_lost, b_second, b_rise, b_rounded, b_out = frozen_tile(
            b_next, b_l, b_a, b_s, b_first, b_lost, b_second, b_rise, b_rounded, b_out,
            b_q, b_unit, b_ref, b_down, i_b, i_g, i_n, p_key, p_value, k_tiles, v_tiles, step_kn, step_vn, o_m, keys, right,
            E, EV, BE, BEV, BM, LAST, RIGHT, VALUES, TMA and LAST == BN, AHEAD, BITS, True,
        )  # fmt: skip

    b_lanes, b_l = b_l, tl.sum(b_l, 1)
    m_good &= m_empty | ((b_l >= 0.5) & (b_l <= WIDE))
    if VALUES and p_value.dtype.element_ty == tl.float16:
        m_good &= m_empty | (b_l * b_down <= NARROW)
    b_l = tl.where(m_empty, 1.0, b_l)
    b_s = tl.sum(b_s, 1)
    b_entropy, m_mixed = near_entropy(b_l, b_lanes, b_a, keys, b_q.dtype == tl.float32)
    b_entropy = tl.where(b_count == 1, 0.0, b_entropy)  # no rounding of a reference for one key
    b_some = tl.maximum(b_count, 1).to(tl.float32)
    b_shift = tl.div_rn(tl.sum(b_first, 1), b_some)
    b_squares = tl.sum(b_second, 1) - b_shift * b_shift * b_some
    m_single = (b_count == 1) & (tl.abs(b_shift) < float("inf"))  # the reference is the logit, but for rounding
    b_squares = tl.where(m_single, 0.0, b_squares)
    m_near = m_empty | m_single | (b_shift * b_shift * b_some <= FAR * b_squares)  # false for inf and NaN
    b_top = b_ref * LN2
    b_top_low = tl.fma(b_ref, LN2, -b_top) + b_ref * LN2_LOW
    b_rise = tl.max(b_rise, 1).to(tl.float32, bitcast=True)
    b_peak = tl.where(m_empty, float("-inf"), tl.fma(b_rise, LN2, b_top))
    b_mean = (b_ref + b_shift) * LN2
    if b_q.dtype == tl.float32:  # the reference and its distance may nearly cancel
        b_far = tl.sum(b_first.to(tl.float64) - b_lost.to(tl.float64), 1) / b_some.to(tl.float64)
        b_mean = ((b_ref.to(tl.float64) + b_far) * LN2).to(tl.float32)
    b_mean = tl.where(m_empty, 0.0, b_mean)
    b_variance = tl.where(m_empty, 0.0, tl.div_rn(tl.maximum(b_squares, 0.0), b_some) * (LN2 * LN2))
    b_rounded = tl.where(m_empty, 1.0, tl.max(b_rounded, 1))
    m_other = o_m >= rows
    w_holds = tl.min((m_good | m_other).to(tl.int32), 0) == 1
    e_holds = tl.min((m_mixed | m_other).to(tl.int32), 0) == 1 if ENTROPY & BITS else True
    m_holds = tl.min((m_near | m_other).to(tl.int32), 0) == 1 if (MEAN | VARIANCE) & BITS else True
    return (
        w_holds, e_holds, m_holds, m_empty, b_top, b_top_low, b_l, b_s, b_entropy, b_rounded, b_out, b_peak, b_count,
        b_mean, b_variance,
    )  # fmt: skip
