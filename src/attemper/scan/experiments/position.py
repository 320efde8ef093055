"""position: change one token of an attention module's input, and see which rows of q, k and v move in each head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..._display import plural
from ...watch.examine import AttentionCall, Examiner, examine
from .subject import CannotRun
from .trial import Answer, Moved, Trial

PASTS = ("past_key_value", "past_key_values", "layer_past", "kv_cache", "cache", "past")


@dataclass
class MovedRows:
    """Which rows of each head moved, (H, L)."""

    moved: Tensor
    token: int

    def describe(self, what: str) -> str | None:
        """The fault in words; None: there is none."""
        counts = self.moved.sum(-1)
        moving = (counts > 0).nonzero().flatten().tolist()
        if not moving or self.moved.shape[0] < 2:
            return None
        strangers = [head for head in moving if not bool(self.moved[head, self.token])]
        some = max(moving, key=lambda head: int(counts[head]))
        alike = bool((self.moved[moving] == self.moved[moving[0]]).all())
        if alike and (len(moving) == len(counts) or int(counts.max()) == 1):
            return None  # its own row, those of its neighbours (a convolution), or the same row in another order
        head = strangers[0] if strangers else some
        still = len(counts) - len(moving)
        count = int(counts[head])
        if strangers:
            rows = f"{count} rows of head {head} that belong" if count > 1 else f"a row of head {head} that belongs"
            rows += " to other tokens" if count > 1 else " to another token"
        else:
            rows = f"{count} rows of head {head}, of several tokens"
        rest = f"no row of {plural(still, 'other head')}" if still else "other rows of other heads"
        return f"token {self.token} was changed, and {what} moved in {rows}, and in {rest}"


@dataclass
class PositionExaminer(Examiner):
    """Keeps q, k and v of a module's calls, and compares them with those of a second call on a changed token."""

    repeating: bool = False
    spread: bool = False  # whether a token moved several rows of a head, the same in every head
    before: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)
    after: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)
    kept: list[AttentionCall] = field(default_factory=list)

    def keep(self, name: str, call: AttentionCall, seen: object) -> None:
        if call.info.kind == "self":
            (self.after if self.repeating else self.before).append(parts_of(call))


def parts_of(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Copies of q, k and v of a call, (…, L, E) each."""
    query, key = (call.query.mT, call.key) if call.flipped else (call.query, call.key)
    key = key.mT if call.product and not call.flipped else key
    return query.detach().clone(), key.detach().clone(), None if call.value is None else call.value.detach().clone()


@contextmanager
def repeated_calls(
    model: nn.Module, layers: list[str], examiner: PositionExaminer, moved: dict[str, str | None]
) -> Iterator[None]:
    """While the model runs, call each of these modules once more with one token changed; `found` gets the faults."""
    modules = dict(model.named_modules())

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if examiner.repeating or not examiner.before:
            return
        changed = _changed(args, kwargs, examiner.before[0][0].shape[-2])
        if changed is None:
            examiner.before.clear()
            return
        examiner.repeating = True
        try:
            module(*changed[0], **changed[1])
            name = next(layer for layer in layers if modules.get(layer) is module)
            moved[name] = _compared(examiner, changed[2])
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
            pass
        finally:
            examiner.repeating = False
            examiner.before.clear()
            examiner.after.clear()

    handles = [
        modules[layer].register_forward_hook(hook, with_kwargs=True) for layer in layers if layer and layer in modules
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def position(trial: Trial) -> Answer:
    """Whether row i of every head belongs to token i."""
    if not trial.order:
        raise CannotRun("no self-attention was found")
    if trial.checks.heads_followed:
        return Answer("in every layer the heads were followed to the projections, op by op")
    modules = dict(trial.runner.judge.named_modules())
    if all(type(modules.get(one)).__module__.startswith("torch.nn.") for one in trial.order):
        return Answer("torch's own modules cut the heads")
    runner, examiner = trial.runner, PositionExaminer()
    moved: dict[str, str | None] = {}
    with examine(runner.judge, [examiner], caller="scan"), repeated_calls(runner.judge, trial.order, examiner, moved):
        runner(trial.subject.batch, {})
    if not moved:
        what = "no attention module takes the tokens as (batch, length, width) or (length, batch, width)"
        raise CannotRun(what, "a model whose attention is a module that does")
    wrong = {layer: words for layer, words in moved.items() if words is not None}
    if not wrong:
        layers = plural(len(moved), "layer")
        what = "the same rows of every head" if examiner.spread else "its own row of every head, and no other"
        return Answer(f"in {layers} a token changed {what}")
    answers = [trial.fault("position_leak", Moved(layer, 0.0, 0), words=words) for layer, words in wrong.items()]
    return Answer(answers[0].message, [finding for answer in answers for finding in answer.findings])


def _changed(
    args: tuple[Any, ...], kwargs: dict[str, Any], length: int
) -> tuple[tuple[Any, ...], dict[str, Any], int] | None:
    """The arguments with one token of the hidden states changed, and which; None if there are none."""
    given = [*args, *kwargs.values()]
    first = next((value for value in given if _is_states(value)), None)
    axis = None if first is None else next((axis for axis in (1, 0) if first.shape[axis] == length), None)
    if first is None or axis is None or length < 3:
        return None
    token = length // 2
    other = first.clone()
    other.select(axis, token).copy_(first.select(axis, 0) - first.select(axis, token).flip(-1))
    new_args = tuple(other if argument is first else argument for argument in args)
    new_kwargs = {name: None if name in PASTS else other if value is first else value for name, value in kwargs.items()}
    return new_args, new_kwargs, token


def _compared(examiner: PositionExaminer, token: int) -> str | None:
    for before, after in zip(examiner.before, examiner.after, strict=True):
        if before[0].shape[-2] != before[1].shape[-2]:
            continue  # sampled queries, or pooled keys: their rows are not the tokens
        for what, old, new in zip(("q", "k", "v"), before, after, strict=True):
            if old is None or new is None or old.shape != new.shape or old.dim() < 3 or old.shape[-2] <= token:
                continue
            apart = (old - new).abs().amax(-1)
            width = old.shape[-1] * max(old.shape[-3], 1)
            floor = width * torch.finfo(old.dtype).eps * old.abs().amax()  # the bound of a sum of that many terms
            moved = (apart > floor).reshape(-1, old.shape[-3] if old.dim() == 4 else len(old), old.shape[-2]).any(0)
            if _chosen(
                moved, old.reshape(-1, *moved.shape, old.shape[-1]), new.reshape(-1, *moved.shape, new.shape[-1]), floor
            ):
                continue  # rows are chosen by their scores, as Informer chooses queries
            words = MovedRows(moved, token).describe(what)
            if words is not None:
                return words
            examiner.spread |= bool((moved.sum(-1) > 1).any())
    return None


def _chosen(moved: Tensor, old: Tensor, new: Tensor, floor: Tensor) -> bool:
    """Whether rows moved because others stand in their place: all but one of a head are rows that were there before."""
    if int(moved.sum(-1).max()) < 2:
        return False
    for head in range(moved.shape[0]):
        for before, after in zip(old[:, head], new[:, head], strict=True):
            apart = (after[:, None] - before).abs().amax(-1).amin(-1)
            if int((apart > floor).sum()) > 1:
                return False
    return True


def _is_states(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_nested and value.is_floating_point() and value.dim() == 3
