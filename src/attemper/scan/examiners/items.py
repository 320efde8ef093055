"""The input that the model is running on, and which rows and keys of a call belong to each item of its batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from ...watch.examine import AttentionCall

T = TypeVar("T")


@dataclass(frozen=True)
class BatchItems:
    """The items of one input, without their padding: one entry per item of the batch. None: not known.

    One input may be a batch of several items: the tokens are then those of the first.
    """

    inputs: tuple[int, ...] | None = None  # the numbers of the inputs in the document; None: 0, 1, …
    tokens: tuple[tuple[str, ...], ...] | None = None
    special: tuple[tuple[bool, ...], ...] | None = None  # [CLS], [SEP], <s>, …
    image: bool = False  # the keys may be patches of an image


@dataclass
class CurrentInput:
    """The input that the model is running on. The examiners of a scan share one of these; it is set before each pass."""

    items: BatchItems = field(default_factory=BatchItems)


@dataclass(frozen=True)
class Item:
    """One item of a batch in one call: its rows and columns, and their tokens."""

    index: int  # in the batch
    number: int  # of the input
    rows: tuple[int, int]  # its queries, from and up to
    keys: tuple[int, int]
    tokens: tuple[str, ...] | None  # of its keys
    special: tuple[bool, ...]  # of its keys

    @property
    def tail(self) -> int:
        """How many special tokens are at its end: [SEP], </s>."""
        reverse = self.special[::-1]
        return reverse.index(False) if False in reverse else 0


def items(call: AttentionCall, rows: Tensor | None, current: CurrentInput) -> list[Item]:
    """The items of a call; none if its columns are not the keys in order (hashed buckets), or its batch is another."""
    known = current.items
    info, (before, after) = call.info, call.sink_columns
    numbers = known.inputs if known.inputs is not None else tuple(range(info.batch))
    if len(numbers) == 1:
        numbers *= info.batch
    if not call.in_order or len(numbers) != info.batch:
        return []
    last = info.keys - after
    square = info.kind == "self" and info.queries == last - before
    listed = []
    for index, number in enumerate(numbers):
        start, stop = _span(rows, index, info.queries)
        keys = (before + start, before + stop) if square else (before, last)
        tokens = _of(known.tokens, index, keys[1] - keys[0])
        special = _of(known.special, index, keys[1] - keys[0])
        listed.append(Item(index, number, (start, stop), keys, tokens, special or (False,) * (keys[1] - keys[0])))
    return listed


def _span(rows: Tensor | None, index: int, length: int) -> tuple[int, int]:
    """From the first real query of an item to one after its last."""
    if rows is None:
        return 0, length
    real = rows[index if rows.shape[0] > 1 else 0].nonzero().flatten().tolist()
    return (real[0], real[-1] + 1) if real else (0, 0)


def _of(entries: tuple[tuple[T, ...], ...] | None, index: int, length: int) -> tuple[T, ...] | None:
    """An item's entry if it has as many tokens as there are keys: a decoder has other tokens than its encoder."""
    entry = entries[index] if entries is not None and index < len(entries) else ()
    return entry if len(entry) == length else None
