"""Storages: what is known of tensors, kept by the memory behind them, so that every view of a tensor finds it."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Fact = TypeVar("Fact")


class Storages(Generic[Fact]):
    """A mapping from a tensor, or any view of it, to a fact; it keeps no tensor's memory alive.

    Autograd hands the model another tensor object than the one a mode returns when that is a view; they share storage.
    """

    def __init__(self) -> None:
        # the weak reference holds the address: it cannot come to mean another storage while it is a key here
        self._facts: dict[int, tuple[StorageWeakRef, Fact]] = {}

    def get(self, tensor: Tensor) -> Fact | None:
        if not self._facts:
            return None
        found = self._facts.get(address(tensor))
        return None if found is None else found[1]

    def has(self, tensor: Tensor) -> bool:
        """Whether anything was put for it, be it None."""
        return bool(self._facts) and address(tensor) in self._facts

    def put(self, tensor: Tensor, fact: Fact) -> None:
        place = address(tensor)
        if place:
            self._facts[place] = (StorageWeakRef(tensor.untyped_storage()), fact)

    def drop(self, tensor: Tensor) -> None:
        self._facts.pop(address(tensor), None)

    def drop_freed(self) -> None:
        """Forget the storages whose memory is gone, and with them what their facts held."""
        # as a list: another thread may add to it
        for place in [place for place, (reference, _) in list(self._facts.items()) if reference.expired()]:
            self._facts.pop(place, None)

    def __bool__(self) -> bool:
        return bool(self._facts)


def address(tensor: Tensor) -> int:
    """The identity of a tensor's storage; 0 for a tensor without one (nested, sparse, wrapped)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0
