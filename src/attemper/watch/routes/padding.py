"""Padding of a call: which of its rows count."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...operation.padding import kept_by_mask
from ..attach.running import Pass, running
from ..call import AttentionCall, Facts


def leave_padding_out(call: AttentionCall) -> None:
    """Set which rows count: from the mask in self-attention; in cross-attention, those of the self-attention before it."""
    current, facts = running.current, call.facts
    if current is None:
        return
    sequence, _ = current.sequences.of_call(call.query, call.key)
    place = None if sequence is None else (sequence, facts.batch, facts.queries)
    if facts.kind == "cross":
        # of the same sequence only: another one of the same length has other padding
        call.rows = current.kept.get(place) if call.rows is None and place is not None else call.rows
        return
    before, after = call.sink_columns
    keys = facts.keys - before - after
    matrix = call.logits if call.logits is not None else call.mask
    if call.rows is None and matrix is not None and facts.masked and call.in_order and facts.queries == keys:
        matrix = matrix.reshape((1,) * (4 - matrix.dim()) + tuple(matrix.shape)) if matrix.dim() < 4 else matrix
        if matrix.dim() == 4 and matrix.shape[-1] == facts.keys:
            if current.light is None or before or after or matrix.is_inference():
                call.rows = kept_by_mask(matrix[..., before : facts.keys - after])
            else:
                call.rows = _remembered(current.masks, matrix)
    if place is not None:
        current.kept[place] = call.rows


def count_all_rows(current: Pass, facts: Facts, query: Tensor, key: Tensor) -> None:
    """What `leave_padding_out` does for self-attention without a mask."""
    sequence, _ = current.sequences.of_call(query, key)
    if sequence is not None:
        current.kept[sequence, facts.batch, facts.queries] = None


def _remembered(masks: dict[Any, tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """`kept_by_mask`, once for the calls that share a mask: it is a dozen small ops."""
    place = (mask.data_ptr(), mask._version, mask.dtype, mask.shape, mask.stride())
    found = masks.get(place)
    if found is None:
        found = masks[place] = (mask, kept_by_mask(mask))  # while it is kept, its memory is not used again
    return found[1]
