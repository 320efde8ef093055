"""reach: change one token, or another input, in a copy of an item; the rows that move in evaluation and in training mode."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checks.declared import AHEAD, is_published, is_real, matching_setting
from ..unchanged import opened
from .changes import why_causal
from .runner import LayerRows, woken
from .subject import OTHERS, CannotRun, NamedBatch
from .tiled import by_item, distances, fullest, other_token, tiled
from .trial import ERRORS, Answer, Moved, Trial, bound

FEWEST = 5  # tokens
FAR = 3  # rows that are beyond a window
SEEDS = (2, 3, 4)
CLEARLY = 16  # times as far as rounding could move a row: it depends on a token, and another one does not
ROUNDED = 64  # items of a batch differ by less in the last place of a number
UNUSED = re.compile(r"label|target|loss|position|_ids?$|index|mask", re.IGNORECASE)
TYPES = "token_type_ids"
REGULAR = re.compile(
    r"drop|batchnorm|instancenorm", re.IGNORECASE
)  # what training mode changes, by the class of a module


Later = list[tuple[Moved, int, int]]
"""The first layer of which a row before a changed token moved, the row and the token; empty: none did."""


@dataclass
class Copies:
    """One item several times. By copy: the token, or the other input, that is changed in it; None: it is as it is."""

    subject: NamedBatch
    changes: list[int | str | None]

    @property
    def count(self) -> int:
        return len(self.changes)

    @property
    def places(self) -> dict[int, int]:
        """By copy: the token that is changed."""
        return {copy: change for copy, change in enumerate(self.changes) if isinstance(change, int)}

    def batch(self, changes: Sequence[int | str | None]) -> tuple[Any, dict[int, str]]:
        """A batch of copies with these changes, and by its items: the other input that is changed."""
        subject = self.subject
        whole = tiled(subject, len(changes))
        tokens = whole.value.clone()
        known = {name: value for name, value in whole.arguments.items() if name != subject.tokens}
        axis = 1 if subject.sequence_first else 0
        inputs: dict[int, str] = {}
        for item, change in enumerate(changes):
            if isinstance(change, int):
                tokens[item : item + 1, change : change + 1] = other_token(subject, tokens[item : item + 1], change)
            elif change is not None and known[change].shape[axis] == len(changes):
                known[change] = known[change].clone()
                part = known[change].select(axis, item)
                part.copy_(_other_numbers(part))
                inputs[item] = change
        return whole.with_tokens(tokens, **known), inputs


def reach(trial: Trial) -> Answer:
    """Whether rows depend on what they may depend on: on no later token, on other tokens at all, and on every other input."""
    subject = trial.subject
    subject.needs_tokens()
    trial.after("repeat", "batch")
    real = _real(subject)
    # of two neighbours, at least one is not the first of a block; of a prefix, every row sees the last token
    places = [real[-1], real[-2]]
    last = trial.checks.prefix - 1
    more = [place for place in (last, real[0]) if place >= 0 and place not in places]
    copies = changed_copies(subject, list(dict.fromkeys(places + more)), others(subject))
    with woken(trial.runner.judge):
        rows, effects = ran(trial, copies)
    leak = seen_later(trial, copies, rows, places=places)
    trial.later, trial.reached = (
        seen_later(trial, copies, rows, places=places[:1]),
        reached(trial, copies, rows, real[0]),
    )
    why = "it should be causal" if trial.strict else why_causal(trial)
    prefixed = last > 0 and not _ends_at_borders(trial, copies, rows, last)
    if not trial.strict and (
        trial.ahead or prefixed or trial.checks.reads_both_ways or subject.rivals
    ):  # one of two may be a memory
        why = None
    if leak and why is not None and "future" not in trial.failed:
        moved, row, token = leak[0]
        if moved.layer or trial.base[""].dim() > 2:
            return trial.fault("later_seen", moved, row=row, token=token, why=why)
    for name, moves in effects.items():
        if not moves:
            return trial.fault("source_ignored", Moved("", 0.0, 0), given=name)
    known = is_published(subject.model)
    if not known and trial.order and _stays_alone(trial, copies, rows) and _stays_alone(trial, *_at_start(trial, real)):
        return trial.fault("tokens_apart", Moved("", 0.0, 0))
    what = f", and {', '.join(effects)} changed the output" if effects else ""
    return Answer(f"a token moved rows that may depend on it{what}")


def modes(trial: Trial) -> Answer:
    """Whether rows see later tokens in training mode if, and only if, they do in evaluation mode."""
    subject, model = trial.subject, trial.runner.judge
    subject.needs_tokens()
    trial.after("repeat", "batch")
    if is_published(subject.model):
        raise CannotRun(f"{type(subject.model).__name__} is published: what its modes differ in is intended")
    real = _real(subject, None)
    places = [real[-1], real[0]]
    if trial.later is None:
        copies = changed_copies(subject, places)
        with woken(model):
            rows = ran(trial, copies)[0]
        trial.later, trial.reached = seen_later(trial, copies, rows), reached(trial, copies, rows, real[0])
    with woken(model), training(model):
        found = _trained_alone(trial, places) if subject.items == 1 else None
        trained, apart = _trained_together(trial, places) if found is None else (found, None)
    if bool(trained) == bool(trial.later):
        if apart is None:
            return Answer(f"rows {'see' if trained else 'do not see'} later tokens in both modes")
        moved, mode, row = apart
        words = {
            "mode": mode,
            "other": "evaluation" if mode == "training" else "training",
            "row": row,
            "token": real[0],
        }
        return trial.fault("modes_differ", moved, **words, which="", none="it does not")
    moved, row, token = (trained or trial.later)[0]
    ahead = matching_setting(model.modules(), AHEAD)
    mode, other = ("training", "evaluation") if trained else ("evaluation", "training")
    words = {
        "mode": mode,
        "other": other,
        "row": row,
        "token": token,
        "which": ", which comes later",
        "none": "no row does",
    }
    if ahead is not None:
        return Answer(f"rows see later tokens in {mode} mode alone: assumed intended, because of {ahead}", skipped=True)
    return trial.fault("modes_differ", moved, **words)


def _trained_alone(trial: Trial, places: list[int]) -> Later | None:
    """Which row sees a later token in training mode, each copy run alone; None if that does not show it, as where a model
    takes no single item while it trains, or if rows depend on other tokens than in evaluation."""
    copies = changed_copies(trial.subject, places)
    as_it_is = changed_copies(trial.subject, [])
    try:
        rows = ran(trial, copies)[0]
        if not all(bool(part.isfinite().all()) for part in rows.values()):
            return None
        if not _are_alike(trial, ran(trial, as_it_is, seed=1, counted=False)[0], rows):
            if not _are_alike(trial, ran(trial, as_it_is)[0], rows):
                return None  # a generator of the model's own, which draws other numbers in every pass
            # what is drawn may hide a token from all rows, as dropout of whole tokens does
            every = (rows, *(ran(trial, copies, seed=number, counted=False)[0] for number in SEEDS if trial.later))
            return next(filter(None, (seen_later(trial, copies, one) for one in every)), [])
    except ERRORS:
        return None
    trained = seen_later(trial, copies, rows)
    alike = bool(trained) == bool(trial.later)
    return None if alike and _apart(trial, reached(trial, copies, rows, places[-1])) else trained


def _trained_together(trial: Trial, places: list[int]) -> tuple[Later, tuple[Moved, str, int] | None]:
    """The same with all copies in one pass, and whether a row depends on a token in one mode alone."""
    copies = changed_copies(trial.subject, places, as_it_is=2)
    drew, trial.runner.draws = trial.runner.draws, False
    rows, before = ran(trial, copies, together=True)[0], None
    draws, trial.runner.draws = trial.runner.draws, drew
    second = {name: part[1:] for name, part in rows.items() if len(part) == copies.count}
    if draws or not _are_alike(trial, second, rows):
        # what is drawn differs between items; with the same seed it is the same in a second pass
        before = ran(trial, changed_copies(trial.subject, [], as_it_is=copies.count), together=True)[0]
        if not _are_alike(trial, before, rows):
            raise CannotRun("the same text gives other numbers in training mode, with the same random numbers")
    apart = _apart(trial, reached(trial, copies, rows, places[-1])) if before is None else None
    return seen_later(trial, copies, rows, before), apart


def _are_alike(trial: Trial, one: LayerRows, two: LayerRows) -> bool:
    """Whether the first items of two passes have the same rows, but for rounding."""
    return all(_alike(trial, name, part[0], two[name][0]) for name, part in one.items() if name in two)


def reached(trial: Trial, copies: Copies, rows: LayerRows, place: int) -> LayerRows:
    """By layer: how far each row moved with a changed token."""
    moved: LayerRows = {}
    copy = next((copy for copy, token in copies.places.items() if token == place), None)
    for name in trial.order if copy is not None else ():
        part = by_item(trial, rows, name, copies.count)
        if part is not None and part.shape[1] == len(trial.lengths[trial.subject.length]):
            moved[name] = distances(part[copy], part[0])
    return moved


def _apart(trial: Trial, trained: LayerRows) -> tuple[Moved, str, int] | None:
    """The first layer of which a row depends on a token in one mode alone, that mode, and the row."""
    for name, evaluated in trial.reached.items():
        if name not in trained:
            continue
        limit = bound(trial.floor, name)
        for mode, here, there in (("evaluation", evaluated, trained[name]), ("training", trained[name], evaluated)):
            alone = (here > CLEARLY * limit) & (there <= limit)
            row = int(alone.int().argmax())
            if (
                bool(alone[row:].all()) and len(alone) - row >= FAR
            ):  # a window; keys chosen by score leave out single rows
                return Moved(name, float(here[row]), row), mode, int(trial.lengths[trial.subject.length][row])
    return None


def _real(subject: NamedBatch, needs: str | None = f"{FEWEST} tokens or more") -> list[int]:
    """The places of the real tokens of the item that is copied."""
    positions = subject.real[fullest(subject)].nonzero().flatten().tolist()
    if len(positions) < FEWEST:
        raise CannotRun(f"a text of {len(positions)} tokens is too short", needs)
    return positions


def _at_start(trial: Trial, real: list[int]) -> tuple[Copies, LayerRows]:
    """A pass in which the first tokens are changed: of a windowed or strided attention, others see these than the last ones."""
    copies = changed_copies(trial.subject, real[:2])
    with woken(trial.runner.judge):
        return copies, ran(trial, copies)[0]


def others(subject: NamedBatch) -> list[str]:
    """The other inputs that an output should depend on: sequences of numbers or of ids, and pictures."""
    names = []
    for name, value in subject.arguments.items():
        if (
            name == subject.tokens
            or not isinstance(value, Tensor)
            or (name in OTHERS and name != TYPES)
            or (is_real(name, value) is not None and name != TYPES)
        ):
            continue
        ids = name in ("input_ids", "decoder_input_ids") or _are_types(subject, name, value)
        numbers = value.is_floating_point() and value.dim() in (3, 4, 5) and 1 < value.shape[-1] != value.shape[-2]
        pictures = name.startswith("pixel")
        if ids or ((numbers or pictures) and not UNUSED.search(name)):
            names.append(name)
    return names


def _are_types(subject: NamedBatch, name: str, value: Tensor) -> bool:
    """Whether an argument says of each token what kind it is, and the batch has more than one: published models ignore it."""
    return name == TYPES and not is_published(subject.model) and bool((value != value[:1, :1]).any())


def changed_copies(subject: NamedBatch, places: list[int], inputs: Sequence[str] = (), as_it_is: int = 1) -> Copies:
    """One item several times: as it is, with one token changed, or with one other input changed."""
    return Copies(subject, [*[None] * as_it_is, *places, *inputs])


def ran(
    trial: Trial, copies: Copies, seed: int = 0, counted: bool = True, together: bool = False
) -> tuple[LayerRows, dict[str, bool]]:
    """The rows of all copies, and by other input: whether the output moved when it was changed.

    Of a batch of one item the copies run one after the other, so that no pass is larger than the model's own. Those of several
    items run ``together``: what a batch holds beside tensors, one part for each item, then fits no copy, and the model raises.
    """
    changes, items = copies.changes, copies.count if together or trial.subject.items > 1 else 1
    batches = [copies.batch(changes[start : start + items]) for start in range(0, copies.count, items)]
    if counted:
        trial.runner.take()
    parts: list[LayerRows] = []
    first: list[Tensor] = []
    moved: dict[str, bool] = {}
    trial.runner.seed = seed
    try:
        for batch, inputs in batches:
            rows, output = trial.outputs(batch, trial.lengths, counted=False)
            parts.append(rows)
            for item in range(items) if any(isinstance(change, str) for change in changes) else ():
                own = _of_item(output, item, items)
                first = first or [part.clone() for part in own]
                if item in inputs and (moves := _moves(own, first)) is not None:
                    moved[inputs[item]] = moves
    finally:
        trial.runner.seed = 0
    if len(parts) == 1:
        return parts[0], moved
    shapes = {name: {part[name].shape if name in part else None for part in parts} for name in parts[0]}
    whole = [name for name, some in shapes.items() if len(some) == 1 and parts[0][name].shape[0] == 1]
    return {name: torch.cat([part[name] for part in parts]) for name in whole}, moved


def _of_item(output: Any, item: int, items: int) -> list[Tensor]:
    """What a model returned for one of the items of its batch."""
    parts = list(tensors_of(output))
    return parts if items == 1 else [part[item] for part in parts if part.dim() and part.shape[0] == items]


def _other_numbers(part: Tensor) -> Tensor:
    if not part.is_floating_point():
        return part.roll(1, 0) if bool((part != part.roll(1, 0)).any()) else part.flip(0)
    draws = torch.Generator().manual_seed(4)
    noise = torch.randn(part.shape, generator=draws, dtype=torch.float64, device="cpu")
    return (noise * max(float(part.double().std(correction=0)), 0.1)).to(part)


def seen_later(
    trial: Trial, copies: Copies, rows: LayerRows, before: LayerRows | None = None, places: Sequence[int] | None = None
) -> Later:
    """Which row before a changed token moved, compared with the first copy, or with the same copy of another pass."""
    compared_rows = trial.lengths[trial.subject.length]
    for name in [*trial.order, ""]:
        part, old = (by_item(trial, some, name, copies.count) for some in (rows, before or rows))
        if part is None or old is None or part.shape != old.shape or part.shape[1] != len(compared_rows):
            continue
        for copy, place in copies.places.items():
            if places is not None and place not in places:
                continue
            earlier = distances(part[copy], old[0 if before is None else copy])[compared_rows < place - trial.prepended]
            if len(earlier) and float(earlier.max()) > bound(trial.floor, name):
                row = int(earlier.argmax())
                return [(Moved(name, float(earlier[row]), row), int(compared_rows[row]), place)]
    return []


def _alike(trial: Trial, name: str, one: Tensor, two: Tensor) -> bool:
    return one.shape != two.shape or float(distances(one, two).max()) <= bound(trial.floor, name)


def _ends_at_borders(trial: Trial, copies: Copies, rows: LayerRows, last: int) -> bool:
    """Whether rows see ahead to the end of their block, which is no prefix: its last token moves rows, and not the first one."""
    compared_rows = trial.lengths[trial.subject.length]
    copy = next(copy for copy, place in copies.places.items() if place == last)
    parts = [
        rows[name]
        for name in [*trial.order, ""]
        if name in rows and rows[name].shape[:2] == (copies.count, len(compared_rows))
    ]
    if not parts or matching_setting(trial.runner.judge.modules(), AHEAD) is not None:
        return False
    moved = torch.stack([distances(part[copy], part[0]) for part in parts]).amax(0)
    limit = max(bound(trial.floor, name) for name in trial.floor)
    return bool((moved[compared_rows < last] > limit).any()) and not bool(moved[0] > limit)


def _stays_alone(trial: Trial, copies: Copies, rows: LayerRows) -> bool:
    """Whether no row of the output moved but those of the changed tokens."""
    compared_rows, judged = trial.lengths[trial.subject.length], False
    part = by_item(trial, rows, "", copies.count)
    if part is None or part.shape[1] != len(compared_rows) or part.dim() < 3:
        return False
    for copy, place in copies.places.items():
        moved = distances(part[copy], part[0])
        own = (compared_rows - place).abs() <= trial.prepended
        if bool(own.all()) or bool((moved[~own] > bound(trial.floor, "")).any()) or not bool((moved[own] > 0).any()):
            return False
        judged = True
    return judged


def _moves(tensors: Sequence[Tensor], first: Sequence[Tensor]) -> bool | None:
    """Whether any tensor of an output differs from that of the first copy; None if there is none to compare."""
    known = [(part, old) for part, old in zip(tensors, first, strict=False) if part.shape == old.shape and part.numel()]
    for part, old in known:
        by = (part.double() - old.double()).abs().max()
        if not by <= ROUNDED * torch.finfo(part.dtype).eps * old.double().abs().max():
            return True
    return False if known else None


def tensors_of(output: Any) -> Iterator[Tensor]:
    """All tensors of numbers in what a model returned."""
    output = opened(output)
    if isinstance(output, Tensor):
        if output.is_floating_point() and not output.is_nested:
            yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from tensors_of(part)
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from tensors_of(part)


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Training mode, but for dropout and norms over the batch; afterwards every module is in the mode it was in."""
    before = [(part, part.training) for part in model.modules()]
    model.train()
    for part in model.modules():
        if REGULAR.search(type(part).__name__):
            part.eval()
    try:
        yield
    finally:
        for part, was in before:
            part.training = was
