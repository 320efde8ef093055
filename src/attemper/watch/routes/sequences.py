"""Sequences: which tensors of a pass belong to one sequence, so that self-attention is told from cross-attention.

A sequence has a number. A projection, a norm, a residual sum or an attention's output has the number of what it was made
from. Tensors are known by weak references to their storage: an address that is used again is never mistaken.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .handwritten.storages import Storages


class Sequences:
    """Tensor → number of its sequence."""

    def __init__(self) -> None:
        self._numbers: Storages[int] = Storages()
        self._last = 0

    def known(self, tensor: Tensor) -> int | None:
        return self._numbers.get(tensor)

    def of(self, tensor: Tensor) -> int:
        """Its number; a tensor that comes from nothing known begins a sequence."""
        number = self._numbers.get(tensor)
        if number is None:
            self._last = number = self._last + 1
            self._numbers.put(tensor, number)
        return number

    def put(self, tensor: Tensor, number: int) -> None:
        self._numbers.put(tensor, number)

    def follow(self, sources: Iterable[Tensor], made: Tensor) -> None:
        """What is made of several belongs to the first that is known: in a residual sum, to the stream."""
        for source in sources:
            number = self._numbers.get(source)
            if number is not None:
                self._numbers.put(made, number)
                return
