"""tiled: one item of a batch several times, each copy with something changed; which rows of a copy differ from the first."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .runner import LayerRows
from .subject import CannotRun, NamedBatch
from .trial import Trial


def fullest(subject: NamedBatch) -> int:
    """The item with the most real tokens."""
    return int(subject.real.sum(1).argmax())


def tiled(subject: NamedBatch, times: int) -> NamedBatch:
    """A batch of the item with the most real tokens, several times."""
    item = fullest(subject)
    arguments = {}
    for name, value in subject.arguments.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            arguments[name] = value
            continue
        rows = value.shape[:2] == subject.value.shape[:2]
        axis = 1 if subject.sequence_first and value.dim() > 1 and not rows else 0
        square = value.dim() == 2 and value.shape == (subject.length, subject.length) and name != subject.tokens
        if value.shape[axis] == subject.items and (value.dim() > 1 or subject.items > 1) and not square:
            value = torch.cat([value.narrow(axis, item, 1)] * times, axis)
        arguments[name] = value
    others = {name: value for name, value in arguments.items() if name != subject.tokens}
    tokens = arguments[subject.tokens].transpose(0, 1) if subject.sequence_first else arguments[subject.tokens]
    return replace(subject, batch=subject.with_tokens(tokens, **others), arguments=arguments)


def other_token(subject: NamedBatch, tokens: Tensor, place: int) -> Tensor:
    """Something else for the token at a place of (B, L, …) tokens: another word of the batch, no padding; or other numbers."""
    here = tokens[:, place : place + 1]
    if tokens.is_floating_point():
        draws = torch.Generator().manual_seed(3)
        noise = torch.randn(here.shape, generator=draws, dtype=torch.float64, device="cpu")
        return (noise * max(float(tokens.double().std(correction=0)), 0.1)).to(here)
    pad = getattr(getattr(subject.model, "config", None), "pad_token_id", None)
    known = [int(token) for token in subject.value[subject.real].unique() if int(token) not in (pad, int(here[0, 0]))]
    if not known:
        raise CannotRun("the text has one word only")
    return torch.full_like(here, known[len(known) // 2])


def by_item(trial: Trial, rows: LayerRows, name: str, count: int) -> Tensor | None:
    """What a layer returned in a pass of several copies, (B, R, …), if its first dimension is that of the items; else None."""
    part, base = rows.get(name), trial.base.get(name)
    if part is None or base is None or (part.shape[0], base.shape[0]) != (count, trial.subject.items):
        return None
    return part


def distances(rows: Tensor, before: Tensor) -> Tensor:
    """How far each row, (R, …), is from the same row before, as a share of their size; 0 where it was not finite."""
    one, two = (part.double().reshape(part.shape[0], -1) for part in (rows, before))
    keep = torch.isfinite(two).all(-1)
    if not bool(keep.any()):
        return torch.zeros(len(one), dtype=torch.float64, device=one.device)
    whole = two[keep].square().sum(-1).mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    distance = (one - two).square().sum(-1).sqrt() / whole
    return distance.nan_to_num(nan=torch.inf).masked_fill(~keep, 0.0)
