"""position: change one token's input to an attention module, and see which rows of q, k and v of which head move."""

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
TODO = "Write x.view(B, L, H, E).transpose(1, 2): split the last dimension first, then move the heads."


@dataclass
class MovedRows:
    """Which rows of each head moved, (H, L)."""

    moved: Tensor
    token: int

    def says(self, what: str) -> str | None:
        """What is wrong with them; None: nothing is."""
        counts = self.moved.sum(-1)
        moving = (counts > 0).nonzero().flatten().tolist()
        if not moving or self.moved.shape[0] < 2:
            return None
        strangers = [head for head in moving if not bool(self.moved[head, self.token])]
        some = max(moving, key=lambda head: int(counts[head]))
        alike = bool((self.moved[moving] == self.moved[moving[0]]).all())
        if alike and (len(moving) == len(counts) or int(counts.max()) == 1):
            return None  # its own row, its neighbours' (a convolution), or its place among rows in another order
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

    again: bool = False
    spread: bool = False  # whether a token moved several rows of a head, the same in every head
    before: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)
    after: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)
    kept: list[AttentionCall] = field(default_factory=list)

    def keep(self, name: str, call: AttentionCall, seen: object) -> None:
        if call.facts.kind == "self":
            query, key = (call.query.mT, call.key) if call.flipped else (call.query, call.key)
            key = key.mT if call.product and not call.flipped else key
            value = call.value
            parts = tuple(None if part is None else part.detach().clone() for part in (query, key, value))
            (self.after if self.again else self.before).append(parts)  # type: ignore[arg-type]


@contextmanager
def asking(
    model: nn.Module, layers: list[str], examiner: PositionExaminer, found: dict[str, str | None]
) -> Iterator[None]:
    """While the model runs, each of these modules is called once more with one token changed; what is wrong is put in `found`."""
    modules = dict(model.named_modules())

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if examiner.again or not examiner.before:
            return
        changed = _changed(args, kwargs)
        if changed is None:
            examiner.before.clear()
            return
        examiner.again = True
        try:
            module(*changed[0], **changed[1])
            name = next(one for one in layers if modules.get(one) is module)
            found[name] = _compared(examiner, changed[2])
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
            pass
        finally:
            examiner.again = False
            examiner.before.clear()
            examiner.after.clear()

    handles = [modules[one].register_forward_hook(hook, with_kwargs=True) for one in layers if one and one in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def position(trial: Trial) -> Answer:
    """Whether row i of every head belongs to token i."""
    runner, examiner = trial.runner, PositionExaminer()
    found: dict[str, str | None] = {}
    with examine(runner.judge, [examiner], caller="scan"), asking(runner.judge, trial.order, examiner, found):
        runner(trial.subject.batch, {})
    if not found:
        raise CannotRun("no attention module takes the tokens as (batch, length, width)")
    wrong = {layer: words for layer, words in found.items() if words is not None}
    if not wrong:
        layers = plural(len(found), "layer")
        what = "the same rows of every head" if examiner.spread else "its own row of every head, and no other"
        return Answer(f"in {layers} a token changed {what}")
    layer, words = next(iter(wrong.items()))
    says = f"Heads mix positions: {words}."
    answer = trial.fault("position_leak", Moved(layer, 0.0, 0), says, TODO)
    for other, more in list(wrong.items())[1:]:
        answer.findings += trial.fault(
            "position_leak", Moved(other, 0.0, 0), f"Heads mix positions: {more}.", TODO
        ).findings
    return answer


def _changed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], int] | None:
    """The arguments with one token of the hidden states changed, and which; None if there are none."""
    given = [*args, *kwargs.values()]
    first = next((one for one in given if _is_states(one)), None)
    if first is None or first.shape[1] < 3:
        return None
    token = first.shape[1] // 2
    other = first.clone()
    other[:, token] = -first[:, token].flip(-1) + first[:, 0]
    new_args = tuple(other if one is first else one for one in args)
    new_kwargs = {name: None if name in PASTS else other if one is first else one for name, one in kwargs.items()}
    return new_args, new_kwargs, token


def _compared(examiner: PositionExaminer, token: int) -> str | None:
    for before, after in zip(examiner.before, examiner.after, strict=True):
        for what, old, new in zip(("q", "k", "v"), before, after, strict=True):
            if old is None or new is None or old.shape != new.shape or old.dim() < 3 or old.shape[-2] <= token:
                continue
            apart = (old - new).abs().amax(-1)
            width = old.shape[-1] * max(old.shape[-3], 1)
            floor = width * torch.finfo(old.dtype).eps * old.abs().amax()  # the bound of a sum of that many terms
            moved = (apart > floor).reshape(-1, old.shape[-3] if old.dim() == 4 else len(old), old.shape[-2]).any(0)
            words = MovedRows(moved, token).says(what)
            if words is not None:
                return words
            examiner.spread |= bool((moved.sum(-1) > 1).any())
    return None


def _is_states(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_nested and value.is_floating_point() and value.dim() == 3
