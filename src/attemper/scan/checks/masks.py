"""Masks: which keys some rows of a call see, as its mask or its logits show, and what pattern that is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.contract import HIDDEN_BIAS
from ...vitals import Vitals
from ...watch.examine import AttentionCall, WeakMask, is_pattern, two_values, weights_of_rows

ROWS = 24  # of a call that are looked at
SHORTEST = 5  # a text too short has no pattern


@dataclass(frozen=True)
class MaskPattern:
    """What the rows of a self-attention see, item by item and head by head."""

    future: bool  # a row sees a key after its own
    past: bool  # a row sees a key before its own
    own: bool  # a row sees its own key
    shifted: bool  # every row sees all keys before its own, and one after it
    prefix: int  # how many first keys every row sees, if later rows see no key after their own; else 0
    heads_differ: bool
    padding_seen: bool  # a real row sees a padded key
    words_hidden: bool  # no real row sees a real key
    judged_padding: bool = False  # whether the batch has padding

    @property
    def causal(self) -> bool:
        """Whether rows see keys, and none after their own."""
        return not self.future and (self.past or self.own)


def pattern(call: AttentionCall, real: Tensor | None) -> MaskPattern | None:
    """The pattern of a self-attention; None if its keys are not its queries in order. ``real`` is (B, L), False for padding."""
    facts, (before, after) = call.facts, call.sink_columns
    length = facts.keys - before - after
    if facts.kind != "self" or facts.queries != length or length < SHORTEST or not call.in_order or call.over != "keys":
        return None
    rows = _sampled(length, call.query)
    seen = _visible(call, rows)[..., before : facts.keys - after]
    places = torch.arange(length, device=seen.device)
    whole = seen.shape[0] in (1, facts.batch)
    if real is not None and whole and real.shape == (facts.batch, length) and bool(real.any()):
        real = real.to(seen.device).expand(seen.shape[0] if seen.shape[0] > 1 else facts.batch, -1)
        seen = seen.expand(len(real), -1, -1, -1)
    else:
        real = None
    counted = torch.ones_like(seen[:, 0]) if real is None else real[:, rows, None] & real[:, None, :]
    first = seen[:, 0] & counted
    later, earlier = places > rows[:, None], places < rows[:, None]
    padded = bool((seen[:, 0] & real[:, rows, None] & ~real[:, None, :]).any()) if real is not None else False
    return MaskPattern(
        future=bool((first & later).any()),
        past=bool((first & earlier).any()),
        own=bool((first & (places == rows[:, None])).any()),
        shifted=_shifted(first, rows, length),
        prefix=_prefix(first, later),
        heads_differ=seen.shape[1] > 1 and not bool((seen == seen[:, :1]).all()) and not _chosen(seen),
        padding_seen=padded,
        words_hidden=real is not None and not bool(real.all()) and not bool((first & (later | earlier)).any()),
        judged_padding=real is not None and not bool(real.all()),
    )


def weak_argument(call: AttentionCall, vitals: Vitals) -> WeakMask | None:
    """The largest weight on a key that a mask of two numbers should hide: a mask that was added by the call itself."""
    mask = call.mask
    if call.logits is not None or mask is None or not mask.is_floating_point() or mask.dim() < 2 or mask.numel() < 4:
        return None
    length = mask.shape[-2]
    rows = _sampled(length, mask)
    shown = mask[..., rows, :]
    values = two_values(shown)
    if (
        values is None
        or values.low <= HIDDEN_BIAS
        or not (values.high == 0.0 or (values.low, values.high) == (0.0, 1.0))
    ):
        return None
    hidden = shown == values.low
    if not is_pattern(hidden):
        return None
    from_rows = (
        rows if length == call.facts.queries else torch.arange(min(ROWS, call.facts.queries), device=mask.device)
    )
    weights = weights_of_rows(call, vitals, from_rows)
    chosen = hidden & ~hidden.all(-1, keepdim=True)
    low, high = (f"{number + 0.0:g}".replace("-", "−") for number in (values.low, values.high))
    largest = float(weights.where(chosen, 0.0).amax())
    return WeakMask(f"a mask of {low} and {high} that is added", largest)


def _sampled(length: int, like: Tensor) -> Tensor:
    """Some rows, evenly spread, the first and the last among them."""
    if length <= ROWS:
        return torch.arange(length, device=like.device)
    return torch.linspace(0, length - 1, ROWS, device=like.device).long()


def _visible(call: AttentionCall, rows: Tensor) -> Tensor:
    """Which keys some rows may see, (B or 1, H or 1, R, Lk)."""
    if call.logits is not None:
        return ~(call.logits[:, :, rows] <= HIDDEN_BIAS)
    keys = torch.arange(call.facts.keys, device=rows.device)
    ahead = keys - rows[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if call.causal:
        seen = ahead <= 0
    if call.window is not None:
        seen = seen & (ahead > -call.window) & (ahead < call.window)
    mask = call.mask
    if mask is None:
        return seen[None, None]
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape)) if mask.dim() < 4 else mask
    mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
    return seen & (mask if mask.dtype == torch.bool else mask > HIDDEN_BIAS)


def _chosen(seen: Tensor) -> bool:
    """Whether the model chose by score which keys its rows see: all heads see equally many, or no two heads see the same.

    A mask whose batch and heads were swapped by mistake is not like that: it gives some heads the same pattern, and heads
    different numbers of keys.
    """
    counts = seen.sum(-1)
    if bool((counts == counts[:1, :1]).all()):
        return True
    patterns = seen.flatten(2).flatten(0, 1)
    return seen.shape[0] > 1 and len(patterns.unique(dim=0)) == len(patterns)


def _shifted(seen: Tensor, rows: Tensor, length: int) -> bool:
    """Whether every row sees all keys up to the one after its own, and no further."""
    inner = rows < length - 2
    expected = torch.arange(length, device=rows.device) <= rows[inner, None] + 1
    return int(inner.sum()) > 2 and bool((seen[:, inner] == expected).all())


def _prefix(seen: Tensor, later: Tensor) -> int:
    """How many first keys rows see although they come later, if no row sees a later key beyond them."""
    ahead = seen & later
    if not bool(ahead.any()):
        return 0
    columns = ahead.any(0).any(0).nonzero().flatten()
    last = int(columns[-1]) + 1
    return last if last < seen.shape[-1] else 0
