"""long: a longer text, beyond a window and up to the trained length: it must run, and earlier rows of a decoder must stay."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .subject import CannotRun
from .trial import ERRORS, Answer, Moved, Trial, first_moved, named, share

LONGEST = 512  # tokens that are tried
NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_length", "block_size", "n_ctx")
TODO = (
    "Make masks and positions for the length that was given: a table or a mask of fixed size must be as long as the longest "
    "input that the model declares."
)


def long(trial: Trial) -> Answer:
    """Whether longer inputs run, and keep what came before."""
    subject = trial.subject
    subject.needs_tokens()
    limit, by = _limit(subject.model)
    window = _window(subject.model)
    length = subject.length
    wanted = min(limit or LONGEST, max(2 * length, (window or 0) + 2 * length), max(LONGEST, 2 * length))
    if wanted <= length:
        raise CannotRun(f"the text is as long as {by or 'the model'} allows")
    arguments = subject.arguments.items()
    others = {name: part for name, part in arguments if name != subject.tokens and isinstance(part, torch.Tensor)}
    if others:
        if set(others) - {"attention_mask", "token_type_ids"} or not bool(subject.real.all()):
            raise CannotRun("the batch has other parts than tokens and a mask")
        others = {name: _repeated(value, wanted) for name, value in others.items()}
    try:
        rows = trial.lengths[length]
        after = trial.run(subject.with_tokens(_repeated(subject.value, wanted), **others), {wanted: rows})
    except ERRORS as error:
        if limit is None:
            return Answer(f"{wanted} tokens raise {type(error).__name__}, and nothing declares that many", skipped=True)
        says = f"{wanted} tokens raise {type(error).__name__}, although {by} is {limit}."
        return trial.fault("long_breaks", Moved("", 0.0, 0), says, TODO)
    if any(not bool(torch.isfinite(part).all()) for part in after.values()):
        says = f"With {wanted} tokens the output holds NaN or infinity."
        return trial.fault("long_breaks", Moved("", 0.0, 0), says, TODO)
    flags = trial.checks.is_causal
    beyond = f" and a window of {window}" if window and window < wanted else ""
    tried = f"{wanted} tokens ran{f', of {limit}' if limit else ''}{beyond}"
    if not flags or not all(flags.values()) or "future" in trial.failed:
        return Answer(tried)
    real = subject.real[:, rows.to(subject.value.device)]
    moved = first_moved(after, trial.base, trial.order, trial.floor, real)
    if moved is None:
        return Answer(f"{tried}, and earlier rows stayed")
    where = named(moved.layer)
    says = f"With {wanted} tokens in place of {length}, a row of {where} for the first ones moved by {share(moved.by)}."
    return trial.fault("long_breaks", moved, says, TODO)


def _limit(model: nn.Module) -> tuple[int | None, str]:
    for holder, whose in ((getattr(model, "config", None), "config."), (model, f"{type(model).__name__}.")):
        for name in NAMES:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value, whose + name
    return None, ""


def _window(model: nn.Module) -> int | None:
    value: Any = getattr(getattr(model, "config", None), "sliding_window", None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _repeated(value: Any, length: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    return torch.cat([value] * -(-length // value.shape[1]), 1)[:, :length]
