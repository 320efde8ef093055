"""Dynamo: while a step is measured torch.compile runs eagerly, since a compiled graph hides its ops. torch's switch is global.

Dynamo is loaded for that, as any optimizer loads it too: a model that is compiled inside the block must run eagerly as well.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import nn

from ..._torch_private import DYNAMO_MODULE, DYNAMO_WRAPPER
from .running import python_frames

HOOKS = "(?#attemper)Using `torch.compile.module.` when there are global hooks"
"""torch warns that a compiled module fires global hooks once more, which is expected. The comment makes this filter unique."""


COMPILED = "the model is compiled: watched steps run eagerly, the others as compiled."


class Eager:
    """The switch, on or off."""

    def __init__(self) -> None:
        self.stance: Any = None
        self.filters: Any = None

    def on(self) -> None:
        if self.stance is None:
            self.stance = torch.compiler.set_stance("force_eager")
            warnings.filterwarnings("ignore", HOOKS)
            self.filters = warnings.filters

    def off(self) -> None:
        if self.stance is None:
            return
        self.stance.__exit__(None, None, None)
        # warnings.catch_warnings swaps the list of filters: remove the filter from the list it was added to and from that in use
        in_use: Any = warnings.filters
        for filters in (self.filters, in_use):
            for item in [item for item in filters if getattr(item[1], "pattern", None) == HOOKS]:
                filters.remove(item)
        self.stance = self.filters = None


def is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def in_compiled() -> bool:
    """Whether the caller runs inside a function that torch.compile made. With the switch on it runs eagerly."""
    return any(
        frame.f_code.co_name == DYNAMO_WRAPPER and frame.f_globals.get("__name__") == DYNAMO_MODULE
        for frame in python_frames(sys._getframe(1))
    )
