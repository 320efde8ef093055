"""Reading: what a pass over the model reads, and where each item of the batch lies in a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from ...watch.examine import AttentionCall as Call

T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """What the coming pass reads: an entry per item of the batch, without its padding. None: not known.

    Every examiner of this folder has a ``reading``, to be set before each pass. One input may be a batch of several items:
    tokens are then those of the first.
    """

    inputs: tuple[int, ...] | None = None  # the numbers of the inputs in the document; None: 0, 1, …
    tokens: tuple[tuple[str, ...], ...] | None = None
    special: tuple[tuple[bool, ...], ...] | None = None  # [CLS], [SEP], <s>, …
    image: bool = False  # the model sees: a row is then looked at as a whole, on the image


@dataclass(frozen=True)
class Item:
    """One item of a batch in one call: which rows and columns are its own, and what they are called."""

    place: int  # in the batch
    number: int  # of the input
    rows: tuple[int, int]  # its queries, from and up to
    keys: tuple[int, int]
    tokens: tuple[str, ...] | None  # of its keys
    special: tuple[bool, ...]  # of its keys

    @property
    def tail(self) -> int:
        """How many special tokens end it: [SEP], </s>."""
        reverse = self.special[::-1]
        return reverse.index(False) if False in reverse else 0


def items(call: Call, rows: Tensor | None, reading: Reading) -> list[Item]:
    """The items of a call; none where its columns are not the keys in order (hashed buckets), or its items are not the inputs."""
    facts, (before, after) = call.facts, call.beside
    numbers = reading.inputs if reading.inputs is not None else tuple(range(facts.batch))
    if len(numbers) == 1:
        numbers *= facts.batch
    if not call.in_order or len(numbers) != facts.batch:
        return []
    last = facts.keys - after
    square = facts.kind == "self" and facts.queries == last - before
    found = []
    for place, number in enumerate(numbers):
        start, stop = _span(rows, place, facts.queries)
        keys = (before + start, before + stop) if square else (before, last)
        tokens = _of(reading.tokens, place, keys[1] - keys[0])
        special = _of(reading.special, place, keys[1] - keys[0])
        found.append(Item(place, number, (start, stop), keys, tokens, special or (False,) * (keys[1] - keys[0])))
    return found


def _span(rows: Tensor | None, place: int, length: int) -> tuple[int, int]:
    """From the first real query of an item to behind its last."""
    if rows is None:
        return 0, length
    real = rows[place if rows.shape[0] > 1 else 0].nonzero().flatten().tolist()
    return (real[0], real[-1] + 1) if real else (0, 0)


def _of(entries: tuple[tuple[T, ...], ...] | None, place: int, length: int) -> tuple[T, ...] | None:
    """An item's entry, where it speaks of as many keys as there are: a decoder reads something else than its encoder."""
    found = entries[place] if entries is not None and place < len(entries) else ()
    return found if len(found) == length else None
