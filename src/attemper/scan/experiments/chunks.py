"""chunks: the text in parts of several tokens with the KV cache, and with caches that modules hold; every row is compared."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ..checks.declared import is_published
from .cache import NAMES, cache_of, step
from .runner import LayerRows
from .subject import CannotRun, NamedBatch
from .tiled import distances
from .trial import NO_ROWS, Answer, Moved, Trial, bound, named, share

FEWEST = 6  # tokens
STARTS = ("start_pos", "input_pos", "start", "offset")


def chunks(trial: Trial) -> Answer:
    """Whether a part of several tokens gives, with the cache, what the whole text gives."""
    subject = trial.subject
    subject.needs_tokens()
    names = [name for name in NAMES if subject.takes(name)]
    starts = [name for name in STARTS if subject.takes(name) and name in subject.arguments]
    if not names and not starts:
        raise CannotRun("the model takes no KV cache")
    trial.after("future", "cache")
    if subject.sequence_first:
        raise CannotRun("attention runs along the first dimension", "a batch (batch, length)")
    length = subject.length
    if length < FEWEST:
        raise CannotRun(f"a text of {length} tokens is too short", f"{FEWEST} tokens or more")
    subject, base = trial.whole()
    ends = [0, length // 3, length] if names else [0, length // 3, length - 1, length]
    moved, row = _moved(trial, subject, base, names, starts, ends, False)
    if moved is not None and names and subject.takes("position_ids") and "position_ids" not in subject.arguments:
        moved, row = _moved(trial, subject, base, names, starts, ends, True)
    if moved is None:
        return Answer(f"{length - length // 3} tokens after {length // 3} gave what the whole text gives")
    if is_published(subject.model):
        name = type(subject.model).__name__
        said = (
            f"{length - length // 3} tokens at once after {length // 3} moved {named(moved.layer)} by {share(moved.by)}"
        )
        return Answer(f"{said}: assumed intended, as {name} is published", skipped=True)
    return trial.fault("chunk_differs", moved, row=row, tokens=length - length // 3, before=length // 3)


def _moved(
    trial: Trial,
    subject: NamedBatch,
    base: LayerRows,
    names: list[str],
    starts: list[str],
    ends: list[int],
    placed: bool,
) -> tuple[Moved | None, int]:
    """The first layer with a row that differs from the whole text's, and which row."""
    compared_rows, past = trial.lengths[subject.length], None
    worst: dict[str, tuple[float, int]] = {}
    with trial.runner.keeping_state():
        for start, stop in itertools.pairwise(ends):
            batch = step(subject, names[0], start, stop, past) if names else _from(subject, starts[0], start, stop)
            if placed:
                batch["position_ids"] = torch.arange(start, stop, device=subject.value.device).expand(subject.items, -1)
            got, output = trial.outputs(batch, {stop - start: torch.arange(stop - start, device="cpu")})
            past = cache_of(output, names[0]) if names else None
            if names and past is None:
                raise CannotRun("the model returns no cache")
            places = ((compared_rows >= start) & (compared_rows < stop)).nonzero().flatten()
            for layer, part in got.items():
                old = base.get(layer)
                if old is None or old.shape[:2] != (1, len(compared_rows)) or part.shape[:2] != (1, stop - start):
                    continue
                apart = distances(part[0, compared_rows[places] - start], old[0, places])
                row = int(apart.argmax())
                if float(apart[row]) > worst.get(layer, (0.0, 0))[0]:
                    worst[layer] = float(apart[row]), int(compared_rows[places[row]])
    if not worst and not any(name in base for name in [*trial.order, ""]):
        raise CannotRun(NO_ROWS, "a model that returns one row per token")
    for layer in [*trial.order, ""]:
        by, row = worst.get(layer, (0.0, 0))
        if by > bound(trial.floor, layer):
            return Moved(layer, by, 0), row
    return None, 0


def _from(subject: NamedBatch, name: str, start: int, stop: int) -> dict[str, Any]:
    """The arguments for the tokens from ``start`` to ``stop``, for a model that holds its cache and is told where it is."""
    given = subject.arguments[name]
    sliced: dict[str, Any] = {}
    for other, value in subject.arguments.items():
        whole = isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == subject.length
        sliced[other] = value[:, start:stop] if other == subject.tokens or whole else value
    place = torch.arange(start, stop, device=subject.value.device)
    sliced[name] = place if isinstance(given, Tensor) and given.dim() == 1 and len(given) == subject.length else start
    if isinstance(given, Tensor) and not given.dim():
        sliced[name] = torch.tensor(start, device=given.device)
    return sliced
