"""Trial: the model, its batch and the passes that all experiments share; and what an experiment answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...health import Finding
from ..checks.examiner import AttentionChecks, made
from .movement import Moved, floors
from .runner import Rows, Runner, chosen
from .subject import CannotRun, Subject

ERRORS = (
    *(RuntimeError, ValueError, TypeError, LookupError, NotImplementedError, AttributeError, AssertionError),
    *(ArithmeticError, ImportError),
)
"""What the forward of a model may raise on a batch that it was not written for."""


@dataclass
class Answer:
    """What an experiment found: a sentence, and its findings; none: it passed. ``skipped``: it says nothing."""

    says: str
    findings: list[Finding] = field(default_factory=list)
    skipped: bool = False


@dataclass
class Trial:
    """What the experiments have in common. ``base`` are the rows of the batch as it is, by the judge."""

    subject: Subject
    runner: Runner
    checks: AttentionChecks
    order: list[str]  # layers of self-attention, as they run
    sizes: list[int] = field(default_factory=list)  # how many queries the self-attentions have
    strict: bool = False  # whether a bidirectional model is a fault too: assert_causal
    failed: list[str] = field(default_factory=list)  # experiments
    base: Rows = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)
    lengths: dict[int, Tensor] = field(default_factory=dict)

    def prepare(self, around: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext) -> None:
        """The two passes that all others are compared with: in the model's own dtype, and by the judge, inside ``around``."""
        lengths = [self.subject.length] if self.subject.ordered else self.sizes
        self.lengths = {length: chosen(length) for length in [*self.subject.other_lengths(), *lengths]}
        own = self.runner.own(self.subject.batch, self.lengths)
        try:
            with around(self.runner.judge):
                self.base = self.runner(self.subject.batch, self.lengths)
        except ERRORS:
            if not self.runner.exact:
                raise
            self.runner.give_up_float64()
            with around(self.runner.judge):
                self.base = self.runner(self.subject.batch, self.lengths)
        if any(not bool(torch.isfinite(rows).all()) for rows in self._own()):
            raise CannotRun("the output holds NaN or infinity")
        if self.runner.exact:
            self.floor = floors(own, self.base)
        else:
            twice = self.subject.with_tokens(torch.cat([self.subject.value] * 2, 0), **self.subject.doubled())
            again = self.runner(twice, self.lengths)
            self.floor = floors({name: rows[: self.subject.items] for name, rows in again.items()}, self.base)

    def after(self, *names: str) -> None:
        """Raise if one of these experiments has failed: what it found moves rows in this one too."""
        for name in names:
            if name in self.failed:
                raise CannotRun(f"what the experiment {name!r} found would show here too")

    def _own(self) -> list[Tensor]:
        """The model's own output, if it has one row per token."""
        return [rows for name, rows in self.base.items() if not name and len(rows) == self.subject.items]

    def fault(self, name: str, moved: Moved, says: str, todo: str, level: str | None = None) -> Answer:
        """The answer that a layer moved."""
        return Answer(says, [made(name, (moved.layer, "self"), moved.by, says, todo, level)])


def share(number: float) -> str:
    """A share of a size, in words."""
    return f"{number:.2g} times its size" if number >= 10 else f"{100 * number:.3g} % of its size"


def named(layer: str) -> str:
    return layer or "the model's output"
