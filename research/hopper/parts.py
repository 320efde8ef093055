"""What the warps of one program are made of: sums without shuffles, whose turn it is, the ring of tiles, the schedule.

Names as in kernels/triton/tile.py: `i_` an index, `o_` offsets, `m_` a mask, `p_` a pointer, `b_` a block of values.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

LANES: gl.constexpr = gl.constexpr(8)
"""Sums are kept for every eighth key: those lie in the registers of one thread, so that they are added without shuffles."""
ROWS: gl.constexpr = gl.constexpr(64)
"""Rows of a warpgroup: one instruction of the matrix unit takes so many."""
GROUPS: gl.constexpr = gl.constexpr(2)
"""Warpgroups that compute; another warp copies."""
MINUS_ZERO: gl.constexpr = gl.constexpr(-2147483648)


@gluon.jit
def lanes(b_x, BN: gl.constexpr):
    """The sum of a tile's columns in every lane: [ROWS, BN] to [ROWS, LANES], in registers."""
    return gl.sum(b_x.reshape([ROWS, BN // LANES, LANES]), 1)


@gluon.jit
def with_products(b_sum, b_x, b_y, BN: gl.constexpr):
    """b_sum + Σ x y in every lane, one instruction for each product: the sum so far begins each chain of additions.

    The others begin with -0.0, which the compiler drops; +0.0 it may not drop.
    """
    b_terms = (b_x * b_y).reshape([ROWS, BN // LANES, LANES])
    m_first = gl.arange(0, BN // LANES, gl.SliceLayout(0, gl.SliceLayout(2, b_terms.type.layout)))[None, :, None] == 0
    b_begin = gl.convert_layout(b_sum, gl.SliceLayout(1, b_terms.type.layout), assert_trivial=True)[:, None, :]
    b_none = gl.to_tensor(MINUS_ZERO).to(gl.float32, bitcast=True)
    return gl.sum(b_terms + gl.where(m_first, b_begin, b_none), 1)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def ordered(b_bits):
    """The bits of numbers as integers in the order of the numbers, also below 0; and back."""
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def with_largest(b_largest, b_t, BN: gl.constexpr, BELOW: gl.constexpr):
    """The largest t of every lane, as its bits, since integers compare in pairs. BELOW, it may be below 0: `ordered`."""
    b_bits = b_t.to(gl.int32, bitcast=True)
    if BELOW:
        b_bits = ordered(b_bits)
    return gl.maximum(b_largest, gl.reduce(b_bits.reshape([ROWS, BN // LANES, LANES]), 1, _larger))


@gluon.jit
def held(b_x):
    """The same numbers, after a nap that a negative sum would cause and no sum does.

    The compiler cannot move what they are made of behind it. Without it, it moves most of the softmax behind the wait for the
    product with the values, and the two no longer overlap.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .f32 a, b; add.f32 a, $4, $5; add.f32 b, $6, $7; add.f32 a, a, b; setp.lt.f32 p, a, 0fBF800000; "
        "@p nanosleep.u32 1; mov.f32 $0, $4; mov.f32 $1, $5; mov.f32 $2, $6; mov.f32 $3, $7; }",
        "=f,=f,=f,=f,f,f,f,f", [b_x], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def wait_for_turn(token, GROUP: gl.constexpr):
    """The warpgroups take turns at the matrix units: while one multiplies, the other computes weights and signs."""
    if GROUP == 0:
        return gl.inline_asm_elementwise(
            "bar.sync 9, 256; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
        )
    return gl.inline_asm_elementwise(
        "bar.sync 10, 256; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def give_turn(token, TO: gl.constexpr):
    if TO == 0:
        return gl.inline_asm_elementwise(
            "bar.arrive 9, 256; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
        )
    return gl.inline_asm_elementwise(
        "bar.arrive 10, 256; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
    )


@aggregate
class Shared:
    """What the warps of a program share.

    A slot of the ring holds the keys of one turn and the values of the turn before, which are multiplied at the same time: one
    barrier says that a slot is full, one that it is empty. There are queries of two tiles, with a slot for each warpgroup.
    """

    queries: gl.shared_memory_descriptor
    keys: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    outputs: gl.shared_memory_descriptor
    queries_full: gl.shared_memory_descriptor
    queries_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor

    @constexpr_function
    def __init__(self, queries, keys, values, outputs, queries_full, queries_empty, full, empty, done):
        self.queries, self.keys, self.values, self.outputs = queries, keys, values, outputs
        self.queries_full, self.queries_empty = queries_full, queries_empty
        self.full, self.empty, self.done = full, empty, done


@aggregate
class Work:
    """The tiles of rows that this program computes, and what a tile is of."""

    p_table: gl.tensor
    p_counts: gl.tensor
    p_flags: gl.tensor
    p_worst: gl.tensor
    heads: gl.tensor
    groups: gl.tensor
    rows: gl.tensor
    keys: gl.tensor
    right: gl.tensor

    @constexpr_function
    def __init__(self, p_table, p_counts, p_flags, p_worst, heads, groups, rows, keys, right):
        self.p_table, self.p_counts, self.p_flags, self.p_worst = p_table, p_counts, p_flags, p_worst
        self.heads, self.groups, self.rows, self.keys, self.right = heads, groups, rows, keys, right


@aggregate
class Tiles:
    """What warps of the backward share: vectors that a program keeps, for each warpgroup, and those that come in turn."""

    kept: gl.shared_memory_descriptor
    kept_too: gl.shared_memory_descriptor
    first: gl.shared_memory_descriptor
    second: gl.shared_memory_descriptor
    terms: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @constexpr_function
    def __init__(self, kept, kept_too, first, second, terms, ready, full, empty):
        self.kept, self.kept_too, self.first, self.second = kept, kept_too, first, second
        self.terms, self.ready, self.full, self.empty = terms, ready, full, empty


@aggregate
class Call:
    """A program of the backward: head (of `heads`, or `groups`) and first row or key; row i sees keys up to i + right."""

    i_b: gl.tensor
    i_h: gl.tensor
    i_first: gl.tensor
    heads: gl.tensor
    groups: gl.tensor
    rows: gl.tensor
    keys: gl.tensor
    right: gl.tensor

    @constexpr_function
    def __init__(self, i_b, i_h, i_first, heads, groups, rows, keys, right):
        self.i_b, self.i_h, self.i_first, self.heads, self.groups = i_b, i_h, i_first, heads, groups
        self.rows, self.keys, self.right = rows, keys, right


@gluon.jit
def how_many(work):
    return gl.load(work.p_counts + gl.program_id(0))


@gluon.jit
def tile_of(work, i_round):
    """Head (of all batches) and first row of the tile that this program has in a round; see schedule.py."""
    i_tile = gl.load(work.p_table + i_round * gl.num_programs(0) + gl.program_id(0))
    tiles = (work.rows + ROWS * GROUPS - 1) // (ROWS * GROUPS)
    return i_tile // tiles, i_tile % tiles * (ROWS * GROUPS)


@gluon.jit
def blocks_of(work, stop, BN: gl.constexpr, RIGHT: gl.constexpr):
    """How many tiles of keys the rows below `stop` see; one at least, which may be hidden from all of them."""
    seen = work.keys
    if RIGHT:
        seen = gl.minimum(gl.minimum(stop, work.rows) + work.right, work.keys)
    return gl.maximum((seen + BN - 1) // BN, 1)


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    slot += 1
    wraps = (slot == STAGES).to(gl.int32)
    return slot * (1 - wraps), phase ^ wraps


WEIGHTS: gl.constexpr = gl.constexpr(2.0)
MOMENTS: gl.constexpr = gl.constexpr(1.0)
"""What a row's flag says: its weights, or its mean and variance alone, must be computed again."""


@gluon.jit
def any_flag(work):
    """Whether a tile of this program has a flag: what its warpgroups wrote when they had computed all of them."""
    worst = 0.0
    for group in gl.static_range(GROUPS):
        worst = gl.maximum(worst, gl.load(work.p_worst + gl.program_id(0) * GROUPS + group, volatile=True))
    return worst > 0.0


@gluon.jit
def flag_of(work, i_head, i_row, N: gl.constexpr, WARPS: gl.constexpr):
    """The largest flag of N rows. Computing them again does not change it, so that all warps read the same."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    o_m = i_row + gl.arange(0, N, layout)
    b_flag = gl.load(
        work.p_flags + i_head.to(gl.int64) * work.rows + o_m, mask=o_m < work.rows, other=0.0, volatile=True
    )
    return gl.max(b_flag, 0)


@gluon.jit
def announce(barrier, bytes_, unless):
    mbarrier.expect(barrier, bytes_, pred=unless == 0)
