"""Which program computes which tiles of rows, in which order.

One program runs on each multiprocessor until its tiles are done. Heads are taken in groups whose keys and values fit into the
cache that all multiprocessors share, the longest tiles of a group first, and each tile goes to the program that is free first.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

ROWS_OF_TILE = 128
SHARED_CACHE = 12 << 20
"""Bytes of keys and values that a group of heads may have: a quarter of an H200's second cache was fastest."""
OUTSIDE = 1.1
"""What a tile takes besides its keys (queries, output, signs), as tiles of 128 keys: measured on an H200."""


class Shape(NamedTuple):
    """All that a schedule depends on."""

    heads: int  # of all items of the batch
    per_group: int  # query heads that share one of keys and values
    rows: int
    keys: int
    right: int | None  # row i sees keys up to i + right; None: all
    dim: int  # of keys and values together
    block: int  # keys of a tile
    programs: int


def tiles_by_program(shape: Shape) -> list[list[int]]:
    """For each program its tiles, in order; tile t is rows from `t % tiles * 128` on of head `t // tiles`."""
    tiles = -(-shape.rows // ROWS_OF_TILE)
    bytes_of_head = 2 * shape.keys * shape.dim
    together = max(1, SHARED_CACHE // bytes_of_head) * shape.per_group
    work: list[list[int]] = [[] for _ in range(min(shape.programs, shape.heads * tiles))]
    free = [(0.0, program) for program in range(len(work))]
    cost = [_blocks(shape, tile) * shape.block / 128 + OUTSIDE for tile in range(tiles)]
    for first in range(0, shape.heads, together):
        heads = range(first, min(first + together, shape.heads))
        if shape.right is None:
            order = [(head, tile) for head in heads for tile in range(tiles)]
        else:
            order = [(head, tile) for tile in reversed(range(tiles)) for head in heads]
        for head, tile in order:
            when, program = heapq.heappop(free)
            work[program].append(head * tiles + tile)
            heapq.heappush(free, (when + cost[tile], program))
    return work


def _blocks(shape: Shape, tile: int) -> int:
    """As `blocks_of` counts them."""
    seen = shape.keys
    if shape.right is not None:
        seen = min(min((tile + 1) * ROWS_OF_TILE, shape.rows) + shape.right, shape.keys)
    return max(-(-seen // shape.block), 1)


@lru_cache(maxsize=256)
def schedule(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tiles as a table, a row for each round and a column for each program, and how many each program has."""
    work = tiles_by_program(shape)
    rounds = max(map(len, work))
    table = torch.tensor(
        [[own[at] if at < len(own) else -1 for own in work] for at in range(rounds)], dtype=torch.int32
    )
    counts = torch.tensor([len(own) for own in work], dtype=torch.int32)
    return table.to(device), counts.to(device)
