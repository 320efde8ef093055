"""Overrides: what answers for torch by `__torch_function__` sees torch's functions as if none of them were intercepted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import has_torch_function

from ..._torch_private import may_be_rewritten
from ...operation.biases import answers_for_torch
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
        given = (*args, *kwargs.values())
        if not has_torch_function(given) or not (may_be_rewritten() or any(map(answers_for_torch, given))):
            return self.original(*args, **kwargs)
        with self.lock:
            self.answering += 1
            if self.answering == 1 and self.switch.on and getattr(self.owner, self.name) is self.ours:
                setattr(self.owner, self.name, self.original)
        try:
            return self.original(*args, **kwargs)
        finally:
            with self.lock:
                self.answering -= 1  # the last of several at once puts ours back, if it was not removed meanwhile
                if not self.answering and self.switch.on and getattr(self.owner, self.name) is self.original:
                    setattr(self.owner, self.name, self.ours)


def constructing(failed: Callable[[Exception], None], original: Function, switch: Switch) -> Function:
    """`Tensor.__new__` for a watched forward: under a dispatch mode torch cannot make `CausalBias(…)`, or any such subclass."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        current = running.current
        paused = False
        if cls is not Tensor and current is not None and current.active and switch.on:
            try:
                paused = current.pause()
            except Exception as error:
                failed(error)
        try:
            return original(cls, *args, **kwargs)
        finally:
            if paused and current is not None:
                try:
                    current.resume()
                except Exception as error:
                    failed(error)

    return __new__


def answering(original: Function, switch: Switch) -> Function:
    """`CausalBias.__torch_function__`, where a model called torch's function by a name of its own while ours has torch's name."""

    def __torch_function__(  # noqa: N807
        cls: type, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = functional.scaled_dot_product_attention
        if switch.on and getattr(named, "__wrapped__", None) is func:
            func = named
        return original(func, types, args, kwargs)

    return __torch_function__
