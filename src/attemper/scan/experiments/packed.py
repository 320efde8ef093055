"""packed: run some documents of a packed batch alone, and compare with their rows in the pack."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .subject import CannotRun, NamedBatch
from .trial import Answer, Moved, Trial, bound, distance

MOST = 3  # documents that are run alone
NUMBERED = ("document_ids", "documents", "attention_mask")
"""Arguments that number the documents; a mask does if it holds more numbers than 0 and 1."""
NEEDS = "one row (1, length) of several documents, with position_ids that restart at 0, or their offsets as cu_seqlens"


def packed(trial: Trial) -> Answer:
    """Whether the documents of a pack have the rows that they have alone."""
    subject = trial.subject
    ends = offsets(subject.arguments, subject.length)
    if ends is None or not bool(subject.real.all()):
        raise CannotRun("the batch is not packed")
    if subject.sequence_first:
        raise CannotRun("a pack (length, batch) is not tried", NEEDS)
    if subject.items > 1 and any(name.startswith("cu_seq") for name in subject.arguments):
        raise CannotRun("a pack of several rows with one list of offsets is not tried", NEEDS)
    base = {name: part[:1] for name, part in trial.base.items() if part.shape[0] == subject.items}  # the first row
    subject = subject.alone(0)
    documents = list(itertools.pairwise(ends))
    rows = trial.lengths[subject.length]
    compared = 0
    for number in sorted({0, 1, len(documents) - 1})[:MOST]:
        start, stop = documents[number]
        inside = (rows >= start) & (rows < stop)
        after = trial.run(_alone(subject, start, stop), {stop - start: rows[inside] - start})
        for layer in [*trial.order, ""]:
            part, whole = after.get(layer), base.get(layer)
            if part is None or whole is None or whole.shape[1] != len(rows):
                continue
            compared += 1
            by, row = distance(whole[:, inside.to(whole.device)], part)
            if by > bound(trial.floor, layer):
                return trial.fault(
                    "packed_differs", Moved(layer, by, row), document=number, row=int(rows[inside][row]) - start
                )
    if not compared:
        raise CannotRun("nothing that the model returns has one row per token", "a model that does")
    return Answer(f"{len(documents)} documents in one row have the numbers that they have alone")


def offsets(arguments: Mapping[str, Any], length: int) -> list[int] | None:
    """Where the documents of a pack begin, and its length; None: it is not known to be one."""
    for name, value in arguments.items():
        if name.startswith("cu_seq") and isinstance(value, Tensor) and value.dim() == 1:
            found = [int(one) for one in value]
            return found if found and found[-1] == length and len(found) > 2 else None
    numbers = next((arguments[one] for one in ("position_ids", *NUMBERED) if one in arguments), None)
    if not isinstance(numbers, Tensor) or numbers.dim() != 2 or numbers.shape[1] != length:
        return None
    step = numbers[0].diff()
    begins = (step < 1) if "position_ids" in arguments else (step != 0)
    if not bool(begins.any()):
        return None
    return [0, *((begins.nonzero().flatten() + 1).tolist()), length]


def _alone(subject: NamedBatch, start: int, stop: int) -> Any:
    """The arguments of one document."""
    document: dict[str, Any] = {}
    length, count = subject.length, stop - start
    for name, value in subject.arguments.items():
        if name == subject.tokens:
            continue
        if name.startswith("cu_seq") and isinstance(value, Tensor):
            document[name] = torch.tensor([0, count], dtype=value.dtype, device=value.device)
        elif name.startswith("max_") and (isinstance(value, int) or (isinstance(value, Tensor) and value.dim() == 0)):
            document[name] = count if isinstance(value, int) else torch.full_like(value, count)
        elif not isinstance(value, Tensor):
            continue
        elif value.dim() >= 2 and value.shape[-2:] == (length, length):
            document[name] = value[..., start:stop, start:stop]
        elif value.dim() >= 2 and value.shape[:2] == (1, length):
            document[name] = value[:, start:stop]
        elif value.dim() == 1 and len(value) == length:
            document[name] = value[start:stop]
    return subject.with_tokens(subject.value[:, start:stop], **document)
