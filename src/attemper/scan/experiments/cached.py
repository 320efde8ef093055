"""cached: why a step with the KV cache differs: its query, keys, values and mask, beside those of the whole text, by layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ...vitals import Vitals
from ...watch.examine import AttentionCall, Examiner
from .position import parts_of
from .trial import STEADY, distance

POSITION = (
    "Give a step the position of its token, which is the number of tokens in the cache, and not 0; or rotate by the position_ids "
    "that are passed."
)
MASK = (
    "Make the mask of a step over all keys: tril(diagonal=keys - queries). is_causal=True aligns the first query with the first "
    "key: it hides all cached keys but the first from a single query."
)
LOST = (
    "Join the keys and values of a step to those that are cached, torch.cat([past, new], -2), and return all of them."
)
STORED = (
    "Look at how the cache is written: the key and value of a token go to a place of their own, once, rotated by their position, "
    "and stay as they are."
)
AFTER = "Look at what follows attention: a convolution, a norm or a state that sees earlier tokens needs a cache of its own."


class Step(NamedTuple):
    """What one call of attention was given: (B, H, L, E) each, and how many keys its last row sees."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    visible: int


@dataclass
class Steps(Examiner):
    """Keeps the last self-attention call of each layer."""

    layers: dict[str, Step] = field(default_factory=dict)

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> int:
        return int(vitals.visible[..., -1].max())

    def keep(self, name: str, call: AttentionCall, seen: Any) -> None:
        if call.document is None and not sum(call.sink_columns):
            self.layers[name] = Step(*parts_of(call), seen)


def why_it_differs(order: list[str], whole: dict[str, Step], step: dict[str, Step]) -> tuple[str, str, str] | None:
    """The first layer whose step differs from the whole text: its name, how, and what to do; None: no layer is known."""
    known = [name for name in order if name in whole and name in step]
    for name in known:
        difference = _difference(whole[name], step[name])
        if difference is not None:
            return name, *difference
    return (known[-1], "has the query, keys, values and mask of the whole text", AFTER) if known else None


def _difference(whole: Step, step: Step) -> tuple[str, str] | None:
    length, keys = whole.key.shape[-2], step.key.shape[-2]
    if keys < length:
        return f"has {keys} of {length} keys", LOST
    if step.visible != whole.visible:
        return f"sees {step.visible} of {length} keys, and the last row of the whole text {whole.visible}", MASK
    new = [
        what
        for what, some in (("query", (step.query, whole.query)), ("key", (step.key[..., :length, :], whole.key)))
        if _apart(some[0][..., -1:, :], some[1][..., -1:, :]) is not None
    ]
    if new:
        return f"has another {' and another '.join(new)} of its token", POSITION
    for what, cached, right in (("key", step.key, whole.key), ("value", step.value, whole.value)):
        place = None if cached is None or right is None else _apart(cached[..., :length, :], right)
        if place is not None:
            return f"has another {what} of token {place} in its cache", STORED
    return None


def _apart(rows: Tensor, other: Tensor) -> int | None:
    """The first row that differs by more than rounding; None: none does, or they cannot be compared."""
    if rows.shape != other.shape or rows.dim() < 3:
        return None
    for row in range(rows.shape[-2]):
        if distance(*(part[..., row : row + 1, :].flatten(0, -2)[None] for part in (rows, other)))[0] > STEADY:
            return row
    return None
