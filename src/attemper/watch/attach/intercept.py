"""Intercept: functions of ours in the place of those that models call for attention, so that a pass needs no dispatch mode.

In a full pass they announce their calls, which shows whether the mode sees any others. In an intercepted pass they read their own
arguments, as a route reads those of an op. A softmax is intercepted too: one that no full pass saw may be attention by hand.
Whatever the plan lacks turns the pass into a full one before the function runs: see `Attachment.fall_back`.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import has_torch_function

from ..._torch_private import _is_any_autocast_enabled, is_autocast_on
from ...errors import AttemperError
from ...kernels.contract import Problem
from ...operation.call_hooks import call_hooks
from ...operation.ops import FORWARD
from ..call import AttentionCall
from ..routes import ragged, sdpa
from ..routes.exchanged import tell_exchanges
from .guards import SDPAArguments, form_of, lowered, sdpa_arguments, signature_of
from .measuring import rows_of, sums_of
from .modes import leave_all
from .overrides import Function, InItsPlace, answering, constructing
from .plan import ExpectedCall, InterceptedPass, KnownCall, plans
from .running import Pass, Switch, is_innermost, module_call, running

if TYPE_CHECKING:
    from ..observer import Observer
    from .attachment import Attachment

SDPA = torch.ops.aten.scaled_dot_product_attention.default
FUSED = tuple(name for name in (sdpa.MHA, sdpa.ENCODER) if hasattr(torch, name))
SOFTMAXES = tuple((owner, name) for owner in (torch, torch.special, Tensor) for name in ("softmax", "log_softmax"))

UNSEEN = "a softmax ran here that no full pass had seen. If it is attention, this step lacks it"
SILENT = "it ran with fewer attention calls than in the last full pass. What it computed in another way is missing from this step"
FOUND = (
    "a full pass found attention calls that intercepted passes do not see. Up to {passes} passes before it may lack them; "
    "full=True follows every pass"
)

KNOWN = 4096  # calls that are kept for one type of pass

ROUNDS = 100 if sys.version_info >= (3, 13) else math.inf
"""How often functions of classes are replaced and put back in a process. After that they stay while a watch is open.

Since 3.13, Python gives a class 1,000 versions. After as many changes it caches no attribute of the class and of its subclasses
any more: every later lookup on nn.Module and Tensor takes several times as long.
"""

CallToMake = tuple[tuple[Any, ...], dict[str, Any], Callable[[], object] | None]
"""The arguments that a function is called with, and what runs after it."""
BeforeCall = Callable[[Function, Pass, tuple[Any, ...], dict[str, Any]], CallToMake]


METHODS: dict[str, Callable[[Any], Any]] = {"__new__": staticmethod, "__torch_function__": classmethod}
"""Functions that a class holds in this form."""


class Installed(NamedTuple):
    """A function of ours in the place of another."""

    owner: Any
    name: str
    before: Any  # what was in the owner's own namespace; None if it inherits the function
    ours: Function
    switch: Switch

    @property
    def is_there(self) -> bool:
        """Whether nobody has replaced ours."""
        return vars(self.owner).get(self.name) is self.ours


class Interception:
    """Puts functions in the place of torch's, and back."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.installed: list[Installed] = []
        # those that have measured a step and did not close yet
        self.open: weakref.WeakSet[Observer] = weakref.WeakSet()
        self.rounds = 0  # how often functions were put into classes

    def install(self, observer: Observer) -> None:
        """Intercept, for this watch."""
        plans.forget_changed(observer.modules)
        self.open.add(observer)
        self.attachment.readers.update(ragged.readers())
        self.installed = [wrapped for wrapped in self.installed if wrapped.switch.on or wrapped.is_there]
        there = {(wrapped.owner, wrapped.name) for wrapped in self.installed}
        made: list[tuple[Any, str, Callable[[Function, Switch], Function]]] = [
            (nn.Module, "_call_impl", partial(module_call, self.attachment)),
            (functional, "scaled_dot_product_attention", partial(self._guarded, self._sdpa)),
            (*ragged.jagged_sdpa(), partial(ragged.jagged, self)),
            *((torch, name, partial(self._guarded, self._fast_path)) for name in FUSED),
            *((owner, name, partial(self._guarded, self._softmax)) for owner, name in SOFTMAXES),
            (Tensor, "__new__", partial(constructing, self.attachment.failed)),
        ]
        biases = sys.modules.get("torch.nn.attention.bias")  # loading it loads Dynamo
        if biases is not None:
            made.append((biases.CausalBias, "__torch_function__", answering))
        new = [self._make(*wrapped) for wrapped in made if wrapped[:2] not in there]
        self.rounds += any(isinstance(wrapped.owner, type) for wrapped in new)
        self.installed += new
        for wrapped in new:  # after all lookups: one between two changes would use up another version tag of the class
            setattr(wrapped.owner, wrapped.name, wrapped.ours)
        for wrapped in self.installed:
            wrapped.switch.on = True

    def _make(self, owner: Any, name: str, make: Callable[[Function, Switch], Function]) -> Installed:
        original, switch = getattr(owner, name), Switch()
        called = original if isinstance(owner, type) else InItsPlace(owner, name, original, switch)
        ours = wraps(original)(make(called, switch))
        if isinstance(called, InItsPlace):
            called.ours = ours
        ours = METHODS.get(name, lambda function: function)(ours)
        return Installed(owner, name, vars(owner).get(name), ours, switch)

    def uninstall(self) -> None:
        """Put torch's functions back. Those of classes may stay while a watch is open, switched off: see `ROUNDS`."""
        stay = [
            wrapped
            for wrapped in self.installed
            if self.open and self.rounds >= ROUNDS and isinstance(wrapped.owner, type)
        ]
        for wrapped in reversed(self.installed):
            wrapped.switch.on = False  # someone else may have wrapped ours
            if wrapped in stay or not wrapped.is_there:
                continue
            if wrapped.before is None:
                delattr(wrapped.owner, wrapped.name)  # Tensor inherits it
            else:
                setattr(wrapped.owner, wrapped.name, wrapped.before)
        self.installed = stay

    def end(self, current: Pass, complete: bool) -> None:
        """A pass has ended: keep what it showed, and tell of calls that intercepted passes have missed."""
        call_hooks.current, intercepted = None, current.begun_intercepted
        if current.collectives or (intercepted is not None and intercepted.plan.exchanges):
            tell_exchanges(current, self.attachment.observing(current))
        if current.full_pass is not None:
            # a checkpoint that is computed again may be stopped as soon as its backward has all it needs
            if complete or current.full_pass.pass_type.recomputing:
                with self.attachment.lock:
                    plan, passes = plans.learn(current.full_pass)
                self._lost(current, map(id, plan), FOUND.format(passes=passes))
        elif intercepted is not None and complete and not current.counts_for_none(self.attachment.observers):
            silent = intercepted.silent()
            if silent:
                self._lost(current, silent, SILENT)
            if not intercepted.is_complete:
                intercepted.plan.valid = False

    def _lost(self, current: Pass, modules: Iterable[int], reason: str) -> None:
        """Warn of attention calls in these modules that intercepted passes may have missed."""
        for number in modules:
            for observer in self.attachment.observing(current):
                if number in observer.names:
                    observer.add_lost(observer.names[number], reason)

    def _guarded(self, begin: BeforeCall, original: Function, switch: Switch) -> Function:
        """A function with attemper's own code before and after it, whose exceptions never reach the model."""
        answered = original.original if isinstance(original, InItsPlace) else original

        def function(*args: Any, **kwargs: Any) -> Any:
            current, after = running.current, None
            if current is not None and switch.on and not current.intercepting:
                try:
                    args, kwargs, after = begin(original, current, args, kwargs)
                except Exception as error:
                    self.attachment.give_up(error)
            out = (original if has_torch_function((*args, *kwargs.values())) else answered)(*args, **kwargs)
            if after is not None:
                try:
                    after()
                except Exception as error:
                    self.attachment.give_up(error)
            return out

        return function

    def _sdpa(self, original: Function, current: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallToMake:
        intercepted, full_pass = current.intercepted, current.full_pass
        if intercepted is None:
            if full_pass is None:
                return args, kwargs, None
            given = sdpa_arguments(*args, **kwargs)
            return args, kwargs, partial(self._followed, given, full_pass.announcing(form_of(given)))
        if current.left_out and current.counts_for_none(self.attachment.observers):
            return args, kwargs, None
        given = sdpa_arguments(*args, **kwargs)
        if given is not None and _is_any_autocast_enabled() and is_autocast_on(given.query.device.type):
            given = lowered(given)
            args, kwargs = given[:6], {"scale": given.scale, "enable_gqa": given.enable_gqa}
        expected, signature = self._expected(current, intercepted, "sdpa"), None
        if given is not None and expected is not None:
            signature = signature_of(given, current, running.frames[-1], expected.sequences)
            known = intercepted.plan.known.get(signature)
            if known is not None:
                query, key, _, mask, _, causal, scale, _ = given
                return args, kwargs, partial(self._take, current, known, query, key, mask, causal, scale)
        form = form_of(given)
        if expected is not None and given is not None and form in intercepted.plan.forms:
            return args, kwargs, partial(self._read, current, SDPA, given, {}, signature)
        new = expected is not None and form is not None  # the expected call, with arguments of a new form
        self.attachment.fall_back(current, differs=not new)
        learn = partial(self._learn_form, intercepted, intercepted.position, form if new else None)
        return args, kwargs, partial(self._followed, given, learn)

    def _followed(self, given: SDPAArguments | None, seen: Callable[[], bool]) -> None:
        """A call of SDPA has run in a full pass. For most empty tensors torch runs no op that the mode sees."""
        if not seen() and given is not None and not all(tensor.numel() for tensor in given[:3]):
            self.attachment.unmeasured(tuple(running.frames), "attention on empty tensors")

    def _take(
        self,
        current: Pass,
        known: KnownCall,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        causal: bool | str,
        scale: float | None,
        rows: Tensor | None = None,
        call: AttentionCall | None = None,
    ) -> None:
        """Measure and count a call: for its sums alone, if its only watch needs no more."""
        only, summary = None, None
        if call is None or call.is_sdpa:
            only = current.wants_only_sums(self.attachment.observers, known.module)
        current.intercepting = True
        try:
            if only is not None:
                try:
                    rows = rows_of(current, known.info, query, key, mask, rows)
                    summary = sums_of(query, key, mask, causal, scale, rows, only)
                except (AttemperError, RuntimeError) as error:
                    leave_all()
                    self.attachment.unmeasured(tuple(running.frames), str(error).removesuffix("."))
                    return
            if only is None or summary is None:
                call = call or AttentionCall(known.info, tuple(running.frames), query, key, None, mask, causal, scale)
                self.attachment.take(call, current)
            else:
                current.add_sums(known.info, summary, only, known.module)
        finally:
            current.intercepting, current.planned = False, None
            if current.interfaced is not None:
                current.interfaced.followed = True

    def _learn_form(self, intercepted: InterceptedPass, before: int, form: object) -> bool:
        """Whether the mode saw a call. Its form is kept if it was the expected one and one op; None: it was not expected."""
        seen = intercepted.position == before + 1
        if form is not None and seen and intercepted.last_is_op:
            intercepted.plan.forms.add(form)
        else:
            intercepted.differs = True
        return seen

    def _fast_path(self, original: Any, current: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallToMake:
        intercepted, full_pass = current.intercepted, current.full_pass
        if full_pass is not None:
            return args, kwargs, full_pass.announcing()
        if intercepted is None or (current.left_out and current.counts_for_none(self.attachment.observers)):
            return args, kwargs, None
        if self._expected(current, intercepted, "fused") is None:
            self.attachment.fall_back(current)
            return args, kwargs, None
        op = getattr(torch.ops.aten, original.name).default
        given, layer = sdpa.arguments_by_name(op, args, kwargs), running.frames[-1].module
        form, module = sdpa.form_of_fused(given), getattr(layer, "self_attn", layer)
        signature = None if form is None else (op, id(layer), id(module), form)
        known = intercepted.plan.known.get(signature)
        if known is None or current.wants_only_sums(self.attachment.observers, known.module) is None:
            return args, kwargs, partial(self._read, current, op, args, kwargs, signature)
        return args, kwargs, partial(self._take_fused, current, known, given)

    def _take_fused(self, current: Pass, known: KnownCall, given: dict[str, Any]) -> None:
        """Measure and count a call of a fused op, by its arguments."""
        query, key, mask, rows = sdpa.projected(given)
        self._take(current, known, query, key, mask, False, None, rows)

    def _softmax(self, original: Function, current: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallToMake:
        intercepted = current.intercepted
        if current.full_pass is not None:
            current.full_pass.softmaxes += 1
        elif intercepted is not None:
            intercepted.softmaxes += 1
            if intercepted.softmaxes > intercepted.plan.softmaxes:
                self.attachment.fall_back(current)
                self._lost(current, [id(frame.module) for frame in running.frames[-1:]], UNSEEN)
        return args, kwargs, None

    def computed(self, problem: Problem) -> None:
        """A call of attemper's own operation has been computed."""
        current = running.current
        if current is None or current.intercepting or problem.value is None:
            return
        if current.full_pass is not None:
            current.full_pass.announced += 1
        elif current.intercepted is not None and not current.counts_for_none(self.attachment.observers):
            if self._expected(current, current.intercepted, "attemper") is None:
                self.attachment.fall_back(current)
            self._read(current, FORWARD, problem, {})

    def failed(self, error: Exception) -> None:
        """`computed` raised."""
        self.attachment.give_up(error)

    def _expected(self, current: Pass, intercepted: InterceptedPass, route: str) -> ExpectedCall | None:
        """The call that a full pass saw here, in the innermost module; its sequences are those of the call that is read next."""
        module = running.frames[-1].module
        # the interface has compared the module that called it
        expected = intercepted.expected(module) if current.interfaced is not None or is_innermost(module) else None
        expected = expected if expected is not None and expected.route == route else None
        current.planned = None if expected is None else expected.sequences
        return expected

    def _read(self, current: Pass, op: Any, args: Any, kwargs: dict[str, Any], signature: object = None) -> None:
        """Read a call from the arguments of an op; keep what is known of it for later calls with the same signature."""
        frames = tuple(running.frames)
        call = self.attachment.readers[op](op, args, kwargs, frames)
        if isinstance(call, AttentionCall):
            if current.interfaced is not None:
                call.info = current.interfaced.complete(call.info)
            known = KnownCall(call.info, id(call.frames[-1].module))
            if signature is not None and current.intercepted is not None and call.module_heads is None:
                kept = current.intercepted.plan.known
                if len(kept) > KNOWN:
                    kept.clear()
                kept[signature] = known
            scale: Any = call.scale
            self._take(current, known, call.query, call.key, call.mask, call.causal, scale, call.rows, call)
        elif call is not None:
            self.attachment.unmeasured(frames, f"a {op} call on {call}")
