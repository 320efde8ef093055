"""Overrides: what answers for torch by `__torch_function__` sees torch's functions as if none of them were intercepted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import has_torch_function

from .running import Switch, running

Function = Callable[..., Any]


class InItsPlace:
    """A function of torch that ours stands in for. While a class or a mode answers a call of it, it is back in its place.

    `torch.nn.attention.bias.CausalBias` compares the function that it is asked about with the one that has this name in torch.
    """

    def __init__(self, owner: Any, name: str, original: Function, switch: Switch) -> None:
        self.owner, self.name, self.original, self.switch = owner, name, original, switch
        self.ours: Function | None = None
        self.lock, self.answering = threading.Lock(), 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not has_torch_function((*args, *kwargs.values())):
            return self.original(*args, **kwargs)
        self._put(1, self.ours, self.original)
        try:
            return self.original(*args, **kwargs)
        finally:
            self._put(-1, self.original, self.ours)

    def _put(self, step: int, there: Function | None, instead: Function | None) -> None:
        """With the first call of several at once torch's goes there; with the last one ours, if it was not removed meanwhile."""
        with self.lock:
            self.answering += step
            if self.answering == (step > 0) and self.switch.on and getattr(self.owner, self.name) is there:
                setattr(self.owner, self.name, instead)


def constructing(original: Function, switch: Switch) -> Function:
    """`Tensor.__new__` for a watched forward: under a dispatch mode torch cannot make `CausalBias(…)`, or any such subclass."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        current = running.current
        if cls is Tensor or current is None or not current.active or not switch.on or not current.pause():
            return original(cls, *args, **kwargs)
        try:
            return original(cls, *args, **kwargs)
        finally:
            current.resume()

    return __new__
