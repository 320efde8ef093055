"""Learned: what a full pass showed of a model's attention calls, so that a light pass can expect the same ones.

A Lesson is written while a full pass runs. If every call in it went through a function that a light pass can intercept, it
becomes a Plan. Plans are kept by the module that a pass begins with, as long as that module lives.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from ..._torch_private import _current_graph_task_id
from ...kernels.contract import is_recording
from ..call import AttentionCall

CHECK_EVERY = 50
"""Of the passes of one kind, every so many-th is a full one, which checks what was learned."""

DECLARED = ("interface", "replaced")  # routes that read a call from the arguments of a function, with a mode and without

PassKind = tuple[bool, bool, bool, str | None]


def kind_of_pass(entry: nn.Module) -> PassKind:
    """Passes of different kinds may run different functions: computed again in a backward, with gradients, …"""
    implementation = getattr(getattr(entry, "config", None), "_attn_implementation", None)
    return _current_graph_task_id() != -1, is_recording(), entry.training, implementation


class ExpectedCall(NamedTuple):
    """A call as a full pass saw it."""

    module: int  # the id of the innermost module around it
    implementation: str | None  # of the Hugging Face interface
    sequences: tuple[int | None, int | None]  # the numbers of q and k


class Lesson:
    """A full pass: which modules ran, and which of their attention calls an intercepted function announced."""

    def __init__(self, entry: nn.Module) -> None:
        self.entry, self.kind = entry, kind_of_pass(entry)
        self.modules: dict[int, nn.Module] = {}
        self.runs: Counter[int] = Counter()  # how often each ran
        self.around: set[int] = {id(entry)}  # the modules that a call ran in
        self.calls: list[ExpectedCall] = []
        self.announced = 0  # how many of the calls an intercepted function announced
        self.forms: set[Any] = set()  # of the calls of SDPA
        self.softmaxes = 0
        self.clean = True  # whether nothing was seen that a light pass would not see

    def entered(self, module: nn.Module) -> None:
        self.modules[id(module)] = module
        self.runs[id(module)] += 1

    def counted(self, call: AttentionCall, around: Iterable[nn.Module], sequences: tuple[int | None, int | None]) -> None:
        """A call was counted, in these modules."""
        modules = [id(module) for module in around]
        self.around.update(modules)
        self.calls.append(ExpectedCall(modules[-1], call.facts.implementation, sequences))
        self.clean &= call.logits is None and not call.product
        self.announced += call.facts.route in DECLARED

    def announce(self, before: int, form: object = None) -> None:
        """An intercepted function has returned: it must have made one call, beyond so many before it."""
        self.announced += 1
        self.clean &= len(self.calls) == before + 1
        if form is not None:
            self.forms.add(form)

    @property
    def can_be_light(self) -> bool:
        return self.clean and self.announced == len(self.calls)


class Plan:
    """What a light pass expects. It is void once one of its modules is freed: another may then have the same id."""

    def __init__(self, lesson: Lesson) -> None:
        self.around = {number: number in lesson.around for number in lesson.modules}
        self.order = [call.module for call in lesson.calls]
        self.calls: dict[int, list[ExpectedCall]] = {}
        for call in lesson.calls:
            self.calls.setdefault(call.module, []).append(call)
        self.runs = {number: lesson.runs[number] for number in self.calls}
        numbers = [number for call in lesson.calls for number in call.sequences if number is not None]
        self.last_sequence = max(numbers, default=0)
        self.forms, self.softmaxes = lesson.forms, lesson.softmaxes
        self.uses = 0
        self.valid = lesson.can_be_light
        mine = weakref.ref(self)

        def freed(_: object) -> None:
            plan = mine()
            if plan is not None:
                plan.valid = False

        self.modules = [weakref.ref(module, freed) for module in lesson.modules.values()]


class Plans:
    """The plans of all models, by the module that a pass begins with and the kind of the pass."""

    def __init__(self) -> None:
        self.plans: weakref.WeakKeyDictionary[nn.Module, dict[PassKind, Plan]] = weakref.WeakKeyDictionary()

    def get(self, entry: nn.Module) -> Plan | None:
        """The plan of a pass that begins now; None if it must be a full one."""
        plan = self.plans.get(entry, {}).get(kind_of_pass(entry))
        if plan is None or not plan.valid:
            return None
        plan.uses += 1
        return plan if plan.uses % CHECK_EVERY else None

    def learn(self, lesson: Lesson) -> list[nn.Module]:
        """Keep what a full pass showed; returns the modules with calls that light passes since the last one may have missed."""
        plans = self.plans.setdefault(lesson.entry, {})
        before, plans[lesson.kind] = plans.get(lesson.kind), Plan(lesson)
        if before is None or not before.valid or not before.uses:
            return []
        now = Counter(call.module for call in lesson.calls)
        return [
            lesson.modules[number]
            for number, count in now.items()
            # known, and with more calls each time that it ran
            if number in before.around and count * before.runs.get(number, 1) > len(before.calls.get(number, ())) * lesson.runs[number]
        ]

    def forget(self, plan: Plan) -> None:
        plan.valid = False


plans = Plans()


class LightPass:
    """The calls of one light pass, compared with its plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ran: Counter[int] = Counter()
        self.made: Counter[int] = Counter()
        self.position = 0
        self.softmaxes = 0
        self.differs = False
        self.last_is_op = False  # whether the last call was read from the arguments of an op

    def expected(self, module: nn.Module) -> ExpectedCall | None:
        """The next call of a module; None if a full pass saw no more of them."""
        calls = self.plan.calls.get(id(module))
        if calls is None:
            return None
        made = self.made[id(module)]
        return calls[made] if made < len(calls) else None

    def counted(self, module: nn.Module, call: AttentionCall) -> None:
        number, order = id(module), self.plan.order
        self.last_is_op = not call.product
        self.made[number] += 1
        if self.position >= len(order) or order[self.position] != number:
            self.differs = True
        self.position += 1

    def silent(self) -> list[int]:
        """The modules that ran with fewer calls than before, each time that they ran."""
        plan = self.plan
        return [
            number
            for number, calls in plan.calls.items()
            if self.ran[number] and self.made[number] * plan.runs[number] < len(calls) * self.ran[number]
        ]

    @property
    def is_complete(self) -> bool:
        return not self.differs and self.position == len(self.plan.order)
