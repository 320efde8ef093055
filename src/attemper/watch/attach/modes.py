"""Modes: run attemper's own code inside a model's forward without its autograd graph, autocast and dispatch modes."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ..._torch_private import (
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _pop_mode,
    _push_mode,
    _set_grad_enabled,
    is_autocast_on,
)
from ...errors import restoring


class Open(threading.local):
    """The regions that this thread is in, the outermost first."""

    def __init__(self) -> None:
        self.regions: list[without_modes] = []


_open = Open()


class without_modes:  # noqa: N801 (used as a function)
    """Run without any dispatch mode, attemper's or another's. A class, not a generator: measured calls enter one.

    Every step of ``__exit__`` can be repeated: `leave_all` undoes a region whose own exit failed.
    """

    __slots__ = ("modes",)

    def __enter__(self) -> None:
        self.modes: list[Any] = []
        _open.regions.append(self)
        while _len_torch_dispatch_stack():
            self.modes.append(_pop_mode())

    def __exit__(self, *error: object) -> None:
        if self in _open.regions:
            _open.regions.remove(self)
            for mode in reversed(self.modes):
                _push_mode(mode)


class without_autograd_and_modes(without_modes):  # noqa: N801 (used as a function)
    """Run without autograd graph, autocast and dispatch modes."""

    __slots__ = ("autocast", "graph")

    def __init__(self, device: str) -> None:
        on = _is_any_autocast_enabled() and is_autocast_on(device)
        self.autocast = torch.autocast(device, enabled=False) if on else None
        self.graph = torch.is_grad_enabled()

    def __enter__(self) -> None:
        super().__enter__()
        if self.graph:
            _set_grad_enabled(False)
        if self.autocast is not None:
            self.autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        autocast, self.autocast = self.autocast, None
        if autocast is not None:
            autocast.__exit__(*error)
        if self.graph:
            _set_grad_enabled(True)
        super().__exit__()


def leave_all() -> None:
    """Leave every region of this thread, as an exception in attemper's own code may have left some of them open."""
    while _open.regions:
        _open.regions[-1].__exit__(None, None, None)


restoring.append(leave_all)
