"""Padding: which queries of a self-attention are padding, as its mask shows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.contract import HIDDEN_BIAS


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
