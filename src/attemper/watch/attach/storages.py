"""Storages: facts about tensors, kept by the memory behind them, so that every view of a tensor finds them."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor, UntypedStorage

Fact = TypeVar("Fact")
FEW = 4  # new facts before freed storages are looked for

_free, _expired = UntypedStorage._free_weak_ref, UntypedStorage._expired


class _Held(Generic[Fact]):
    """A fact and a weak reference to its storage: the memory can be freed, but its address is not used again."""

    __slots__ = ("address", "fact")

    address: int
    fact: Fact

    def __del__(self) -> None:
        _free(self.address)


class Storages(Generic[Fact]):
    """A mapping from a tensor, or any view of it, to a fact; it keeps no tensor's memory alive.

    Where a mode returns a view, autograd gives the model another tensor object; both share their storage.
    """

    def __init__(self) -> None:
        self._facts: dict[int, _Held[Fact]] = {}
        self._many = FEW

    def get(self, tensor: Tensor) -> Fact | None:
        if not self._facts:
            return None
        fact = self._facts.get(address(tensor))
        return None if fact is None else fact.fact

    def has(self, tensor: Tensor) -> bool:
        """Whether anything was put for it, even None."""
        return bool(self._facts) and address(tensor) in self._facts

    def put(self, tensor: Tensor, fact: Fact) -> None:
        try:
            place: int = tensor.untyped_storage()._weak_ref()  # type: ignore[assignment]
        except (NotImplementedError, RuntimeError):
            return
        held: _Held[Fact] = _Held()
        held.address, held.fact = place, fact
        self._facts[place] = held
        if len(self._facts) > self._many:
            # the stub of a freed storage lies between activations, and keeps the allocator from joining their memory
            self.drop_freed()
            self._many = len(self._facts) + max(FEW, len(self._facts) // 4)

    def drop(self, tensor: Tensor) -> None:
        self._facts.pop(address(tensor), None)

    def drop_freed(self) -> None:
        """Forget the storages whose memory was freed, and their facts."""
        # a list keeps its items alive: another thread may add or drop facts meanwhile
        for held in list(self._facts.values()):
            if _expired(held.address) and self._facts.get(held.address) is held:
                self._facts.pop(held.address, None)

    def __bool__(self) -> bool:
        return bool(self._facts)


def address(tensor: Tensor) -> int:
    """The identity of a tensor's storage; 0 for a tensor without one (nested, sparse, wrapped)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0
