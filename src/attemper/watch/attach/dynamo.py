"""Eager: while somebody listens Dynamo compiles nothing, since a compiled graph hides its ops. All of it: the switch is torch's.

Dynamo is loaded for that, as any optimizer does too: a model that is compiled later, inside the block, is to run eagerly as well.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

HOOKS = "(?#attemper)Using `torch.compile.module.` when there are global hooks"
"""torch warns that a compiled module fires global hooks once more; that is expected. No other filter is spelt like this one."""


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
        # whoever catches warnings has another list for a while: ours is taken from the one it went to and from the one in use
        in_use: Any = warnings.filters
        for filters in (self.filters, in_use):
            for item in [item for item in filters if getattr(item[1], "pattern", None) == HOOKS]:
                filters.remove(item)
        self.stance = self.filters = None
