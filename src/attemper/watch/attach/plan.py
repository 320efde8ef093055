"""Plan: the attention calls that a full pass showed, which the intercepted passes after it expect; others fall back.

A FullPass is filled while a full pass runs. If every call in it went through a function that can be intercepted, it
becomes a PassPlan. Plans are kept by the module that a pass begins with, as long as that module lives.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._torch_private import _current_graph_task_id
from ..call import AttentionCall, CallInfo
from ..record.ranks import Exchange
from ..routes.kind import shown_kind
from .running import Frame
from .storages import address

CHECK_AFTER, MOST_UNCHECKED = 50, 400
"""The 50th pass of a type is a full one, which checks the plan. After a check that found the same calls, twice as many
passes are intercepted, at most 400: a full pass takes twice as long as the model's own."""

DECLARED = ("interface", "replaced")  # routes that read a call from the arguments of a function, in any pass

PASS_TYPES = 64  # that are kept for one module


class ExpectedCall(NamedTuple):
    """A call as a full pass saw it."""

    module: int  # the id of the innermost module around it
    route: str
    implementation: str | None  # of the Hugging Face interface
    sequences: tuple[int | None, int | None]  # the numbers of q and k


class KnownCall(NamedTuple):
    """What is known of a call before its arguments are measured."""

    info: CallInfo
    module: int  # the id of the module that its numbers are those of


class PassType(NamedTuple):
    """Passes of different types may run different functions."""

    recomputing: bool  # a checkpoint that is computed again in a backward
    recording: bool
    training: bool
    implementation: str | None  # of the Hugging Face interface
    pattern: tuple[Any, ...]

    @classmethod
    def of(cls, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PassType:
        """The type of a pass that begins now with this module and these arguments."""
        implementation = getattr(getattr(entry, "config", None), "_attn_implementation", None)
        recording = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        recomputing = _current_graph_task_id() != -1
        return cls(recomputing, recording, entry.training, implementation, pattern_of(args, kwargs))


def pattern_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Which arguments of a module are the same tensor, and what the others are. Self- and cross-attention differ in this."""
    places: dict[int, int] = {}
    pattern: list[Any] = [len(args), *kwargs]
    several = len(args) + len(kwargs) > 1
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            # the first has no other to be the same as
            place = (address(value) or id(value)) if several else 0
            pattern.append(places.setdefault(place, len(places)))
        else:
            pattern.append(value if value is None or isinstance(value, (bool, str)) else type(value))
    return tuple(pattern)


class FullPass:
    """A full pass: which modules ran, and which of their attention calls an intercepted function announced."""

    def __init__(self, entry: nn.Module, pass_type: PassType) -> None:
        self.entry, self.pass_type = entry, pass_type
        self.modules: dict[int, nn.Module] = {}
        self.runs: Counter[int] = Counter()  # how often each ran
        self.around: set[int] = {id(entry)}  # the modules that a call ran in
        self.patterns: dict[int, list[tuple[Any, ...]]] = {}  # of their arguments, each time that they ran
        self.patterned: set[int] = set()  # those in which the arguments decide about a call
        self.calls: list[ExpectedCall] = []
        self.announced = 0  # how many of the calls an intercepted function announced
        self.forms: set[Any] = set()  # of the calls of SDPA
        self.softmaxes = 0
        self.exchanges: list[Exchange] = []  # what its attention modules exchange with other ranks
        self.clean = True  # whether nothing was seen that an intercepted pass would not see

    def entered(self, module: nn.Module, pattern: tuple[Any, ...] | None) -> None:
        """A module begins its forward with arguments of this pattern; None if it holds no attention."""
        self.modules[id(module)] = module
        self.runs[id(module)] += 1
        if pattern is not None:
            self.patterns.setdefault(id(module), []).append(pattern)

    def counted(self, call: AttentionCall, around: list[Frame], sequences: tuple[int | None, int | None]) -> None:
        """A call was counted, in these modules."""
        modules = [id(frame.module) for frame in around]
        if call.info.kind == "cross" or shown_kind(call.frames[-1], call.query, call.key) is None:
            self.patterned.update(modules)
        self.around.update(modules)
        self.calls.append(ExpectedCall(modules[-1], call.info.route, call.info.implementation, sequences))
        self.clean &= call.logits is None and not call.product
        self.announced += call.info.route in DECLARED

    def announcing(self, form: object = None) -> Callable[[], bool]:
        """What runs after an intercepted function: the mode must have seen it make one call. It returns whether it did."""
        before = len(self.calls)

        def announce() -> bool:
            self.announced += 1
            seen = len(self.calls) == before + 1
            self.clean &= seen
            if form is not None:
                self.forms.add(form)
            return seen

        return announce

    @property
    def can_be_intercepted(self) -> bool:
        return self.clean and self.announced == len(self.calls)


class PassPlan:
    """What an intercepted pass expects. It is void once one of its modules is freed: another may then have the same id."""

    def __init__(self, full_pass: FullPass) -> None:
        self.around = {number: number in full_pass.around for number in full_pass.modules}
        self.order = [call.module for call in full_pass.calls]
        self.calls: dict[int, list[ExpectedCall]] = {}
        for call in full_pass.calls:
            self.calls.setdefault(call.module, []).append(call)
        self.runs = {number: full_pass.runs[number] for number in self.calls}
        numbers = [number for call in full_pass.calls for number in call.sequences if number is not None]
        self.last_sequence = max(numbers, default=0)
        self.forms, self.softmaxes = full_pass.forms, full_pass.softmaxes
        self.known: dict[Any, KnownCall] = {}  # the calls that were read, by all that is asked of their arguments
        self.patterns = {
            number: full_pass.patterns[number] for number in full_pass.patterned if number in full_pass.patterns
        }
        inner = {*self.calls, *self.patterns, id(full_pass.entry)}
        self.without_calls = frozenset(number for number, around in self.around.items() if not around)
        self.not_innermost = frozenset(number for number in self.around if number not in inner)
        self.exchanges = full_pass.exchanges
        self.uses, self.check_at = 0, CHECK_AFTER
        self.valid = full_pass.can_be_intercepted
        mine = weakref.ref(self)

        def freed(_: object) -> None:
            plan = mine()
            if plan is not None:
                plan.valid = False

        self.modules = [weakref.ref(module, freed) for module in full_pass.modules.values()]

    def skipped_by(self, names: list[dict[int, str]]) -> frozenset[int]:
        """The modules that need no frame: those that make no call themselves, if every watch has a name for those that do."""
        unnamed = set[int]().union(*[self.calls.keys() - each.keys() for each in names])
        return self.without_calls if unnamed else self.not_innermost

    def each(self, number: int) -> int:
        """How many calls a module makes in a pass."""
        return len(self.calls.get(number, ()))


class PassPlans:
    """The plans of all models, by the module that a pass begins with and the type of the pass."""

    def __init__(self) -> None:
        self.plans: weakref.WeakKeyDictionary[nn.Module, dict[PassType, PassPlan]] = weakref.WeakKeyDictionary()
        # a hash of the modules below each
        self.known: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def forget_changed(self, modules: Iterable[nn.Module]) -> None:
        """A watch of these modules opens, the model first. If the modules changed since the last watch, forget their plans."""
        listed = list(modules)
        now = hash(tuple(map(id, listed)))
        if self.known.get(listed[0], now) != now:
            for module in listed:
                self.plans.pop(module, None)
        self.known[listed[0]] = now

    def get(self, entry: nn.Module, pass_type: PassType) -> PassPlan | None:
        """The plan of a pass that begins now; None if it must be a full one."""
        plan = self.plans.get(entry, {}).get(pass_type)
        if plan is None or not plan.valid:
            return None
        plan.uses += 1
        return plan if plan.uses < plan.check_at else None

    def learn(self, full_pass: FullPass) -> tuple[list[nn.Module], int]:
        """Keep what a full pass showed.

        Returns the modules with calls that intercepted passes since the last full one may have missed, and their number.
        """
        plans = self.plans.setdefault(full_pass.entry, {})
        if len(plans) > PASS_TYPES:
            plans.clear()
        before = plans.get(full_pass.pass_type)
        plan = plans[full_pass.pass_type] = PassPlan(full_pass)
        if before is None or not before.valid or not before.uses:
            return [], 0
        if plan.order == before.order:
            plan.check_at = min(2 * before.check_at, MOST_UNCHECKED)
        now = Counter(call.module for call in full_pass.calls)
        missed = [
            full_pass.modules[number]
            for number, count in now.items()
            if number in before.around
            and count * before.runs.get(number, 1) > before.each(number) * full_pass.runs[number]
        ]
        return missed, before.uses - 1


plans = PassPlans()


class InterceptedPass:
    """The calls of one intercepted pass, compared with its plan."""

    def __init__(self, plan: PassPlan) -> None:
        self.plan = plan
        self.ran: dict[int, int] = {}  # how often each module around a call ran
        self.made: dict[int, int] = {}  # how many calls each made
        self.position = 0
        self.softmaxes = 0
        self.differs = False
        self.followed: set[int] = set()  # the modules that ran when the pass became a full one
        self.last_is_op = False  # whether the last call was read from the arguments of an op

    def entered(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A module begins its forward; whether it ran before, with arguments like these where they decide about a call."""
        around = self.plan.around.get(number)
        if not around:
            return around is not None
        ran, patterns = self.ran.get(number, 0), self.plan.patterns.get(number)
        self.ran[number] = ran + 1
        return patterns is None or (ran < len(patterns) and patterns[ran] == pattern_of(args, kwargs))

    def expected(self, module: nn.Module) -> ExpectedCall | None:
        """The next call of a module; None if a full pass saw no more of them."""
        calls = self.plan.calls.get(id(module))
        if calls is None:
            return None
        made = self.made.get(id(module), 0)
        return calls[made] if made < len(calls) else None

    def counted(self, module: nn.Module, product: bool = False) -> None:
        """A call was counted in this module; `product` if it was read from a product of q and k."""
        number, order = id(module), self.plan.order
        self.last_is_op = not product
        self.made[number] = self.made.get(number, 0) + 1
        if self.position >= len(order) or order[self.position] != number:
            self.differs = True
        self.position += 1

    def silent(self) -> list[int]:
        """The modules that ran with fewer calls than before, each time that they ran."""
        plan = self.plan
        return [
            number
            for number, calls in plan.calls.items()
            if number not in self.followed
            and self.made.get(number, 0) * plan.runs[number] < len(calls) * self.ran.get(number, 0)
        ]

    @property
    def is_complete(self) -> bool:
        return not self.differs and self.position == len(self.plan.order)
