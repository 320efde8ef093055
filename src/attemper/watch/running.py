"""Running: which modules are in the middle of their forward, in this thread, and what one pass through a model knows."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

if TYPE_CHECKING:
    from .chain import Chain
    from .interface import Interfaced

CROSS = re.compile(r"cross|encoder_attn|enc_?dec|multihead_attn", re.IGNORECASE)
QUIET = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.GELU, nn.ReLU, nn.SiLU, nn.Conv1d, nn.Conv2d)
"""Modules inside which there is nothing to see; most of a model's ops are theirs, and each op seen costs its time."""

SELF = re.compile(r"self", re.IGNORECASE)


class Frame:
    """A module whose forward is running; `kind` where its arguments tell self- from cross-attention."""

    __slots__ = ("kind", "made", "module", "name")

    def __init__(self, module: nn.Module, name: str, arguments: tuple[Any, ...]) -> None:
        self.module = module
        self.name = name
        self.made: dict[int, int] = {}  # where a projection of it put its output → where its input is
        self.kind: str | None = None
        if isinstance(module, nn.MultiheadAttention) and len(arguments) > 1:
            same = base(arguments[0]) == base(arguments[1])
            self.kind = "self" if same else "cross"


def projects(module: nn.Module) -> bool:
    """Linear and its kin; GPT-2's Conv1D says how wide it is in another word."""
    return hasattr(module, "in_features") or hasattr(module, "nf")


def base(tensor: object) -> int:
    """Where a tensor's storage begins: the same for all its views; 0 where there is none (nested, wrapped by torch.func)."""
    if not isinstance(tensor, Tensor):
        return 0
    try:
        return int(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())
    except RuntimeError:
        return 0


class Pass:
    """One call of the outermost watched module: its mode, and what is tracked on the way, all forgotten at its end."""

    def __init__(self, chain: Chain, mode: TorchDispatchMode) -> None:
        self.chain, self.mode = chain, mode
        self.listening = False
        self.interfaced: Interfaced | None = None
        self.begun: list[object] = []  # the watches for which this pass is counted
        self.kept: dict[tuple[int, int], Tensor | None] = {}  # (batch, length) → rows that are not padding

    def listen(self) -> None:
        if not self.listening:
            _push_mode(self.mode)
            self.listening = True

    def rest(self) -> None:
        """Step aside, unless a mode of the model's own lies above."""
        depth = torch._C._len_torch_dispatch_stack()
        if self.listening and depth and torch._C._get_dispatch_stack_at(depth - 1) is self.mode:
            _pop_mode()
            self.listening = False

    def end(self) -> None:
        """Take the mode away for good, wherever in the stack it is."""
        above = []
        while self.listening:
            top = _pop_mode()
            self.listening = top is not self.mode
            if self.listening:
                above.append(top)
        for mode in reversed(above):
            _push_mode(mode)


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
    sources = frame.made.get(base(query)), frame.made.get(base(key))
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
