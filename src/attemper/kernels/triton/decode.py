"""Few rows on many keys: the keys are split over programs, so that they fill the card, and a second launch joins the parts.

A program takes a chunk of the keys of one key/value head, and the rows of every query head that shares it: the cache is
read once. Attention over a split is attention over the whole by the formulas of `attemper.merge`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Problem, Results, is_by_token
from .arguments import (
    cdiv,
    complete,
    decode_block,
    forward_constants,
    inputs,
    keeps_weights,
    next_power_of_2,
    numbers,
    options_of,
    steps,
    tile_of,
    widest,
    written,
)
from .launch import ALIGNED, Block, Launch, across, plans_of, room, run
from .online import online
from .store import entropy_of, moments, store_output, store_signs, vector_index
from .tile import ADDED, LOG2E, NUMBERS, program, with_positive_scale

N_PARTS = 12
"""Numbers that a part has for each row, besides its sum of values."""


def decode_key(problem: Problem, sign_bits: int) -> tuple[Any, ...]:
    """All that the launches of a decode are compiled for. The number of keys, which grows from call to call, is not among it."""
    query, key, value, mask, gain = problem[:5]
    strides = [*query.stride()[:3], *key.stride()[:3], *(() if value is None else value.stride()[:3])]
    if mask is not None or gain is not None:
        strides = [*steps(problem)]
    bounds = (problem.left is None, problem.right is None, problem.softcap is None)  # their values are arguments
    return (
        *(query.get_device(), query.dtype, query.shape[1:], key.shape[1], sign_bits, bounds),
        *(is_by_token(query), keeps_weights(problem, sign_bits), None if value is None else value.shape[3]),
        *[None if tensor is None else (tensor.dtype, tensor.data_ptr() % ALIGNED) for tensor in problem[:5]],
        *[step % 16 if 1 != step < 1 << 31 else (step % 16, step == 1) for step in strides],
    )


class Split(NamedTuple):
    """How the keys of a call are split over programs, and the memory of their parts."""

    block: Block
    chunk: int  # keys of a program
    programs: int
    parts: Tensor
    sums: Tensor

    @classmethod
    def of(cls, problem: Problem, n_rows: int, splits: int) -> Split:
        query, key, value = problem.query, problem.key, problem.value
        shared, keys = query.shape[1] // key.shape[1] * query.shape[2], key.shape[2]
        block = decode_block(widest(problem), query.dtype, shared, room(query.device))
        chunk = cdiv(cdiv(keys, splits), block["BN"]) * block["BN"]
        programs = cdiv(keys, chunk)
        parts = torch.empty((N_PARTS, programs, n_rows), dtype=torch.float32, device=query.device)
        sums = parts
        if value is not None:
            sums = torch.empty((programs, n_rows, value.shape[3]), dtype=torch.float32, device=query.device)
        return cls(block, chunk, programs, parts, sums)


def launch_decode(problem: Problem, results: Results, sign_bits: int, splits: int) -> None:
    """Fields of `results` may be None."""
    query, n_rows = problem.query, results.lse.numel()
    split = Split.of(problem, n_rows, splits)
    plans = plans_of(decode_key(problem, sign_bits))

    def launch(which: int) -> Launch:
        return decode_launches(problem, complete(results, query), sign_bits, split)[which]

    # numbers change from call to call too
    tensors = (*inputs(problem), split.parts, split.sums)
    changing = (*steps(problem), *numbers(problem), split.chunk, n_rows)
    grid = (split.programs, *across(query.shape[0] * problem.key.shape[1]))
    run(plans, "split", tensors, lambda: launch(0), changing, grid)
    tensors, changing = (split.parts, split.sums, *results), (*query.shape[1:3], n_rows, split.programs)
    run(plans, next_power_of_2(split.programs), tensors, lambda: launch(1), changing, (n_rows, 1, 1))


def decode_launches(problem: Problem, results: Results, sign_bits: int, split: Split) -> tuple[Launch, Launch]:
    """The launch over parts of the keys, and the one that joins them."""
    query, n_rows = problem.query, results.lse.numel()
    sign_bits = written(sign_bits, results)
    block, chunk, programs, parts, sums = split
    constants = forward_constants(problem, sign_bits) | tile_of(block)
    args = (*inputs(problem), parts, sums, *steps(problem), *numbers(problem), chunk, n_rows)
    grid = (programs, query.shape[0] * problem.key.shape[1])
    over_parts = Launch(decode_kernel, grid, args, constants, options_of(block))
    joined = {name: constants[name] for name in ("EV", "BEV", "VALUES", "BITS")} | {"SPLITS": next_power_of_2(programs)}
    joined["BY_TOKEN"] = is_by_token(query)
    args = (parts, sums, *results, *query.shape[1:3], n_rows, programs)
    return over_parts, Launch(join_kernel, (n_rows, 1), args, joined, {"num_warps": 4})


@triton.jit(do_not_specialize=[*NUMBERS, "chunk", "n_rows"])
def decode_kernel(
    p_query, p_key, p_value, p_mask, p_gain, p_parts, p_sums,
    step_qb, step_qh, step_qm, step_kb, step_kh, step_kn, step_vb, step_vh, step_vn,
    step_mb, step_mh, step_mm, step_mn, step_gb, step_gh, step_gm,
    scale, softcap, dropout, seed, heads, groups, rows, keys, left, right, chunk, n_rows,
    E: tl.constexpr, EV: tl.constexpr, BE: tl.constexpr, BEV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASK: tl.constexpr, GAIN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
    VALUES: tl.constexpr, EXACT: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    i_split, i_pair, _ = program()
    i_b, i_g = i_pair // groups, i_pair % groups
    repeat = heads // groups
    o_p = tl.arange(0, BM)
    m_m = o_p < repeat * rows
    o_h = (i_g * repeat + o_p // rows).to(tl.int64)
    o_m = tl.where(m_m, o_p % rows, rows)  # a row beyond the last sees nothing
    o_m64 = o_m.to(tl.int64)
    o_e = tl.arange(0, BE)

    p_q = p_query + i_b * step_qb + (o_h * step_qh + o_m64 * step_qm)[:, None] + o_e[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & (o_e[None, :] < E), other=0.0)
    b_scale = tl.full([BM], 1.0, tl.float32) * scale
    if GAIN:
        b_scale *= tl.load(p_gain + i_b * step_gb + o_h * step_gh + o_m64 * step_gm, mask=m_m, other=0.0)
    b_base = tl.full([BM], 1.0, tl.float32)
    if not (CAP or MASK == ADDED):
        b_q, b_base = with_positive_scale(b_q, b_scale)
    p_m = p_mask + i_b * step_mb + (o_h * step_mh + o_m64 * step_mm)[:, None]
    first = i_split * chunk
    stop = tl.minimum(first + chunk, keys)
    if LEFT:
        first = tl.maximum(first, tl.maximum(-left, 0) // BN * BN)
    if RIGHT:
        stop = tl.minimum(stop, rows + right)
    m_empty, b_top, b_top_low, b_l, b_a, b_s, b_rounded, b_out, b_peak, b_arg, b_count, b_met, b_mean, b_squares = online(
        b_q, b_scale, b_base, p_key + i_b * step_kb + i_g * step_kh, p_value + i_b * step_vb + i_g * step_vh, p_m,
        step_kn, step_vn, step_mm * 0, step_mn, o_m, first, stop, i_pair, rows, tl.minimum(stop, keys), left, right,
        softcap, dropout, seed, E, EV, BE, BEV, BM, BN, MASK, LEFT, RIGHT, CAP, DROP, VALUES, EXACT, BITS,
    )  # fmt: skip

    o_row = (i_b * heads + o_h) * rows + o_m
    o_part = i_split.to(tl.int64) * n_rows + o_row
    step = tl.cdiv(keys, chunk).to(tl.int64) * n_rows
    # where a part sees nothing, its weight is 0 whatever its reference: the lowest there is
    tl.store(p_parts + o_part, tl.where(m_empty, float("-inf"), b_top), mask=m_m)
    tl.store(p_parts + step + o_part, b_top_low, mask=m_m)
    tl.store(p_parts + 2 * step + o_part, tl.where(m_empty, 0.0, b_l), mask=m_m)
    tl.store(p_parts + 3 * step + o_part, b_a, mask=m_m)
    tl.store(p_parts + 4 * step + o_part, b_s, mask=m_m)
    tl.store(p_parts + 5 * step + o_part, tl.where(m_empty, 0.0, b_rounded), mask=m_m)
    tl.store(p_parts + 6 * step + o_part, b_peak, mask=m_m)
    tl.store(p_parts + 7 * step + o_part, b_arg.to(tl.float32, bitcast=True), mask=m_m)
    tl.store(p_parts + 8 * step + o_part, b_count.to(tl.float32, bitcast=True), mask=m_m)
    tl.store(p_parts + 9 * step + o_part, b_mean, mask=m_m)
    tl.store(p_parts + 10 * step + o_part, b_squares, mask=m_m)
    tl.store(p_parts + 11 * step + o_part, b_met, mask=m_m)
    if VALUES:
        o_v = tl.arange(0, BEV)
        tl.store(p_sums + o_part[:, None] * EV + o_v[None, :], b_out, mask=m_m[:, None] & (o_v[None, :] < EV))


@triton.jit(do_not_specialize=["heads", "rows", "n_rows", "splits"])
def join_kernel(
    p_parts, p_sums,
    p_output, p_low, p_argmax, p_lse_low, p_visible, p_mean, p_variance, p_peak, p_lse, p_entropy, p_sum_p2,
    heads, rows, n_rows, splits,
    EV: tl.constexpr, BEV: tl.constexpr, SPLITS: tl.constexpr, VALUES: tl.constexpr, BITS: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """One row from its parts."""
    i_row = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, SPLITS)
    m_s = o_s < splits
    o_part = o_s.to(tl.int64) * n_rows + i_row
    step = splits.to(tl.int64) * n_rows
    b_top = tl.load(p_parts + o_part, mask=m_s, other=float("-inf"))
    b_low = tl.load(p_parts + step + o_part, mask=m_s, other=0.0)
    b_l = tl.load(p_parts + 2 * step + o_part, mask=m_s, other=0.0)
    b_a = tl.load(p_parts + 3 * step + o_part, mask=m_s, other=0.0)
    b_s = tl.load(p_parts + 4 * step + o_part, mask=m_s, other=0.0)
    b_rounded = tl.load(p_parts + 5 * step + o_part, mask=m_s, other=0.0)
    b_peak = tl.load(p_parts + 6 * step + o_part, mask=m_s, other=float("-inf"))
    b_arg = tl.load(p_parts + 7 * step + o_part, mask=m_s, other=0.0).to(tl.int32, bitcast=True)
    b_count = tl.load(p_parts + 8 * step + o_part, mask=m_s, other=0.0).to(tl.int32, bitcast=True)
    b_mean = tl.load(p_parts + 9 * step + o_part, mask=m_s, other=0.0)
    b_squares = tl.load(p_parts + 10 * step + o_part, mask=m_s, other=0.0)
    b_met = tl.load(p_parts + 11 * step + o_part, mask=m_s, other=0.0)

    top = tl.max(b_top, 0)
    b_d = tl.where(b_top == float("-inf"), 0.0, b_top - top) * LOG2E
    b_c = tl.where(b_top == float("-inf"), 0.0, tl.math.exp2(b_d))
    empty = top == float("-inf")
    top_low = tl.max(tl.where(b_top == top, b_low, float("-inf")), 0)
    l = tl.where(empty, 1.0, tl.sum(b_c * b_l, 0))
    a = tl.sum(b_c * (b_a + b_d * b_l), 0)
    s = tl.sum(b_c * b_c * b_s, 0)
    rounded = tl.where(empty, 1.0, tl.sum(b_c * b_rounded, 0))
    # NaN of any part is the row's
    peak = tl.where(tl.sum((b_peak != b_peak).to(tl.int32), 0) > 0, float("nan"), tl.max(b_peak, 0))
    arg = tl.min(tl.where((b_peak == tl.max(b_peak, 0)) & (b_arg >= 0), b_arg, 2147483647), 0)
    arg = tl.where(arg == 2147483647, -1, arg)
    count = tl.sum(b_count, 0)
    met = tl.sum(b_met, 0)
    mean = tl.sum(b_mean * b_met, 0) / tl.maximum(met, 1.0)
    squares = tl.sum(b_squares + b_met * (b_mean - mean) * (b_mean - mean), 0)
    mean, variance = moments(count, met, mean, squares)

    one, none = tl.zeros([1], tl.float32), tl.zeros([1], tl.int32)
    o_row = i_row + tl.zeros([1], tl.int64)
    m_row = o_row >= 0
    store_signs(
        o_row, m_row, m_row, m_row, one + top == float("-inf"), one + tl.where(empty, 0.0, top),
        one + tl.where(empty, 0.0, top_low), one + l, one + s,
        entropy_of(one + l, one + a), one + peak, none + arg, none + count, one + mean, one + variance,
        p_argmax, p_lse_low, p_visible, p_mean, p_variance, p_peak, p_lse, p_entropy, p_sum_p2, BITS,
    )  # fmt: skip
    if VALUES:
        o_v = tl.arange(0, BEV)
        m_v = m_s[:, None] & (o_v[None, :] < EV)
        b_v = tl.load(p_sums + o_part[:, None] * EV + o_v[None, :], mask=m_v, other=0.0)
        b_out = tl.sum(tl.where(b_c[:, None] == 0.0, 0.0, b_v * b_c[:, None]), 0)
        o_out = vector_index(o_row // rows // heads, o_row // rows % heads, o_row % rows, heads, rows, BY_TOKEN)
        store_output(o_out, m_row, b_out[None, :], one + rounded, p_output, p_low, EV, BEV, BITS)
