"""Trial: the passes that all experiments share, how far two passes differ beside rounding, and the answer of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...health import Finding
from ...health.finding import fault_finding
from ..checks.examiner import AttentionChecks
from .runner import POOLED, LayerRows, Runner, chosen
from .subject import CannotRun, NamedBatch

ERRORS = (
    *(RuntimeError, ValueError, TypeError, LookupError, NotImplementedError, AttributeError, AssertionError),
    *(ArithmeticError, ImportError),
)
"""What the forward of a model may raise on a batch that it was not written for."""


STEADY = 1e-3
"""Two passes that should be equal differ by less, as a share of a row's size, or nothing is judged."""
ROUNDINGS = 16
"""How many times as far as the measured rounding a row may move; in 110 sound models it was 0.7 times at most."""
AT_ONCE = 32  # rows that are compared in float64 at a time: those of logits are as wide as a vocabulary
PREPENDED = 64  # tokens that a model may put before a text
NO_ROWS = "nothing that the model returns has one row per token"


@dataclass(frozen=True)
class Moved:
    """The first layer whose rows moved, "" for the model's output, and by how much of their size."""

    layer: str
    by: float
    row: int  # the row that moved most, as a place in the kept rows


OUTPUT = Moved("", 0.0, 0)


def distance(a: Tensor, b: Tensor, counted: Tensor | None = None) -> tuple[float, int]:
    """The largest distance of a row of ``a`` from that of ``b``, as a share of their root-mean-square size; and which row.

    ``counted`` is (B, R): False leaves a row out. Rows that are not finite in ``b`` are left out too.
    """
    one, two = (part.flatten(2) if part.dim() > 2 else part.unsqueeze(-1) for part in (a, b))
    parts = list(zip(one.split(AT_ONCE, 1), two.split(AT_ONCE, 1), strict=True))
    size = torch.cat([old.double().square().sum(-1) for _, old in parts], 1)
    apart = torch.cat([(new.double() - old).square().sum(-1) for new, old in parts], 1)
    keep = torch.isfinite(size) if counted is None else torch.isfinite(size) & counted.to(size.device)
    if not bool(keep.any()):
        return 0.0, 0
    whole = size[keep].mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    by = (apart.sqrt() / whole).masked_fill(~keep, 0.0).nan_to_num(nan=torch.inf)
    most = by.max()
    # the first of the rows that moved alike but for rounding, so that every machine gives the same answer
    alike = by >= most * (1 - torch.finfo(torch.float32).eps)
    return float(most), int(alike.flatten().int().argmax()) % by.shape[1]


def floors(own: LayerRows, judged: LayerRows) -> dict[str, float]:
    """By layer: how far a row moves between two passes that should be equal."""
    return {
        name: distance(own[name], rows)[0] if _alike(rows, own.get(name)) else torch.inf
        for name, rows in judged.items()
    }


def bound(floor: dict[str, float], layer: str) -> float:
    """How far two passes may differ by rounding alone: see ROUNDINGS."""
    return ROUNDINGS * (floor.get(layer, 0.0) + torch.finfo(torch.float32).eps)


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


def check_comparable(after: LayerRows, before: LayerRows) -> None:
    """Raise if no layer and no output has the same rows in both; a pooled output has no row of a token."""
    if not any(_alike(rows, before.get(name)) for name, rows in after.items() if name != POOLED):
        raise CannotRun(NO_ROWS, "a model that returns one row per token")


def _alike(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.shape == b.shape and a.numel() > 0


@dataclass
class Answer:
    """The result of an experiment: a sentence and its findings; none if it passed.

    ``skipped``: it decided nothing, and ``needs`` says what to pass so that it does; None: it does not apply.
    """

    message: str
    findings: list[Finding] = field(default_factory=list)
    skipped: bool = False
    needs: str | None = None


@dataclass
class Trial:
    """What the experiments have in common. ``base`` are the rows of the batch as it is, by the judge."""

    subject: NamedBatch
    runner: Runner
    checks: AttentionChecks
    order: list[str]  # layers of self-attention, as they run
    sizes: list[int] = field(default_factory=list)  # how many queries the self-attentions have
    ahead: bool = False  # whether a setting says that rows see later tokens
    strict: bool = False  # whether a bidirectional model is a fault too: assert_causal
    failed: list[str] = field(default_factory=list)  # experiments
    rough: bool = False  # whether rounding alone is why
    unsteady: CannotRun | None = None  # why nothing can be judged: two passes that should be equal are not
    other: Moved | None = None  # what a second call moved
    leaves: list[str] = field(default_factory=list)  # what a call leaves behind in the model, moved or not
    copied: tuple[int, Moved | None] | None = None  # an item, and what moved in a batch of its copies alone
    left: list[str] | None = None  # what the first call left behind, if that moved it; None: the output is random
    weights: dict[tuple[str, str], Tensor] = field(default_factory=dict)  # of some rows, in the model's own dtype
    base: LayerRows = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)
    later: list[tuple[Moved, int, int]] | None = None  # of `reach`: which row saw a later token
    reached: LayerRows = field(default_factory=dict)  # of `reach`: how far the first token moved each row, by layer
    others: tuple[LayerRows, LayerRows] | None = None  # of two items with other tokens, in one pass
    lengths: dict[int, Tensor] = field(default_factory=dict)

    def prepare(self) -> None:
        """Run the passes that all others are compared with: the batch as it is, a second time, and with other rounding."""
        subject, runner = self.subject, self.runner
        lengths = [subject.length] if subject.ordered else self.sizes
        self.lengths = {length: chosen(length) for length in [*subject.other_lengths(), *lengths]}
        with runner.keeping_state() as held:
            self.base = self.run(subject.batch, self.lengths)
            left = self.leaves = held.changed()
            runner.seed = 1
            try:
                again = self.run(subject.batch, self.lengths)
            finally:
                runner.seed = 0
        if not self._are_finite(self.base):
            raise CannotRun("the output holds NaN or infinity")
        self.floor = floors(again, self.base)
        if (moved := self._worst()) is not None:
            self.other, self.unsteady = moved, self._why(moved, left)
            return
        rounded = floors(runner.with_other_rounding(subject.batch, self._placed(self.lengths)), self.base)
        self.floor = {name: max(by, rounded[name]) for name, by in self.floor.items()}
        if (moved := self._worst()) is not None:
            by = f"rounding alone moves {named(moved.layer)} by {share(moved.by)}, so a fault could not be told from it"
            self.rough, self.unsteady = True, CannotRun(by, "the model in float32, with trained weights")

    def _worst(self) -> Moved | None:
        """The first layer of which two passes that should be equal differ by too much to judge."""
        for name in [*self.order, "", POOLED]:
            if self.floor.get(name, 0.0) > STEADY:
                return Moved("" if name == POOLED else name, self.floor[name], 0)
        return None

    def _why(self, moved: Moved, left: list[str]) -> CannotRun:
        """Whether a second call gave other numbers because they are random, or because of what the first one left."""
        self.runner.seed = 1
        try:
            other = self.run(self.subject.batch, self.lengths)
            differs = any(floor > STEADY for floor in floors(other, self.base).values())
            # what cannot be put back, such as a weight that is changed, moves a pass with the same seed too
            alike = differs and max(floors(self.run(self.subject.batch, self.lengths), other).values()) <= STEADY
        finally:
            self.runner.seed = 0
        by = f"moved {named(moved.layer)} by {share(moved.by)}"
        if alike:
            return CannotRun(
                f"the output is random in evaluation mode: another seed {by}",
                "a model that draws while training alone: F.dropout(x, p, training=self.training)",
            )
        self.left = left
        what = f": it changed {', '.join(left[:3])}{' …' if len(left) > 3 else ''}" if left else ""
        return CannotRun(
            f"the model keeps state from call to call{what}, so the same batch {by} in a second call",
            "a model that clears its state where a text begins, or takes and returns it",
        )

    @property
    def prepended(self) -> int:
        """How many tokens of its own the model puts before those of the text, as far as the lengths of its layers show."""
        subject = self.subject
        if not subject.ordered or not self.sizes or subject.length in self.sizes:
            return 0
        more = [length - subject.length for length in self.sizes if 0 < length - subject.length <= PREPENDED]
        return (
            more[0] if len(more) == 1 and more[0] % subject.length else 0
        )  # a multiple: other sequences are between them

    def _placed(self, lengths: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The rows of the tokens by the length of what is returned, with the tokens that the model puts before them."""
        more = self.prepended
        moved = {length + more: rows + more for length, rows in lengths.items()} if more else {}
        return {**moved, **lengths}

    def run(self, batch: Any, lengths: Mapping[int, Tensor]) -> LayerRows:
        """The rows of a pass by the judge."""
        return self.runner(batch, self._placed(lengths))

    def outputs(self, batch: Any, lengths: Mapping[int, Tensor], counted: bool = True) -> tuple[LayerRows, Any]:
        """The same, with what the model returned; ``counted`` as in `Runner.outputs`."""
        return self.runner.outputs(batch, self._placed(lengths), counted)

    def whole(self) -> tuple[NamedBatch, LayerRows]:
        """An item whose tokens are all real, alone, and its rows of the pass that others are compared with."""
        subject = self.subject
        full = subject.real.all(1)
        if not bool(full.any()):
            raise CannotRun("every item of the batch has padding", "a batch with one item that has none")
        item = int(full.int().argmax())
        return subject.alone(item), {
            name: part[item : item + 1] for name, part in self.base.items() if part.shape[0] == subject.items
        }

    def real(self, subject: NamedBatch, lengths: Mapping[int, Tensor] | None = None) -> Tensor:
        """(B, R): which of the kept rows are those of real tokens; ``lengths`` if a pass kept others than `base` did."""
        kept = (self.lengths if lengths is None else lengths)[subject.length]
        return subject.real[:, kept.to(subject.value.device)]

    @property
    def is_causal(self) -> bool:
        """Whether every layer has a causal mask, and `future` found no leak."""
        flags = self.checks.is_causal
        return bool(flags) and all(flags.values()) and "future" not in self.failed

    def _are_finite(self, rows: LayerRows) -> bool:
        """Whether all rows of real tokens are finite; a padded one may see no key."""
        subject = self.subject
        real = self.real(subject) if subject.ordered else None
        alike = real is not None and any(part.shape[:2] == real.shape for part in rows.values())
        parts = [
            part[real] if alike and real is not None and part.shape[:2] == real.shape else part
            for part in rows.values()
        ]
        return all(bool(torch.isfinite(part).all()) for part in parts)

    def after(self, *names: str) -> None:
        """Raise if one of these experiments has failed: its fault would move rows in this one too."""
        for name in names:
            if name in self.failed:
                raise CannotRun(f"what the experiment {name!r} found would show here too")

    def fault(self, name: str, moved: Moved, **words: object) -> Answer:
        """The answer that a layer moved; ``words`` fill in the message of the fault."""
        words = {"layer": named(moved.layer), "share": share(moved.by), "why": "", **words}
        finding = fault_finding(name, (moved.layer, "self"), moved.by, **words)
        return Answer(finding.message, [finding])


def share(number: float) -> str:
    """A share of a size, in words."""
    return f"{number:.2g} times its size" if number >= 10 else f"{100 * number:.3g} % of its size"


def named(layer: str) -> str:
    return layer or "the model's output"
