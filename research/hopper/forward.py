"""Forward on Hopper: one warp copies tiles, two warpgroups of 64 rows each compute, and every sign comes from the same pass.

A softmax is the same whatever is subtracted from the logits, as long as no exp overflows. The *fast pass* subtracts the
largest logit of a row's first tile from all of them, so that its loop has no maximum, nothing to rescale, and no tile that waits
for another:

    turn g:   S = Q K(g)ᵀ starts, O += P V(g-1) starts;  S is there: P = exp2(S - reference), its sums and signs;  O is there

A row whose sums show that the reference did not fit is flagged. When a program has computed its tiles, it computes the flagged
ones again by the *careful pass*, with a running maximum, which takes logits of any size, infinities and NaN.

Keys are taken from the last to the first: the tile with the hidden keys of a causal row is the first, and the loop has no mask.
Logarithms are to base 2.
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

from .parts import (
    GROUPS,
    ROWS,
    WEIGHTS,
    Shared,
    Work,
    any_flag,
    blocks_of,
    flag_of,
    give_turn,
    held,
    how_many,
    lanes,
    next_slot,
    tile_of,
    wait_for_turn,
)
from .sums import OUTPUT_LOW, begin, cut, go_on, go_on_carefully, lost_bits, nothing_yet, store_signs, visible_keys


@gluon.jit
def copy_tile(
    q_tiles, k_tiles, v_tiles, shared, work, i_head, i_row, number, slot, phase, v_head, v_row, waits,
    BN: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Copy the queries of a tile, and for each turn its keys and the values of the turn before, which may be another tile's."""
    blocks = blocks_of(work, i_row + ROWS * GROUPS, BN, RIGHT)
    i_b, i_h = i_head // work.heads, i_head % work.heads
    i_g = i_b * work.groups + i_h // (work.heads // work.groups)
    place, turn = number % 2 * GROUPS, number // 2 & 1
    for group in gl.static_range(GROUPS):
        mbarrier.wait(shared.queries_empty.index(place + group), turn ^ 1)
        mbarrier.expect(shared.queries_full.index(place + group), q_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(
            q_tiles, [i_b, i_h, i_row + group * ROWS, 0], shared.queries_full.index(place + group),
            shared.queries.index(place + group),
        )  # fmt: skip
    for i_block in range(blocks):
        i_key = (blocks - 1 - i_block) * BN
        mbarrier.wait(shared.empty.index(slot), phase ^ 1)
        if VALUES:
            mbarrier.expect(shared.full.index(slot), k_tiles.block_type.nbytes + v_tiles.block_type.nbytes, pred=waits)
            mbarrier.expect(shared.full.index(slot), k_tiles.block_type.nbytes, pred=waits == 0)
            tma.async_copy_global_to_shared(
                v_tiles, [v_head // work.groups, v_head % work.groups, v_row, 0], shared.full.index(slot),
                shared.values.index(slot), pred=waits,
            )  # fmt: skip
        else:
            mbarrier.expect(shared.full.index(slot), k_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(
            k_tiles, [i_b, i_g - i_b * work.groups, i_key, 0], shared.full.index(slot), shared.keys.index(slot)
        )
        v_head, v_row, waits = i_g, i_key, waits | True
        slot, phase = next_slot(slot, phase, STAGES)
    return slot, phase, v_head, v_row, waits


@gluon.jit
def copy_last_values(v_tiles, shared, work, slot, phase, v_head, v_row, STAGES: gl.constexpr):
    mbarrier.wait(shared.empty.index(slot), phase ^ 1)
    mbarrier.expect(shared.full.index(slot), v_tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(
        v_tiles,
        [v_head // work.groups, v_head % work.groups, v_row, 0],
        shared.full.index(slot),
        shared.values.index(slot),
    )
    return next_slot(slot, phase, STAGES)


@gluon.jit
def copy_all(
    q_tiles, k_tiles, v_tiles, shared, work, BN: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr,
    VALUES: gl.constexpr,
):  # fmt: skip
    """The warp that copies: all tiles of the program, then those that are computed again."""
    slot, phase = gl.to_tensor(0), gl.to_tensor(0)
    v_head, v_row, waits = gl.to_tensor(0), gl.to_tensor(0), work.rows < 0
    rounds = how_many(work)
    for i_round in range(rounds):
        i_head, i_row = tile_of(work, i_round)
        slot, phase, v_head, v_row, waits = copy_tile(
            q_tiles, k_tiles, v_tiles, shared, work, i_head, i_row, i_round, slot, phase, v_head, v_row, waits,
            BN, STAGES, RIGHT, VALUES,
        )  # fmt: skip
    if VALUES:
        slot, phase = copy_last_values(v_tiles, shared, work, slot, phase, v_head, v_row, STAGES)
    mbarrier.wait(shared.done, 0)
    if any_flag(work):
        number, waits = rounds, work.rows < 0
        for i_round in range(rounds):
            i_head, i_row = tile_of(work, i_round)
            if flag_of(work, i_head, i_row, ROWS * GROUPS, 1) > 0.0:
                slot, phase, v_head, v_row, waits = copy_tile(
                    q_tiles, k_tiles, v_tiles, shared, work, i_head, i_row, number, slot, phase, v_head, v_row, waits,
                    BN, STAGES, RIGHT, VALUES,
                )  # fmt: skip
                number += 1
        if VALUES:
            slot, phase = copy_last_values(v_tiles, shared, work, slot, phase, v_head, v_row, STAGES)


@gluon.jit
def first_scores(
    b_zero, shared, place, number, slot, phase, token, GROUP: gl.constexpr, BN: gl.constexpr, BE: gl.constexpr
):  # fmt: skip
    mbarrier.wait(shared.queries_full.index(place), number // 2 & 1)
    mbarrier.wait(shared.full.index(slot), phase)
    token = wait_for_turn(token, GROUP)
    b_z = warpgroup_mma(
        shared.queries.index(place).reshape([ROWS, BE]), shared.keys.index(slot).reshape([BN, BE]).permute((1, 0)), b_zero,
        use_acc=False, is_async=True,
    )  # fmt: skip
    token = give_turn(token, 1 - GROUP)
    return warpgroup_mma_wait(0, deps=(b_z,)), token


@gluon.jit
def hand_back(
    shared, work, i_row, i_own, slot, phase, token, GROUP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    RIGHT: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """How many tiles of keys a warpgroup sees. Those that only the other one sees are handed straight back."""
    blocks = blocks_of(work, i_row + ROWS * GROUPS, BN, RIGHT)
    if RIGHT and not TOGETHER:
        all_blocks = blocks
        blocks = gl.minimum(blocks, blocks_of(work, i_own + ROWS, BN, RIGHT))
        for _ in range(all_blocks - blocks):
            token = wait_for_turn(token, GROUP)
            token = give_turn(token, 1 - GROUP)
            mbarrier.wait(shared.full.index(slot), phase)
            mbarrier.arrive(shared.empty.index(slot), count=1)
            slot, phase = next_slot(slot, phase, STAGES)
    return blocks, slot, phase, token


@gluon.jit
def compute_tile(
    b_z, more, o_tiles, shared, work, signs, unit, i_head, i_row, number, slot, phase, token, b_worst, level, dim,
    GROUP: gl.constexpr, BN: gl.constexpr, BE: gl.constexpr, BEV: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr,
    EDGE: gl.constexpr, SHIFTED: gl.constexpr, TOGETHER: gl.constexpr, CAREFUL: gl.constexpr, EXACT: gl.constexpr,
    BITS: gl.constexpr, BY_TOKEN: gl.constexpr,
):  # fmt: skip
    """64 rows of a tile. TOGETHER, both warpgroups see the same tiles of keys, so that the next tile's first scores start early.

    `level` is what the careful pass writes: weights and all that is made of them, or mean and variance alone.
    """
    z_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BEV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    dtype: gl.constexpr = shared.values.dtype
    half: gl.constexpr = dtype == gl.float16
    b_zero = gl.zeros([ROWS, BN], gl.float32, z_layout)
    i_own = i_row + GROUP * ROWS
    blocks, slot, phase, token = hand_back(
        shared, work, i_row, i_own, slot, phase, token, GROUP, BN, STAGES, RIGHT, TOGETHER
    )
    place = number % 2 * GROUPS + GROUP
    queries = shared.queries.index(place).reshape([ROWS, BE])
    if not TOGETHER:
        b_z, token = first_scores(b_zero, shared, place, number, slot, phase, token, GROUP, BN, BE)
    mbarrier.arrive(shared.empty.index(slot), count=1)

    # the first tile of keys: the only one with hidden keys, and that which gives the reference
    m_there, m_seen = visible_keys(work, (blocks - 1) * BN, i_own, b_zero, BN, RIGHT, EDGE)
    if CAREFUL:
        b_ref, sums = nothing_yet(b_zero, BN)
        b_e, b_times, b_ref, sums = go_on_carefully(b_z, m_seen, b_ref, sums, unit, BN, BITS)
    else:
        b_e, b_ref, sums = begin(b_z, m_there, m_seen, unit, BN, RIGHT, EDGE, SHIFTED, BITS)
    b_rounded = sums[0] * 0.0
    if EXACT:
        b_e = cut(b_e, dtype)
        b_rounded = lanes(b_e, BN)
    b_p = gl.convert_layout(b_e.to(dtype), p_layout, assert_trivial=True)
    b_out = gl.zeros([ROWS, BEV], gl.float32, o_layout)
    slot, phase = next_slot(slot, phase, STAGES)
    mbarrier.wait(shared.full.index(slot), phase)

    for i_block in range(1, blocks):
        token = wait_for_turn(token, GROUP)
        b_z = warpgroup_mma(
            queries, shared.keys.index(slot).reshape([BN, BE]).permute((1, 0)), b_zero, use_acc=False, is_async=True
        )
        b_out = warpgroup_mma(b_p, shared.values.index(slot).reshape([BN, BEV]), b_out, is_async=True)
        token = give_turn(token, 1 - GROUP)
        b_z = warpgroup_mma_wait(1, deps=(b_z,))
        m_seen = b_zero == 0
        if SHIFTED:
            _there, m_seen = visible_keys(work, (blocks - 1 - i_block) * BN, i_own, b_zero, BN, True, False)
        if CAREFUL:
            b_e, b_times, b_ref, sums = go_on_carefully(b_z, m_seen, b_ref, sums, unit, BN, BITS)
            if EXACT:
                b_rounded = b_rounded * gl.convert_layout(
                    b_times, gl.SliceLayout(1, b_rounded.type.layout), assert_trivial=True
                )[:, None]  # fmt: skip
        else:
            b_e, sums = go_on(b_z, m_seen, b_ref, sums, unit, BN, SHIFTED, BITS)
        if EXACT:
            b_e = cut(b_e, dtype)
            b_rounded += lanes(b_e, BN)
        sums = (held(sums[0]), sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7], sums[8])
        used = slot
        slot, phase = next_slot(slot, phase, STAGES)
        mbarrier.wait(shared.full.index(slot), phase)
        b_out = warpgroup_mma_wait(0, deps=(b_out,))
        mbarrier.arrive(shared.empty.index(used), count=1)
        b_p = gl.convert_layout(b_e.to(dtype), p_layout, assert_trivial=True)
        if CAREFUL:
            b_out = b_out * gl.convert_layout(b_times, gl.SliceLayout(1, o_layout), assert_trivial=True)[:, None]
    mbarrier.arrive(shared.queries_empty.index(place), count=1)

    # the last product with values, and with it the first scores of the next tile, whose keys are in the same slot
    if TOGETHER:
        following = (number + 1) % 2 * GROUPS + GROUP
        mbarrier.wait(shared.queries_full.index(following), (number + 1) // 2 & 1, pred=more)
        token = wait_for_turn(token, GROUP)
        b_out = warpgroup_mma(b_p, shared.values.index(slot).reshape([BN, BEV]), b_out, is_async=True)
        b_z = warpgroup_mma(
            shared.queries.index(following).reshape([ROWS, BE]),
            shared.keys.index(slot).reshape([BN, BE]).permute((1, 0)), b_zero, use_acc=False, is_async=True,
        )  # fmt: skip
        token = give_turn(token, 1 - GROUP)
    else:
        b_out = warpgroup_mma(b_p, shared.values.index(slot).reshape([BN, BEV]), b_out, is_async=True)

    # while it runs
    b_l, m_empty, b_worst = store_signs(
        work, signs, unit, i_head, i_own, b_ref, sums, level, b_worst, half, RIGHT, SHIFTED, CAREFUL, BITS
    )
    if EXACT:  # the weights that multiplied the values lost digits: the output is divided by the sum of these
        b_l = gl.where(m_empty, 1.0, gl.sum(b_rounded, 1))
    b_over = gl.convert_layout(1.0 / b_l, gl.SliceLayout(1, o_layout))
    tma.store_wait(0)
    b_out = warpgroup_mma_wait(1 if TOGETHER else 0, deps=(b_out,))
    b_out = b_out * b_over[:, None]
    b_short = b_out.to(dtype)
    shared.outputs.index(GROUP).reshape([ROWS, BEV]).store(b_short)
    fence_async_shared()
    i_b, i_h = i_head // work.heads, i_head % work.heads
    writes = level >= WEIGHTS
    # a tile beyond the last row is not written
    tma.async_copy_shared_to_global(
        o_tiles, [i_b, i_h, gl.where(writes, i_own, work.rows), 0], shared.outputs.index(GROUP)
    )
    if OUTPUT_LOW & BITS:
        o_m = i_own + gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))
        o_v = gl.arange(0, BEV, gl.SliceLayout(0, o_layout))
        o_vector = i_head.to(gl.int64) * work.rows + o_m
        if BY_TOKEN:
            o_vector = (i_b.to(gl.int64) * work.rows + o_m) * work.heads + i_h
        m_low = ((o_m < work.rows) & writes)[:, None] & (o_v < dim)[None, :]
        gl.store(signs[8] + o_vector[:, None] * dim + o_v[None, :], lost_bits(b_out, b_short), mask=m_low)
    if TOGETHER:
        b_z = warpgroup_mma_wait(0, deps=(b_z,))
    return b_z, slot, phase, token, b_worst


@gluon.jit
def measure_tile(
    shared, work, signs, unit, i_head, i_row, number, slot, phase, token, b_worst, level,
    GROUP: gl.constexpr, BN: gl.constexpr, BE: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr, EDGE: gl.constexpr,
    SHIFTED: gl.constexpr, CAREFUL: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """64 rows of a tile without values: the signs alone. While one warpgroup multiplies, the other one adds up."""
    z_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    half: gl.constexpr = False
    b_zero = gl.zeros([ROWS, BN], gl.float32, z_layout)
    i_own = i_row + GROUP * ROWS
    blocks, slot, phase, token = hand_back(
        shared, work, i_row, i_own, slot, phase, token, GROUP, BN, STAGES, RIGHT, False
    )
    place = number % 2 * GROUPS + GROUP
    queries = shared.queries.index(place).reshape([ROWS, BE])
    b_z, token = first_scores(b_zero, shared, place, number, slot, phase, token, GROUP, BN, BE)
    mbarrier.arrive(shared.empty.index(slot), count=1)
    slot, phase = next_slot(slot, phase, STAGES)
    m_there, m_seen = visible_keys(work, (blocks - 1) * BN, i_own, b_zero, BN, RIGHT, EDGE)
    if CAREFUL:
        b_ref, sums = nothing_yet(b_zero, BN)
        _e, _times, b_ref, sums = go_on_carefully(b_z, m_seen, b_ref, sums, unit, BN, BITS)
    else:
        _e, b_ref, sums = begin(b_z, m_there, m_seen, unit, BN, RIGHT, EDGE, SHIFTED, BITS)
    for i_block in range(1, blocks):
        mbarrier.wait(shared.full.index(slot), phase)
        token = wait_for_turn(token, GROUP)
        b_z = warpgroup_mma(
            queries, shared.keys.index(slot).reshape([BN, BE]).permute((1, 0)), b_zero, use_acc=False, is_async=True
        )
        token = give_turn(token, 1 - GROUP)
        b_z = warpgroup_mma_wait(0, deps=(b_z,))
        mbarrier.arrive(shared.empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
        m_seen = b_zero == 0
        if SHIFTED:
            _there, m_seen = visible_keys(work, (blocks - 1 - i_block) * BN, i_own, b_zero, BN, True, False)
        if CAREFUL:
            _e, _times, b_ref, sums = go_on_carefully(b_z, m_seen, b_ref, sums, unit, BN, BITS)
        else:
            _e, sums = go_on(b_z, m_seen, b_ref, sums, unit, BN, SHIFTED, BITS)
    mbarrier.arrive(shared.queries_empty.index(place), count=1)
    _l, _empty, b_worst = store_signs(
        work, signs, unit, i_head, i_own, b_ref, sums, level, b_worst, half, RIGHT, SHIFTED, CAREFUL, BITS
    )
    return slot, phase, token, b_worst


@gluon.jit
def one_tile(
    b_z, more, o_tiles, shared, work, signs, unit, i_head, i_row, number, slot, phase, token, b_worst, level, dim,
    GROUP: gl.constexpr, BN: gl.constexpr, BE: gl.constexpr, BEV: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr,
    EDGE: gl.constexpr, SHIFTED: gl.constexpr, TOGETHER: gl.constexpr, CAREFUL: gl.constexpr, VALUES: gl.constexpr,
    EXACT: gl.constexpr, BITS: gl.constexpr, BY_TOKEN: gl.constexpr,
):  # fmt: skip
    if VALUES:
        b_z, slot, phase, token, b_worst = compute_tile(
            b_z, more, o_tiles, shared, work, signs, unit, i_head, i_row, number, slot, phase, token, b_worst, level, dim,
            GROUP, BN, BE, BEV, STAGES, RIGHT, EDGE, SHIFTED, TOGETHER, CAREFUL, EXACT, BITS, BY_TOKEN,
        )  # fmt: skip
    else:
        slot, phase, token, b_worst = measure_tile(
            shared, work, signs, unit, i_head, i_row, number, slot, phase, token, b_worst, level,
            GROUP, BN, BE, STAGES, RIGHT, EDGE, SHIFTED, CAREFUL, BITS,
        )  # fmt: skip
    return b_z, slot, phase, token, b_worst


@gluon.jit
def compute_all(
    o_tiles, shared, work, signs, unit, dim,
    GROUP: gl.constexpr, BN: gl.constexpr, BE: gl.constexpr, BEV: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr,
    EDGE: gl.constexpr, SHIFTED: gl.constexpr, TOGETHER: gl.constexpr, VALUES: gl.constexpr, EXACT: gl.constexpr,
    BITS: gl.constexpr, BY_TOKEN: gl.constexpr,
):  # fmt: skip
    """A warpgroup: all tiles of the program by the fast pass, then those with a flag by the careful one."""
    z_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    b_zero = gl.zeros([ROWS, BN], gl.float32, z_layout)
    b_worst = gl.sum(lanes(b_zero, BN), 1)
    token, slot, phase = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    rounds = how_many(work)
    all_of_it = gl.to_tensor(2.0)
    if GROUP == 1:
        token = give_turn(token, 0)
    b_z = b_zero
    if TOGETHER and VALUES:
        b_z, token = first_scores(b_zero, shared, GROUP, 0, slot, phase, token, GROUP, BN, BE)
    for i_round in range(rounds):
        i_head, i_row = tile_of(work, i_round)
        b_z, slot, phase, token, b_worst = one_tile(
            b_z, i_round + 1 < rounds, o_tiles, shared, work, signs, unit, i_head, i_row, i_round, slot, phase, token, b_worst,
            all_of_it, dim, GROUP, BN, BE, BEV, STAGES, RIGHT, EDGE, SHIFTED, TOGETHER, False, VALUES, EXACT, BITS, BY_TOKEN,
        )  # fmt: skip
    if VALUES:  # the slot of the last values
        mbarrier.arrive(shared.empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    gl.store(work.p_worst + gl.program_id(0) * GROUPS + GROUP, gl.max(b_worst, 0))
    gl.thread_barrier()
    mbarrier.arrive(shared.done, count=1)
    mbarrier.wait(shared.done, 0)
    if any_flag(work):
        number = rounds
        for i_round in range(rounds):
            i_head, i_row = tile_of(work, i_round)
            if flag_of(work, i_head, i_row, ROWS * GROUPS, 4) > 0.0:
                own = flag_of(work, i_head, i_row + GROUP * ROWS, ROWS, 4)
                b_z, slot, phase, token, b_worst = one_tile(
                    b_z, i_round < 0, o_tiles, shared, work, signs, unit, i_head, i_row, number, slot, phase, token, b_worst,
                    own, dim, GROUP, BN, BE, BEV, STAGES, RIGHT, EDGE, SHIFTED, False, True, VALUES, EXACT, BITS, BY_TOKEN,
                )  # fmt: skip
                number += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "groups", "rows", "keys", "right", "dim"])
def forward_kernel(
    q_tiles, k_tiles, v_tiles, o_tiles, p_low, p_lse_low, p_visible, p_mean, p_variance, p_peak, p_lse, p_entropy, p_sum_p2,
    p_flags, p_worst, p_table, p_counts, scale, heads, groups, rows, keys, right, dim,
    BE: gl.constexpr, BEV: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr, EDGE: gl.constexpr,
    SHIFTED: gl.constexpr, TOGETHER: gl.constexpr, VALUES: gl.constexpr, EXACT: gl.constexpr, BITS: gl.constexpr,
    BY_TOKEN: gl.constexpr,
):  # fmt: skip
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        gl.allocate_shared_memory(q_tiles.dtype, [2 * GROUPS, 1, 1, ROWS, BE], q_tiles.layout),
        gl.allocate_shared_memory(k_tiles.dtype, [STAGES, 1, 1, BN, BE], k_tiles.layout),
        gl.allocate_shared_memory(v_tiles.dtype, [STAGES if VALUES else 1, 1, 1, BN, BEV], v_tiles.layout),
        gl.allocate_shared_memory(o_tiles.dtype, [GROUPS if VALUES else 1, 1, 1, ROWS, BEV], o_tiles.layout),
        gl.allocate_shared_memory(gl.int64, [2 * GROUPS, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [2 * GROUPS, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [1], barriers),
    )
    for place in gl.static_range(2 * GROUPS):
        mbarrier.init(shared.queries_full.index(place), count=1)
        mbarrier.init(shared.queries_empty.index(place), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(shared.full.index(slot), count=1)
        mbarrier.init(shared.empty.index(slot), count=GROUPS)
    mbarrier.init(shared.done, count=GROUPS)
    fence_async_shared()
    work = Work(p_table, p_counts, p_flags, p_worst, heads, groups, rows, keys, right)
    signs = (p_lse, p_lse_low, p_visible, p_mean, p_variance, p_peak, p_entropy, p_sum_p2, p_low)
    unit = scale * 1.4426950408889634
    gl.warp_specialize(
        [
            (compute_all, (
                o_tiles, shared, work, signs, unit, dim,
                0, BN, BE, BEV, STAGES, RIGHT, EDGE, SHIFTED, TOGETHER, VALUES, EXACT, BITS, BY_TOKEN,
            )),
            (compute_all, (
                o_tiles, shared, work, signs, unit, dim,
                1, BN, BE, BEV, STAGES, RIGHT, EDGE, SHIFTED, TOGETHER, VALUES, EXACT, BITS, BY_TOKEN,
            )),
            (copy_all, (q_tiles, k_tiles, v_tiles, shared, work, BN, STAGES, RIGHT, VALUES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
