"""The attention weights of chosen rows of a call, whichever route it took; what every look closer starts from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._checks import prepare
from ..kernels.reference import logits as scores_of
from ..kernels.seam import measuring_dtype
from ..vitals import NEG_INF, Vitals
from ..watch.call import Call

BUDGET = 2**23  # weights in memory at a time: 32 MiB of float32


def weights_of_rows(call: Call, vitals: Vitals, rows: Tensor) -> Tensor:
    """The weights of some query rows on all keys, (B, H, R, Lk), float32; a row that sees no key is zero.

    Args:
        call: the call under way, with q and k or the model's own logits.
        vitals: its vitals, on whose device the weights come.
        rows: the query numbers, (R,), integers, in any order. The result takes B·H·R·Lk numbers: see ``chunks``.
    """
    logits = logits_of_rows(call, rows.to(vitals.lse.device))
    if not logits.shape[-1]:
        return logits.float()
    # not exp(logit - lse): far from zero that difference is rounding, and the row is whole anyway
    empty = logits.amax(-1, keepdim=True) == NEG_INF
    return logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0).float()


def logits_of_rows(call: Call, rows: Tensor) -> Tensor:
    """The logits of some query rows, (B, H, R, Lk), in the dtype of vitals; -inf where the row may not look."""
    if call.logits is not None:
        return call.logits[:, :, rows].to(measuring_dtype(call.logits.dtype))
    options: dict[str, Any] = {name: getattr(call, name) for name in ("mask", "causal", "scale", "window", "softcap")}
    problem = prepare("weights", call.query, call.key, None, signs=(), **options).problem
    wide = measuring_dtype(problem.query.dtype)
    mask = problem.mask
    if mask is not None and mask.shape[2] > 1:
        mask = mask[:, :, rows]
    chosen = problem._replace(
        query=problem.query[:, :, rows].to(wide), key=problem.key.to(wide), mask=mask, left=None, right=None
    )
    z, keep, _ = scores_of(chosen)
    i, j = rows.unsqueeze(-1), torch.arange(z.shape[-1], device=z.device)
    if problem.left is not None:
        keep = keep & (j >= i - problem.left)
    if problem.right is not None:
        keep = keep & (j <= i + problem.right)
    return z.masked_fill(~keep, NEG_INF)


def chunks(call: Call, rows: Tensor, budget: int = BUDGET) -> Iterator[Tensor]:
    """The rows in parts whose weights fit the budget, so that n × n is never in memory."""
    facts = call.facts
    step = max(1, budget // max(1, facts.batch * facts.heads * facts.keys))
    yield from rows.split(step)
