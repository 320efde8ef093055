"""Names: the modules of a model by name, without the wrappers of torch.compile and distributed training.

A record of a wrapped model therefore merges with one of the model itself. A scan also numbers the calls of a module that runs
several times on one sequence, as the shared layer of an ALBERT does at every depth.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch import nn

from .running import Frame, Pass, running

if TYPE_CHECKING:
    from ..call import AttentionCall
    from ..observer import Observer

ALWAYS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # names that only wrappers use
WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)  # their child is "module", as in other modules too


def named_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Every module and its name; parents come before their children, and the first name counts.

    One recursive walk: torch's own passes each module through the iterators of all its parents, which is slow.
    """
    names: dict[nn.Module, str] = {}

    def visit(module: nn.Module, name: str) -> None:
        names[module] = name
        wraps = isinstance(module, WRAPPERS)
        for word, child in module._modules.items():
            if child is not None and child not in names:
                hidden = word in ALWAYS or (wraps and word == "module")
                visit(child, name if hidden else f"{name}.{word}" if name else word)

    visit(model, "")
    return names


def name_in(observer: Observer, frames: tuple[Frame, ...]) -> str | None:
    """The name of the innermost of these modules that belongs to a watch's model."""
    for frame in reversed(frames):
        name = observer.names.get(id(frame.module))
        if name is not None:
            return name
    return None


def is_in(name: str, outer: str) -> bool:
    """Whether a module is another one or inside it; the model itself has no name."""
    return not outer or name == outer or name.startswith(f"{outer}.")


NUMBERED = re.compile(r" \(call (\d+)\)$")
MOST_CALLS = 48  # that are numbered; a loop over hundreds of steps would make as many layers of one


def split_number(name: str) -> tuple[str, int]:
    """The name of a module, and which of its calls in a pass is meant."""
    match = NUMBERED.search(name)
    return (name, 1) if match is None else (name[: match.start()], int(match[1]))


class CallNumbers:
    """Numbers the calls of each module in a pass. A second input, or a single query per call, is no further depth."""

    def __init__(self) -> None:
        self.current: Pass | None = None
        self.last: dict[tuple[str, str, int], tuple[Frame, int]] = {}  # by module, kind and sequence

    def named(self, name: str, call: AttentionCall, names: dict[int, str]) -> str:
        """The name of a module, with the number of its call from the second on."""
        if running.current is not self.current:
            self.current, self.last = running.current, {}
        sequence = None if self.current is None else self.current.sequences_of(call.query, call.key)[0]
        frame = next(
            (candidate for candidate in reversed(call.frames) if names.get(id(candidate.module)) == name), None
        )
        if sequence is None or frame is None or call.info.queries == 1:
            return name
        place = name, call.info.kind, sequence
        before, number = self.last.get(place, (None, 0))
        if before is not frame:
            number = min(number + 1, MOST_CALLS)
            self.last[place] = frame, number
        return name if number == 1 else f"{name} (call {number})"
