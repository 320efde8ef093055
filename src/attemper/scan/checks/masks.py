"""The pattern of a mask: which keys some rows of a call see, from its mask or its logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.contract import HIDDEN_BIAS
from ...vitals import Vitals
from ...watch.examine import AttentionCall, WeakMask, is_pattern, two_values, weights_of_rows

ROWS = 24  # of a call that are looked at
SHORTEST = 5  # tokens; a shorter text shows no pattern


@dataclass(frozen=True)
class MaskPattern:
    """Which keys the rows of a self-attention see."""

    future: bool  # a row sees a key after its own
    past: bool  # a row sees a key before its own
    own: bool  # a row sees its own key
    shifted: bool  # every row sees all keys before its own, and one after it
    prefix: int  # length of a prefix that every row sees, if no row sees a later key beyond it; else 0
    heads_differ: bool
    padding_seen: bool  # a real row sees a padded key
    words_hidden: bool  # no real row sees a real key
    judged_padding: bool = False  # whether the batch has padding
    count: int = 0  # of the rows that were looked at: how many see a later key
    example: str = ""  # one of them, in words
    padded_keys: int = 0  # of an item: how many a real row sees, at most
    padded: str = ""
    heads_example: str = ""  # a row in which a head hides what another one sees
    far: int = 0  # how many places before its own a row sees a key, at most; less than the length, as keys are hidden

    @property
    def causal(self) -> bool:
        """Whether rows see keys, and none after their own."""
        return not self.future and (self.past or self.own)


def pattern(call: AttentionCall, real: Tensor | None) -> MaskPattern | None:
    """The pattern of a self-attention; None if its keys are not its queries in order. ``real`` is (B, L), False for padding."""
    info, (before, after) = call.info, call.sink_columns
    length = info.keys - before - after
    if info.kind != "self" or info.queries != length or length < SHORTEST or not call.in_order or call.over != "keys":
        return None
    rows = _sampled(length, call.query)
    seen = _visible(call, rows)[..., before : info.keys - after]
    places = torch.arange(length, device=seen.device)
    whole = seen.shape[0] in (1, info.batch)
    if real is not None and whole and real.shape == (info.batch, length) and bool(real.any()):
        real = real.to(seen.device).expand(seen.shape[0] if seen.shape[0] > 1 else info.batch, -1)
        seen = seen.expand(len(real), -1, -1, -1)
    else:
        real = None
    counted = torch.ones_like(seen[:, 0]) if real is None else real[:, rows, None] & real[:, None, :]
    first = seen[:, 0] & counted
    later, earlier = places > rows[:, None], places < rows[:, None]
    padded = torch.zeros_like(first) if real is None else seen[:, 0] & real[:, rows, None] & ~real[:, None, :]
    heads_differ = seen.shape[1] > 1 and not bool((seen == seen[:, :1]).all()) and not _chosen(seen, rows)
    return MaskPattern(
        future=bool(((seen.any(1) & counted if _each_way(seen, rows) else first) & later).any()),
        past=bool((first & earlier).any()),
        own=bool((first & (places == rows[:, None])).any()),
        shifted=_shifted(first, rows, length),
        prefix=_prefix(first, later, counted),
        heads_differ=heads_differ,
        padding_seen=bool(padded.any()),
        words_hidden=real is not None and not bool(real.all()) and not bool((first & (later | earlier)).any()),
        judged_padding=real is not None and not bool(real.all()),
        count=int((first & later).any(-1).any(0).sum()),
        example=_example(first & later, rows),
        padded_keys=int(padded.sum(-1).max()),
        padded=_example(padded, rows),
        heads_example=_heads_example(seen, rows) if heads_differ else "",
        far=int((rows[:, None] - places).where(first & earlier, 0).max()),
    )


def is_cross_causal(call: AttentionCall) -> bool:
    """Whether row i of a cross-attention sees the keys 0 to i of a source that is no text of the same length."""
    info = call.info
    if info.kind != "cross" or info.queries == info.keys or min(info.queries, info.keys) < SHORTEST - 1:
        return False
    if not call.in_order or call.over != "keys" or any(call.sink_columns):
        return False
    rows = _sampled(info.queries, call.query)
    seen = _visible(call, rows)
    return bool((seen == (torch.arange(info.keys, device=seen.device) <= rows[:, None])).all())


def _example(seen: Tensor, rows: Tensor) -> str:
    """The first row that sees a key, (B, R, L), with the last key that it sees; of which item, if not of the first."""
    if not bool(seen.any()):
        return ""
    item, row = (int(number) for number in seen.any(-1).nonzero()[0])
    key = int(seen[item, row].nonzero()[-1])
    return f"row {int(rows[row])}{f' of item {item}' if item else ''} sees key {key}"


def _heads_example(seen: Tensor, rows: Tensor) -> str:
    """A key that the first head sees and another one hides, or the other way round, (B, H, R, L)."""
    item, head, row, key = (int(number) for number in (seen != seen[:, :1]).nonzero()[0])
    sees, hides = (0, head) if bool(seen[item, 0, row, key]) else (head, 0)
    return f"in row {int(rows[row])} head {sees} sees key {key}, and head {hides} does not"


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
    from_rows = rows if length == call.info.queries else torch.arange(min(ROWS, call.info.queries), device=mask.device)
    weights = weights_of_rows(call, vitals, from_rows)
    chosen = hidden & ~hidden.all(-1, keepdim=True)
    low, high = (f"{number + 0.0:g}".replace("-", "−") for number in (values.low, values.high))
    largest = float(weights.where(chosen, 0.0).amax())
    return WeakMask(f"a mask of {low} and {high} that is added", largest)


def _sampled(length: int, like: Tensor) -> Tensor:
    """Evenly spread rows, including the first and the last."""
    if length <= ROWS:
        return torch.arange(length, device=like.device)
    return torch.linspace(0, length - 1, ROWS, device=like.device).long()


def _visible(call: AttentionCall, rows: Tensor) -> Tensor:
    """Which keys some rows may see, (B or 1, H or 1, R, Lk), those of sinks among them."""
    if call.logits is not None:
        return ~(call.logits[:, :, rows] <= HIDDEN_BIAS)
    return torch.nn.functional.pad(_visible_keys(call, rows), call.sink_columns, value=True)


def _visible_keys(call: AttentionCall, rows: Tensor) -> Tensor:
    keys = torch.arange(call.key.shape[-2], device=rows.device)
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


def _chosen(seen: Tensor, rows: Tensor) -> bool:
    """Whether the model chose by score which keys its rows see: all heads see equally many, or no two heads see the same.

    A mask whose batch and heads were swapped by mistake is not like that: it gives some heads the same pattern, and heads
    different numbers of keys.
    """
    counts = seen.sum(-1)
    if bool((counts == counts[:1, :1]).all()):
        return True
    if _each_way(seen, rows):
        return True
    patterns = seen.flatten(2).flatten(0, 1)
    return seen.shape[0] > 1 and len(patterns.unique(dim=0)) == len(patterns)


def _each_way(seen: Tensor, rows: Tensor) -> bool:
    """Whether some heads read from the left, and all others from the right."""
    places = torch.arange(seen.shape[-1], device=seen.device)
    left, right = ((seen == side).flatten(2).all(-1) for side in (places <= rows[:, None], places >= rows[:, None]))
    return bool((left | right).all())


def _shifted(seen: Tensor, rows: Tensor, length: int) -> bool:
    """Whether every row sees all keys up to the one after its own, and no further."""
    inner = rows < length - 2
    expected = torch.arange(length, device=rows.device) <= rows[inner, None] + 1
    return int(inner.sum()) > 2 and bool((seen[:, inner] == expected).all())


def _prefix(seen: Tensor, later: Tensor, counted: Tensor) -> int:
    """The length of a prefix that every row sees, if no row sees a later key beyond it; else 0.

    ``counted`` leaves out padding, and a key that no row sees may be padding of a batch without a mask: neither is hidden from a
    row because of the row's place, so neither ends a prefix.
    """
    ahead = seen & later
    if not bool(ahead.any()):
        return 0
    last = int(ahead.any(0).any(0).nonzero().flatten()[-1]) + 1
    hidden = ~seen & later & counted & seen.any(1, keepdim=True)
    return last if bool(hidden[..., last:].any()) else 0
