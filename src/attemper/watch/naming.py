"""Naming: modules as their model names them, without the wrappers that compiling and distributing put around it.

So a record of a wrapped model merges with one of the model itself.
"""

from __future__ import annotations

from torch import nn

ALWAYS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # nobody else's words
WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)  # they call theirs "module", as others may


def names_of(model: nn.Module) -> dict[int, str]:
    """By id: whoever keeps this must hold the model, so that no id can come to mean another module."""
    found: dict[int, str] = {}
    shown = {"": ""}  # torch's name → ours; parents come before their children
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if name:
            above, _, word = name.rpartition(".")
            parent = modules[above]
            hidden = word in ALWAYS or (word == "module" and isinstance(parent, WRAPPERS))
            shown[name] = shown[above] if hidden else f"{shown[above]}.{word}".lstrip(".")
        found[id(module)] = shown[name]
    return found
