"""Naming: modules as their model names them, without the wrappers that compiling and distributing put around it.

So a record of a wrapped model merges with one of the model itself.
"""

from __future__ import annotations

from torch import nn

ALWAYS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # nobody else's words
WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)  # they call theirs "module", as others may


def named_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Every module and what it is called here; parents come before their children, and the first name counts.

    In one walk: torch's own passes each module through the iterators of all its parents, which shows in a watched step.
    """
    found: dict[nn.Module, str] = {}

    def visit(module: nn.Module, name: str) -> None:
        found[module] = name
        wraps = isinstance(module, WRAPPERS)
        for word, child in module._modules.items():
            if child is not None and child not in found:
                hidden = word in ALWAYS or (wraps and word == "module")
                visit(child, name if hidden else f"{name}.{word}" if name else word)

    visit(model, "")
    return found
