"""Attachment: how all watches of a process see which module runs and which ops, and what becomes of an attention call.

A function takes the place of ``nn.Module._call_impl``: a hook on a single module switches the encoder's fast path off, and
global hooks slow every module down. A dispatch mode gets ops below autograd, where fused attention is still one op. Both exist
only while some watch measures a step. A mode belongs to a thread: the one that runs a watched module enters and leaves it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..._torch_private import _current_graph_task_id, _get_tracing_state
from ...errors import AttemperError, internal_error
from ...operation.call_hooks import call_hooks
from ...vitals import SIGNS
from ..call import AttentionCall
from ..routes import sdpa
from ..routes.handwritten.chain import Chain, shared
from ..routes.kind import Sequences
from ..routes.transformers import Interface
from ..trace.trace import Trace
from .dispatch import READERS, Mode, TracingMode
from .dynamo import Eager
from .intercept import Interception
from .measuring import Measured, leave_padding_out, measured, native_summary
from .modes import leave_all, without_autograd_and_modes
from .names import name_in
from .plan import FullPass, InterceptedPass, PassType, pattern_of, plans
from .running import Frame, Pass, Site, is_quiet, running, running_modules, traits
from .storages import Storages

if TYPE_CHECKING:
    from ..observer import Observer


class Attachment:
    """The watches that measure now, and what is installed for them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.observers: tuple[Observer, ...] = ()
        self.parameters: Storages[bool] = Storages()
        self.passes: dict[Pass, Site] = {}
        self.eager = Eager()
        self.readers = READERS
        self.interception = Interception(self)
        self.interface = Interface(self.begin, self.unmeasured, self.fall_back, self.failed, self.give_up)

    def add(self, observer: Observer) -> None:
        """Install what a watch needs that measures a step."""
        with self.lock:
            self.observers = (*self.observers, observer)
            observer.native = native_summary(observer.kernel, observer.signs)
            observer.takes_any_kernel = observer.kernel == "auto" and observer.signs == SIGNS
            self.eager.on()
            self.interface.install()
            self.interception.install(observer)
            for module in observer.modules:
                self.eager.on_module(module)
                for parameter in module._parameters.values():
                    if parameter is not None:
                        self.parameters.put(parameter, True)

    def remove(self, observer: Observer) -> None:
        with self.lock:
            self.observers = tuple(other for other in self.observers if other is not observer)
            self._release()

    def closed(self, observer: Observer, depth: int) -> None:
        """A watch, opened with so many modules running, has closed."""
        if len(running.frames) > depth:
            self.unwind(depth)  # an interrupt while a module entered or left its forward
        with self.lock:
            self.interception.open.discard(observer)
            self.remove(observer)

    def _release(self) -> None:
        """Uninstall everything after the last watch, unless a forward still runs in another thread."""
        if self.observers:
            return
        self.passes = {key: site for key, site in self.passes.items() if site.is_running()}
        if self.passes:
            return
        self.parameters = Storages()
        self.interception.uninstall()
        self.interface.uninstall()
        self.eager.off()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module begins its forward."""
        frames = running.frames
        if frames and frames[0].module is module:
            self.forget_ended()
            frames = running.frames
        key, name = id(module), None
        for observer in self.observers:
            name = observer.names.get(key)
            if name is not None:
                break
        current, fell_back = running.current, False
        if current is None:
            if name is None or torch.compiler.is_compiling() or (running.given_up is not None and self._has_given_up()):
                return
            current = self._begin(module, args, kwargs, sys._getframe(1))
        elif current.intercepted is not None and not current.intercepted.entered(key, args, kwargs):
            self.fall_back(current)
            frames = running.frames
            fell_back = frames[-1].module is module  # it has a frame already, as all that run now
        if name is not None and len(current.begun) < len(self.observers):
            self._count_pass(module, current)
        if current.intercepted is not None:
            if not frames or current.intercepted.plan.around.get(key):
                frames.append(Frame(module, name or "", args))
        elif self._needs_frame(module, args, kwargs, current) and not fell_back:
            if traits(module).attends:
                for frame in frames:
                    frame.outer = True
            frames.append(Frame(module, name or "", args))

    def _needs_frame(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], current: Pass) -> bool:
        """Tell a full pass of a module that begins its forward; whether a call may be made in it."""
        quiet = is_quiet(module)
        if current.full_pass is not None:
            current.full_pass.entered(module, None if quiet else pattern_of(args, kwargs))
        paused = quiet and current.pause()  # no op in it is looked at
        return not (paused and running.frames)

    def name_of(self, key: int) -> str | None:
        """The name of a module, by its id, in the first watch that has it."""
        for observer in self.observers:
            name = observer.names.get(key)
            if name is not None:
                return name
        return None

    def _begin(self, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Pass:
        """A pass begins with this module and these arguments, in this frame of Python's stack."""
        plan = full_pass = None
        # torch.jit.trace compares graphs of several passes, with the lines of Python that each op came from
        planned = running.mode is None and _get_tracing_state() is None
        if planned and not any(observer.wants_full for observer in self.observers):
            pass_type = PassType.of(entry, args, kwargs)
            with self.lock:
                plan = plans.get(entry, pass_type)
            full_pass = FullPass(entry, pass_type) if plan is None else None
            call_hooks.current = self.interception
        current = running.current = Pass()
        with self.lock:
            self.passes[current] = Site(frame)
        if plan is not None:
            current.intercepted = current.begun_intercepted = InterceptedPass(plan)
            current.intercepted.ran[id(entry)] = 1
        else:
            current.full_pass, current.sequences = full_pass, Sequences()
            self._follow_ops(current)
        return current

    def _follow_ops(self, current: Pass) -> None:
        """Push the mode of a pass, which gets every op."""
        if current.mode is None:
            current.chain = Chain(self.parameters, current.sequences, self.begin, self.unmeasured, self.missed)
            if running.mode is not None:  # ops are altered, and not traced
                current.mode = running.mode(self)
            elif any(observer.wants_traces for observer in self.observers):
                current.trace = Trace(current.chain)
                current.mode = TracingMode(self, current.trace)
            else:
                current.mode = Mode(self)
        current.resume()

    def fall_back(self, current: Pass, differs: bool = True) -> None:
        """The rest of an intercepted pass is a full one; so is the next pass if the model differs from its plan."""
        if current.intercepted is not None:
            current.sequences = Sequences(current.intercepted.plan.last_sequence)
        current.intercepted, current.skips, current.planned = None, frozenset(), None
        running.frames = running_modules(running.frames, self.name_of, current.begun_intercepted)
        if current.begun_intercepted is not None:
            current.begun_intercepted.differs |= differs
            current.begun_intercepted.followed = {id(frame.module) for frame in running.frames}
        if not current.counts_for_none(self.observers):
            self._follow_ops(current)

    def _count_pass(self, module: nn.Module, current: Pass) -> None:
        for observer in self.observers:
            if observer not in current.begun and id(module) in observer.names:
                current.begun.append(observer)
                if not observer.pass_began(module):
                    current.left_out.append(observer)
        if current.counts_for_none(self.observers):
            current.pause()
            current.full_pass = None
        if current.intercepted is not None and len(current.begun) == len(self.observers):
            current.all_told(self.observers, current.intercepted.plan)

    def leave(self, module: nn.Module, arguments: tuple[Any, ...], output: object, complete: bool = True) -> None:
        """A module has ended its forward; `complete` if it raised nothing."""
        current, frames = running.current, running.frames
        if current is not None and current.intercepted is not None and len(frames) > 1 and frames[-1].module is module:
            frames.pop()
            return
        if (
            current is not None
            and frames
            and current.intercepted is None
            and not current.counts_for_none(self.observers)
        ):
            self._follow_ops(current)
            current.left(frames, module, arguments, output)
        if frames and frames[-1].module is not module and is_quiet(module):
            return  # it has no frame
        # a pass that an interrupt ended while a module entered or left it has frames above this one
        for depth in range(len(frames) - 1, -1, -1):
            if frames[depth].module is module:
                self.unwind(depth, complete)
                return

    def unwind(self, depth: int, complete: bool = False) -> None:
        """Forget the frames from this depth on; with the last of them the pass ends."""
        del running.frames[depth:]
        current = running.current
        if depth == 0 and current is not None:
            if current.mode is not None:
                current.chain.end()
            current.end(complete)
            for frames in current.doubtful:
                if not frames[-1].accounted:
                    reason = f"{type(frames[-1].module).__name__} ran, but no attention call was found in it"
                    self.missed(frames, reason, current)
            self.interception.end(current, complete)
            if current.begun_intercepted is None:
                self.parameters.drop_freed()
            with self.lock:
                self.passes.pop(current, None)
                if not self.observers:
                    self._release()
            running.current = None

    def forget_ended(self) -> None:
        """Forget a pass of this thread that an interrupt ended while a module entered or left its forward."""
        current = running.current
        if current is not None:
            site = self.passes.get(current)
            if site is None or not site.is_running():
                self.unwind(0)

    def failed(self, error: Exception) -> None:
        """An exception in attemper's own code, while an op or a call of the model was looked at: only that is missing."""
        reason = internal_error(error)
        if not isinstance(error, Warning):  # where warnings are errors, its note is there already
            with suppress(Warning):
                self.unmeasured(tuple(running.frames), reason)

    def give_up(self, error: Exception, module: nn.Module | None = None) -> None:
        """attemper's own code raised while a pass was followed: the rest of it is not measured, and the model runs on."""
        leave_all()
        current, frames = running.current, tuple(running.frames)
        site = None if current is None else self.passes.get(current)
        running.given_up = Site(sys._getframe(1)) if site is None else site
        running.frames, running.current, call_hooks.current = [], None, None
        if current is not None:
            current.end(True)  # what it measured is right
            if current.begun_intercepted is not None:
                current.begun_intercepted.plan.valid = False
            with self.lock:
                self.passes.pop(current, None)
                self._release()
        reason = f"{internal_error(error)}. The rest of this pass is not measured"
        names = [name for frame in reversed(frames) if (name := self.name_of(id(frame.module))) is not None]
        name = (self.name_of(id(module)) if module is not None else None) or (names[0] if names else "")
        for observer in self.observing(current):
            with suppress(Warning):
                observer.add_unmeasured(name, reason)

    def _has_given_up(self) -> bool:
        """Whether the pass that runs in this thread is no longer measured."""
        site = running.given_up
        if site is not None and not site.is_running():
            site = running.given_up = None
        return site is not None

    def begin(self, call: AttentionCall) -> Callable[[tuple[Frame, ...]], None]:
        """Measure a call. The function that is returned counts it, once it is certain to be attention."""
        current = running.current
        if current is not None and current.interfaced is not None:
            call.info = current.interfaced.complete(call.info)
        frames = call.frames
        reason = sdpa.unreadable(call.query, call.key)
        if reason is not None:  # whatever the route: our kernels read memory by its address
            self.unmeasured(frames, f"attention on {reason}")
            return lambda last: None
        observers = [observer for observer in self.observing(current) if name_in(observer, frames) is not None]
        summaries = self._measure(call, observers, current)
        if summaries is None:
            return lambda last: None

        def count(last: tuple[Frame, ...]) -> None:
            if not call.counted:
                place = tuple(shared(frames, last)) if last is not frames else frames
                self._count(call, observers, summaries, current, [name_in(observer, place) for observer in observers])

        return count

    def take(self, call: AttentionCall, current: Pass) -> None:
        """Measure and count a call that is readable and certain to be attention: what `begin` does, with fewer questions."""
        key, observers, names = id(call.frames[-1].module), [], []
        for observer in self.observers if not current.left_out else self.observing(current):
            name = observer.names.get(key)
            name = name_in(observer, call.frames) if name is None else name
            if name is not None:
                observers.append(observer)
                names.append(name)
        summaries = self._measure(call, observers, current)
        if summaries is not None:
            self._count(call, observers, summaries, current, names)

    def _measure(self, call: AttentionCall, observers: list[Observer], current: Pass | None) -> Measured | None:
        # a forward inside a backward is a checkpoint computed again: its numbers are counted, its gradients are still to come
        recomputing = _current_graph_task_id() != -1
        summaries: Measured = [(None, [])] * len(observers)
        try:
            with without_autograd_and_modes(call.query.device.type):
                leave_padding_out(call)
                if current is not None and current.trace is not None:
                    call.traced = current.trace.read(call)
                if not recomputing:
                    summaries = measured(call, observers)
        except (AttemperError, RuntimeError) as error:
            # the model runs on, and a warning says that this call is missing from the record
            leave_all()
            self.unmeasured(call.frames, str(error).removesuffix("."))
            return None
        call.logits = call.scores = call.graph = call.mask = call.vitals = None
        return summaries

    def _count(
        self,
        call: AttentionCall,
        observers: list[Observer],
        summaries: Measured,
        current: Pass | None,
        names: Sequence[str | None],
    ) -> None:
        call.counted = True
        if current is not None:
            current.counted(call, running.frames or [*call.frames])
        self._note_doubts(call, observers)
        for observer, name, (summary, looked) in zip(observers, names, summaries, strict=True):
            if name is not None:
                observer.add_call(name, call, summary, looked)

    def _note_doubts(self, call: AttentionCall, observers: list[Observer]) -> None:
        """Mark the modules around a call as accounted for, and note what is uncertain about its numbers."""
        for frame in call.frames:
            frame.accounted = True
        for unknown in call.doubts():
            self.missed(call.frames, unknown)
        if (doubt := call.doubt_of_gradients()) is not None:
            for observer in observers:
                name = name_in(observer, call.frames)
                if observer.wants_gradients and name is not None:
                    observer.add_note(name, doubt)

    def observing(self, current: Pass | None) -> list[Observer]:
        """The watches that measure a pass."""
        return [observer for observer in self.observers if current is None or observer not in current.left_out]

    def missed(self, frames: tuple[Frame, ...], reason: str, current: Pass | None = None) -> None:
        """Note what may be attention and was not measured, or what is uncertain about a call."""
        current = current or running.current
        if current is not None:
            current.spoil()
        for observer in self.observing(current):
            name = name_in(observer, frames)
            if name is not None:
                observer.add_note(name, reason)

    def unmeasured(self, frames: tuple[Frame, ...], reason: str) -> None:
        """Warn of an attention call that cannot be measured."""
        for frame in frames:
            frame.accounted = True
        if running.current is not None:
            running.current.spoil()
        raised: Warning | None = None
        for observer in self.observing(running.current):
            name = name_in(observer, frames)
            try:
                if name is not None:
                    observer.add_unmeasured(name, reason)
            except Warning as warning:  # where warnings are errors; other watches are told too
                raised = warning
        if raised is not None:
            raise raised


attachment = Attachment()
