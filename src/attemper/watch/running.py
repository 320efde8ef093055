"""Running: which modules are in the middle of their forward, in this thread, and what one pass through a model knows."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .storages import Storages, address

if TYPE_CHECKING:
    from .chain import Chain
    from .interface import Interfaced

CROSS = re.compile(r"cross|encoder_attn|enc_?dec|multihead_attn", re.IGNORECASE)
SELF = re.compile(r"self", re.IGNORECASE)


class Frame:
    """A module whose forward is running; `kind` where its arguments tell self- from cross-attention."""

    __slots__ = ("kind", "module", "name")

    def __init__(self, module: nn.Module, name: str, arguments: tuple[Any, ...]) -> None:
        self.module = module
        self.name = name
        self.kind: str | None = None
        if isinstance(module, nn.MultiheadAttention) and len(arguments) > 1:
            same = address(arguments[0]) == address(arguments[1])
            self.kind = "self" if same else "cross"


def projects(module: nn.Module) -> bool:
    """Linear and its kin; GPT-2's Conv1D says how wide it is in another word."""
    return hasattr(module, "in_features") or hasattr(module, "nf")


class Pass:
    """One call of the outermost watched module: what is tracked on the way, all forgotten at its end."""

    def __init__(self, chain: Chain, mode: TorchDispatchMode) -> None:
        self.chain, self.mode = chain, mode
        self.interfaced: Interfaced | None = None
        self.begun: list[object] = []  # the watches for which this pass is counted
        self.projected: Storages[int] = Storages()  # what a projection made → the storage it was made from
        self.kept: dict[tuple[int, int], Tensor | None] = {}  # (batch, length) → rows that are not padding

    def note_projection(self, module: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
        """Remember what a projection was given, to tell later whether q and k come from one sequence."""
        if not projects(module):
            return
        if isinstance(output, Tensor) and arguments and isinstance(arguments[0], Tensor):
            self.projected.put(output, address(arguments[0]))


class Running(threading.local):
    """The state of this thread."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.current: Pass | None = None


running = Running()


def kind_of(frames: tuple[Frame, ...], query: Tensor, key: Tensor, lengths: tuple[int, int]) -> str:
    """Self- or cross-attention: by the module's arguments, by its name, by where q and k come from, then by lengths."""
    frame = frames[-1]
    if frame.kind is not None:
        return frame.kind
    labels = (".".join(frame.name.split(".")[-2:]), type(frame.module).__name__)
    if getattr(frame.module, "is_cross_attention", False) or any(CROSS.search(label) for label in labels):
        return "cross"
    if any(SELF.search(label) for label in labels):
        return "self"
    current = running.current
    if current is not None:
        sources = current.projected.get(query), current.projected.get(key)
        if None not in sources:
            return "self" if sources[0] == sources[1] else "cross"
    return "cross" if lengths[0] > lengths[1] else "self"


def heads_of(frames: tuple[Frame, ...], folded: int) -> int:
    """The heads in a folded (B·H) dimension, as the innermost module that says so has them; 1 when none does."""
    for frame in reversed(frames):
        for attribute in ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads"):
            heads = getattr(frame.module, attribute, None)
            if isinstance(heads, int) and heads > 0 and folded % heads == 0:
                return heads
    return 1
