"""unpadded: an item of a padded batch, alone and without its padding; its rows must be those that it has in the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks.declared import is_published
from .changes import POOL
from .runner import POOLED, LayerRows
from .subject import CannotRun
from .tiled import distances
from .trial import NO_ROWS, Answer, Moved, Trial, bound, first_moved, named, share

FEWEST = 3  # real tokens


def unpadded(trial: Trial) -> Answer:
    """Whether an item has the same rows without its padding."""
    subject = trial.subject
    subject.needs_tokens()
    counts = subject.real.sum(1)
    if subject.sequence_first or bool((counts == subject.length).all()):
        raise CannotRun("the batch has no padding")
    trial.after("repeat", "padding", "batch")
    item = int(counts.masked_fill((counts == subject.length) | (counts < FEWEST), subject.length + 1).argmin())
    places = subject.real[item].nonzero().flatten().cpu()
    start, stop = int(places[0]), int(places[-1]) + 1
    if len(places) != stop - start or not FEWEST <= len(places) < subject.length:
        raise CannotRun("no item has padding at its ends alone")
    alone = subject.alone(item)
    shape = alone.value.shape[:2]
    others = {
        name: value[:, start:stop]
        for name, value in alone.arguments.items()
        if name != alone.tokens and isinstance(value, Tensor) and value.shape[:2] == shape
    }
    rows = trial.run(
        alone.with_tokens(alone.value[:, start:stop], **others), {len(places): torch.arange(len(places), device="cpu")}
    )
    moved = _moved(trial, rows, item, places)
    pooled = (
        {} if is_published(subject.model) else {POOLED: trial.base[POOLED][item : item + 1]} if POOLED in rows else {}
    )
    if moved is None and (moved := first_moved(rows, pooled, [POOLED], trial.floor)) is not None:
        message = (
            f"Padding changes the output: without it that of item {item} moved by {share(moved.by)}, and no row of a layer did: "
            "what pools the tokens counts padding, or takes the row of a padded token."
        )
        return trial.fault("padding_counted", moved, message=message, advice=POOL)
    if moved is None:
        return Answer(f"item {item} has the same rows without its padding")
    if is_published(subject.model):
        name = type(subject.model).__name__
        said = f"without its padding {named(moved.layer)} of item {item} moved by {share(moved.by)}"
        return Answer(f"{said}: assumed intended, as {name} is published", skipped=True)
    return trial.fault("padding_counted", moved, row=moved.row, item=item, side="left" if start else "right")


def _moved(trial: Trial, rows: LayerRows, item: int, places: Tensor) -> Moved | None:
    """The first layer with a row that moved."""
    compared_rows, compared = trial.lengths[trial.subject.length], False
    for name in [*trial.order, ""]:
        part, base = rows.get(name), trial.base.get(name)
        if part is None or base is None or part.shape[:2] != (1, len(places)):
            continue
        if base.shape[:2] != (trial.subject.items, len(compared_rows)):
            continue
        compared = True
        shown = torch.isin(compared_rows, places)
        apart = distances(part[0, compared_rows[shown] - places[0]], base[item, shown])
        row = int(apart.argmax())
        if float(apart[row]) > bound(trial.floor, name):
            return Moved(name, float(apart[row]), int(compared_rows[shown][row]))
    if not compared and POOLED not in rows:
        raise CannotRun(NO_ROWS)
    return None
