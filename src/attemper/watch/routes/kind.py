"""Kind: whether an attention call is self- or cross-attention, and which tensors of a pass belong to one sequence.

A sequence has a number. A projection, a norm, a residual sum or an attention's output has the number of what it was made
from. Tensors are known by weak references to their storage, so an address that is used again is never mistaken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from torch import Tensor

from ..attach.running import Frame, running
from ..attach.storages import Storages, address

CROSS = re.compile(r"cross|encoder_attn|enc_?dec|multihead_attn", re.IGNORECASE)
SELF = re.compile(r"self", re.IGNORECASE)


class Sequences:
    """Tensor → number of its sequence. In an intercepted pass, where no op is followed, the plan has the numbers of each call."""

    def __init__(self, last: int = 0) -> None:
        self._numbers: Storages[int] = Storages()
        self._last = last  # numbers that are given from now on are others

    def known(self, tensor: Tensor) -> int | None:
        return self._numbers.get(tensor)

    def of(self, tensor: Tensor) -> int:
        """Its number; a tensor that is made of nothing known begins a sequence."""
        number = self._numbers.get(tensor)
        if number is None:
            self._last = number = self._last + 1
            self._numbers.put(tensor, number)
        return number

    def put(self, tensor: Tensor, number: int) -> None:
        self._numbers.put(tensor, number)

    def follow(self, sources: Iterable[Tensor], made: Tensor) -> None:
        """What is made of several tensors belongs to the first that is known: a residual sum, to the residual stream."""
        for source in sources:
            number = self._numbers.get(source)
            if number is not None:
                self._numbers.put(made, number)
                return


@lru_cache(4096)
def kind_by_name(name: str, cls: str) -> str | None:
    """What the names of a module and of its class show."""
    # BERT and models like it call the inner module of any attention "self", which shows nothing
    parts = [part for part in name.split(".") if part != "self"]
    labels = (".".join(parts[-2:]), cls)
    if any(map(CROSS.search, labels)):
        return "cross"
    return "self" if any(map(SELF.search, labels)) else None


def shown_kind(frame: Frame, query: Tensor, key: Tensor) -> str | None:
    """Self- or cross-attention, if the module's arguments, its name or the storage of q and k show it."""
    if frame.kind is not None:
        return frame.kind
    named = kind_by_name(frame.name, type(frame.module).__name__)
    if named == "cross" or getattr(frame.module, "is_cross_attention", False):
        return "cross"
    if named == "self":
        return "self"
    return "self" if address(query) == address(key) != 0 else None


def kind_of(frames: Sequence[Frame], query: Tensor, key: Tensor, lengths: tuple[int, int]) -> str:
    """Self- or cross-attention: by the module's arguments, by its name, by the sequences of q and k, then by lengths."""
    shown = shown_kind(frames[-1], query, key)
    if shown is not None:
        return shown
    if running.current is not None:
        sequences = running.current.sequences_of(query, key)
        if None not in sequences:
            return "self" if sequences[0] == sequences[1] else "cross"
    # one query and many keys: a cache is being read
    return "cross" if 1 < lengths[0] != lengths[1] else "self"
