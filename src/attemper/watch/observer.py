"""Observer: what a watch asks of each attention call, and what it is told of the step that runs: its passes, calls and notes.

Passes decide which calls of a model count in a step; evaluation and generation run between those that train.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import DRY_RUNS, DYNAMO_MODULE, DYNAMO_WRAPPER, PIPELINE_STAGE, _current_graph_task_id
from ..errors import InputError
from .attach.dynamo import COMPILED
from .attach.gradients import NO_GRADIENTS
from .attach.names import CallNumbers, is_in, named_modules
from .attach.running import python_frames
from .call import AttentionCall, Examiner, Looked, NoAttentionCall, Summary
from .record.entry import Entry
from .record.ranks import Exchange, Ranks
from .record.record import Record
from .record.sums import StepAccumulator
from .routes.handwritten.layout import all_heads

FOLLOWS = (
    "it follows torch's scaled_dot_product_attention, nn.MultiheadAttention and nn.TransformerEncoderLayer, the Hugging Face "
    "attention interface, and attention written by hand as product, softmax, product. For other attention, call "
    "attemper.measure(query, key) inside the model"
)
EXCHANGED = (
    "{layer}: ranks exchange tensors around its attention ({op}), so that its heads, or the rows or keys of them, are those of "
    "this rank{calls}. record.info[layer, kind].local is True for every such layer."
)


COUNTED = ("training", "all")
LEFT_OUT = (
    "passes without gradients, and passes in evaluation mode in a step that has others in training mode, are left out; "
    "passes='all' counts them."
)
ONLY_OTHERS = (
    "a step had only passes without gradients, after steps that had gradients: it has no rows. "
    "Use passes='all' to count every pass."
)
UNFINISHED = (
    "passes after the last step are left out: they ran in evaluation mode after steps in training mode, or no step of the "
    "optimizer followed. Use passes='all' to count every pass."
)

FAILED = (
    "a pass raised an error before it ended, and its step went on without it: the calls that it had made are left out. They are "
    "counted only if an error ends the block."
)


class Passes:
    """Decides whether a pass counts, by the mode of the model when it begins.

    Passes have three grades: in training mode with gradients, in evaluation mode with gradients, without gradients. In a step
    only the passes of its best grade count. Once a pass had gradients, none without them counts: the watch is over a training.
    If no pass has gradients, all count. Passes after the last step are no step if the steps had a better grade: see `unfinished`.
    Passes are compared if the outermost module of one is or contains that of the other: a frozen part called by itself counts.
    """

    def __init__(self, counted: str) -> None:
        self.all_count = counted == "all"
        self.begin()

    def begin(self) -> None:
        """Start from nothing: a watch opens."""
        self.begun = self.counted = 0
        self.highest: dict[str, int] = {}  # the best grade of any step, by the module that was called
        self.end_step()

    def end_step(self) -> None:
        self.grades: dict[str, int] = {}  # of the passes of this step, by the module that was called
        self.left_out = False  # whether some of this step were

    def take(self, module: nn.Module, name: str) -> list[str] | None:
        """None if the pass that begins with this module does not count; otherwise the modules whose earlier passes do not."""
        self.begun += 1
        recomputing = _current_graph_task_id() != -1  # a checkpoint, computed again in a backward
        worse: list[str] = []
        if not self.all_count and not recomputing:
            recording = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            compared = self._compare(name, (1 + module.training) * recording)
            if compared is None:
                return None
            worse = compared
        self.counted += 1
        return worse

    def take_grades(self, name: str, calls: list[int]) -> list[int]:
        """The grades of a layer's calls in this step that count, from how many calls it had of each grade."""
        ran = [grade for grade, count in enumerate(calls) if count]
        self.begun = max(self.begun, sum(calls))
        grades = ran if self.all_count else [grade for grade in reversed(ran) if self._compare(name, grade) is not None]
        self.counted = max(self.counted, sum(calls[grade] for grade in grades))
        return grades

    def _compare(self, name: str, grade: int) -> list[str] | None:
        """None if a pass of this grade does not count; otherwise the modules whose earlier passes do not."""
        # usually all passes have one grade, and no names need to be compared: comparing takes every pair of a step
        alike = {*self.grades.values()} <= {grade} and (grade or not any(self.highest.values()))
        others = {} if alike else {other: places for other, places in self.grades.items() if _are_nested(name, other)}
        if any(grade < places for places in others.values()) or (not alike and not grade and self._highest(name)):
            self.left_out = True
            return None
        worse = [other for other, places in others.items() if places < grade]
        for other in worse:
            del self.grades[other]
        self.grades[name] = grade
        self.highest[name] = max(grade, self.highest.get(name, 0))
        return worse

    def unfinished(self, after_optimizer: bool) -> list[str]:
        """The modules whose passes in the current step are no step of training, if the watch ends now.

        `after_optimizer`: an optimizer ends the steps, and has ended one.
        """
        return [name for name, grade in self.grades.items() if after_optimizer or grade < self._highest(name)]

    def _highest(self, name: str) -> int:
        return max((grade for other, grade in self.highest.items() if _are_nested(name, other)), default=0)


def is_dry() -> bool:
    """Whether torch's pipelining runs a stage to learn the shapes of its tensors: nothing is trained on what it computes."""
    return _is_called_by(DRY_RUNS, PIPELINE_STAGE)


def in_compiled() -> bool:
    """Whether the caller runs inside a function that torch.compile made. With the switch on it runs eagerly."""
    return _is_called_by({DYNAMO_WRAPPER}, DYNAMO_MODULE)


def _is_called_by(functions: set[str], module: str) -> bool:
    """Whether this thread runs one of these functions of a module of torch, which may not be loaded."""
    frames = python_frames(sys._getframe(1)) if module in sys.modules else ()
    return any(frame.f_code.co_name in functions and frame.f_globals.get("__name__") == module for frame in frames)


def _are_nested(name: str, other: str) -> bool:
    return is_in(name, other) or is_in(other, name)


@dataclass(eq=False)
class Observer:
    """A watch as the sources of its calls see it: what it asks for, and where they put what they find."""

    model: nn.Module
    signs: tuple[str, ...]
    kernel: str
    wants_gradients: bool
    full: bool
    examiners: Sequence[Examiner]
    passes: Passes
    step: int
    steps_ended: int = 0
    caller: str = "watch"  # the function that the user called, for errors
    given_rows: Tensor | None = None
    modules: tuple[nn.Module, ...] = ()  # while the watch is open
    names: dict[int, str] = field(default_factory=dict)  # of the modules, by their ids
    native: Any = None  # what sums its calls on a CPU, if the native library does
    takes_any_kernel: bool = False  # for all signs, so that a call on a GPU may start an earlier launch again
    ranks: Ranks = field(default_factory=Ranks)
    record: Record = field(default_factory=Record)
    unmeasured: int = 0  # calls that were found and not measured
    without_gradients: set[str] = field(default_factory=set)  # layers whose missing gradients were noted
    numbers: CallNumbers | None = None  # if the calls of a module on one sequence are layers of their own

    def __post_init__(self) -> None:
        self.forget_step()

    def open(self) -> None:
        self.steps_ended = 0
        self.passes.begin()
        named = named_modules(self.model)
        self.modules, self.names = tuple(named), {id(module): name for module, name in named.items()}
        self.ranks = Ranks(self.model)

    def close(self) -> None:
        self.modules, self.names = (), {}

    @property
    def wants_full(self) -> bool:
        return self.full or bool(self.examiners)

    @property
    def wants_traces(self) -> bool:
        return any(getattr(examiner, "traces", False) for examiner in self.examiners)

    def note(self, sentence: str) -> bool:
        """Keep a sentence in the notes, once; whether it is new."""
        if sentence in self.record.notes:
            return False
        self.record.notes.append(sentence)
        return True

    def warn(self, sentence: str) -> None:
        if self.note(sentence):
            warnings.warn(f"watch(): {sentence}", stacklevel=2)

    def title(self, name: str) -> str:
        """The name of a layer for a sentence: the model itself has the name of its class, not that of a wrapper."""
        return name or [type(module).__name__ for module, named in named_modules(self.model).items() if not named][-1]

    def pass_began(self, module: nn.Module) -> bool:
        """Whether the pass that begins counts."""
        if is_dry():
            return False
        worse = self.passes.take(module, self.names[id(module)])
        if worse is None or worse:
            self.note(LEFT_OUT)
        if worse is None:
            return False
        if self.sums.failed:
            self._drop_failed((get_ident(),))
        for name in worse:  # the earlier passes of this step were evaluation
            self.sums.drop(name)
        if in_compiled():
            self.warn(COMPILED)
        return True

    def add_call(self, name: str, call: AttentionCall, summary: Summary, looked: Looked) -> None:
        shown = name if self.numbers is None else self.numbers.named(name, call, self.names)
        self.sums.add(shown, call.info, summary, call)
        if self.ranks.many:
            self._note_part(name, call)
        for examiner, part, looked_at in looked:
            examiner.keep(name if getattr(examiner, "by_module", False) else shown, part, looked_at)

    def _note_part(self, layer: str, call: AttentionCall) -> None:
        """Note a layer that runs a part of its heads on this rank."""
        named, heads = all_heads(call.frames), call.info.heads
        if named is not None and named > heads and named % heads == 0:
            self.ranks.split = True
            self.sums.local.add(layer)
            self.warn(f"{self.title(layer)}: {heads} of its {named} heads run on this rank, counted from 0.")

    def add_exchange(self, layer: str, exchange: Exchange) -> None:
        """The ranks of a layer exchange tensors while it runs. That is said once, unless all its rows are whole and added."""
        if self.ranks.makes_whole(exchange):
            return
        calls = f", and its {exchange.calls} calls are measured one by one" if exchange.calls > 1 else ""
        if not (self.sums.local or self.ranks.tensor_parallel):  # which is said at the start
            self.warn(EXCHANGED.format(layer=self.title(layer), op=exchange.op, calls=calls))
        self.sums.local.add(layer)

    def add_unmeasured(self, name: str, reason: str) -> None:
        self.unmeasured += 1
        self.warn(f"{self.title(name)}: not measured: {reason}.")

    def add_note(self, name: str, reason: str) -> None:
        """Note what may be attention and was not measured, or what is uncertain about a call."""
        self.note(f"{self.title(name)}: {reason}.")

    def add_lost(self, name: str, reason: str) -> None:
        """Warn of attention that an intercepted pass may have missed."""
        self.warn(f"{self.title(name)}: step {self.step}: {reason}.")

    def _drop_failed(self, threads: tuple[int, ...] | None = None) -> None:
        """Forget passes that raised, in these threads or in all: the step goes on without them."""
        if self.sums.drop_failed(threads):
            self.note(FAILED)

    def settle(self, goes_on: bool) -> None:
        """Decide what counts of the passes that did not end, now that a step ends: none that raised if the training goes on."""
        sums = self.sums
        # passes that are all that a block has may have been stopped on purpose, by an exception
        if goes_on and sums.failed and (sums.layers or self.steps_ended):
            self._drop_failed()
        if sums.running or sums.failed:
            sums.settle()

    def drop_unfinished(self, after_optimizer: bool) -> None:
        """Forget evaluation after the last step. Training passes before an error are kept: they may show what went wrong."""
        unfinished = self.passes.unfinished(after_optimizer)
        if unfinished:
            self.note(UNFINISHED)
        for name in unfinished:
            self.sums.drop(name)

    def forget_step(self) -> None:
        """Begin the step anew."""
        self.sums = StepAccumulator(self.wants_gradients)

    def check_calls(self) -> None:
        """Raise if passes counted, and no attention call was found in them."""
        if self.passes.counted and not self.sums.calls and not self.unmeasured:
            raise NoAttentionCall(f"{self.caller}(): found no attention call in {self.title('')}; {FOLLOWS}.")

    def note_gradients(self, entries: list[Entry]) -> None:
        """Note the layers of a step whose gradients were not measured, the first time."""
        for layer, failure in self.sums.failures.items():
            self.warn(f"{self.title(layer)}: gradients could not be measured: {failure}.")
        layers = [self.title(entry.layer) for entry in entries if self.wants_gradients and entry.gradients is None]
        if layers:
            named = ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
            named = "any layer" if len(layers) == len(entries) else named
            if named not in self.without_gradients:
                self.without_gradients.add(named)
                self.note(NO_GRADIENTS.format(step=entries[0].step, layers=named))

    def check_end(self, was_measuring: bool, every: int) -> None:
        """Raise or warn if a block that ended well measured nothing, or not what was asked for."""
        if was_measuring:
            self.check_calls()
        if not self.passes.begun and not self.unmeasured:
            raise InputError(
                f"watch(): {type(self.model).__name__} was not called inside the block. Call model(…), "
                "and not model.forward(…)."
            )
        if every > 1 and not self.steps_ended and self.passes.counted > 1:
            warnings.warn(
                f"watch(): every={every}, but no step ended, so all {self.passes.counted} passes count as one. "
                "Call watch.step() after each step, or give watch() the optimizer.",
                stacklevel=3,
            )
