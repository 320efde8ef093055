"""Light: the functions that models call for attention are intercepted, so that a pass needs no dispatch mode.

In a full pass they announce their calls, which shows whether the mode sees any others. In a light pass they read their own
arguments, as a route reads those of an op. A softmax is intercepted too: one that no full pass saw may be attention by hand.
Whatever was not expected turns the pass into a full one before the function runs.
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

from ..._torch_private import _get_tracing_state, is_autocast_on
from ...kernels.contract import Problem
from ...operation.listen import listening
from ...operation.ops import FORWARD
from ..call import AttentionCall, Facts
from ..routes import ragged
from ..routes import sdpa as fused
from ..routes.arguments import SDPAArguments, bound, form_of, lowered, signature_of
from ..routes.exchanged import tell_exchanges
from ..routes.kind import LearnedSequences
from .again import take_again
from .learned import ExpectedCall, FullPass, LightPass, PassType, plans
from .overrides import Function, InItsPlace, answering, constructing
from .running import Pass, Switch, is_innermost, module_call, running, running_modules

if TYPE_CHECKING:
    from ..session import Watch
    from .attachment import Attachment

SDPA = torch.ops.aten.scaled_dot_product_attention.default
FUSED = tuple(name for name in (fused.MHA, fused.ENCODER) if hasattr(torch, name))
SOFTMAXES = tuple((owner, name) for owner in (torch, torch.special, Tensor) for name in ("softmax", "log_softmax"))

UNSEEN = "a softmax ran here that no full pass had seen. If it is attention, this step lacks it"
SILENT = "it ran with fewer attention calls than in the last full pass. What it computed in another way is missing from this step"
FOUND = (
    "a full pass found attention calls that light passes do not see. Up to {passes} passes before it may lack them; "
    "full=True follows every pass"
)

FACTS = 4096  # facts of calls that are kept for one type of pass

ROUNDS = 100 if sys.version_info >= (3, 13) else math.inf
"""How often functions of classes are replaced and put back in a process. After that they stay while a watch is open.

Since 3.13, Python gives a class 1,000 versions. After as many changes it caches no attribute of the class and of its subclasses
any more: every later lookup on nn.Module and Tensor takes several times as long.
"""

CallToMake = tuple[tuple[Any, ...], dict[str, Any], Callable[[], None] | None]
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
        self.open: weakref.WeakSet[Watch] = weakref.WeakSet()  # those that have measured a step and did not close yet
        self.rounds = 0  # how often functions were put into classes

    def install(self, observer: Watch) -> None:
        """Intercept, for this watch."""
        plans.forget_changed(observer.modules)
        self.open.add(observer)
        self.attachment.readers.update(ragged.readers())
        self.installed = [one for one in self.installed if one.switch.on or one.is_there]
        there = {(one.owner, one.name) for one in self.installed}
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
        new = [self._make(*one) for one in made if one[:2] not in there]
        self.rounds += any(isinstance(one.owner, type) for one in new)
        self.installed += new
        for one in new:  # after all lookups: one between two changes would use up another version tag of the class
            setattr(one.owner, one.name, one.ours)
        for one in self.installed:
            one.switch.on = True

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
        stay = [one for one in self.installed if self.open and self.rounds >= ROUNDS and isinstance(one.owner, type)]
        for one in reversed(self.installed):
            one.switch.on = False  # someone else may have wrapped ours
            if one in stay or not one.is_there:
                continue
            if one.before is None:
                delattr(one.owner, one.name)  # Tensor inherits it
            else:
                setattr(one.owner, one.name, one.before)
        self.installed = stay

    def begin(self, current: Pass, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make a pass a light one if it was learned what to expect of it; otherwise learn it."""
        if _get_tracing_state() is not None:
            return  # torch.jit.trace compares graphs of several passes, with the lines of Python that each op came from
        pass_type = PassType.of(entry, args, kwargs)
        with self.attachment.lock:
            plan = plans.get(entry, pass_type)
        if plan is None:
            current.full_pass = FullPass(entry, pass_type)
        else:
            current.light = current.begun_light = LightPass(plan)
            current.light.ran[id(entry)] = 1
            current.sequences = current.chain.sequences = LearnedSequences(plan.last_sequence)
        listening.listener = self

    def convert(self, current: Pass, differs: bool = True) -> None:
        """The rest of a light pass is a full one; so is the next pass if the model differs."""
        current.light, current.skips = None, frozenset()
        running.frames = running_modules(running.frames, self.attachment.name_of, current.begun_light)
        if current.begun_light is not None:
            current.begun_light.differs |= differs
            current.begun_light.followed = {id(frame.module) for frame in running.frames}
        if not current.counts_for_none(self.attachment.observers):
            current.resume()

    def end(self, current: Pass, complete: bool) -> None:
        """A pass has ended: keep what it showed, and tell of calls that light passes have missed."""
        listening.listener = None
        tell_exchanges(current, self.attachment.observing(current))
        light = current.begun_light
        if current.full_pass is not None:
            # a checkpoint that is computed again may be stopped as soon as its backward has all it needs
            if complete or current.full_pass.pass_type.again:
                with self.attachment.lock:
                    found, passes = plans.learn(current.full_pass)
                self._lost(current, map(id, found), FOUND.format(passes=passes))
        elif light is not None and complete and not current.counts_for_none(self.attachment.observers):
            self._lost(current, light.silent(), SILENT)
            if not light.is_complete:
                light.plan.valid = False

    def _lost(self, current: Pass, modules: Iterable[int], reason: str) -> None:
        """Warn of attention calls in these modules that light passes may have missed."""
        for number in modules:
            for observer in self.attachment.observing(current):
                if number in observer.names:
                    observer.add_lost(observer.names[number], reason)

    def _guarded(self, begin: BeforeCall, original: Function, switch: Switch) -> Function:
        """A function with attemper's own code before and after it, whose exceptions never reach the model."""

        def function(*args: Any, **kwargs: Any) -> Any:
            current, after = running.current, None
            if current is not None and switch.on and not current.intercepting:
                try:
                    args, kwargs, after = begin(original, current, args, kwargs)
                except Exception as error:
                    self.attachment.give_up(error)
            out = original(*args, **kwargs)
            if after is not None:
                try:
                    after()
                except Exception as error:
                    self.attachment.give_up(error)
            return out

        return function

    def _sdpa(self, original: Function, current: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallToMake:
        light, full_pass = current.light, current.full_pass
        if light is None:
            after = None if full_pass is None else full_pass.announcing(form_of(bound(*args, **kwargs)))
            return args, kwargs, after
        if current.left_out and current.counts_for_none(self.attachment.observers):
            return args, kwargs, None
        given = bound(*args, **kwargs)
        if given is not None and is_autocast_on(given.query.device.type):
            given = lowered(given)
            args, kwargs = given[:6], {"scale": given.scale, "enable_gqa": given.enable_gqa}
        expected = self._expected(current, light, "sdpa")
        signature = signature_of(given, current) if given is not None and expected is not None else None
        facts = light.plan.facts.get(signature)
        if facts is not None and given is not None:
            return args, kwargs, partial(self._take_known, current, facts, given)
        form = form_of(given)
        if expected is not None and given is not None and form in light.plan.forms:
            return args, kwargs, partial(self._read, current, SDPA, given, {}, signature)
        new = expected is not None and form is not None  # the expected call, with arguments of a new form
        self.convert(current, differs=not new)
        return args, kwargs, partial(self._learn_form, light, light.position, form if new else None)

    def _take_known(self, current: Pass, facts: Facts, given: SDPAArguments) -> None:
        """Measure a call whose facts are known."""
        query, key, _, mask, _, causal, scale, _ = given
        current.intercepting = True
        try:
            if mask is not None or not take_again(self.attachment, facts, query, key, causal, scale, current):
                call = AttentionCall(facts, tuple(running.frames), query, key, None, mask, causal, scale)
                self.attachment.take(call, current)
        finally:
            self._taken(current)

    def _learn_form(self, light: LightPass, before: int, form: object) -> None:
        """Keep the form of the expected call, if the mode saw it as one op; None: the call was not expected."""
        if form is not None and light.position == before + 1 and light.last_is_op:
            light.plan.forms.add(form)
        else:
            light.differs = True

    def _fast_path(self, original: Any, current: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallToMake:
        light, full_pass = current.light, current.full_pass
        if full_pass is not None:
            return args, kwargs, full_pass.announcing()
        if light is None or current.counts_for_none(self.attachment.observers):
            return args, kwargs, None
        if self._expected(current, light, "fused") is None:
            self.convert(current)
            return args, kwargs, None
        op = getattr(torch.ops.aten, original.name).default
        return args, kwargs, partial(self._read, current, op, args, kwargs)

    def _softmax(self, original: Function, current: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallToMake:
        light = current.light
        if current.full_pass is not None:
            current.full_pass.softmaxes += 1
        elif light is not None:
            light.softmaxes += 1
            if light.softmaxes > light.plan.softmaxes:
                self.convert(current)
                self._lost(current, [id(frame.module) for frame in running.frames[-1:]], UNSEEN)
        return args, kwargs, None

    def computed(self, problem: Problem) -> None:
        """A call of attemper's own operation has been computed."""
        current = running.current
        if current is None or current.intercepting or problem.value is None:
            return
        if current.full_pass is not None:
            current.full_pass.announced += 1
        elif current.light is not None and not current.counts_for_none(self.attachment.observers):
            if self._expected(current, current.light, "attemper") is None:
                self.convert(current)
            self._read(current, FORWARD, problem, {})

    def failed(self, error: Exception) -> None:
        """`computed` raised."""
        self.attachment.give_up(error)

    def _expected(self, current: Pass, light: LightPass, route: str) -> ExpectedCall | None:
        """The call that a full pass saw here, in the innermost module; its sequences are those of the call that is read next."""
        module = running.frames[-1].module
        # the interface has compared the module that called it
        expected = light.expected(module) if current.interfaced is not None or is_innermost(module) else None
        expected = expected if expected is not None and expected.route == route else None
        if isinstance(current.sequences, LearnedSequences):
            current.sequences.now = None if expected is None else expected.sequences
        return expected

    def _read(self, current: Pass, op: Any, args: Any, kwargs: dict[str, Any], signature: object = None) -> None:
        """Read a call from the arguments of an op; keep its facts for later calls with the same signature."""
        frames = tuple(running.frames)
        call = self.attachment.readers[op](op, args, kwargs, frames)
        if isinstance(call, AttentionCall):
            if current.interfaced is not None:
                call.facts = current.interfaced.complete(call.facts)
            if signature is not None and current.light is not None and call.module_heads is None:
                facts = current.light.plan.facts
                if len(facts) > FACTS:
                    facts.clear()
                facts[signature] = call.facts
            self._take(current, call)
        elif call is not None:
            self.attachment.unmeasured(frames, f"a {op} call on {call}")

    def _take(self, current: Pass, call: AttentionCall) -> None:
        current.intercepting = True
        try:
            self.attachment.take(call, current)
        finally:
            self._taken(current)

    def _taken(self, current: Pass) -> None:
        """The call of an intercepted function was read."""
        current.intercepting = False
        if current.interfaced is not None:
            current.interfaced.followed = True
        if isinstance(current.sequences, LearnedSequences):
            current.sequences.now = None
