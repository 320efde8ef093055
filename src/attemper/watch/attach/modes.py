"""Modes: run attemper's own code inside a model's forward without its autograd graph, autocast and dispatch modes."""

from __future__ import annotations

from typing import Any

import torch

from ..._torch_private import (
    _len_torch_dispatch_stack,
    _pop_mode,
    _push_mode,
    _set_grad_enabled,
    is_autocast_on,
)


class without_modes:  # noqa: N801 (used as a function)
    """Run without any dispatch mode, attemper's or another's. A class, not a generator: measured calls enter one."""

    __slots__ = ("modes",)

    def __enter__(self) -> None:
        self.modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack())]

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self.modes):
            _push_mode(mode)


class without_autograd_and_modes(without_modes):  # noqa: N801 (used as a function)
    """Run without autograd graph, autocast and dispatch modes."""

    __slots__ = ("autocast", "graph")

    def __init__(self, device: str) -> None:
        self.autocast = torch.autocast(device, enabled=False) if is_autocast_on(device) else None

    def __enter__(self) -> None:
        self.graph = torch.is_grad_enabled()
        if self.graph:
            _set_grad_enabled(False)
        super().__enter__()
        if self.autocast is not None:
            self.autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.autocast is not None:
            self.autocast.__exit__(*error)
        super().__exit__()
        if self.graph:
            _set_grad_enabled(True)
