"""Spread: the standard deviation of a call's logits, without keys that a scaled mask hides."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.contract import HIDDEN_BIAS
from ...vitals import Vitals
from ...watch.examine import AttentionCall

FAR = 400.0
"""A mask of −1e4 scaled by 1/√d_k is further below the other logits than this, up to a head width of 625."""

APART = 4.0
"""… and by this many times the range of either side: scores alone have no such gap."""

ROWS = 256
"""How many rows of each head are sampled then: otherwise every row of a long text would be sorted."""


def logit_std(call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> tuple[float, float, float]:
    """Sums over the rows that count: their number, variances and visible keys. ``rows`` (B, Lq) is False for padding."""
    variance, visible = vitals.variance.double(), vitals.visible.double()
    step = 1
    if call.logits is not None and call.facts.masked and _reaches(call.logits):
        step = -(-call.logits.shape[-2] // ROWS)
        logits = call.logits[:, :, ::step].detach().double()
        shown = _not_hidden(logits)
        visible = shown.sum(-1).double()
        mean = logits.where(shown, 0.0).sum(-1, keepdim=True) / visible.clamp(min=1).unsqueeze(-1)
        variance = (logits - mean).where(shown, 0.0).square().sum(-1) / visible.clamp(min=1)
    counted = visible > 1
    if rows is not None:
        counted = counted & rows[:, None, ::step]
    return float(counted.sum()), float(variance.where(counted, 0.0).sum()), float(visible.where(counted, 0.0).sum())


def _reaches(logits: Tensor) -> bool:
    """Whether two visible logits of a row are that far apart; one head at a time, to save memory."""
    for head in logits.detach().flatten(0, 1):
        shown = head > HIDDEN_BIAS
        reach = head.amax(-1) - head.where(shown, torch.inf).amin(-1)
        if bool((reach > FAR).any()):
            return True
    return False


def _not_hidden(logits: Tensor) -> Tensor:
    """The logits that no mask hides: without those that are, in every head, below a gap in their row."""
    shown = logits > HIDDEN_BIAS
    ordered = logits.where(shown, -torch.inf).sort(-1, descending=True).values
    upper, lower = ordered[..., :-1], ordered[..., 1:]
    gap, place = (upper - lower).where(lower.isfinite(), 0.0).max(-1, keepdim=True)
    above, below = upper.gather(-1, place), lower.gather(-1, place)
    last = logits.where(shown, torch.inf).amin(-1, keepdim=True)
    wide = torch.maximum(ordered[..., :1] - above, below - last)
    hidden = (gap > FAR) & (gap > APART * wide) & (logits <= below)
    return shown & ~hidden.all(1, keepdim=True)
