"""Backward on Hopper: two kernels, each with one warp that copies and two warpgroups that compute. No sum is shared between
programs, so bits repeat, and no memory has to be zeroed before or rounded after.

over the keys (`rows_kernel`), 64 rows for each warpgroup:                  dQ = Σ dZ K
over the rows (`keys_kernel`), 64 keys for each warpgroup, transposed:      dV = Σ Pᵀ G,  dK = Σ dZᵀ Q

That is seven products. One kernel would need five, and all of its programs would add to dQ: in any order, so that bits do not
repeat, or in turn, so that programs wait for one another. Weights and dZ stay in the registers from which the matrix unit takes
them.

What rounding takes from dZ would add up along the part that all keys share: dZ is also multiplied by ones, in eight columns, and
dQ is put right by what is missing from the sum.

A row has numbers of its own (terms.py). In a row that sees one key, dZ is what arrives at the sum of its logits: that is taken in
place of p (dP - δ), so that the gradients are zero where nothing arrives.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attemper.kernels.triton.row_terms import G_ENTROPY, G_MOMENTS, G_P2, G_PEAK

from .parts import GROUPS, ROWS, Call, Tiles, next_slot
from .terms import ARGMAX, CONSTANT, ENTROPY, LEVEL, LSE, P2, PEAK, PLACES, SLOPE, TOTAL

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
HIDDEN: gl.constexpr = gl.constexpr(-1e30)  # 2 to this is 0, and 0 times it is 0, as 0 times -inf is not
SUMS: gl.constexpr = gl.constexpr(8)  # columns of ones: the fewest that a product has
MEAN_OF: gl.constexpr = gl.constexpr(64)  # keys
WEIGHT_LIFT: gl.constexpr = gl.constexpr(1024.0)  # times a weight of float16: small ones keep their digits


@gluon.jit
def place_of(n_heads, tiles, together):
    """Head (of all batches) and tile of a program. Heads are computed `together` whose vectors fit into the second cache."""
    i = gl.program_id(0)
    first = i // (together * tiles) * together
    many = gl.minimum(together, n_heads - first)
    i = i - first * tiles
    return first + i % many, i // many


@gluon.jit
def keys_seen(call, o_m, o_n, RIGHT: gl.constexpr):
    m_seen = o_n + o_m * 0 < call.keys
    if RIGHT:
        m_seen = m_seen & (o_n <= o_m + call.right)
    return m_seen


@gluon.jit
def sees_one(call, o_m, RIGHT: gl.constexpr):
    """Which rows see the first key and no other."""
    b_last = o_m * 0 + call.keys
    if RIGHT:
        b_last = gl.minimum(b_last, o_m + call.right + 1)
    return b_last == 1


@gluon.jit
def dz_of(b_s, b_t, b_p, b_dp, terms, o_n, ARRIVED: gl.constexpr):
    """The gradient of the logits, by the formula of kernels/triton/backward.py; of keys that a row does not see, anything."""
    b_constant, b_entropy, b_p2, b_level, b_slope, b_peak, b_arg = terms
    b_dz = b_dp + b_constant
    if G_ENTROPY & ARRIVED:
        b_dz -= b_entropy * b_t
    if G_P2 & ARRIVED:
        b_dz += b_p2 * b_p
    b_dz = b_dz * b_p
    if G_MOMENTS & ARRIVED:
        b_dz += b_level + b_slope * b_s
    if G_PEAK & ARRIVED:
        b_dz += gl.where(o_n == b_arg, b_peak, 0.0)
    return b_dz


# over the keys: dQ


@gluon.jit
def key_blocks(call, BN: gl.constexpr, RIGHT: gl.constexpr):
    """How many tiles of keys the rows of a program see, one at least."""
    b_last = call.keys
    if RIGHT:
        b_last = gl.minimum(gl.minimum(call.i_first + ROWS * GROUPS, call.rows) + call.right, call.keys)
    return gl.maximum((b_last + BN - 1) // BN, 1)


@gluon.jit
def copy_keys(
    q_tiles, g_tiles, k_tiles, v_tiles, shared, call, BN: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr
):
    mbarrier.expect(shared.ready, GROUPS * (q_tiles.block_type.nbytes + g_tiles.block_type.nbytes))
    for group in gl.static_range(GROUPS):
        at = call.i_first + group * ROWS
        tma.async_copy_global_to_shared(q_tiles, [call.i_b, call.i_h, at, 0], shared.ready, shared.kept.index(group))
        tma.async_copy_global_to_shared(
            g_tiles, [call.i_b, call.i_h, at, 0], shared.ready, shared.kept_too.index(group)
        )
    i_g = call.i_h // (call.heads // call.groups)
    slot, phase = gl.to_tensor(0), gl.to_tensor(0)
    blocks = key_blocks(call, BN, RIGHT)
    for i_block in range(blocks):
        at = (blocks - 1 - i_block) * BN
        full = shared.full.index(slot)
        mbarrier.wait(shared.empty.index(slot), phase ^ 1)
        mbarrier.expect(full, k_tiles.block_type.nbytes + v_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(k_tiles, [call.i_b, i_g, at, 0], full, shared.first.index(slot))
        tma.async_copy_global_to_shared(v_tiles, [call.i_b, i_g, at, 0], full, shared.second.index(slot))
        slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def rows_step(
    b_dq, b_sum, b_lse, terms, lift, ones, shared, call, i_key, i_row, slot, phase, scale, b_zero,
    GROUP: gl.constexpr, BN: gl.constexpr, BE: gl.constexpr, BEV: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr,
    ARRIVED: gl.constexpr, LIFT: gl.constexpr, HIDES: gl.constexpr,
):  # fmt: skip
    """What the keys from i_key on add to dQ, and to the sum of dZ as it was rounded.

    HIDES, a row may not see all of them, or they are not all there.
    """
    s_layout: gl.constexpr = b_zero.type.layout
    a_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=b_dq.type.layout, k_width=2)
    o_m = (i_row + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout)))[:, None]
    o_n = (i_key + gl.arange(0, BN, gl.SliceLayout(0, s_layout)))[None, :]
    queries, gs = shared.kept.index(GROUP).reshape([ROWS, BE]), shared.kept_too.index(GROUP).reshape([ROWS, BEV])
    keys, values = shared.first.index(slot).reshape([BN, BE]), shared.second.index(slot).reshape([BN, BEV])
    mbarrier.wait(shared.full.index(slot), phase)
    b_s = warpgroup_mma(queries, keys.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_dp = warpgroup_mma(gs, values.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(1, deps=(b_s,))
    b_t = b_s * (scale * LOG2E) - b_lse
    if HIDES:
        b_t = gl.where(keys_seen(call, o_m, o_n, RIGHT), b_t, HIDDEN)
    b_p = gl.exp2(b_t)
    b_dp = warpgroup_mma_wait(0, deps=(b_dp,))
    b_dz = dz_of(b_s, b_t, b_p, b_dp, terms, o_n, ARRIVED)
    if HIDES and G_MOMENTS & ARRIVED:
        b_dz = gl.where(keys_seen(call, o_m, o_n, RIGHT), b_dz, 0.0)
    if LIFT:
        b_dz = b_dz * lift
    b_short = gl.convert_layout(b_dz.to(shared.kept.dtype), a_layout, assert_trivial=True)
    b_same = gl.convert_layout(b_short, gl.DotOperandLayout(0, b_sum.type.layout, 2), assert_trivial=True)
    b_sum = warpgroup_mma(b_same, ones.permute((1, 0)), b_sum, is_async=True)
    b_dq = warpgroup_mma(b_short, keys, b_dq, is_async=True)
    b_sum = warpgroup_mma_wait(1, deps=(b_sum,))
    b_dq = warpgroup_mma_wait(0, deps=(b_dq,))
    mbarrier.arrive(shared.empty.index(slot), count=1)
    slot, phase = next_slot(slot, phase, STAGES)
    return b_dq, b_sum, slot, phase


@gluon.jit
def mean_key(p_first, call, step_kn, dim, BE: gl.constexpr):
    """The mean of the first keys. A row of dZ adds up to what arrives at its sum: what rounding makes of that would be multiplied
    by the part that all keys share, so it is put right along their mean."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BE, BE // 8], [4, 1], [1, 0])
    o_n = gl.arange(0, MEAN_OF, gl.SliceLayout(1, layout))
    o_e = gl.arange(0, BE, gl.SliceLayout(0, layout))
    m_there = (o_n < call.keys)[:, None] & (o_e < dim)[None, :]
    b_keys = gl.load(p_first + o_n.to(gl.int64)[:, None] * step_kn + o_e[None, :], mask=m_there, other=0.0)
    return gl.sum(b_keys.to(gl.float32), 0) * (1.0 / gl.minimum(call.keys, MEAN_OF).to(gl.float32))


@gluon.jit
def compute_rows(
    dq_tiles, p_terms, p_key, p_lift, ones, shared, call, padded, scale, step_kb, step_kh, step_kn, dim,
    GROUP: gl.constexpr, BN: gl.constexpr, BE: gl.constexpr, BEV: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr,
    ARRIVED: gl.constexpr, N_TERMS: gl.constexpr, LIFT: gl.constexpr,
):  # fmt: skip
    """dQ of 64 rows. Keys are taken from the last to the first, so that those which are hidden come first."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    q_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BE, 16])
    dtype: gl.constexpr = dq_tiles.dtype
    i_row = call.i_first + GROUP * ROWS
    b_zero = gl.zeros([ROWS, BN], gl.float32, s_layout)
    b_dq = gl.zeros([ROWS, BE], gl.float32, q_layout)
    b_sum = gl.zeros(
        [ROWS, SUMS],
        gl.float32,
        gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SUMS, 16]),
    )
    o_m = i_row + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    o_q = i_row + gl.arange(0, ROWS, gl.SliceLayout(1, q_layout))
    p_rows = p_terms + (call.i_b * call.heads + call.i_h).to(gl.int64) * N_TERMS * padded
    b_lse = gl.load(p_rows + LSE * padded + o_m)[:, None]
    b_constant = gl.load(p_rows + CONSTANT * padded + o_m)[:, None]
    b_total = o_q.to(gl.float32) * 0.0
    terms = (b_constant, b_lse, b_lse, b_lse, b_lse, b_lse, b_lse)
    if N_TERMS == PLACES:
        b_total = gl.load(p_rows + TOTAL * padded + o_q)
        terms = (
            b_constant, gl.load(p_rows + ENTROPY * padded + o_m)[:, None], gl.load(p_rows + P2 * padded + o_m)[:, None],
            gl.load(p_rows + LEVEL * padded + o_m)[:, None], gl.load(p_rows + SLOPE * padded + o_m)[:, None],
            gl.load(p_rows + PEAK * padded + o_m)[:, None],
            gl.load(p_rows + ARGMAX * padded + o_m).to(gl.int32, bitcast=True)[:, None],
        )  # fmt: skip
    lift = 1.0
    if LIFT:
        lift = gl.load(p_lift)
    slot, phase = gl.to_tensor(0), gl.to_tensor(0)
    blocks = key_blocks(call, BN, RIGHT)
    open_until = call.keys
    if RIGHT:
        open_until = gl.maximum(gl.minimum(call.keys, i_row + call.right + 1), 0)
    hiding = gl.maximum(blocks - open_until // BN, 0)
    mbarrier.wait(shared.ready, 0)
    for i_block in range(hiding):
        b_dq, b_sum, slot, phase = rows_step(
            b_dq, b_sum, b_lse, terms, lift, ones, shared, call, (blocks - 1 - i_block) * BN, i_row, slot, phase, scale, b_zero,
            GROUP, BN, BE, BEV, STAGES, RIGHT, ARRIVED, LIFT, True,
        )  # fmt: skip
    for i_block in range(hiding, blocks):
        b_dq, b_sum, slot, phase = rows_step(
            b_dq, b_sum, b_lse, terms, lift, ones, shared, call, (blocks - 1 - i_block) * BN, i_row, slot, phase, scale, b_zero,
            GROUP, BN, BE, BEV, STAGES, RIGHT, ARRIVED, LIFT, False,
        )  # fmt: skip
    o_e = gl.arange(0, BE, gl.SliceLayout(0, q_layout))
    i_g = call.i_h // (call.heads // call.groups)
    p_first = p_key + call.i_b.to(gl.int64) * step_kb + i_g.to(gl.int64) * step_kh
    b_key = gl.load(p_first + o_e, mask=o_e < dim, other=0.0).to(gl.float32)
    b_shared = gl.convert_layout(mean_key(p_first, call, step_kn, dim, BE), gl.SliceLayout(0, q_layout))
    b_rounded = gl.convert_layout(gl.max(b_sum, 1), gl.SliceLayout(1, q_layout))  # all columns are the same
    b_dq = b_dq * (1.0 / lift) + (b_total - b_rounded * (1.0 / lift))[:, None] * b_shared[None, :]
    m_one = sees_one(call, o_q, RIGHT)
    b_dq = gl.where(m_one[:, None], b_total[:, None] * b_key[None, :], b_dq) * scale
    shared.kept.index(GROUP).reshape([ROWS, BE]).store(b_dq.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_tiles, [call.i_b, call.i_h, i_row, 0], shared.kept.index(GROUP))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["n_heads", "heads", "groups", "rows", "keys", "right", "tiles", "together", "padded", "dim"]
)
def rows_kernel(
    q_tiles, g_tiles, k_tiles, v_tiles, dq_tiles, p_terms, p_key, p_lift, scale, step_kb, step_kh, step_kn,
    n_heads, heads, groups, rows, keys, right, tiles, together, padded, dim,
    BN: gl.constexpr, BE: gl.constexpr, BEV: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr,
    ARRIVED: gl.constexpr, N_TERMS: gl.constexpr, LIFT: gl.constexpr,
):  # fmt: skip
    """dQ of 128 rows of one head. The last rows, which see most keys, are computed first."""
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Tiles(
        gl.allocate_shared_memory(q_tiles.dtype, [GROUPS, 1, 1, ROWS, BE], q_tiles.layout),
        gl.allocate_shared_memory(g_tiles.dtype, [GROUPS, 1, 1, ROWS, BEV], g_tiles.layout),
        gl.allocate_shared_memory(k_tiles.dtype, [STAGES, 1, 1, BN, BE], k_tiles.layout),
        gl.allocate_shared_memory(v_tiles.dtype, [STAGES, 1, 1, BN, BEV], v_tiles.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [1], barriers),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
    )
    ones = gl.allocate_shared_memory(
        k_tiles.dtype, [SUMS, BN], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    )
    ones.store(gl.full([SUMS, BN], 1.0, k_tiles.dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    begin(shared, STAGES)
    i_head, i_tile = place_of(n_heads, tiles, together)
    i_row = (tiles - 1 - i_tile) * (ROWS * GROUPS)
    call = Call(i_head // heads, i_head % heads, i_row, heads, groups, rows, keys, right)
    gl.warp_specialize(
        [
            (compute_rows, (
                dq_tiles, p_terms, p_key, p_lift, ones, shared, call, padded, scale, step_kb, step_kh, step_kn, dim,
                0, BN, BE, BEV, STAGES, RIGHT, ARRIVED, N_TERMS, LIFT,
            )),
            (compute_rows, (
                dq_tiles, p_terms, p_key, p_lift, ones, shared, call, padded, scale, step_kb, step_kh, step_kn, dim,
                1, BN, BE, BEV, STAGES, RIGHT, ARRIVED, N_TERMS, LIFT,
            )),
            (copy_keys, (q_tiles, g_tiles, k_tiles, v_tiles, shared, call, BN, STAGES, RIGHT)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def begin(shared, STAGES: gl.constexpr):
    mbarrier.init(shared.ready, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(shared.full.index(slot), count=1)
        mbarrier.init(shared.empty.index(slot), count=GROUPS)
    fence_async_shared()


# over the rows: dK and dV


@gluon.jit
def row_blocks(call, BM: gl.constexpr, RIGHT: gl.constexpr):
    """The first row that sees the program's keys, and how many tiles of rows there are from there on."""
    i_row = call.i_first * 0
    if RIGHT:
        i_row = gl.maximum(call.i_first - call.right, 0) // BM * BM
    return i_row, (gl.maximum(call.rows - i_row, 0) + BM - 1) // BM


@gluon.jit
def copy_rows(
    q_tiles, g_tiles, k_tiles, v_tiles, t_tiles, shared, call, BM: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr,
    N_TERMS: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(shared.ready, GROUPS * (k_tiles.block_type.nbytes + v_tiles.block_type.nbytes))
    for group in gl.static_range(GROUPS):
        at = call.i_first + group * ROWS
        tma.async_copy_global_to_shared(k_tiles, [call.i_b, call.i_h, at, 0], shared.ready, shared.kept.index(group))
        tma.async_copy_global_to_shared(
            v_tiles, [call.i_b, call.i_h, at, 0], shared.ready, shared.kept_too.index(group)
        )
    repeat = call.heads // call.groups
    first, blocks = row_blocks(call, BM, RIGHT)
    slot, phase = gl.to_tensor(0), gl.to_tensor(0)
    for i_repeat in range(repeat):
        i_h = call.i_h * repeat + i_repeat
        for i_block in range(blocks):
            at = first + i_block * BM
            full = shared.full.index(slot)
            mbarrier.wait(shared.empty.index(slot), phase ^ 1)
            mbarrier.expect(
                full, q_tiles.block_type.nbytes + g_tiles.block_type.nbytes + N_TERMS * t_tiles.block_type.nbytes
            )
            tma.async_copy_global_to_shared(q_tiles, [call.i_b, i_h, at, 0], full, shared.first.index(slot))
            for place in gl.static_range(N_TERMS):
                tma.async_copy_global_to_shared(
                    t_tiles, [call.i_b * call.heads + i_h, place, at], full, shared.terms.index(slot * N_TERMS + place)
                )
            tma.async_copy_global_to_shared(g_tiles, [call.i_b, i_h, at, 0], full, shared.second.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def row_term(shared, slot, PLACE: gl.constexpr, N_TERMS: gl.constexpr, BM: gl.constexpr, layout: gl.constexpr):
    return shared.terms.index(slot * N_TERMS + PLACE).reshape([1, BM]).load(layout)


@gluon.jit
def keys_step(
    b_dk, b_dv, lift, shared, call, i_row, i_key, slot, phase, scale, b_zero,
    GROUP: gl.constexpr, BM: gl.constexpr, BE: gl.constexpr, BEV: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr,
    ARRIVED: gl.constexpr, N_TERMS: gl.constexpr, LIFT: gl.constexpr, HIDES: gl.constexpr,
):  # fmt: skip
    """What the rows from i_row on add to dK and dV. HIDES, one of them may not see all keys, or may see only the first."""
    s_layout: gl.constexpr = b_zero.type.layout
    dz_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=b_dk.type.layout, k_width=2)
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=b_dv.type.layout, k_width=2)
    dtype: gl.constexpr = shared.kept.dtype
    o_n = (i_key + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout)))[:, None]
    o_m = (i_row + gl.arange(0, BM, gl.SliceLayout(0, s_layout)))[None, :]
    keys, values = shared.kept.index(GROUP).reshape([ROWS, BE]), shared.kept_too.index(GROUP).reshape([ROWS, BEV])
    queries, gs = shared.first.index(slot).reshape([BM, BE]), shared.second.index(slot).reshape([BM, BEV])
    mbarrier.wait(shared.full.index(slot), phase)
    b_s = warpgroup_mma(keys, queries.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_dp = warpgroup_mma(values, gs.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_lse = row_term(shared, slot, LSE, N_TERMS, BM, s_layout)
    b_s = warpgroup_mma_wait(1, deps=(b_s,))
    b_t = b_s * (scale * LOG2E) - b_lse
    if HIDES and RIGHT:
        b_t = gl.where(o_n <= o_m + call.right, b_t, HIDDEN)
    b_p = gl.exp2(b_t)
    b_weights = b_p
    if LIFT:
        b_weights = b_p * WEIGHT_LIFT
    b_weights = gl.convert_layout(b_weights.to(dtype), p_layout, assert_trivial=True)
    b_constant = row_term(shared, slot, CONSTANT, N_TERMS, BM, s_layout)
    b_dp = warpgroup_mma_wait(0, deps=(b_dp,))
    b_dv = warpgroup_mma(b_weights, gs, b_dv, is_async=True)
    terms = (b_constant, b_lse, b_lse, b_lse, b_lse, b_lse, b_lse)
    if N_TERMS == PLACES:
        terms = (
            b_constant, row_term(shared, slot, ENTROPY, N_TERMS, BM, s_layout),
            row_term(shared, slot, P2, N_TERMS, BM, s_layout), row_term(shared, slot, LEVEL, N_TERMS, BM, s_layout),
            row_term(shared, slot, SLOPE, N_TERMS, BM, s_layout), row_term(shared, slot, PEAK, N_TERMS, BM, s_layout),
            row_term(shared, slot, ARGMAX, N_TERMS, BM, s_layout).to(gl.int32, bitcast=True),
        )  # fmt: skip
    b_dz = dz_of(b_s, b_t, b_p, b_dp, terms, o_n, ARRIVED)
    if HIDES:
        b_total = b_lse * 0.0
        if N_TERMS == PLACES:
            b_total = row_term(shared, slot, TOTAL, N_TERMS, BM, s_layout)
        b_dz = gl.where(sees_one(call, o_m, RIGHT), b_total, b_dz)
        b_dz = gl.where(keys_seen(call, o_m, o_n, RIGHT), b_dz, 0.0)
    if LIFT:
        b_dz = b_dz * lift
    b_short = gl.convert_layout(b_dz.to(dtype), dz_layout, assert_trivial=True)
    b_dk = warpgroup_mma(b_short, queries, b_dk, is_async=True)
    b_dv = warpgroup_mma_wait(1, deps=(b_dv,))
    b_dk = warpgroup_mma_wait(0, deps=(b_dk,))
    mbarrier.arrive(shared.empty.index(slot), count=1)
    slot, phase = next_slot(slot, phase, STAGES)
    return b_dk, b_dv, slot, phase


@gluon.jit
def compute_keys(
    dk_tiles, dv_tiles, p_lift, shared, call, scale,
    GROUP: gl.constexpr, BM: gl.constexpr, BE: gl.constexpr, BEV: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr,
    ARRIVED: gl.constexpr, N_TERMS: gl.constexpr, LIFT: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys: over the rows of every head that shares them. Tiles are [keys, rows] here.

    Rows beyond the last have no weights (terms.py); keys beyond the last have gradients that are not written.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BE, 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BEV, 16])
    dtype: gl.constexpr = dk_tiles.dtype
    i_key = call.i_first + GROUP * ROWS
    b_zero = gl.zeros([ROWS, BM], gl.float32, s_layout)
    b_dk = gl.zeros([ROWS, BE], gl.float32, k_layout)
    b_dv = gl.zeros([ROWS, BEV], gl.float32, v_layout)
    lift = 1.0
    if LIFT:
        lift = gl.load(p_lift)
    first, blocks = row_blocks(call, BM, RIGHT)
    hiding = gl.where(call.keys == 1, blocks, 0)
    if RIGHT:
        hidden = (gl.maximum(i_key + ROWS - 1 - call.right - first, 0) + BM - 1) // BM
        hiding = gl.maximum(hiding, gl.minimum(hidden, blocks))
    slot, phase = gl.to_tensor(0), gl.to_tensor(0)
    mbarrier.wait(shared.ready, 0)
    for _repeat in range(call.heads // call.groups):
        for i_block in range(hiding):
            b_dk, b_dv, slot, phase = keys_step(
                b_dk, b_dv, lift, shared, call, first + i_block * BM, i_key, slot, phase, scale, b_zero,
                GROUP, BM, BE, BEV, STAGES, RIGHT, ARRIVED, N_TERMS, LIFT, True,
            )  # fmt: skip
        for i_block in range(hiding, blocks):
            b_dk, b_dv, slot, phase = keys_step(
                b_dk, b_dv, lift, shared, call, first + i_block * BM, i_key, slot, phase, scale, b_zero,
                GROUP, BM, BE, BEV, STAGES, RIGHT, ARRIVED, N_TERMS, LIFT, False,
            )  # fmt: skip
    if LIFT:
        b_dv = b_dv * (1.0 / WEIGHT_LIFT)
    shared.kept.index(GROUP).reshape([ROWS, BE]).store((b_dk * (scale / lift)).to(dtype))
    shared.kept_too.index(GROUP).reshape([ROWS, BEV]).store(b_dv.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_tiles, [call.i_b, call.i_h, i_key, 0], shared.kept.index(GROUP))
    tma.async_copy_shared_to_global(dv_tiles, [call.i_b, call.i_h, i_key, 0], shared.kept_too.index(GROUP))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_heads", "heads", "groups", "rows", "keys", "right", "tiles", "together"])
def keys_kernel(
    q_tiles, g_tiles, k_tiles, v_tiles, t_tiles, dk_tiles, dv_tiles, p_lift, scale,
    n_heads, heads, groups, rows, keys, right, tiles, together,
    BM: gl.constexpr, BE: gl.constexpr, BEV: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr,
    ARRIVED: gl.constexpr, N_TERMS: gl.constexpr, LIFT: gl.constexpr,
):  # fmt: skip
    """dK and dV of 128 keys of one key/value head. The first keys, which most rows see, are computed first."""
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Tiles(
        gl.allocate_shared_memory(k_tiles.dtype, [GROUPS, 1, 1, ROWS, BE], k_tiles.layout),
        gl.allocate_shared_memory(v_tiles.dtype, [GROUPS, 1, 1, ROWS, BEV], v_tiles.layout),
        gl.allocate_shared_memory(q_tiles.dtype, [STAGES, 1, 1, BM, BE], q_tiles.layout),
        gl.allocate_shared_memory(g_tiles.dtype, [STAGES, 1, 1, BM, BEV], g_tiles.layout),
        gl.allocate_shared_memory(t_tiles.dtype, [STAGES * N_TERMS, 1, 1, BM], t_tiles.layout),
        gl.allocate_shared_memory(gl.int64, [1], barriers),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
    )
    begin(shared, STAGES)
    i_head, i_tile = place_of(n_heads, tiles, together)
    call = Call(i_head // groups, i_head % groups, i_tile * (ROWS * GROUPS), heads, groups, rows, keys, right)
    gl.warp_specialize(
        [
            (compute_keys, (
                dk_tiles, dv_tiles, p_lift, shared, call, scale, 0, BM, BE, BEV, STAGES, RIGHT, ARRIVED, N_TERMS, LIFT,
            )),
            (compute_keys, (
                dk_tiles, dv_tiles, p_lift, shared, call, scale, 1, BM, BE, BEV, STAGES, RIGHT, ARRIVED, N_TERMS, LIFT,
            )),
            (copy_rows, (q_tiles, g_tiles, k_tiles, v_tiles, t_tiles, shared, call, BM, STAGES, RIGHT, N_TERMS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
