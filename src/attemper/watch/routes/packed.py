"""Packed: the documents of a packed call, as offsets or positions that restart show them, and a mask that keeps them apart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..attach.measuring import CAPTURED, is_captured
from ..attach.modes import without_autograd_and_modes
from ..attach.running import Frame, running
from ..call import AttentionCall, Documents, Facts, Span
from .handwritten.op_names import FLEX
from .kind import kind_of

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The options of the Hugging Face interface that say where documents begin; transformers reads them if it has all four."""

BY_MASK = ("eager", "sdpa", FLEX)  # functions of transformers that read none of these: their masks keep documents apart

OTHER_KEYS = "a window over keys that are not the queries"

Spans = tuple[Span, ...]


def spans_of(
    implementation: str, mask: object, options: dict[str, Any], query: Tensor, key: Tensor
) -> Spans | str | None:
    """The documents that a function of the interface keeps apart, None if it is given none; or why they are not known.

    This is what transformers' own flash attention does: a mask comes first, then offsets, then positions that restart in a batch
    of one. Functions of other names may do otherwise.
    """
    if implementation in BY_MASK:
        return None
    given = [name for name in LENGTHS if options.get(name) is not None]
    flash = "flash" in implementation  # transformers tells them by this too
    if mask is not None:
        return f"both a mask and {given[0]}" if given and not flash else None
    totals = tuple(tensor.shape[0] * tensor.shape[2] for tensor in (query, key))
    if given:
        if len(given) < len(LENGTHS):
            return f"{given[0]} but not all of {', '.join(LENGTHS)}"
        return spans(options[LENGTHS[0]], options[LENGTHS[1]], totals)
    positions = options.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return None
    if query.shape[0] != 1:
        begun = None if _apart_in_batches_of_one() else _once(positions, _beginnings)
        return "position_ids that restart in a batch of several" if isinstance(begun, tuple) else begun
    begun = _once(positions, _beginnings)
    if not flash and isinstance(begun, tuple):
        return "position_ids that restart"
    return _cut((begun, begun), totals) if isinstance(begun, tuple) else begun


def _apart_in_batches_of_one() -> bool:
    """Whether transformers finds documents by positions in a batch of one alone: before 4.56, in any batch."""
    return hasattr(sys.modules.get("transformers.modeling_flash_attention_utils"), "_is_packed_sequence")


def spans(
    rows: Tensor, keys: Tensor, totals: Sequence[int], used: tuple[Tensor | None, Tensor | None] = (None, None)
) -> Spans | str:
    """The documents between offsets; `used` is how many queries and keys of each there are, if not all. A str: what is wrong."""
    read: list[Any] = [None if tensor is None else _once(tensor, _numbers) for tensor in (rows, keys, *used)]
    wrong = next((one for one in read if isinstance(one, str)), None)
    return _cut((read[0], read[1]), totals, (read[2], read[3])) if wrong is None else wrong


Numbers = tuple[int, ...]


def _cut(
    offsets: tuple[Numbers, Numbers],
    totals: Sequence[int],
    used: tuple[Numbers | None, Numbers | None] = (None, None),
) -> Spans | str:
    ranges = []
    for ends, total, counts in zip(offsets, totals, used, strict=True):
        if len(ends) != len(offsets[0]) or list(ends) != sorted(ends) or min(ends, default=-1) < 0 or ends[-1] > total:
            return f"offsets that do not fit {total} tokens"
        found = list(pairwise(ends))
        ranges.append(found if counts is None else [(a, a + n) for (a, _), n in zip(found, counts, strict=True)])
    return tuple((*row, *key) for row, key in zip(*ranges, strict=True) if row[0] < row[1] and key[0] < key[1])


def packed_call(
    route: str,
    frames: tuple[Frame, ...],
    tensors: tuple[Tensor, Tensor],
    found: Spans,
    flat: Callable[[Tensor], Tensor],
    *,
    scale: float | None,
    causal: bool,
    window: int | None = None,
    dropout: float = 0.0,
) -> AttentionCall | str:
    """A call on q and k, which ``flat`` brings to (1, H, tokens, E). Its facts are those of a padded batch of its documents.

    Causal is as in FlashAttention since 2.1: the last query of each document is aligned with its last key.
    """
    if not found:
        return "documents without a token"
    if window is not None and not causal and any(last - first != stop - start for first, last, start, stop in found):
        return OTHER_KEYS
    with without_autograd_and_modes(tensors[0].device.type):
        query, key = map(flat, tensors)
        keep = torch.zeros(1, query.shape[2], dtype=torch.bool, device=query.device)
        for first, last, _, _ in found:
            keep[:, first:last] = True
        everywhere = sum(last - first for first, last, _, _ in found) == query.shape[2]
    longest = max(last - first for first, last, _, _ in found), max(stop - start for _, _, start, stop in found)
    kind = kind_of(frames, query, key, longest)
    facts = Facts.of(route, kind, query, key, scale=scale, causal=causal, mask=None, dropout=dropout, window=window)
    call = AttentionCall(
        replace(facts, batch=len(found), queries=longest[0], keys=longest[1]), frames, query, key, window=window
    )
    call.scale, call.causal = scale, "lower_right" if causal else False
    call.documents, call.rows = Documents(found, tensors, flat), None if everywhere else keep
    return call


def in_one_row(tensor: Tensor) -> Tensor:
    """(B, H, L, E) → (1, H, B·L, E): the items of a batch after one another, as offsets count them."""
    return tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def within_documents(
    mask: Tensor | None, options: dict[str, Any], query: Tensor, key: Tensor, causal: bool
) -> Tensor | None:
    """The mask of a call of the interface that no row sees through to another document; None if it is given no offsets.

    ``causal`` as above, where no mask holds it. No number is read: a graph may be traced.
    """
    if any(options.get(name) is None for name in LENGTHS):
        return None
    (row, rows_left), (column, keys_left) = (
        _places(options[name], length) for name, length in zip(LENGTHS[:2], (query.shape[2], key.shape[2]), strict=True)
    )
    seen = (row[:, None] == column) & (row[:, None] >= 0)
    if causal:
        seen = seen & (keys_left >= rows_left[:, None])
    if mask is None:
        return seen[None, None]
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def _places(offsets: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Of each token, the number of its document, -1 outside of all, and how many tokens are left to its end."""
    places = torch.arange(length, dtype=offsets.dtype, device=offsets.device)
    number = torch.searchsorted(offsets, places, right=True)
    inside = (number > 0) & (number < len(offsets))
    return number.where(inside, -1), offsets[number.clamp(max=len(offsets) - 1)] - places


def _once(tensor: Any, read: Callable[[Tensor], Any]) -> Any:
    """What is read of a tensor, once in a pass: that waits for its device, and all layers are given the same tensor."""
    if type(tensor) not in (Tensor, Parameter) or tensor.is_meta:
        return "offsets whose numbers cannot be read"
    if is_captured(tensor):
        return CAPTURED
    with without_autograd_and_modes(tensor.device.type):
        if running.current is None or tensor.is_inference():
            return read(tensor)
        known, place = running.current.read, (tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), read)
        if place not in known:
            known[place] = (tensor, read(tensor))  # while it is kept, its memory is not used again
        return known[place][1]


def _numbers(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.flatten().tolist())


def _beginnings(positions: Tensor) -> tuple[int, ...] | None:
    """Where positions, (B, L), begin again, and their length; None if they only go on."""
    first, length = positions.min(), positions.shape[1]
    if length == 1 or torch.equal(
        positions, (first + torch.arange(length, device=positions.device)).expand_as(positions)
    ):
        return None
    return *(positions.flatten() == first).nonzero().flatten().tolist(), positions.numel()
