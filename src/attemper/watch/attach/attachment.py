"""Attachment: the hooks and the mode that all watches of a process share, and what becomes of a call that is seen.

Hooks are global, since a hook on a module of its own switches the encoder's fast path off; the mode sees ops below autograd,
where fused attention is still one op. Both are there only while some watch listens. A mode belongs to a thread, so it
is entered when a watched module begins its forward and left when that module ends, in whichever thread that is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ..._torch_private import HigherOrderOperator, TorchDispatchMode, _current_graph_task_id, _pop_mode, _push_mode
from ...errors import AttemperError
from ...heads import HeadSummary
from ...operation.ops import FORWARD
from ...vitals import Vitals
from ..call import Call, without_autograd_and_modes
from ..routes import attemper as own
from ..routes import sdpa as fused
from ..routes.handwritten.chain import Chain, shared
from ..routes.handwritten.op_names import SOFTMAXES, is_followed, op_name
from ..routes.handwritten.storages import Storages
from ..routes.padding import leave_padding_out
from ..routes.transformers import Interface
from ..trace.trace import Trace
from .dynamo import Eager
from .frames import Site
from .measuring import measured
from .running import Frame, Pass, running, traits

EINSUM = torch.ops.aten.einsum.default
READERS = {**fused.readers(), FORWARD: own.read}


class Listener(Protocol):
    """What a watch is to the attachment."""

    modules: tuple[nn.Module, ...]  # all that are watched
    names: dict[int, str]  # id of a module → its name
    signs: tuple[str, ...]
    kernel: str
    given_rows: Tensor | None

    @property
    def wants_gradients(self) -> bool: ...

    @property
    def wants_traces(self) -> bool: ...

    def began(self, module: nn.Module) -> bool: ...
    def examine(self, call: Call, vitals: Vitals, rows: Tensor | None) -> Any: ...
    def hear(self, name: str, call: Call, summary: HeadSummary | None, seen: Any) -> None: ...
    def unheard(self, name: str, reason: str) -> None: ...
    def missed(self, name: str, reason: str) -> None: ...


class Mode(TorchDispatchMode):
    """Sees every op of a watched forward; runs it unchanged, then looks at what it was.

    It is pushed and popped by itself, not by ``with``: that sets flags which all threads share, and leaves them wrong when two
    threads overlap. They tell Dynamo of modes; while somebody listens, Dynamo does not run.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would wrap every op's call in a context of Dynamo's

    def __init__(self, attachment: Attachment) -> None:
        super().__init__()
        self.attachment = attachment
        self.readers = READERS

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is EINSUM:
            # only in inference mode does it come here whole; what it is made of is what is followed
            _push_mode(self)
            try:
                return func.decompose(*args, **kwargs)
            finally:
                _pop_mode()
        out = func(*args, **kwargs)
        reader, current = self.readers.get(func), running.current
        if current is None:
            return out
        if reader is None:
            if is_followed(func):
                if types and op_name(func) in SOFTMAXES:
                    reason = f"a softmax, which may be attention, of {fused.wrapped(types[0])}"
                    self.attachment.unheard(tuple(running.frames), reason)
                else:
                    current.chain.see(func, args, kwargs, out)
        else:
            frames = tuple(running.frames)
            call = reader(func, args, kwargs, frames)
            if isinstance(call, str):
                self.attachment.unheard(frames, f"a {func} call on {call}")
            elif call is not None:
                if current.place is not None:
                    call.places = (current.place,)
                self.attachment.begin(call)(call.frames)
                current.answers(call, out)
        return out


class TracingMode(Mode):
    """The same where somebody asks what q and k were multiplied by; a class of its own, so that nobody else pays for it."""

    def __init__(self, attachment: Attachment, trace: Trace) -> None:
        super().__init__(attachment)
        self.trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is EINSUM or isinstance(func, HigherOrderOperator):
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.trace.before(func, args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.trace.see(func, args, kwargs or {}, out)
        return out


class Attachment:
    """Who listens, and what is installed for them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.listeners: tuple[Listener, ...] = ()
        self.parameters: Storages[bool] = Storages()
        self.handles: list[RemovableHandle] = []
        self.passes: dict[Pass, Site] = {}
        self.eager = Eager()
        self.interface = Interface(self.begin, self.unheard)

    def add(self, listener: Listener) -> None:
        with self.lock:
            self.listeners = (*self.listeners, listener)
            for module in listener.modules:
                for parameter in module._parameters.values():
                    if parameter is not None:
                        self.parameters.put(parameter, True)
            if not self.handles:
                self.handles = [
                    register_module_forward_pre_hook(self.enter),
                    register_module_forward_hook(self.leave, always_call=True),
                ]
            self.eager.on()
            self.interface.install()

    def remove(self, listener: Listener) -> None:
        with self.lock:
            self.listeners = tuple(other for other in self.listeners if other is not listener)
            self._release()

    def _release(self) -> None:
        """Take everything away once nobody listens; a forward still running in another thread keeps its way out."""
        if self.listeners:
            return
        self.passes = {one: site for one, site in self.passes.items() if site.is_running()}
        if self.passes:
            return
        for handle in self.handles:
            handle.remove()
        self.handles, self.parameters = [], Storages()
        self.interface.uninstall()
        self.eager.off()

    def enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        frames = running.frames
        if frames and frames[0].module is module:
            self.forget_ended()
        name, key = None, id(module)
        for listener in self.listeners:
            name = listener.names.get(key)
            if name is not None:
                break
        if not frames:
            if name is None or torch.compiler.is_compiling():
                return
            running.current = self._pass()
            with self.lock:
                self.passes[running.current] = Site()
            running.current.listen()
        current, known = running.current, traits(module)
        if current is not None:
            if name is not None and len(current.begun) < len(self.listeners):
                self._count_pass(module, current)
                if current.is_deaf(self.listeners):
                    current.rest()
            if known.quiet and current.rest() and frames:
                return  # nothing is seen in it, so nothing is asked of its frame
        if known.attends:
            for frame in frames:
                frame.outer = True
        frames.append(Frame(module, name or "", arguments))

    def _pass(self) -> Pass:
        chain = Chain(self.parameters, self.begin, self.unheard, self.missed)
        if running.mode is not None:  # somebody alters ops, and nobody traces them meanwhile
            return Pass(chain, running.mode(self))
        if not any(listener.wants_traces for listener in self.listeners):
            return Pass(chain, Mode(self))
        trace = Trace(chain)
        return Pass(chain, TracingMode(self, trace), trace)

    def _count_pass(self, module: nn.Module, current: Pass) -> None:
        for listener in self.listeners:
            if listener not in current.begun and id(module) in listener.names:
                current.begun.append(listener)
                if not listener.began(module):
                    current.left_out.append(listener)

    def leave(self, module: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
        current, frames = running.current, running.frames
        if current is not None and frames and not current.is_deaf(self.listeners):
            current.listen()
            current.left(frames, module, arguments, output)
        if frames and frames[-1].module is not module and traits(module).quiet:
            return  # it has no frame
        # a module that raised without an always-called hook may have left frames above this one
        for depth in range(len(frames) - 1, -1, -1):
            if frames[depth].module is module:
                self.unwind(depth)
                return

    def unwind(self, depth: int) -> None:
        """Forget the frames from this depth on; with the last of them the pass ends."""
        del running.frames[depth:]
        current = running.current
        if depth == 0 and current is not None:
            running.current = None
            current.end()
            for frames in current.doubtful:
                if not frames[-1].heard:
                    reason = f"{type(frames[-1].module).__name__} ran, but no attention call was seen in it"
                    self.missed(frames, reason, current)
            self.parameters.drop_freed()
            with self.lock:
                self.passes.pop(current, None)
                self._release()

    def forget_ended(self) -> None:
        """Let go of a pass of this thread that a KeyboardInterrupt or a SystemExit ended: they pass hooks by."""
        current = running.current
        if current is not None:
            site = self.passes.get(current)
            if site is None or not site.is_running():
                self.unwind(0)

    def begin(self, call: Call) -> Callable[[tuple[Frame, ...]], None]:
        """Measure a call; what is returned counts it, once it is certain to be attention."""
        # a forward inside a backward is a checkpoint computed again: its numbers are in, its gradients are still to come
        again = _current_graph_task_id() != -1
        current = running.current
        if current is not None and current.interfaced is not None:
            call.facts = current.interfaced.complete(call.facts)
        frames = call.frames
        reason = fused.unreadable(call.query, call.key)
        if reason is not None:  # whatever the route: our kernels read memory by its address
            self.unheard(frames, f"attention on {reason}")
            return lambda last: None
        listeners = [listener for listener in self._hearing(current) if _name(listener, frames) is not None]
        found: list[tuple[HeadSummary | None, Any]] = [(None, None)] * len(listeners)
        try:
            with without_autograd_and_modes(call.query.device.type):
                leave_padding_out(call)
                if current is not None and current.trace is not None:
                    call.traced = current.trace.read(call)
                if not again:
                    found = measured(call, listeners)
        except (AttemperError, RuntimeError) as error:
            # the model runs on; that this call is missing from its record is said
            self.unheard(frames, str(error))
            return lambda last: None
        call.logits = call.mask = call.vitals = None

        def count(last: tuple[Frame, ...]) -> None:
            if call.counted:
                return
            call.counted = True
            self._remark(call, listeners)
            place = tuple(shared(frames, last)) if last is not frames else frames
            for listener, (summary, seen) in zip(listeners, found, strict=True):
                name = _name(listener, place)
                if name is not None:
                    listener.hear(name, call, summary, seen)

        return count

    def _remark(self, call: Call, listeners: list[Listener]) -> None:
        """Mark the modules around a call as heard, and say what is not certain about its numbers."""
        for frame in call.frames:
            frame.heard = True
        if not call.heads_known:
            self.missed(call.frames, "nothing says how many heads its folded dimension holds: all are one head here")
        if call.one_tensor():
            for listener in listeners:
                name = _name(listener, call.frames)
                if listener.wants_gradients and name is not None:
                    listener.missed(name, "q and k are one tensor: |dq| and |dk| are both its whole gradient")

    def _hearing(self, current: Pass | None) -> list[Listener]:
        """Who listens to a pass."""
        return [listener for listener in self.listeners if current is None or listener not in current.left_out]

    def missed(self, frames: tuple[Frame, ...], reason: str, current: Pass | None = None) -> None:
        """Something that may be attention went by, or was not fully read: noted."""
        for listener in self._hearing(current or running.current):
            name = _name(listener, frames)
            if name is not None:
                listener.missed(name, reason)

    def unheard(self, frames: tuple[Frame, ...], reason: str) -> None:
        for frame in frames:
            frame.heard = True
        for listener in self._hearing(running.current):
            name = _name(listener, frames)
            if name is not None:
                listener.unheard(name, reason)


def _name(listener: Listener, frames: tuple[Frame, ...]) -> str | None:
    """The innermost of these modules that belongs to a watch's model, as that model names it."""
    for frame in reversed(frames):
        name = listener.names.get(id(frame.module))
        if name is not None:
            return name
    return None


attachment = Attachment()
