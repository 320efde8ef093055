"""repeat: the same text in every item of a batch, and the same call again: the same numbers, or something draws or remembers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..checks.declared import has_experts, is_published
from .runner import POOLED, LayerRows
from .subject import CannotRun
from .tiled import by_item, distances, fullest, tiled
from .trial import ERRORS, Answer, Moved, Trial, bound, first_moved, named, share

SHOWN = 3
COPIES = 2
SEEDS = (97, 1009, 65537)
DRAWS = ("dropout", "bernoulli", "rand", "multinomial", "normal_", "uniform_", "exponential_")


def repeat(trial: Trial) -> Answer:
    """Whether the same text gives the same rows in every item, and in every call."""
    if trial.unsteady is not None:
        return _of_calls(trial, trial.unsteady)
    copies = COPIES + (trial.subject.items == COPIES)  # another number, which only the dimension of items has
    try:
        rows = trial.run(tiled(trial.subject, copies).batch, trial.lengths)
    except ERRORS:
        return Answer("a second call gave the same numbers; the model takes no other number of items")
    own: LayerRows = {}
    for name in [*trial.order, "", POOLED]:
        part = by_item(trial, rows, name, copies)
        if part is None:
            continue
        own[name] = part[:1]
        for copy in range(1, copies):
            by = float(distances(part[copy], part[0]).max())
            if by > bound(trial.floor, name):
                return _of_items(trial, Moved("" if name == POOLED else name, by, 0), copy)
    item = fullest(trial.subject)
    before = {name: rows[item : item + 1] for name, rows in trial.base.items() if rows.shape[0] == trial.subject.items}
    trial.copied = item, first_moved(own, before, [*trial.order, POOLED], trial.floor)
    for seed in (
        SEEDS if trial.runner.draws and not is_published(trial.subject.model) else ()
    ):  # what is drawn rarely matters rarely
        trial.runner.seed = seed
        try:
            again = trial.run(trial.subject.batch, trial.lengths)
        finally:
            trial.runner.seed = 0
        trial.other = first_moved(again, trial.base, [*trial.order, POOLED], trial.floor)
        if trial.other is not None:
            return _random(trial, trial.other)
    if trial.leaves and not is_published(trial.subject.model):
        stale = _after_another(trial)
        if stale is not None:
            shown = f"{', '.join(trial.leaves[:SHOWN])}{' …' if len(trial.leaves) > SHOWN else ''}"
            return trial.fault(
                "state_kept", stale, message=STALE.format(where=named(stale.layer), by=share(stale.by), kept=shown)
            )
    return Answer("the same text gave the same rows in every item, and a second call gave the same numbers")


STALE = (
    "A call changes what the next one returns: after another batch of the same shape {where} moved by {by}, compared with a "
    "model that has not run before. The first call leaves {kept}."
)


def _after_another(trial: Trial) -> Moved | None:
    """What moves if another batch of the same shape has run before: a mask, or a memory, that is kept by its shape."""
    try:
        other = trial.subject.another()
        with trial.runner.keeping_state():
            trial.run(trial.subject.batch, trial.lengths)
            after = trial.run(other, trial.lengths)
        return first_moved(after, trial.run(other, trial.lengths), [*trial.order, POOLED], trial.floor)
    except ERRORS:
        return None


def _of_items(trial: Trial, moved: Moved, copy: int) -> Answer:
    experts = has_experts(trial.subject.model)
    if experts is not None:
        return Answer(
            f"the same text gave other rows in item {copy}: assumed intended, as {experts} shares experts among tokens"
        )
    return trial.fault("item_counted", moved, item=copy)


def _of_calls(trial: Trial, why: CannotRun) -> Answer:
    """Which of the two made a second call differ: what the first left behind, or random numbers."""
    if trial.other is None:
        raise why  # rounding
    if is_published(trial.subject.model):
        name = type(trial.subject.model).__name__
        return Answer(f"{why}: assumed intended, as {name} is published", skipped=True)
    if trial.left is not None:
        shown = ", ".join(trial.left[:SHOWN]) + (" …" if len(trial.left) > SHOWN else "")
        return trial.fault("state_kept", trial.other, what=f" It changes {shown} in every call." if shown else "")
    return _random(trial, trial.other)


def _random(trial: Trial, other: Moved) -> Answer:
    """What draws, in a call with another seed that moved a row."""
    drawn: list[tuple[str, str]] = []
    states: list[object] = []
    with drawing(trial.runner.judge, drawn, states):
        trial.run(trial.subject.batch, trial.lengths)
    if not drawn and len(states) == 2 and states[0] == states[1]:
        return trial.fault("state_kept", other, what=" It is held outside the model: a list as a default, or a global.")
    dropped = [one for one in drawn if "dropout" in one[1]]
    where, op = (dropped or drawn or [("", "a generator other than torch's (random, NumPy)")])[0]
    moved = Moved(where or other.layer, other.by, 0)
    return trial.fault("dropout_runs" if dropped else "random_output", moved, op=op, where=where or "the model")


class _Draws(TorchFunctionMode):
    """Notes the functions that draw random numbers, and the module in which they do."""

    def __init__(self, running: list[str], draws: list[tuple[str, str]]) -> None:
        super().__init__()
        self.running, self.found = running, draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name.startswith(DRAWS) and not name.endswith("_like_"):
            off = kwargs.get("training") is False or kwargs.get("train") is False or False in args[1:]
            if not off:
                self.found.append((self.running[-1] if self.running else "", name))
        return func(*args, **kwargs)


def _left(running: list[str]) -> None:
    running.pop()


def _random_state() -> object:
    numpy = sys.modules.get("numpy")
    arrays = None if numpy is None else numpy.random.get_state()[1].tobytes()
    return random.getstate(), arrays, torch.get_rng_state().numpy().tobytes()


@contextmanager
def drawing(model: nn.Module, draws: list[tuple[str, str]], states: list[object]) -> Iterator[None]:
    """While the model runs, note what draws random numbers, and the random states before and after."""
    running: list[str] = []
    handles = [
        model.register_forward_pre_hook(lambda *_: states.append(_random_state())),
        model.register_forward_hook(lambda *_: states.append(_random_state())),
    ]
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        handles.append(module.register_forward_hook(lambda *_: _left(running)))
    try:
        with _Draws(running, draws):
            yield
    finally:
        for handle in handles:
            handle.remove()
