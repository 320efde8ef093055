"""Running: which modules are in their forward, in this thread, and the state of one pass through a model."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from ..._torch_private import (
    TorchDispatchMode,
    _current_graph_task_id,
    _get_dispatch_stack_at,
    _get_tracing_state,
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
    _len_torch_dispatch_stack,
    _NormBase,
    _pop_mode,
    _push_mode,
)
from .storages import address

if TYPE_CHECKING:
    from ..call import AttentionCall, CallInfo, Summary
    from ..observer import Observer
    from ..routes.exchanged import Collective
    from ..routes.handwritten.chain import Chain
    from ..routes.kind import Sequences
    from ..routes.transformers import Interfaced
    from ..trace.trace import Trace
    from .attachment import Attachment
    from .plan import FullPass, InterceptedPass, PassPlan

QUIET = {nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.GELU, nn.ReLU, nn.SiLU, nn.Conv1d, nn.Conv2d}
"""Modules that hold no attention. Most of a model's ops run in them, and every op that the mode dispatches costs time."""

ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
NORM = re.compile(r"norm|dropout", re.IGNORECASE)


OpPlace = tuple[int, int]
"""An op in a run: the id of the module that it runs in, and which of the products and attention ops there it is."""


class Frame:
    """A module whose forward is running; `kind` if its arguments show whether it is self- or cross-attention."""

    __slots__ = ("accounted", "kind", "module", "name", "outer", "shape")

    def __init__(self, module: nn.Module, name: str, arguments: tuple[Any, ...]) -> None:
        self.module = module
        self.name = name
        first = arguments[0] if arguments else None
        shown = isinstance(first, Tensor) and not first.is_nested and first.is_floating_point()
        self.shape = tuple(first.shape) if shown and first is not None else None
        self.accounted = False  # whether a call in it was measured or reported
        self.outer = False  # whether a module inside it is named attention
        self.kind: str | None = None
        if isinstance(module, nn.MultiheadAttention) and len(arguments) > 1 and isinstance(first, Tensor):
            same = first is arguments[1] or address(first) == address(arguments[1])
            self.kind = "self" if same else "cross"


def projects(module: nn.Module) -> bool:
    """Whether it is Linear or similar; GPT-2's Conv1D has `nf` in place of `in_features`."""
    return hasattr(module, "in_features") or hasattr(module, "nf")


def weighed_dimension(module: nn.Module) -> int | None:
    """The dimension for every entry of which it has a weight: the last of a projection and of a norm of vectors with gains, the
    channels of a convolution and of a norm of them; None: it has no such weights."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, _NormBase, nn.GroupNorm)):
        return 1
    named = "norm" in type(module).__name__.lower() and isinstance(getattr(module, "weight", None), Tensor)
    return -1 if named or projects(module) else None


class Traits(NamedTuple):
    """What the class of a module shows."""

    quiet: bool  # one of QUIET: see `is_quiet`
    carries: bool  # whether its output belongs to the sequence of its input: projections, norms, activations, dropout
    attends: bool  # whether its name contains attention


def traits(module: nn.Module) -> Traits:
    """The traits of a module, cached by class: they are needed twice for every module that runs."""
    cls = type(module)
    known = _traits.get(cls)
    if known is None:
        name = cls.__name__
        carries = cls in QUIET or projects(module) or NORM.search(name) is not None
        attends = ATTENTION.search(name) is not None and not name.endswith("Output")  # which is the projection after it
        known = _traits[cls] = Traits(cls in QUIET, carries, attends)
    return known


def is_quiet(module: nn.Module) -> bool:
    """Whether no attention can run in a module: it is one of QUIET, and no hook runs in it."""
    hooks = module._forward_hooks or module._forward_pre_hooks or _global_forward_hooks or _global_forward_pre_hooks
    return traits(module).quiet and not hooks


_traits: dict[type[nn.Module], Traits] = {}


class Pass:
    """One call of the outermost watched module: its mode, and what is tracked until it ends."""

    chain: Chain  # if it has a mode
    sequences: Sequences  # unless it is intercepted

    def __init__(self) -> None:
        self.mode: TorchDispatchMode | None = None  # None: no op of it was followed so far
        self.trace: Trace | None = None
        self.active = False  # whether the mode is on
        self.full_pass: FullPass | None = None  # what is learned in a full pass
        self.intercepted: InterceptedPass | None = None  # while it is intercepted, what it expects
        self.begun_intercepted: InterceptedPass | None = None  # the same, also after it became a full one
        self.skips: frozenset[int] = frozenset()  # while it is intercepted: ids of modules that need no frame in it
        self.only: Observer | None = None  # while it is intercepted: the only watch, if it needs sums alone
        self.intercepting = False  # whether an intercepted function reads a call now
        self.interfaced: Interfaced | None = None
        self.begun: list[Observer] = []  # the watches that were told of this pass
        self.left_out: list[Observer] = []  # those of them for which it does not count
        # in an intercepted pass, the sequences of the call that is read
        self.planned: tuple[int | None, int | None] | None = None
        self.kept: dict[tuple[int, int, int], Tensor | None] = {}  # sequence, batch, length → rows that are not padding
        self.read: dict[Any, tuple[Tensor, Any]] = {}  # what of it, place in memory → tensor, what was read of it
        self.place: OpPlace | None = None  # of the current op, if ops are counted (alter.py)
        self.ratio = 1.0  # what that op's output is then multiplied by
        # the modules around each call that was counted, unless the pass is intercepted; and what ranks exchanged meanwhile
        self.called: list[tuple[Frame, ...]] = []
        self.collectives: list[Collective] = []
        self.doubtful: list[tuple[Frame, ...]] = []  # modules that are named attention and showed no call

    def left(self, frames: list[Frame], module: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
        """A module has ended: note the sequence of its output, and whether one that is named attention showed a call."""
        known = traits(module)
        if known.carries and arguments and isinstance(output, Tensor):
            source = arguments[0]
            if isinstance(source, Tensor) and source.is_floating_point():
                self.chain.carry(source, output, module)
        if self.trace is not None:
            self.trace.left(module, arguments, output)
        if known.attends and frames[-1].module is module and output is not None:
            if frames[-1].outer or frames[-1].accounted:
                return
            self.doubtful.append(tuple(frames))  # the last product may still come

    def counted(self, call: AttentionCall, frames: list[Frame]) -> None:
        """A call of this pass was counted."""
        if self.intercepted is None:
            self.called.append(call.frames)
        if self.full_pass is not None:
            self.full_pass.counted(call, frames, self.sequences_of(call.query, call.key))
        elif self.begun_intercepted is not None:
            self.begun_intercepted.counted(frames[-1].module, call.product)

    def sequences_of(self, query: Tensor, key: Tensor) -> tuple[int | None, int | None]:
        """The numbers of the sequences of q and k, where they are known."""
        return (self.sequences.known(query), self.sequences.known(key)) if self.planned is None else self.planned

    def all_told(self, observers: tuple[Observer, ...], plan: PassPlan) -> None:
        """Every watch was told of an intercepted pass: which modules need no frame, and whether sums are all that is wanted."""
        self.skips = plan.skipped_by([observer.names for observer in observers])
        only = observers[0]
        more = len(observers) > 1 or only.wants_gradients or only.ranks.many
        self.only = None if more else only

    def wants_only_sums(self, observers: tuple[Observer, ...], module: int) -> Observer | None:
        """The only watch of an intercepted pass, if it needs the sums of the next call alone: this module's, by its id."""
        only = self.only
        if only is None or self.intercepted is None or observers != (only,) or self.left_out:
            return None
        recomputing = _current_graph_task_id() != -1  # a checkpoint that is computed again
        return only if module in only.names and only.given_rows is None and not recomputing else None

    def add_sums(self, info: CallInfo, summary: Summary, only: Observer, module: int) -> None:
        """Count a call of this module, of which there are only its sums."""
        if self.intercepted is not None:
            self.intercepted.counted(running.frames[-1].module)
        only.sums.add(only.names[module], info, summary)

    def once(self, tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
        """What is read of a tensor, once in this pass: many layers are given the same mask, or the same offsets."""
        if tensor.is_inference():
            return read(tensor)  # it counts no versions
        place = (read, tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, tensor.stride())
        value = self.read.get(place)
        if value is None:
            value = self.read[place] = (tensor, read(tensor))  # while it is kept, its memory is not used again
        return value[1]

    def spoil(self) -> None:
        """Something was seen that can only be noted: a pass like this one must be full each time."""
        if self.full_pass is not None:
            self.full_pass.clean = False

    def answers(self, call: AttentionCall, out: Any) -> None:
        """The output of an attention call belongs to the sequence of its queries."""
        result = out[0] if isinstance(out, (tuple, list)) else out
        if isinstance(result, Tensor):
            self.sequences.put(result, self.sequences.of(call.query))

    def counts_for_none(self, observers: tuple[Observer, ...]) -> bool:
        return bool(self.left_out) and all(observer in self.left_out for observer in observers)

    def resume(self) -> None:
        """Turn the mode on."""
        if not self.active and self.mode is not None:
            _push_mode(self.mode)
            self.active = True

    def pause(self) -> bool:
        """Turn the mode off, unless a mode of the model's own is above it; whether it is off now."""
        depth = _len_torch_dispatch_stack()
        if self.active and depth and _get_dispatch_stack_at(depth - 1) is self.mode:
            _pop_mode()
            self.active = False
        return not self.active

    def end(self, complete: bool) -> None:
        """Remove the mode, wherever in the stack it is, and tell the watches; `complete` if the pass raised nothing."""
        above = []
        while self.active:
            top = _pop_mode()
            self.active = top is not self.mode
            if self.active:
                above.append(top)
        for mode in reversed(above):
            _push_mode(mode)
        # a checkpoint that is computed again is stopped by an exception as soon as its backward has all it needs
        complete = complete or _current_graph_task_id() != -1
        for observer in self.begun:
            observer.sums.end_pass(complete)


class Site:
    """Where a pass began, to find out whether it still runs: an interrupt between two modules ends it without a call to us."""

    def __init__(self, frame: FrameType) -> None:
        self.thread = threading.get_ident()
        self.frame = frame  # of the function that `module_call` makes

    def is_running(self) -> bool:
        return any(frame is self.frame for frame in python_frames(sys._current_frames().get(self.thread)))


def python_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame of Python's own stack and all frames that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


class Running(threading.local):
    """The state of this thread."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.current: Pass | None = None
        self.given_up: Site | None = None  # the pass in which attemper failed, while it runs
        # makes the mode of the next passes, in place of the plain one (alter.py)
        self.mode: Callable[[Attachment], TorchDispatchMode] | None = None


running = Running()


class Switch:
    """Whether a function of ours does anything. One that someone else has wrapped is never removed, only switched off."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False


def module_call(attachment: Attachment, original: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """The replacement of ``nn.Module._call_impl``: it tells the attachment when a module begins and ends its forward.

    Most modules of an intercepted pass are not followed. Without hooks, their forward is called right here, as torch's own
    function does: one more Python call per module would cost more than the rest of an intercepted pass.
    """
    is_torchs = getattr(original, "__globals__", None) is vars(torch_modules)

    def _call_impl(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not switch.on:
            return original(module, *args, **kwargs)
        current, output = running.current, None
        if current is not None and id(module) in current.skips:
            try:
                hooks = (
                    module._backward_hooks or module._backward_pre_hooks or module._forward_hooks or module._forward_pre_hooks
                    or _global_backward_pre_hooks or _global_backward_hooks or _global_forward_hooks or _global_forward_pre_hooks
                )  # fmt: skip
                straight = is_torchs and not hooks and not _get_tracing_state()
                output = module.forward(*args, **kwargs) if straight else original(module, *args, **kwargs)
                return output
            finally:
                if current.intercepted is None:  # the pass became a full one, in which this module has a frame
                    try:
                        attachment.leave(module, args, output)
                    except Exception as error:
                        attachment.give_up(error, module)
        complete = False
        try:
            try:
                attachment.enter(module, args, kwargs)
            except Exception as error:
                attachment.give_up(error, module)
            output = original(module, *args, **kwargs)
            complete = True
            return output
        finally:
            try:
                attachment.leave(module, args, output, complete)
            except Exception as error:
                attachment.give_up(error, module)

    return _call_impl


CALL = module_call(None, nn.Module._call_impl, Switch()).__code__  # type: ignore[arg-type]
"""The code of that function: its frames on Python's stack show which modules run."""


def _calls(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """The local variables of every call of that function on Python's stack, the innermost first."""
    while frame is not None:
        if frame.f_code is CALL and (values := frame.f_locals)["switch"].on:
            yield values
        frame = frame.f_back


def is_innermost(module: nn.Module) -> bool:
    """Whether a module is the innermost that runs, by Python's stack: an intercepted pass keeps frames only around calls."""
    values = next(_calls(sys._getframe(3)), None)
    return values is None or values["module"] is module  # without values, it was not called in the usual way


def running_modules(
    frames: list[Frame], name: Callable[[int], str | None], intercepted: InterceptedPass | None
) -> list[Frame]:
    """The frames of all modules that run now, the outermost first. An intercepted pass has kept only those around calls."""
    made = {} if intercepted is None else intercepted.made
    found: list[Frame] = []
    known = list(frames)
    for values in reversed(list(_calls(sys._getframe(1)))):
        module = values["module"]
        if known and known[0].module is module:
            frame = known.pop(0)
        elif found and not is_quiet(module):
            frame = Frame(module, name(id(module)) or "", values.get("args", ()))
        else:
            continue
        frame.accounted |= any(id(inner) in made for inner in module.modules())
        for outer in found if traits(module).attends else ():
            outer.outer = True
        found.append(frame)
    if not known:
        return found
    for frame in frames:
        frame.accounted |= bool(made)
    return frames
