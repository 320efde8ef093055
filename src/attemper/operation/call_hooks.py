"""Call hooks: who is told of the attention calls of this thread.

A call hook is a watch in an intercepted pass, which has no dispatch mode. A target is the tally of a module, to which calls are
added.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels.contract import Problem

TALLY, KIND = "attemper_tally", "attemper_kind"
"""Attributes of a module that has a tally: the tensor, and self- or cross-attention, if its name shows that."""


class CallHook(Protocol):
    """Gets each problem after it was computed. What it raises is not the caller's: it gets that too."""

    def computed(self, problem: Problem) -> None: ...

    def failed(self, error: Exception) -> None: ...


class CallHooks(threading.local):
    """The call hook of this thread."""

    current: CallHook | None = None


call_hooks = CallHooks()


class TallyTarget(NamedTuple):
    """Where the calls of a module are added, and what is known of them before they run."""

    tally: Tensor
    training: bool
    route: str
    kind: str  # "self", "cross", or "" where only the lengths can tell
    implementation: str = ""
    declared: float | None = None
    window: int | None = None


class Tallying(threading.local):
    """The targets of the modules that run in this thread; the last one gets its calls."""

    targets: tuple[TallyTarget, ...] = ()


class TracedTallying:
    """Stands for `Tallying` while a graph is traced, because Dynamo cannot trace thread-local attributes."""

    targets: tuple[TallyTarget, ...] = ()

    def __init__(self) -> None:
        self.targets = ()


tallying, traced_tallying = Tallying(), TracedTallying()


def target_of(module: Any, route: str, kind: str = "", **known: Any) -> TallyTarget | None:
    """The target of a module, if it has a tally; `kind` is used unless the module's name shows it."""
    # not module.__dict__: Dynamo would not guard on it, and miss a tally that is added later
    tally = getattr(module, TALLY, None)
    if tally is None:
        return None
    return TallyTarget(tally, module.training, route, getattr(module, KIND, "") or kind, **known)


def current_target() -> TallyTarget | None:
    targets = traced_tallying.targets if torch.compiler.is_compiling() else tallying.targets
    return targets[-1] if targets else None


def begin_target(target: TallyTarget) -> None:
    """The calls that follow are added to this target, until `end_target`."""
    own = traced_tallying if torch.compiler.is_compiling() else tallying
    own.targets = (*own.targets, target)


def end_target(tally: Tensor) -> None:
    """The calls of the module with this tally have ended."""
    traced = torch.compiler.is_compiling()
    if not traced:  # or a graph broke since it began
        traced = not tallying.targets or tallying.targets[-1].tally is not tally
    own = traced_tallying if traced else tallying
    own.targets = own.targets[:-1]
