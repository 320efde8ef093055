"""Σ k over the first keys, tile by tile: the sum of a row's scores is its query times this sum, which saves an addition for each score."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tile import load_rows

SUMMED = 64
"""The keys of one tile of these sums; the tiles of the forward pass are multiples of it."""
WORTH = 2048
"""From so many rows and keys on, the two launches pay for themselves."""


@triton.jit(do_not_specialize=["groups", "keys", "tiles"])
def key_sums_kernel(
    p_key, p_sums, step_kb, step_kh, step_kn, groups, keys, tiles,
    E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i_t, i_pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    p_head = p_key + i_pair // groups * step_kb + i_pair % groups * step_kh
    b_k = load_rows(p_head, i_t * BN, step_kn, keys, E, BE, BN, True)
    tl.store(p_sums + (i_pair * tiles + i_t) * BE + tl.arange(0, BE), tl.sum(b_k.to(tl.float32), 0))


def key_sums(key: Tensor, dim: int) -> Tensor:
    """(B, G, tiles, dim), float32: Σ k over the first tile, the first two, and so on. Only whole tiles are read."""
    batch, groups, keys, _ = key.shape
    tiles = triton.cdiv(keys, SUMMED)
    sums = torch.empty((batch, groups, tiles, dim), dtype=torch.float32, device=key.device)
    key_sums_kernel[(tiles, batch * groups)](
        key, sums, *key.stride()[:3], groups, keys, tiles, E=key.shape[3], BE=dim, BN=SUMMED
    )
    return sums.cumsum(2)
