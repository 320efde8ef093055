"""Dynamo: while a step is measured torch.compile runs eagerly, since a compiled graph hides its ops. torch's switch is global.

Dynamo is loaded for that, as any optimizer loads it too: a model that is compiled inside the block must run eagerly as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

COMPILED = "the model is compiled: watched steps run eagerly, the others as compiled."


class Eager:
    """The switch, on or off."""

    def __init__(self) -> None:
        self.stance: Any = None
        self.modules: list[tuple[nn.Module, Any, Any]] = []  # compiled in place, what was compiled, what runs meanwhile

    def on(self) -> None:
        if self.stance is None:
            self.stance = torch.compiler.set_stance("force_eager")

    def on_module(self, module: nn.Module) -> None:
        """What ``module.compile()`` made calls its module from when it was made; let it be called as it is now."""
        compiled = module._compiled_call_impl
        if compiled is not None and all(compiled is not ours for _, _, ours in self.modules):
            module._compiled_call_impl = ours = module._call_impl
            self.modules.append((module, compiled, ours))

    def off(self) -> None:
        if self.stance is None:
            return
        self.stance.__exit__(None, None, None)
        for module, compiled, ours in self.modules:
            if module._compiled_call_impl is ours:
                module._compiled_call_impl = compiled
        self.stance, self.modules = None, []


def is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules
