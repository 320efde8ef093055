"""Running: which modules are in the middle of their forward, in this thread, and what one pass through a model knows."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from ..._torch_private import (
    TorchDispatchMode,
    _get_dispatch_stack_at,
    _len_torch_dispatch_stack,
    _NormBase,
    _pop_mode,
    _push_mode,
)
from ..routes.handwritten.storages import address
from ..routes.sequences import Sequences

if TYPE_CHECKING:
    from ..call import Call
    from ..routes.handwritten.chain import Chain
    from ..routes.transformers import Interfaced
    from ..trace.trace import Trace
    from .attachment import Attachment

CROSS = re.compile(r"cross|encoder_attn|enc_?dec|multihead_attn", re.IGNORECASE)
QUIET = {nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.GELU, nn.ReLU, nn.SiLU, nn.Conv1d, nn.Conv2d}
"""Modules inside which there is nothing to see; most of a model's ops are theirs, and each op seen costs its time."""

SELF = re.compile(r"self", re.IGNORECASE)
ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
NORM = re.compile(r"norm|dropout", re.IGNORECASE)


Place = tuple[int, int]
"""An op in a run: the id of the module that it runs in, and which of the products and attention ops there it is."""


class Frame:
    """A module whose forward is running; `kind` where its arguments tell self- from cross-attention."""

    __slots__ = ("heard", "kind", "module", "name", "outer", "shape")

    def __init__(self, module: nn.Module, name: str, arguments: tuple[Any, ...]) -> None:
        self.module = module
        self.name = name
        first = arguments[0] if arguments else None
        shown = isinstance(first, Tensor) and not first.is_nested and first.is_floating_point()
        self.shape = tuple(first.shape) if shown and first is not None else None
        self.heard = False  # whether a call was seen in it, or said to be missing
        self.outer = False  # whether a module inside it is an attention module by its name
        self.kind: str | None = None
        if isinstance(module, nn.MultiheadAttention) and len(arguments) > 1 and isinstance(first, Tensor):
            same = first is arguments[1] or address(first) == address(arguments[1])
            self.kind = "self" if same else "cross"


def projects(module: nn.Module) -> bool:
    """Linear and its kin; GPT-2's Conv1D says how wide it is in another word."""
    return hasattr(module, "in_features") or hasattr(module, "nf")


def weighs_channels(module: nn.Module) -> bool:
    """Whether it has a weight for every entry of the last dimension: a projection, or a norm of vectors with gains."""
    if projects(module):
        return True
    named = "norm" in type(module).__name__.lower() and not isinstance(module, (_NormBase, nn.GroupNorm))
    return named and isinstance(getattr(module, "weight", None), Tensor)


class Traits(NamedTuple):
    """What a module's class says of it."""

    quiet: bool  # one of QUIET
    carries: bool  # whether its output belongs to the sequence of its input: projections, norms, activations, dropout
    attends: bool  # whether it calls itself attention


def traits(module: nn.Module) -> Traits:
    """Asked twice of every module that runs, so answered once for its class."""
    kind = type(module)
    known = _traits.get(kind)
    if known is None:
        name = kind.__name__
        carries = kind in QUIET or projects(module) or NORM.search(name) is not None
        known = _traits[kind] = Traits(kind in QUIET, carries, ATTENTION.search(name) is not None)
    return known


_traits: dict[type[nn.Module], Traits] = {}


class Pass:
    """One call of the outermost watched module: its mode, and what is tracked on the way, all forgotten at its end."""

    def __init__(self, chain: Chain, mode: TorchDispatchMode, trace: Trace | None = None) -> None:
        self.chain, self.mode, self.trace = chain, mode, trace
        self.listening = False
        self.interfaced: Interfaced | None = None
        self.begun: list[object] = []  # the watches that know of this pass
        self.left_out: list[object] = []  # those of them for which it does not count
        self.sequences: Sequences = chain.sequences
        self.kept: dict[tuple[int, int, int], Tensor | None] = {}  # sequence, batch, length → rows that are no padding
        self.place: Place | None = None  # of the op under way, where somebody counts them (alter.py)
        self.ratio = 1.0  # by which that op's output is then multiplied
        self.doubtful: list[tuple[Frame, ...]] = []  # attention modules, by their name, in which no call was seen

    def left(self, frames: list[Frame], module: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
        """A module has ended: where its output belongs, and whether it kept what its name promises."""
        known = traits(module)
        if known.carries and arguments and isinstance(output, Tensor):
            source = arguments[0]
            if isinstance(source, Tensor) and source.is_floating_point():
                self.chain.carry(source, output, module)
        if self.trace is not None:
            self.trace.left(module, arguments, output)
        if known.attends and frames[-1].module is module and output is not None:
            if frames[-1].outer or frames[-1].heard:
                return
            self.doubtful.append(tuple(frames))  # the last product may still come

    def answers(self, call: Call, out: Any) -> None:
        """An attention's output belongs to the sequence of its queries."""
        result = out[0] if isinstance(out, (tuple, list)) else out
        if isinstance(result, Tensor):
            self.sequences.put(result, self.sequences.of(call.query))

    def is_deaf(self, listeners: tuple[object, ...]) -> bool:
        """Whether it counts for nobody."""
        return bool(self.left_out) and all(listener in self.left_out for listener in listeners)

    def listen(self) -> None:
        if not self.listening:
            _push_mode(self.mode)
            self.listening = True

    def rest(self) -> bool:
        """Step aside, unless a mode of the model's own lies above; whether nobody listens now."""
        depth = _len_torch_dispatch_stack()
        if self.listening and depth and _get_dispatch_stack_at(depth - 1) is self.mode:
            _pop_mode()
            self.listening = False
        return not self.listening

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
        self.mode: Callable[[Attachment], TorchDispatchMode] | None = (
            None  # makes the passes' mode, in place of the plain one
        )


running = Running()


@lru_cache(4096)
def _kind_said(name: str, kind: str) -> str | None:
    """What the names of a module and of its class say."""
    # BERT and its kin call the inner module of any attention "self"; that alone says nothing
    parts = [part for part in name.split(".") if part != "self"]
    labels = (".".join(parts[-2:]), kind)
    if any(map(CROSS.search, labels)):
        return "cross"
    return "self" if any(map(SELF.search, labels)) else None


def kind_of(frames: tuple[Frame, ...], query: Tensor, key: Tensor, lengths: tuple[int, int]) -> str:
    """Self- or cross-attention: by the module's arguments, by its name, by the sequences of q and k, then by lengths."""
    frame = frames[-1]
    if frame.kind is not None:
        return frame.kind
    said = _kind_said(frame.name, type(frame.module).__name__)
    if said == "cross" or getattr(frame.module, "is_cross_attention", False):
        return "cross"
    if said == "self":
        return "self"
    if address(query) == address(key) != 0:
        return "self"
    if running.current is not None:
        sequences = running.current.sequences.known(query), running.current.sequences.known(key)
        if None not in sequences:
            return "self" if sequences[0] == sequences[1] else "cross"
    # one query beside many keys is a cache being read
    return "cross" if 1 < lengths[0] != lengths[1] else "self"
