"""Padding: which queries of a self-attention are padding, as its mask shows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.contract import HIDDEN_BIAS


def kept_by_mask(mask: Tensor) -> Tensor:
    """Which queries are real, ``(B or 1, L)``, from the square mask or the logits of a self-attention, ``(B, H, L, L)``.

    A key that is hidden from every query is padding, and so is the query at its place. If real queries do not attend to their own
    keys either (a strictly causal mask), a hidden key shows nothing. Some models let a padded query attend to itself (XLNet): two
    or more keys at the end that only their own queries attend to are padding too, if those attend to as many others; a causal
    mask has one such key for each document.

    Where queries choose their keys (top-k), a key that none of them chose is no padding. A mask of padding hides the same keys in
    every head, and lets each row see what its place says: see `_by_places`. Otherwise only a query that sees nothing is padding.
    """
    first = mask[:, 0]  # padding is the same for every head
    # a NaN hides no key: the rows of a model that diverges are not padding
    visible = first if mask.dtype == torch.bool else ~(first <= HIDDEN_BIAS)
    if visible.shape[1] < 2:
        return visible.any(1)
    any_query = visible.any(1)
    own = visible.diagonal(dim1=-2, dim2=-1)
    strict = (any_query & ~own).sum(-1, keepdim=True) * 2 > any_query.sum(-1, keepdim=True)
    lonely = visible.sum(1) <= own.long()
    tail = lonely.flip(-1).cumprod(-1).flip(-1).bool()
    others = visible.sum(2) - own.long()  # in a packed batch the last row of each document sees its own ones
    tail = tail & (others == others[:, -1:]).flip(-1).cumprod(-1).flip(-1).bool()
    length = tail.sum(-1, keepdim=True)
    padded_tail = tail & (length > 1) & (length < tail.shape[-1])
    kept = any_query & ~padded_tail
    chosen = ~(_by_places(visible, kept) & _alike_in_heads(mask))
    return kept | strict | (chosen & visible.any(-1))


def _alike_in_heads(mask: Tensor) -> Tensor:
    """Whether every head hides the same keys from all queries."""
    seen = mask.any(2) if mask.dtype == torch.bool else ~(mask.amax(2) <= HIDDEN_BIAS)
    return (seen == seen[:, :1]).all()


def _by_places(visible: Tensor, kept: Tensor) -> Tensor:
    """Whether the places of rows and keys say which of the kept keys each kept row sees, ``(B, L, L)``.

    Each row sees a run of them that begins and ends no earlier than that of the row before (all keys, causal, windows,
    documents); or all items of a batch see the same keys, although other ones are padding.
    """
    within = visible & kept[:, None, :]
    order = kept.cumsum(-1)  # of the kept keys
    start = order.gather(-1, within.view(torch.uint8).argmax(-1))
    end = order.gather(-1, within.shape[-1] - 1 - within.flip(-1).view(torch.uint8).argmax(-1))
    count = within.sum(-1)
    unseeing = ~kept | (count == 0)
    runs = ((end - start + 1 == count) | unseeing).all()
    for bound in (start.masked_fill(unseeing, 0), end.masked_fill(unseeing, 0)):
        runs = runs & ((bound == bound.cummax(-1).values) | unseeing).all()
    alike = ((within == within.any(0)) | ~kept[:, None, :] | ~kept[:, :, None]).all()
    return runs | (alike & (kept != kept[:1]).any())
