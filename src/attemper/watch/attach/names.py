"""Names: the modules of a model by name, without the wrappers of torch.compile and distributed training.

A record of a wrapped model therefore merges with one of the model itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from ..session import Watch
    from .running import Frame

ALWAYS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # names that only wrappers use
WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)  # their child is "module", as in other modules too


def named_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Every module and its name; parents come before their children, and the first name counts.

    One recursive walk: torch's own passes each module through the iterators of all its parents, which is slow.
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


def name_in(observer: Watch, frames: tuple[Frame, ...]) -> str | None:
    """The name of the innermost of these modules that belongs to a watch's model."""
    for frame in reversed(frames):
        name = observer.names.get(id(frame.module))
        if name is not None:
            return name
    return None
