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
from ..call import AttentionCall, CallInfo, Documents, Span
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
    return cut((begun, begun), totals) if isinstance(begun, tuple) else begun


def _apart_in_batches_of_one() -> bool:
    """Whether transformers finds documents by positions in a batch of one alone: before 4.56, in any batch."""
    return hasattr(sys.modules.get("transformers.modeling_flash_attention_utils"), "_is_packed_sequence")


def spans(
    rows: Tensor, keys: Tensor, totals: Sequence[int], used: tuple[Tensor | None, Tensor | None] = (None, None)
) -> Spans | str:
    """The documents between offsets; `used` is how many queries and keys of each there are, if not all. A str: what is wrong."""
    read: list[Any] = [None if tensor is None else numbers_of(tensor) for tensor in (rows, keys, *used)]
    wrong = next((offsets for offsets in read if isinstance(offsets, str)), None)
    return cut((read[0], read[1]), totals, (read[2], read[3])) if wrong is None else wrong


Numbers = tuple[int, ...]


def cut(
    offsets: tuple[Numbers, Numbers],
    totals: Sequence[int],
    used: tuple[Numbers | None, Numbers | None] = (None, None),
) -> Spans | str:
    ranges = []
    for ends, total, counts in zip(offsets, totals, used, strict=True):
        if len(ends) != len(offsets[0]) or list(ends) != sorted(ends) or min(ends, default=-1) < 0 or ends[-1] > total:
            return f"offsets that do not fit {total} tokens"
        pairs = list(pairwise(ends))
        ranges.append(pairs if counts is None else [(a, a + n) for (a, _), n in zip(pairs, counts, strict=True)])
    return tuple((*row, *key) for row, key in zip(*ranges, strict=True) if row[0] < row[1] and key[0] < key[1])


def packed_call(
    route: str,
    frames: tuple[Frame, ...],
    tensors: tuple[Tensor, Tensor],
    documents: Spans,
    flat: Callable[[Tensor], Tensor],
    *,
    scale: float | None,
    causal: bool,
    window: int | None = None,
    dropout: float = 0.0,
) -> AttentionCall | str:
    """A call on q and k, which ``flat`` brings to (1, H, tokens, E). Its info is that of a padded batch of its documents.

    Causal is as in FlashAttention since 2.1: the last query of each document is aligned with its last key.
    """
    if not documents:
        return "documents without a token"
    if (
        window is not None
        and not causal
        and any(last - first != stop - start for first, last, start, stop in documents)
    ):
        return OTHER_KEYS
    with without_autograd_and_modes(tensors[0].device.type):
        query, key = map(flat, tensors)
    longest = _longest(documents)
    kind = kind_of(frames, query, key, longest)
    info = CallInfo.of(route, kind, query, key, scale=scale, causal=causal, mask=None, dropout=dropout, window=window)
    call = AttentionCall(info, frames, query, key, window=window)
    call.scale, call.causal = scale, "lower_right" if causal else False
    return with_documents(call, Documents(documents, tensors, flat))


def with_documents(call: AttentionCall, documents: Documents) -> AttentionCall:
    """The call with these documents. Its info is that of a padded batch of them, and rows outside of them do not count."""
    rows, keys = _longest(documents.spans)
    call.info = replace(call.info, batch=len(documents.spans), queries=rows, keys=keys + sum(call.sink_columns))
    call.documents, query = documents, call.query
    if sum(last - first for first, last, _, _ in documents.spans) < query.shape[2]:
        with without_autograd_and_modes(query.device.type):
            call.rows = torch.zeros(1, query.shape[2], dtype=torch.bool, device=query.device)
            for first, last, _, _ in documents.spans:
                call.rows[:, first:last] = True
    return call


def _longest(documents: Spans) -> tuple[int, int]:
    return max(last - first for first, last, _, _ in documents), max(stop - start for _, _, start, stop in documents)


def offsets_of(options: dict[str, Any], query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
    """The documents of a call of the interface, as ``attention()`` takes them; None if it is given no offsets.

    Rows after the last document see no key. No number is read: a graph may be traced.
    """
    if any(options.get(name) is None for name in LENGTHS):
        return None
    of_rows, of_keys = (options[name].flatten() for name in LENGTHS[:2])
    rows, keys = (of.new_full((1,), tensor.shape[2]) for of, tensor in ((of_rows, query), (of_keys, key)))
    return torch.cat((of_rows, rows, rows)), torch.cat((of_keys, of_keys[-1:], keys))


def in_one_row(tensor: Tensor) -> Tensor:
    """(B, H, L, E) → (1, H, B·L, E): the items of a batch after one another, as offsets count them."""
    return tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def within_documents(
    mask: Tensor | None, options: dict[str, Any], query: Tensor, key: Tensor, causal: bool
) -> Tensor | None:
    """The mask of a call of the interface that no row sees through to another document; None if it is given no offsets.

    ``causal`` holds within each document; give it where no mask holds it. No number is read: a graph may be traced.
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
    """For each token: the number of its document, -1 outside of all, and how many tokens are left to its end."""
    places = torch.arange(length, dtype=offsets.dtype, device=offsets.device)
    number = torch.searchsorted(offsets, places, right=True)
    inside = (number > 0) & (number < len(offsets))
    return number.where(inside, -1), offsets[number.clamp(max=len(offsets) - 1)] - places


def _once(tensor: Any, read: Callable[[Tensor], Any]) -> Any:
    """Read a tensor once in a pass: reading waits for its device, and all layers are given the same tensor."""
    if type(tensor) not in (Tensor, Parameter) or tensor.is_meta:
        return "offsets whose numbers cannot be read"
    if is_captured(tensor):
        return CAPTURED
    with without_autograd_and_modes(tensor.device.type):
        return read(tensor) if running.current is None else running.current.once(tensor, read)


def numbers_of(tensor: Tensor) -> Numbers | str:
    """Offsets, read once in a pass; or why they cannot be read."""
    numbers: Numbers | str = _once(tensor, _numbers)
    return numbers


def _numbers(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.flatten().tolist())


def _beginnings(positions: Tensor) -> tuple[int, ...] | None:
    """The offsets at which positions, (B, L), restart, and their total length; None if they never restart."""
    first, length = positions.min(), positions.shape[1]
    if length == 1 or torch.equal(
        positions, (first + torch.arange(length, device=positions.device)).expand_as(positions)
    ):
        return None
    return *(positions.flatten() == first).nonzero().flatten().tolist(), positions.numel()
