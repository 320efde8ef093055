"""Movement: how far the rows of two passes differ, layer by layer, and how far rounding alone moves them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .runner import Rows


@dataclass(frozen=True)
class Moved:
    """The first layer whose rows moved, "" for the model's output, and by how much of their size."""

    layer: str
    by: float
    row: int  # the row that moved most, as a place in the kept rows


def distance(a: Tensor, b: Tensor, counted: Tensor | None = None) -> tuple[float, int]:
    """The largest distance of a row of ``a`` from that of ``b``, as a share of their root-mean-square size; and which row.

    ``counted`` is (B, R): False leaves a row out. Rows that are not finite in ``b`` are left out too.
    """
    one, two = (part.double().flatten(2) if part.dim() > 2 else part.double().unsqueeze(-1) for part in (a, b))
    size = two.square().sum(-1)
    apart = (one - two).square().sum(-1)
    keep = torch.isfinite(size) if counted is None else torch.isfinite(size) & counted.to(size.device)
    if not bool(keep.any()):
        return 0.0, 0
    whole = size[keep].mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    by = (apart.sqrt() / whole).masked_fill(~keep, 0.0).nan_to_num(nan=torch.inf)
    place = int(by.flatten().argmax())
    return float(by.flatten()[place]), place % by.shape[1]


def floors(own: Rows, judged: Rows) -> dict[str, float]:
    """By layer: how far rounding in the model's own dtype moves a row."""
    known = {name: distance(rows, judged[name]) for name, rows in own.items() if _alike(rows, judged.get(name))}
    return {name: by for name, (by, _) in known.items()}


def bound(floor: dict[str, float], layer: str) -> float:
    """How far rounding alone may set two passes apart: each of them is off by what was measured, and by one rounding."""
    return 2 * (floor.get(layer, 0.0) + torch.finfo(torch.float32).eps)


def first_moved(
    after: Rows, before: Rows, order: list[str], floor: dict[str, float], counted: Tensor | None = None
) -> Moved | None:
    """The first layer, in the order they run, of which a row moved further than rounding moves it; None: none did."""
    for name in [*order, ""]:
        rows, old = after.get(name), before.get(name)
        if rows is None or not _alike(rows, old):
            continue
        assert old is not None
        use = counted if counted is not None and counted.shape == rows.shape[:2] else None
        if use is None and counted is not None and rows.shape[0] != counted.shape[0]:
            continue
        by, row = distance(rows, old, use)
        if by > bound(floor, name):
            return Moved(name, by, row)
    return None


def judged(after: Rows, before: Rows) -> int:
    """How many layers, and the output, were compared."""
    return sum(_alike(rows, before.get(name)) for name, rows in after.items())


def _alike(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.shape == b.shape and a.numel() > 0
