"""Cuts: whether row i of every head is a part of token i: how a projection's output was cut into heads, and how they were joined.

A head's row is looked for in the projection's output: by its place in memory if both share it, otherwise by its numbers. With
``view(B, H, L, E)`` in place of ``view(B, L, H, E).transpose(1, 2)`` the rows of a head come from other tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attach.storages import address


@dataclass(frozen=True)
class Cut:
    """A row of a head, and the token whose numbers it holds: the same if ``right``."""

    head: int
    row: int
    token: int
    turned: bool = False  # whether it is a key, and a reshape made (…, E, L) of (…, L, E)

    @property
    def right(self) -> bool:
        return self.row == self.token


def split(heads: Tensor, sources: Iterable[Tensor]) -> Cut | None:
    """How heads, (B, H, L, E) or (B·H, L, E), were cut from some (B, L, D), by a wrong row if there is one; None: not found."""
    if heads.dim() not in (3, 4) or heads.is_meta:
        return None
    length, width = heads.shape[-2:]
    cut = None
    for source in sources:
        if source.dim() != 3 or source.shape[1] != length or source.shape[2] <= width or source.dtype != heads.dtype:
            continue
        batch = source.shape[0]
        if heads.shape[0] % batch or (heads.dim() == 4 and heads.shape[0] != batch):
            continue
        each = heads if heads.dim() == 4 else heads.unflatten(0, (batch, -1))
        for head, row in _places(each.shape[1], length):
            token = _token(each, head, row, source)
            if token is not None:
                cut = Cut(head, row, token)
                if not cut.right:
                    return cut
        if cut is not None:
            return cut
    return None


def turned(keys: Tensor, sources: Iterable[Tensor]) -> Cut | None:
    """A column of keys, (B, H, E, L) or (B·H, E, L), that a reshape made; None: a transpose did, or it is not found.

    The last key is looked for in the projection's output: in its own row, or where a reshape of (L, E) to (E, L) finds it.
    """
    if keys.dim() not in (3, 4) or keys.is_meta or min(keys.shape) == 0:
        return None
    each, length = keys.shape[-2:]
    row = length - 1
    places = torch.arange(each, device=keys.device) * length + row
    for source in sources:
        if source.dim() != 3 or source.shape[1] != length or source.shape[2] % each or source.dtype != keys.dtype:
            continue
        numbers = keys.reshape(-1, each, length)[0, :, row]
        parts = source[0].unflatten(-1, (-1, each))
        if bool((parts[row] == numbers).all(-1).any()):
            return None
        moved = parts[places // each, :, places % each]  # (E, parts)
        if each > 1 and bool((moved == numbers[:, None]).all(0).any()):
            return Cut(0, row, row // each, turned=True)
        if each > 1 and torch.equal(source[0].flatten()[places], numbers):  # heads were cut by the same reshape
            return Cut(0, row, row // source.shape[2], turned=True)
    return None


def joined_rows(joined: Tensor, heads: Tensor) -> Cut | None:
    """How the heads' outputs, (B, H, L, E) or (B·H, L, E), became the rows of (B, L, D); None: in neither way."""
    if joined.dim() != 3 or heads.dim() not in (3, 4) or heads.shape[-2] != joined.shape[1]:
        return None
    batch, length, whole = joined.shape
    width = heads.shape[-1]
    if heads.numel() != joined.numel() or whole <= width or joined.dtype != heads.dtype or heads.shape[0] % batch:
        return None
    if heads.dim() == 4 and heads.shape[0] != batch:
        return None
    each = heads if heads.dim() == 4 else heads.unflatten(0, (batch, -1))
    cut = None
    for part, row in _places(each.shape[1], length):
        numbers = joined[0, row, part * width : (part + 1) * width]
        head, token = divmod(row * whole // width + part, length)  # where a reshape without a transpose finds them
        if torch.equal(each[0, part, row], numbers):
            cut = Cut(part, row, row)
        elif torch.equal(each[0, head, token], numbers):
            return Cut(head, row, token)
    return cut


def _places(heads: int, length: int) -> list[tuple[int, int]]:
    """Heads and rows to look at: not the first of both, which any cut leaves in its place."""
    return list(dict.fromkeys([(heads - 1, 0), (heads // 2, length // 2), (0, length - 1)]))


def _token(heads: Tensor, head: int, row: int, source: Tensor) -> int | None:
    """The token of ``source`` (B, L, D) that holds a row of a head: its own, or where a view without a transpose finds it."""
    length, width = source.shape[1:]
    if address(heads) == address(source) and source.is_contiguous():
        offset = heads[0, head, row].storage_offset() - source.storage_offset()
        return int(offset // width) if 0 <= offset < length * width else None
    numbers, each = heads[0, head, row], heads.shape[-1]
    if width % each:
        return None
    parts = source[0].unflatten(-1, (-1, each))
    if bool((parts[row] == numbers).all(-1).any()):
        return row
    for whole in range(width // (heads.shape[1] * each)):  # q, k and v of one projection
        token, part = divmod((whole * heads.shape[1] + head) * length + row, parts.shape[1])
        if token < length and torch.equal(parts[token, part], numbers) and bool((numbers != numbers[:1]).any()):
            return token
    return None
