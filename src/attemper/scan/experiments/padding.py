"""padding: add tokens that a mask hides, on the right and on the left, and see whether real tokens move."""

from __future__ import annotations

from typing import Any

from .movement import Moved, first_moved, judged
from .subject import CannotRun
from .trial import Answer, Trial, named, share

MORE = 3  # padded tokens
TODO = (
    "Hide padded keys with −inf before the softmax, in every layer: mask[:, None, None, :]. On the left, positions must count "
    "real tokens alone: position_ids = (mask.cumsum(-1) − 1).clamp(min=0)."
)


def padding(trial: Trial) -> Answer:
    """Whether padding changes real tokens."""
    subject = trial.subject
    subject.needs_tokens()
    moved = _moved(trial, subject.lengthened(MORE), 0)
    done = ["right"]
    if moved is None and bool(subject.real.all()):
        done.append("left")
        moved = _moved(trial, subject.lengthened(MORE, left=True), MORE)
        if moved is not None:  # it may not count positions by the mask
            placed = subject.takes("position_ids")
            moved = _moved(trial, subject.lengthened(MORE, left=True, placed=True), MORE) if placed else None
            done = done if placed else done[:1]
    if moved is None:
        return Answer(f"{MORE} padded tokens on the {' or the '.join(done)} changed no real token")
    row = int(trial.lengths[subject.length][moved.row])
    says = (
        f"Padding changes real tokens: with {MORE} more tokens on the {done[-1]} that the mask hides, row {row} of "
        f"{named(moved.layer)} moved by {share(moved.by)}."
    )
    return trial.fault("padding_leak", moved, says, TODO)


def _moved(trial: Trial, batch: Any, before: int) -> Moved | None:
    subject = trial.subject
    rows = trial.lengths[subject.length]
    after = trial.runner(batch, {**trial.lengths, subject.length + MORE: rows + before})
    if not judged(after, trial.base):
        raise CannotRun("nothing that the model returns has one row per token")
    real = subject.real[:, rows.to(subject.value.device)]
    return first_moved(after, trial.base, trial.order, trial.floor, real)
