"""Launches of the forward and of the backward: tiles, schedule, what they are compiled for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.kernels.contract import Problem, Results, is_by_token

from .schedule import Shape, schedule


class Block(NamedTuple):
    """Keys of a tile, and tiles of keys and of values that a program holds."""

    keys: int
    stages: int


def problem_of(query: Tensor, key: Tensor, value: Tensor | None, right: int | None) -> Problem:
    """A plain call: row i sees keys up to i + right, or all."""
    nothing: Any = None
    rest = {"mask": None, "gain": None, "weight": None, "sink": None, "documents": None, "seed": nothing}
    scale = query.shape[3] ** -0.5
    return Problem(query, key, value, **rest, scale=scale, left=None, right=right, softcap=None, dropout=0.0)


def padded(dim: int) -> int:
    return 64 if dim <= 64 else 128


def value_of(problem: Problem) -> Tensor:
    """The values; without any the keys, which are not read as values."""
    return problem.key if problem.value is None else problem.value


def block_of(problem: Problem) -> Block:
    """Of the shape alone: asking for signs changes no bit of the output."""
    wide = max(padded(problem.query.shape[3]), padded(value_of(problem).shape[3])) > 64
    keys = 64 if problem.right is not None and problem.key.shape[2] <= 2048 else 128  # narrow tiles hide fewer keys
    if problem.value is None:
        return Block(keys, (4 if wide else 8) * 128 // keys)
    return Block(keys, {(128, True): 2, (128, False): 4, (64, True): 4, (64, False): 6}[keys, wide])


def refusal(problem: Problem) -> str | None:
    """Why this problem is not for this kernel; None if it is."""
    query, key, _, mask, gain = problem[:5]
    if query.dtype not in (torch.bfloat16, torch.float16):
        return "serves bfloat16 and float16"
    if max(query.shape[3], value_of(problem).shape[3]) > 128:
        return "serves head dims up to 128"
    if (
        mask is not None
        or gain is not None
        or problem.left is not None
        or problem.softcap is not None
        or problem.dropout
    ):
        return "has no mask, learned scale, window, softcap or dropout"
    if not 0 < problem.scale < 1e30:
        return "needs a positive scale"
    if not all(_copied(tensor) for tensor in (query, key, value_of(problem))):
        return "needs vectors that begin at multiples of 16 bytes"
    return None


def _copied(tensor: Tensor) -> bool:
    strides = [step * tensor.element_size() % 16 for step in tensor.stride()[:3]]
    return tensor.stride(3) == 1 and not any(strides) and all(tensor.stride()[:3]) and tensor.data_ptr() % 16 == 0


def forward_arguments(
    problem: Problem, results: Results, sign_bits: int, programs: int, tiles: Callable[[Tensor, int, int], Any],
    exact: bool = True, block: Block | None = None,
) -> tuple[int, list[Any], dict[str, Any]]:  # fmt: skip
    """How many programs, and the arguments and constants of `forward_kernel`; `tiles` makes a descriptor."""
    query, key, value = problem.query, problem.key, value_of(problem)
    batch, heads, rows, dim = query.shape
    groups, keys = key.shape[1], key.shape[2]
    block = block_of(problem) if block is None else block
    right = problem.right
    shape = Shape(batch * heads, heads // groups, rows, keys, right, 2 * padded(dim), block.keys, programs)
    table, counts = schedule(shape, query.device)
    flags = torch.empty(batch * heads * rows, dtype=torch.float32, device=query.device)
    worst = torch.empty(2 * len(counts), dtype=torch.float32, device=query.device)
    wide, wide_value = padded(dim), padded(value.shape[3])
    descriptors = (tiles(query, 64, wide), tiles(key, block.keys, wide), tiles(value, block.keys, wide_value))
    signs = (results.lse_low, results.visible, results.mean, results.variance, results.peak, results.lse)
    output = query if problem.value is None else results.output  # not written without values
    args = [*descriptors, tiles(output, 64, wide_value), results.output_low, *signs, results.entropy, results.sum_p2]
    args += [flags, worst, table, counts, problem.scale, heads, groups, rows, keys, right or 0, value.shape[3]]
    together = right is None or (right % block.keys == 0 and block.keys == 128)
    constants = {
        "BE": wide, "BEV": wide_value, "BN": block.keys, "STAGES": block.stages, "RIGHT": right is not None,
        "EDGE": keys % block.keys != 0, "SHIFTED": right is not None and right % 64 != 0,
        "TOGETHER": together, "VALUES": problem.value is not None, "EXACT": exact, "BITS": sign_bits,
        "BY_TOKEN": is_by_token(query),
    }  # fmt: skip
    return len(counts), args, constants


class BackwardBlock(NamedTuple):
    """Keys, or rows, that a program takes at a time, and how many times it holds them."""

    keys: int
    key_stages: int
    rows: int
    row_stages: int


NEAR = 16 << 20
"""Bytes of vectors that heads computed together may have: a third of an H200's second cache."""


def backward_block(problem: Problem, signs: bool) -> BackwardBlock:
    """`signs`: gradients of signs arrive, whose numbers of rows leave registers for fewer rows."""
    if max(padded(problem.query.shape[3]), padded(value_of(problem).shape[3])) > 64:
        return BackwardBlock(64, 4, 32 if signs else 64, 4 if signs else 3)
    return BackwardBlock(128, 4, 64, 4)


def backward_arguments(
    problem: Problem, g: Tensor, terms: Tensor, gradients: tuple[Tensor, Tensor, Tensor], arrived: int, lift: Tensor | None,
    tiles: Callable[[Tensor, int, int], Any], row_tiles: Callable[[Tensor, int], Any], block: BackwardBlock | None = None,
) -> tuple[tuple[int, list[Any], dict[str, Any]], tuple[int, list[Any], dict[str, Any]]]:  # fmt: skip
    """Programs, arguments and constants of `rows_kernel` and of `keys_kernel`; `terms` as `packed` gives them."""
    query, key, value = problem.query, problem.key, value_of(problem)
    dq, dk, dv = gradients
    batch, heads, rows, dim = query.shape
    groups, keys = key.shape[1], key.shape[2]
    block = backward_block(problem, terms.shape[1] > 2) if block is None else block
    wide, wide_value, right = padded(dim), padded(value.shape[3]), problem.right
    scales = terms if lift is None else lift  # not read without a lift
    together = max(1, NEAR // (2 * keys * (wide + wide_value))) * (heads // groups)
    all_heads, all_groups = batch * heads, batch * groups
    row_programs, key_programs = -(-rows // 128), -(-keys // 128)
    near = max(1, NEAR // (2 * rows * (heads // groups) * (wide + wide_value)))
    shape = (heads, groups, rows, keys, right or 0)
    constants = {"BE": wide, "BEV": wide_value, "RIGHT": right is not None, "ARRIVED": arrived}
    constants |= {"N_TERMS": terms.shape[1], "LIFT": lift is not None}
    over_keys = [tiles(query, 64, wide), tiles(g, 64, wide_value), tiles(key, block.keys, wide)]
    over_keys += [tiles(value, block.keys, wide_value), tiles(dq, 64, wide), terms, key, scales, problem.scale]
    over_keys += [*key.stride()[:3], all_heads, *shape, row_programs, together, terms.shape[2], dim]
    over_rows = [tiles(query, block.rows, wide), tiles(g, block.rows, wide_value), tiles(key, 64, wide)]
    over_rows += [
        tiles(value, 64, wide_value),
        row_tiles(terms, block.rows),
        tiles(dk, 64, wide),
        tiles(dv, 64, wide_value),
    ]
    over_rows += [scales if lift is None else scales[1:], problem.scale, all_groups, *shape, key_programs, near]
    return (
        (row_programs * all_heads, over_keys, constants | {"BN": block.keys, "STAGES": block.key_stages}),
        (key_programs * all_groups, over_rows, constants | {"BM": block.rows, "STAGES": block.row_stages}),
    )
