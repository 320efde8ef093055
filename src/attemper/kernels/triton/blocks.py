"""The size of tiles: what was fastest on an H200, by head dim, dtype and direction; before Hopper, what fits without spilling."""

from __future__ import annotations

import torch

Block = dict[str, int]


def forward_block(dim: int, dtype: torch.dtype, values: bool, fast: bool, signs: bool, hopper: bool) -> Block:
    if dtype == torch.float32:
        return _block(32, 32, 4, 1)
    if dim > 128:
        return _block(64, 32, 4, 2)
    if not hopper:
        return _block(64, 64, 4, 2) if dim <= 64 else _block(64, 32, 4, 2)
    if not fast:
        return _block(64, 64, 4, 3)
    if not values:
        return _block(64, 128, 4, 2, 168) if dim <= 64 else _block(64, 64, 4, 3, 128)
    if dim <= 64:
        return _block(64, 128 if signs else 64, 4, 3)
    return _block(64, 64, 4, 2)


def decode_block(dim: int, dtype: torch.dtype, shared: int) -> Block:
    """`shared` is how many rows read one head of keys."""
    rows = max(16, 1 << (shared - 1).bit_length())
    return _block(rows, 64 if dtype == torch.float32 or dim > 128 else 128, 4, 1 if dtype == torch.float32 else 3)


def rows_block(dim: int, dtype: torch.dtype, hopper: bool) -> Block:
    """Of the backward over keys, for dq."""
    if dtype == torch.float32 or dim > 128:
        return _block(32, 32, 4, 1)
    if not hopper:
        return _block(64, 32, 4, 2)
    return _block(64, 64, 4, 3) if dim <= 64 else _block(128, 64, 8, 3)


def keys_block(dim: int, dtype: torch.dtype, hopper: bool) -> Block:
    """Of the backward over rows, for dk and dv."""
    if dtype == torch.float32 or dim > 128:
        return _block(32, 32, 4, 1)
    if not hopper:
        return _block(32, 64, 4, 2)
    return _block(64, 64, 4, 2) if dim <= 64 else _block(32, 64, 4, 3)


def _block(rows: int, keys: int, warps: int, stages: int, registers: int = 0) -> Block:
    """`registers` is the most that a thread may use, so that more programs run at a time; 0 leaves it to the compiler."""
    block = {"BM": rows, "BN": keys, "num_warps": warps, "num_stages": stages}
    return block | ({"maxnreg": registers} if registers else {})
