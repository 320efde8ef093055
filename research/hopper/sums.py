"""What the logits of a tile add to the sums of its rows, by the fast pass and by the careful one; and the signs that these make.

t is a logit minus the row's reference. The sums are one tuple. In every lane: of exp (l), exp · t (a), exp² (s), of scores and of
their squares about a center, and the largest t. Of each row: how many logits there are besides -inf, their mean and their squares
about it in the careful pass; in the fast pass the mean is the center.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attemper.kernels.contract import BIT, OUTPUT_LOW_BIT

from .parts import MOMENTS, ROWS, WEIGHTS, lanes, ordered, with_largest, with_products

VISIBLE: gl.constexpr = gl.constexpr(BIT["visible"])
MEAN: gl.constexpr = gl.constexpr(BIT["mean"])
VARIANCE: gl.constexpr = gl.constexpr(BIT["variance"])
PEAK: gl.constexpr = gl.constexpr(BIT["peak"])
ENTROPY: gl.constexpr = gl.constexpr(BIT["entropy"])
P2: gl.constexpr = gl.constexpr(BIT["sum_p2"])
OUTPUT_LOW: gl.constexpr = gl.constexpr(OUTPUT_LOW_BIT)

LN2: gl.constexpr = gl.constexpr(0.6931471805599453)
LN2_LOW: gl.constexpr = gl.constexpr(-1.904654299957768e-09)  # what float32 leaves out of ln 2
SHUT: gl.constexpr = gl.constexpr(-1000.0)  # 2 to this is 0, and 0 times it is 0, as 0 times -inf is not
MOST: gl.constexpr = gl.constexpr(1152921504606846976.0)  # 2^60: what Σe may reach
MOST_HALF: gl.constexpr = gl.constexpr(32768.0)  # the same if weights are rounded to float16
UPPER_HALF: gl.constexpr = gl.constexpr(-65536)
LOWEST: gl.constexpr = gl.constexpr(-2147483647)
LEAST: gl.constexpr = gl.constexpr(0.5)
FAR: gl.constexpr = gl.constexpr(4.0)  # times the variance: the square of how far the reference may be from the mean


@gluon.jit
def cut(b_e, dtype: gl.constexpr):
    """Weights without the digits that the matrix unit does not take: so that their sum is known for one instruction each.

    Cutting errs as widely as rounding, but all one way, which dividing by the sum of what is left takes back.
    """
    if dtype == gl.float16:
        return b_e.to(gl.float16).to(gl.float32)
    return (b_e.to(gl.int32, bitcast=True) & UPPER_HALF).to(gl.float32, bitcast=True)


@gluon.jit
def lost_bits(b_out, b_short):
    """What rounding took from the output, as `vitals.rounded_off` defines it."""
    b_wide = b_short.to(gl.float32)
    b_lost = b_out.to(gl.int32, bitcast=True) - b_wide.to(gl.int32, bitcast=True)
    if b_short.dtype == gl.float16:
        b_units = (b_out - b_wide) * 1099511627776.0  # 2^40
        b_near = gl.where(b_units < 0, b_units - 0.5, b_units + 0.5).to(gl.int32)
        b_lost = gl.where(gl.abs(b_wide) < 6.103515625e-05, b_near, b_lost)
    b_lost = gl.minimum(gl.maximum(b_lost, -32768), 32767)
    return gl.where(gl.abs(b_wide) < float("inf"), b_lost, 0).to(gl.int16)


@gluon.jit
def visible_keys(work, i_key, i_own, b_zero, BN: gl.constexpr, RIGHT: gl.constexpr, EDGE: gl.constexpr):
    """Which keys of the tile from i_key on there are, and which of them a row sees."""
    z_layout: gl.constexpr = b_zero.type.layout
    o_m = i_own + gl.arange(0, ROWS, gl.SliceLayout(1, z_layout))
    o_n = i_key + gl.arange(0, BN, gl.SliceLayout(0, z_layout))
    m_there = b_zero == 0
    if RIGHT or EDGE:
        m_there = (o_n < work.keys)[None, :] & m_there
    m_seen = m_there
    if RIGHT:
        m_seen = m_there & (o_n[None, :] <= (o_m + work.right)[:, None])
    return m_there, m_seen


@gluon.jit
def begin(
    b_z, m_there, m_seen, unit, BN: gl.constexpr, RIGHT: gl.constexpr, EDGE: gl.constexpr, SHIFTED: gl.constexpr,
    BITS: gl.constexpr,
):  # fmt: skip
    """The first tile, by the fast pass: exp of its logits, the reference, the sums."""
    b_seen = gl.sum(m_seen.to(gl.float32), 1)
    b_ref = gl.max(gl.where(m_seen, b_z, -3e38), 1)
    if RIGHT:  # a row that sees keys before this tile alone: any number near its logits will do
        b_ref = gl.where(b_seen > 0, b_ref, gl.max(gl.where(m_there, b_z, -3e38), 1))
    b_ref = b_ref * unit
    b_t = b_z * unit - b_ref[:, None]
    if RIGHT or EDGE:
        b_t = gl.where(m_seen, b_t, SHUT)
    b_e = gl.exp2(b_t)
    b_l = lanes(b_e, BN)
    b_none, b_row = b_l * 0.0, b_ref * 0.0
    b_a, b_s, b_first, b_second, b_center = b_none, b_none, b_none, b_none, b_row
    b_rise = b_l.to(gl.int32) * 0
    if SHIFTED:
        b_rise = b_rise + LOWEST
    if ENTROPY & BITS:
        b_a = lanes(b_e * b_t, BN)
    if P2 & BITS:
        b_s = lanes(b_e * b_e, BN)
    if PEAK & BITS:
        b_rise = with_largest(b_rise, b_t, BN, SHIFTED)
    if (MEAN | VARIANCE) & BITS:
        # about the mean of this tile, since squares about the largest score would lose digits
        b_center = gl.sum(gl.where(m_seen, b_z, 0.0), 1) / gl.maximum(b_seen, 1.0)
        b_y = gl.where(m_seen, b_z - b_center[:, None], 0.0)
        b_first, b_second = lanes(b_y, BN), lanes(b_y * b_y, BN)
    return b_e, b_ref, (b_l, b_a, b_s, b_first, b_second, b_rise, b_row, b_center, b_row)


@gluon.jit
def go_on(b_z, m_seen, b_ref, sums, unit, BN: gl.constexpr, SHIFTED: gl.constexpr, BITS: gl.constexpr):
    """Any other tile, by the fast pass."""
    b_l, b_a, b_s, b_first, b_second, b_rise, b_met, b_center, b_squares = sums
    b_t = b_z * unit - b_ref[:, None]
    if SHIFTED:
        b_t = gl.where(m_seen, b_t, SHUT)
    b_e = gl.exp2(b_t)
    if PEAK & BITS:
        b_rise = with_largest(b_rise, b_t, BN, SHIFTED)
    if ENTROPY & BITS:
        b_a = with_products(b_a, b_e, b_t, BN)
    if P2 & BITS:
        b_s = with_products(b_s, b_e, b_e, BN)
    if (MEAN | VARIANCE) & BITS:
        b_y = b_z - b_center[:, None]
        if SHIFTED:
            b_y = gl.where(m_seen, b_y, 0.0)
        b_second = with_products(b_second, b_y, b_y, BN)
        b_first += lanes(b_y, BN)
    b_l += lanes(b_e, BN)
    return b_e, (b_l, b_a, b_s, b_first, b_second, b_rise, b_met, b_center, b_squares)


@gluon.jit
def nothing_yet(b_zero, BN: gl.constexpr):
    """The reference and the sums of a careful pass that has seen no key."""
    b_none, b_row = lanes(b_zero, BN), gl.sum(b_zero, 1)
    return b_row + float("-inf"), (b_none, b_none, b_none, b_none, b_none, b_none.to(gl.int32), b_row, b_row, b_row)


@gluon.jit
def go_on_carefully(b_z, m_seen, b_ref, sums, unit, BN: gl.constexpr, BITS: gl.constexpr):
    """Any tile, by the careful pass: also by what the sums so far were multiplied, since a larger logit came."""
    b_l, b_a, b_s, b_first, b_second, b_rise, b_met, b_mean, b_squares = sums
    b_z = gl.where(m_seen, b_z * unit, float("-inf"))
    b_new = gl.maximum(b_ref, gl.max(b_z, 1))
    b_finite = gl.where(b_new == float("-inf"), 0.0, b_new)
    b_moved = gl.where(b_ref == float("-inf"), 0.0, b_ref - b_finite)
    b_times = gl.exp2(b_moved)
    b_t = b_z - b_finite[:, None]
    b_e = gl.exp2(b_t)
    b_t = gl.where(b_t < -1e4, 0.0, b_t)  # their weight is 0, and 0 · -inf is NaN
    rows: gl.constexpr = gl.SliceLayout(1, b_l.type.layout)
    c_times = gl.convert_layout(b_times, rows, assert_trivial=True)[:, None]
    if ENTROPY & BITS:
        c_moved = gl.convert_layout(b_moved, rows, assert_trivial=True)[:, None]
        b_a = (b_a + c_moved * b_l) * c_times + lanes(b_e * b_t, BN)
    if P2 & BITS:
        b_s = b_s * (c_times * c_times) + lanes(b_e * b_e, BN)
    if (MEAN | VARIANCE) & BITS:
        m_adds = b_z != float("-inf")  # a logit of -inf is counted, and adds nothing
        b_tile = gl.sum(m_adds.to(gl.float32), 1)
        b_tile_mean = gl.sum(gl.where(m_adds, b_z, 0.0), 1) / gl.maximum(b_tile, 1.0)
        b_off = gl.where(m_adds, b_z - b_tile_mean[:, None], 0.0)
        b_total = b_met + b_tile
        b_step, b_share = b_tile_mean - b_mean, b_tile / gl.maximum(b_total, 1.0)
        b_squares += gl.sum(b_off * b_off, 1) + b_step * b_step * b_met * b_share
        b_mean += b_step * b_share
        b_met = b_total
    b_l = b_l * c_times + lanes(b_e, BN)
    return b_e, b_times, b_new, (b_l, b_a, b_s, b_first, b_second, b_rise, b_met, b_mean, b_squares)


@gluon.jit
def store_signs(
    work, signs, unit, i_head, i_own, b_ref, sums, level, b_worst, HALF: gl.constexpr, RIGHT: gl.constexpr, SHIFTED: gl.constexpr,
    CAREFUL: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """Write the signs of 64 rows, and by the fast pass their flags. Returns Σe, which rows see no key, and the worst flag."""
    b_lanes, b_a, b_s, b_first, b_second, b_rise, b_met, b_mean, b_squares = sums
    b_l = gl.sum(b_lanes, 1)
    rows: gl.constexpr = b_l.type.layout
    o_m = i_own + gl.arange(0, ROWS, rows)
    m_row = o_m < work.rows
    b_count = work.keys + o_m * 0
    if RIGHT:
        b_count = gl.maximum(gl.minimum(o_m + work.right + 1, work.keys), 0)
    b_some = gl.maximum(b_count, 1).to(gl.float32)
    b_ref = gl.convert_layout(b_ref, rows)
    m_single = b_count == 1
    o_row = i_head.to(gl.int64) * work.rows + o_m
    m_weights, m_moments = m_row & (level >= WEIGHTS), m_row
    if CAREFUL:
        m_empty = b_ref == float("-inf")
        b_met, b_mean = gl.convert_layout(b_met, rows), gl.convert_layout(b_mean, rows)
        b_all = b_mean * (b_met / b_some)
        b_off = gl.where(b_met == b_count.to(gl.float32), 0.0, b_met * (b_mean - b_all) * (b_mean - b_all))
        b_squares = gl.convert_layout(b_squares, rows) + b_off
        b_mean = b_all * LN2
    else:
        m_empty = b_count == 0
        b_center = gl.convert_layout(b_mean, rows)
        b_shift = gl.sum(b_first, 1) / b_some
        b_squares = gl.sum(b_second, 1) - b_shift * b_shift * b_some
        b_squares = gl.where(
            m_single & (gl.abs(b_shift) < float("inf")), 0.0, gl.where(b_squares < 0.0, 0.0, b_squares)
        )
        most: gl.constexpr = MOST_HALF if HALF else MOST
        b_flag = gl.where(m_empty | ((b_l >= LEAST) & (b_l <= most)), 0.0, WEIGHTS)
        if (MEAN | VARIANCE) & BITS:
            m_near = m_empty | m_single | (b_shift * b_shift * b_some <= FAR * b_squares)  # false for inf and NaN
            b_flag = gl.maximum(b_flag, gl.where(m_near, 0.0, MOMENTS))
        gl.store(work.p_flags + o_row, b_flag, mask=m_row)
        b_worst = gl.maximum(b_worst, gl.where(m_row, b_flag, 0.0))
        b_mean = (b_center + b_shift) * (unit * LN2)
        b_squares = b_squares * (unit * unit)
    b_base = gl.where(m_empty, 0.0, b_ref)
    b_l = gl.where(m_empty, 1.0, b_l)
    b_top = b_base * LN2
    m_endless = b_top == float("inf")  # inf / inf: the weights are NaN, the largest logit and lse are not
    b_log = gl.log(b_l)
    b_lse = b_top + b_log
    b_part = b_lse - b_top
    b_low = (b_top - (b_lse - b_part)) + (b_log - b_part) + (gl.fma(b_base, LN2, -b_top) + b_base * LN2_LOW)
    b_lse = gl.where(m_empty, float("-inf"), gl.where(m_endless, float("inf"), b_lse))
    gl.store(signs[0] + o_row, b_lse, mask=m_weights)
    gl.store(signs[1] + o_row, gl.where(m_empty | m_endless, 0.0, b_low), mask=m_weights)
    if VISIBLE & BITS:
        gl.store(signs[2] + o_row, b_count, mask=m_weights)
    if MEAN & BITS:
        gl.store(signs[3] + o_row, gl.where(m_empty, 0.0, b_mean), mask=m_moments)
    if VARIANCE & BITS:
        gl.store(signs[4] + o_row, gl.where(m_empty, 0.0, b_squares / b_some * (LN2 * LN2)), mask=m_moments)
    if PEAK & BITS:
        if CAREFUL:
            b_peak = gl.where(m_endless | (b_l == b_l), b_top, b_l)
        else:
            b_largest = gl.max(b_rise, 1)
            if SHIFTED:
                b_largest = ordered(b_largest)
            b_peak = gl.fma(b_largest.to(gl.float32, bitcast=True), LN2, b_top)
        gl.store(signs[5] + o_row, gl.where(m_empty, float("-inf"), b_peak), mask=m_weights)
    if ENTROPY & BITS:
        # ln Σe and Σet / Σe nearly cancel: the reference is moved by a whole k, to where Σe is in 1 … 2
        b_k = (b_l.to(gl.int32, bitcast=True) >> 23) - 127
        b_down = ((127 - b_k) << 23).to(gl.float32, bitcast=True)
        c_k = gl.convert_layout(b_k.to(gl.float32), gl.SliceLayout(1, b_lanes.type.layout))[:, None]
        b_rest = gl.sum(b_a - c_k * b_lanes, 1)
        b_entropy = gl.log(b_l * b_down) - (b_rest * b_down) / (b_l * b_down) * LN2
        b_entropy = gl.where(m_empty | (m_single & (b_l == b_l)) | (b_entropy < 0), 0.0, b_entropy)
        gl.store(signs[6] + o_row, b_entropy, mask=m_weights)
    if P2 & BITS:
        gl.store(signs[7] + o_row, gl.where(m_empty, 0.0, gl.sum(b_s, 1) / (b_l * b_l)), mask=m_weights)
    return b_l, m_empty, b_worst
