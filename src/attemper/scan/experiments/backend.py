"""backend: a model that can compute its attention in two ways, fused and by hand, must give the same rows in both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch import Tensor, nn

from .runner import LayerRows, chosen
from .subject import CannotRun, NamedBatch
from .trial import ERRORS, Answer, Trial, first_moved

FLAG = re.compile(r"^_?(use_|enable_)?(flash|sdpa|fused|efficient)(_attn|_attention)?$", re.IGNORECASE)

LONG = 512  # tokens


def backend(trial: Trial) -> Answer:
    """Whether attention by hand gives what fused attention gives."""
    model = trial.runner.judge
    flags = [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if FLAG.search(name) and isinstance(value, bool)
    ]
    if not flags:
        raise CannotRun("no module has a flag (flash, fused_attn, use_sdpa) for another way to compute attention")
    module, name = flags[0]
    flag, was = f"{type(module).__name__}.{name}", vars(module)[name]
    subject, before, lengths = _beginning(trial)
    try:
        with flipped(flags):
            rows = trial.run(subject.batch, lengths)
    except ERRORS as error:
        return Answer(f"with {flag} = {not was} the model raises {type(error).__name__}", skipped=True)
    real = trial.real(subject, lengths) if subject.ordered else None
    moved = first_moved(rows, before, trial.order, trial.floor, real)
    if moved is None:
        where = f" for the first {subject.length} tokens" if subject is not trial.subject else ""
        return Answer(f"{flag} = {not was} gave the same rows{where}")
    return trial.fault("backend_differs", moved, flag=flag, other=not was, now=was)


def _beginning(trial: Trial) -> tuple[NamedBatch, LayerRows, dict[int, Tensor]]:
    """The batch, its rows and which of them are kept; of a long text its first tokens, because attention by hand stores n × n."""
    subject = trial.subject
    if subject.ordered and subject.length > LONG and not subject.sequence_first:
        short, lengths = subject.first(LONG), {**trial.lengths, LONG: chosen(LONG)}
        with suppress(*ERRORS):  # a model that takes one length alone is run on the whole text
            return short, trial.run(short.batch, lengths), lengths
    return subject, trial.base, trial.lengths


@contextmanager
def flipped(flags: list[tuple[nn.Module, str]]) -> Iterator[None]:
    """While this lasts, the flags have their other value."""
    before = [vars(module)[name] for module, name in flags]
    for module, name in flags:
        vars(module)[name] = not vars(module)[name]
    try:
        yield
    finally:
        for (module, name), was in zip(flags, before, strict=True):
            vars(module)[name] = was
