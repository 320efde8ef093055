"""Trial: the passes that all experiments share, how far two passes differ and rounding moves them, and what is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...health import Finding
from ..checks.examiner import AttentionChecks, fault_finding
from .runner import POOLED, LayerRows, Runner, chosen
from .subject import CannotRun, NamedBatch

ERRORS = (
    *(RuntimeError, ValueError, TypeError, LookupError, NotImplementedError, AttributeError, AssertionError),
    *(ArithmeticError, ImportError),
)
"""What the forward of a model may raise on a batch that it was not written for."""


@dataclass(frozen=True)
class Moved:
    """The first layer whose rows moved, "" for the model's output, and by how much of their size."""

    layer: str
    by: float
    row: int  # the row that moved most, as a place in the kept rows


def distance(a: Tensor, b: Tensor, counted: Tensor | None = None) -> tuple[float, int]:
    """The largest distance of a row of ``a`` from that of ``b``, as a share of their root-mean-square size; and which row.

    ``counted`` is (B, R): False leaves a row out. LayerRows that are not finite in ``b`` are left out too.
    """
    one, two = (part.double().flatten(2) if part.dim() > 2 else part.double().unsqueeze(-1) for part in (a, b))
    size = two.square().sum(-1)
    apart = (one - two).square().sum(-1)
    keep = torch.isfinite(size) if counted is None else torch.isfinite(size) & counted.to(size.device)
    if not bool(keep.any()):
        return 0.0, 0
    whole = size[keep].mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    by = (apart.sqrt() / whole).masked_fill(~keep, 0.0).nan_to_num(nan=torch.inf)
    most = by.max()
    # of rows that moved alike, but for rounding, the first: the answer is the same on every machine
    alike = by >= most * (1 - torch.finfo(torch.float32).eps)
    return float(most), int(alike.flatten().int().argmax()) % by.shape[1]


def floors(own: LayerRows, judged: LayerRows) -> dict[str, float]:
    """By layer: how far rounding in the model's own dtype moves a row."""
    known = {name: distance(rows, judged[name]) for name, rows in own.items() if _alike(rows, judged.get(name))}
    return {name: by for name, (by, _) in known.items()}


def bound(floor: dict[str, float], layer: str) -> float:
    """How far rounding alone may set two passes apart: each of them is off by what was measured, and by one rounding."""
    return 2 * (floor.get(layer, 0.0) + torch.finfo(torch.float32).eps)


def first_moved(
    after: LayerRows, before: LayerRows, order: list[str], floor: dict[str, float], counted: Tensor | None = None
) -> Moved | None:
    """The first layer, in the order they run, of which a row moved further than rounding moves it; None: none did."""
    for name in [*order, ""]:
        rows, old = after.get(name), before.get(name)
        if rows is None or not _alike(rows, old):
            continue
        assert old is not None
        use = counted if counted is not None and counted.shape == rows.shape[:2] else None
        if use is None and counted is not None and rows.shape[0] != counted.shape[0]:
            continue
        by, row = distance(rows, old, use)
        if by > bound(floor, name):
            return Moved("" if name == POOLED else name, by, row)
    return None


def judged(after: LayerRows, before: LayerRows) -> int:
    """How many layers, and the output, were compared; a pooled output has no row of a token."""
    return sum(_alike(rows, before.get(name)) for name, rows in after.items() if name != POOLED)


def _alike(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.shape == b.shape and a.numel() > 0


@dataclass
class Answer:
    """What an experiment found: a sentence, and its findings; none: it passed. ``skipped``: it says nothing."""

    says: str
    findings: list[Finding] = field(default_factory=list)
    skipped: bool = False


@dataclass
class Trial:
    """What the experiments have in common. ``base`` are the rows of the batch as it is, by the judge."""

    subject: NamedBatch
    runner: Runner
    checks: AttentionChecks
    order: list[str]  # layers of self-attention, as they run
    sizes: list[int] = field(default_factory=list)  # how many queries the self-attentions have
    strict: bool = False  # whether a bidirectional model is a fault too: assert_causal
    failed: list[str] = field(default_factory=list)  # experiments
    weights: dict[tuple[str, str], Tensor] = field(default_factory=dict)  # of some rows, in the model's own dtype
    own: LayerRows = field(default_factory=dict)
    base: LayerRows = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)
    lengths: dict[int, Tensor] = field(default_factory=dict)

    def prepare(self, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """The passes that all others are compared with: in the model's own dtype, inside ``around``, and by the judge."""
        subject = self.subject
        lengths = [subject.length] if subject.ordered else self.sizes
        self.lengths = {length: chosen(length) for length in [*subject.other_lengths(), *lengths]}
        with around():
            self.own = self.runner.own(subject.batch, self.lengths)
        if not self._are_finite(self.own):
            raise CannotRun("the output holds NaN or infinity")
        judged: LayerRows | None = None
        if self.runner.exact:
            try:
                judged = self.runner(subject.batch, self.lengths)
            except ERRORS:
                self.runner.give_up_float64()
        if judged is None or not self._are_finite(judged):
            self.runner.give_up_float64()
            self.base = self.own
            self.floor = floors(self.runner.with_other_rounding(subject.batch, self.lengths), self.base)
        else:
            self.base, self.floor = judged, floors(self.own, judged)

    def run(self, batch: Any, lengths: Mapping[int, Tensor]) -> LayerRows:
        """The rows of a pass by the judge; in the own dtype if float64 alone gives NaN (its mask is −∞ to a float32 softmax)."""
        return self.outputs(batch, lengths)[0]

    def outputs(self, batch: Any, lengths: Mapping[int, Tensor]) -> tuple[LayerRows, Any]:
        """The same, with what the model returned."""
        found, output = self.runner.outputs(batch, lengths)
        if self.runner.exact and not self._are_finite(found):
            self.runner.give_up_float64()
            self.base = self.own
            found, output = self.runner.outputs(batch, lengths)
        return found, output

    def _are_finite(self, rows: LayerRows) -> bool:
        """Whether all rows of real tokens are finite; a padded one may see no key."""
        subject = self.subject
        real = subject.real[:, self.lengths[subject.length].to(subject.value.device)] if subject.ordered else None
        alike = real is not None and any(part.shape[:2] == real.shape for part in rows.values())
        parts = [
            part[real] if alike and real is not None and part.shape[:2] == real.shape else part
            for part in rows.values()
        ]
        return all(bool(torch.isfinite(part).all()) for part in parts)

    def after(self, *names: str) -> None:
        """Raise if one of these experiments has failed: what it found moves rows in this one too."""
        for name in names:
            if name in self.failed:
                raise CannotRun(f"what the experiment {name!r} found would show here too")

    def fault(self, name: str, moved: Moved, says: str, todo: str) -> Answer:
        """The answer that a layer moved."""
        return Answer(says, [fault_finding(name, (moved.layer, "self"), moved.by, says, todo)])


def share(number: float) -> str:
    """A share of a size, in words."""
    return f"{number:.2g} times its size" if number >= 10 else f"{100 * number:.3g} % of its size"


def named(layer: str) -> str:
    return layer or "the model's output"
