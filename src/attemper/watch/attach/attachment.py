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

from ..._torch_private import _current_graph_task_id
from ...errors import AttemperError
from ...operation.listen import listening
from ..call import AttentionCall
from ..routes import sdpa as fused
from ..routes.handwritten.chain import Chain, shared
from ..routes.padding import leave_padding_out
from ..routes.transformers import Interface
from ..trace.trace import Trace
from .dispatch import READERS, Mode, TracingMode
from .dynamo import Eager
from .learned import pattern_of
from .light import Interception
from .measuring import Measured, measured
from .modes import leave_all, reason_of, without_autograd_and_modes
from .names import name_in
from .running import Frame, Pass, Site, is_quiet, running, traits
from .storages import Storages

if TYPE_CHECKING:
    from ..session import Watch


class Attachment:
    """The watches that measure now, and what is installed for them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.observers: tuple[Watch, ...] = ()
        self.parameters: Storages[bool] = Storages()
        self.passes: dict[Pass, Site] = {}
        self.eager = Eager()
        self.readers = READERS
        self.interception = Interception(self)
        self.interface = Interface(self.begin, self.unmeasured, self.interception.convert, self.failed, self.give_up)

    def add(self, observer: Watch) -> None:
        """Install what a watch needs that measures a step."""
        with self.lock:
            self.observers = (*self.observers, observer)
            self.eager.on()
            self.interface.install()
            self.interception.install(observer)
            for module in observer.modules:
                self.eager.on_module(module)
                for parameter in module._parameters.values():
                    if parameter is not None:
                        self.parameters.put(parameter, True)

    def remove(self, observer: Watch) -> None:
        with self.lock:
            self.observers = tuple(other for other in self.observers if other is not observer)
            self._release()

    def closed(self, observer: Watch, depth: int) -> None:
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
        self.passes = {one: site for one, site in self.passes.items() if site.is_running()}
        if self.passes:
            return
        self.parameters = Storages()
        self.interception.uninstall()
        self.interface.uninstall()
        self.eager.off()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module begins its forward."""
        key = id(module)
        if running.frames and running.frames[0].module is module:
            self.forget_ended()
        current, name, converted = running.current, self.name_of(key), False
        if current is None:
            if name is None or torch.compiler.is_compiling() or self._has_given_up():
                return
            current = self._begin(module, args, kwargs, sys._getframe(1))
        elif current.light is not None and not current.light.entered(key, args, kwargs):
            self.interception.convert(current)
            converted = running.frames[-1].module is module  # it has a frame already, as all that run now
        # with modules to skip, it is light and every watch was told of it
        if not current.skips and not self._needs_frame(module, args, kwargs, current, name):
            return
        if converted:
            return
        if traits(module).attends:
            for frame in running.frames:
                frame.outer = True
        running.frames.append(Frame(module, name or "", args))

    def _needs_frame(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], current: Pass, name: str | None
    ) -> bool:
        """Tell of a module that begins its forward; whether a call may be made in it."""
        quiet = is_quiet(module)
        if name is not None and len(current.begun) < len(self.observers):
            self._count_pass(module, current)
        if current.full_pass is not None:
            current.full_pass.entered(module, None if quiet else pattern_of(args, kwargs))
        if current.light is not None:
            return not running.frames or bool(current.light.plan.around.get(id(module)))
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
        current = running.current = self._pass()
        with self.lock:
            self.passes[current] = Site(frame)
        if type(current.mode) is Mode and not any(observer.wants_full for observer in self.observers):
            self.interception.begin(current, entry, args, kwargs)
        if current.light is None:
            current.resume()
        return current

    def _pass(self) -> Pass:
        chain = Chain(self.parameters, self.begin, self.unmeasured, self.missed)
        if running.mode is not None:  # ops are altered, and not traced
            return Pass(chain, running.mode(self))
        if not any(observer.wants_traces for observer in self.observers):
            return Pass(chain, Mode(self))
        trace = Trace(chain)
        return Pass(chain, TracingMode(self, trace), trace)

    def _count_pass(self, module: nn.Module, current: Pass) -> None:
        for observer in self.observers:
            if observer not in current.begun and id(module) in observer.names:
                current.begun.append(observer)
                if not observer.pass_began(module):
                    current.left_out.append(observer)
        if current.counts_for_none(self.observers):
            current.pause()
            current.full_pass = None
        if current.light is not None and len(current.begun) == len(self.observers):
            current.skips = current.light.plan.skipped_by([observer.names for observer in self.observers])

    def leave(self, module: nn.Module, arguments: tuple[Any, ...], output: object, complete: bool = True) -> None:
        """A module has ended its forward; `complete` if it raised nothing."""
        current, frames = running.current, running.frames
        if current is not None and current.light is not None and len(frames) > 1 and frames[-1].module is module:
            frames.pop()
            return
        if current is not None and frames and current.light is None and not current.counts_for_none(self.observers):
            current.resume()
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
            current.chain.end()
            current.end(complete)
            for frames in current.doubtful:
                if not frames[-1].accounted:
                    reason = f"{type(frames[-1].module).__name__} ran, but no attention call was found in it"
                    self.missed(frames, reason, current)
            self.interception.end(current, complete)
            if current.begun_light is None:
                self.parameters.drop_freed()
            with self.lock:
                self.passes.pop(current, None)
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
        reason = reason_of(error)
        if not isinstance(error, Warning):  # where warnings are errors, its note is there already
            with suppress(Warning):
                self.unmeasured(tuple(running.frames), reason)

    def give_up(self, error: Exception, module: nn.Module | None = None) -> None:
        """The same while a pass was followed: nothing more of it is measured, and the model runs on."""
        leave_all()
        current, frames = running.current, tuple(running.frames)
        site = None if current is None else self.passes.get(current)
        running.given_up = Site(sys._getframe(1)) if site is None else site
        running.frames, running.current, listening.listener = [], None, None
        if current is not None:
            current.end(True)  # what it measured is right
            if current.begun_light is not None:
                current.begun_light.plan.valid = False
            with self.lock:
                self.passes.pop(current, None)
                self._release()
        reason = f"{reason_of(error)}. The rest of this pass is not measured"
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
            call.facts = current.interfaced.complete(call.facts)
        frames = call.frames
        reason = fused.unreadable(call.query, call.key)
        if reason is not None:  # whatever the route: our kernels read memory by its address
            self.unmeasured(frames, f"attention on {reason}")
            return lambda last: None
        observers = [observer for observer in self.observing(current) if name_in(observer, frames) is not None]
        found = self._measure(call, observers, current)
        if found is None:
            return lambda last: None

        def count(last: tuple[Frame, ...]) -> None:
            if not call.counted:
                place = tuple(shared(frames, last)) if last is not frames else frames
                self._count(call, observers, found, current, [name_in(observer, place) for observer in observers])

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
        found = self._measure(call, observers, current)
        if found is not None:
            self._count(call, observers, found, current, names)

    def _measure(self, call: AttentionCall, observers: list[Watch], current: Pass | None) -> Measured | None:
        # a forward inside a backward is a checkpoint computed again: its numbers are counted, its gradients are still to come
        again = _current_graph_task_id() != -1
        found: Measured = [(None, [])] * len(observers)
        try:
            with without_autograd_and_modes(call.query.device.type):
                leave_padding_out(call)
                if current is not None and current.trace is not None:
                    call.traced = current.trace.read(call)
                if not again:
                    found = measured(call, observers)
        except (AttemperError, RuntimeError) as error:
            # the model runs on, and a warning says that this call is missing from the record
            leave_all()
            self.unmeasured(call.frames, str(error).removesuffix("."))
            return None
        call.logits = call.scores = call.graph = call.mask = call.vitals = None
        return found

    def _count(
        self,
        call: AttentionCall,
        observers: list[Watch],
        found: Measured,
        current: Pass | None,
        names: Sequence[str | None],
    ) -> None:
        call.counted = True
        if current is not None:
            current.counted(call, running.frames or [*call.frames])
        self._note_doubts(call, observers)
        for observer, name, (summary, looked) in zip(observers, names, found, strict=True):
            if name is not None:
                observer.add_call(name, call, summary, looked)

    def _note_doubts(self, call: AttentionCall, observers: list[Watch]) -> None:
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

    def observing(self, current: Pass | None) -> list[Watch]:
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
