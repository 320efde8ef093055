"""Padding: which queries are padding, as the mask shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.contract import HIDDEN_BIAS
from ..attach.running import running
from ..call import AttentionCall


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


def _remembered(masks: dict[Any, tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """`kept_by_mask`, once for the calls that share a mask: it is a dozen small ops."""
    place = (mask.data_ptr(), mask._version, mask.dtype, mask.shape, mask.stride())
    found = masks.get(place)
    if found is None:
        found = masks[place] = (mask, kept_by_mask(mask))  # while it is kept, its memory is not used again
    return found[1]


def kept_by_mask(mask: Tensor) -> Tensor:
    """Which queries are real, ``(B or 1, L)``, from the square mask or the logits of a self-attention, ``(B, H, L, L)``.

    A key that is hidden from every query is padding, and so is the query at its place. If real queries do not attend to their own
    keys either (a strictly causal mask), a hidden key shows nothing. Some models let a padded query attend to itself (XLNet): two
    or more keys at the end that only their own queries attend to are padding too; a causal mask has one such key.
    """
    first = mask[:, 0]  # padding is the same for every head
    # a NaN hides no key: the rows of a model that diverges are not padding
    visible = first if mask.dtype == torch.bool else ~(first <= HIDDEN_BIAS)
    if visible.shape[1] == 1:
        return visible[:, 0]
    any_query = visible.any(1)
    own = visible.diagonal(dim1=-2, dim2=-1)
    strict = (any_query & ~own).sum(-1, keepdim=True) * 2 > any_query.sum(-1, keepdim=True)
    lonely = visible.sum(1) <= own.long()
    tail = lonely.flip(-1).cumprod(-1).flip(-1).bool()
    length = tail.sum(-1, keepdim=True)
    padded_tail = tail & (length > 1) & (length < tail.shape[-1])
    return (any_query & ~padded_tail) | strict
