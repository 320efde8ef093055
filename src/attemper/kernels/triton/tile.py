"""One tile of logits, for every kernel here: the score after scale, softcap and bias, and which keys a row may use and sees.

Names: `i_` an index, `o_` offsets, `m_` a mask, `p_` a pointer, `b_` a block of values, CAPITALS a constexpr.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..contract import ALL_SIGNS, ARGMAX_BIT, BIT, OUTPUT_LOW_BIT

VISIBLE: tl.constexpr = tl.constexpr(BIT["visible"])
MEAN: tl.constexpr = tl.constexpr(BIT["mean"])
VARIANCE: tl.constexpr = tl.constexpr(BIT["variance"])
PEAK: tl.constexpr = tl.constexpr(BIT["peak"])
ENTROPY: tl.constexpr = tl.constexpr(BIT["entropy"])
P2: tl.constexpr = tl.constexpr(BIT["sum_p2"])
ALL: tl.constexpr = tl.constexpr(ALL_SIGNS)
ARGMAX: tl.constexpr = tl.constexpr(ARGMAX_BIT)
OUTPUT_LOW: tl.constexpr = tl.constexpr(OUTPUT_LOW_BIT)

NUMBERS = ["seed", "heads", "groups", "rows", "keys", "left", "right"]
"""Arguments that change from call to call: compiled once for all their values."""

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LN2_LOW: tl.constexpr = tl.constexpr(-1.904654299957768e-09)  # what float32 leaves out of ln 2
HIDDEN_BIAS: tl.constexpr = tl.constexpr(-1e4)
NO_MASK: tl.constexpr = tl.constexpr(0)
BOOLEAN: tl.constexpr = tl.constexpr(1)
ADDED: tl.constexpr = tl.constexpr(2)


@triton.jit
def tanh(x):
    """Within two units in the last place also near 0, where (1 - u) / (1 + u) loses its digits."""
    square = x * x
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    u = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - u) / (1.0 + u)
    return tl.where(tl.abs(x) < 0.3, x * series, tl.where(x < 0, -far, far))


@triton.jit
def program():
    """Which tile this program has, of which head, and of how many heads: `across` in launch.py."""
    i_head = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return tl.program_id(0), i_head, tl.num_programs(1).to(tl.int64) * tl.num_programs(2)


@triton.jit
def key_tiles(
    i_row, rows, keys, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """The tiles of keys that some row of a tile sees, first … stop; every row sees all of whole_first … whole_stop."""
    i_last = tl.minimum(i_row + BM, rows) - 1
    first = tl.maximum(i_row - left, 0) // BN * BN if LEFT else 0
    stop = tl.maximum(tl.minimum(i_last + right + 1, keys), 0) if RIGHT else keys
    whole_first = tl.cdiv(tl.maximum(i_last - left, 0), BN) * BN if LEFT else 0
    whole_stop = tl.maximum(tl.minimum(i_row + right + 1, keys), 0) // BN * BN if RIGHT else keys // BN * BN
    whole_stop = tl.maximum(whole_first, whole_stop)
    none = whole_first >= stop
    return first, tl.where(none, first, whole_first), tl.where(none, first, whole_stop), stop


@triton.jit
def row_tiles(
    i_key, rows, keys, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """The tiles of rows that see some key of a tile of keys, as `key_tiles` gives those of keys."""
    i_last = tl.minimum(i_key + BN, keys) - 1
    first = tl.maximum(i_key - right, 0) // BM * BM if RIGHT else 0
    stop = tl.minimum(i_last + left + 1, rows) if LEFT else rows
    whole_first = tl.cdiv(tl.maximum(i_last - right, 0), BM) * BM if RIGHT else 0
    whole_stop = tl.maximum(tl.minimum(i_key + left + 1, rows), 0) // BM * BM if LEFT else rows // BM * BM
    whole_stop = tl.maximum(whole_first, whole_stop)
    none = (whole_first >= stop) | (i_key + BN > keys)
    return first, tl.where(none, first, whole_first), tl.where(none, first, whole_stop), stop


@triton.jit
def dot_added(b_x, b_y, b_sum):
    """b_sum + x y. In float32 a tile is summed by itself: added to a large sum term by term, each would lose its last digits."""
    if b_x.dtype == tl.float32:
        return b_sum + tl.dot(b_x, b_y, input_precision="ieee")
    return tl.dot(b_x, b_y, b_sum)


@triton.jit
def dot_rounded(b_x, b_y, b_sum, SPLIT: tl.constexpr):
    """b_sum + x y with x rounded to the dtype of y; with SPLIT, what rounding took is multiplied too."""
    b_short = b_x.to(b_y.dtype)
    b_sum = dot_added(b_short, b_y, b_sum)
    if SPLIT:
        b_sum = dot_added((b_x - b_short.to(tl.float32)).to(b_y.dtype), b_y, b_sum)
    return b_sum


@triton.jit
def with_positive_scale(b_q, b_scale):
    """A logit as a positive number times the score: a negative scale is taken into the query. The query, and the numbers."""
    b_q = tl.where(b_scale[:, None] < 0, -b_q, tl.where(b_scale[:, None] == 0, 0.0, b_q)).to(b_q.dtype)
    return b_q, tl.where(b_scale == 0, 1.0, tl.abs(b_scale))


@triton.jit
def load_rows(p, i_n, step, n, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, EDGE: tl.constexpr):
    """Keys or values from i_n on, [BN, BE], 0 beyond the last key (which only a tile at the edge has) and beyond E."""
    o_n, o_e = tl.arange(0, BN), tl.arange(0, BE)
    p_tile = p + (tl.full((), 0, tl.int64) + i_n) * step + (o_n[:, None] * step + o_e[None, :])  # see FAR_APART
    if EDGE:
        return tl.load(p_tile, mask=(i_n + o_n[:, None] < n) & (o_e[None, :] < E), other=0.0)
    if E != BE:
        return tl.load(p_tile, mask=o_e[None, :] < E, other=0.0)
    return tl.load(p_tile)


@triton.jit
def load_tile(
    p, tiles, i_b, i_g, i_n, step, n,
    E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """`load_rows` of a head that `p` points to, or, by the hardware, of head i_g of batch i_b."""
    if TMA:
        return tl.reshape(tiles.load([i_b, i_g, i_n, 0]), [BN, BE])
    return load_rows(p, i_n, step, n, E, BE, BN, EDGE)


@triton.jit
def masked(
    b_z, o_i, o_j, p_mask, step_m, step_n, rows, keys, left, right,
    MASK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Logits with bias, -inf where a key is shut out; and which keys a row sees.

    `o_i` and `o_j` are the rows and keys of the tile, [BM, 1] and [1, BN], or [1, BM] and [BN, 1] for a tile that is transposed.
    """
    m_inside = (o_j < keys) & (o_i < rows)
    m_keep = m_inside
    if EDGE:
        if LEFT:
            m_keep &= o_j >= o_i - left
        if RIGHT:
            m_keep &= o_j <= o_i + right
    m_seen = m_keep
    if MASK != NO_MASK:
        b_mask = tl.load(p_mask + o_i.to(tl.int64) * step_m + o_j.to(tl.int64) * step_n, mask=m_inside, other=0)
        if MASK == BOOLEAN:
            m_keep &= b_mask != 0
            m_seen = m_keep
        else:
            b_bias = b_mask.to(tl.float32)
            b_z += b_bias
            m_seen = m_keep & (b_bias > HIDDEN_BIAS)
    return tl.where(m_keep, b_z, float("-inf")), m_seen


@triton.jit
def kept(seed, i_head, o_i, o_j, dropout):
    """Which weights of a tile survive dropout, the same whenever it is drawn with the same seed."""
    c_key = (o_j + o_i * 0).to(tl.uint32)
    c_row = (o_i + o_j * 0).to(tl.uint32)
    c_head = tl.zeros_like(c_key) + i_head.to(tl.uint32)
    bits, _, _, _ = tl.philox(seed, c_key, c_row, c_head, tl.zeros_like(c_key))
    return tl.uint_to_uniform_float(bits) >= dropout
