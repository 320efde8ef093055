"""Entry: one layer in one step, its heads, and how two entries of it are joined."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...heads import HeadSummary


@dataclass(frozen=True)
class Entry:
    """One layer in one step: its heads, their summary, and the sums of their gradients where a backward gave them."""

    step: int
    layer: str
    kind: str
    heads: tuple[int, ...]
    summary: HeadSummary
    gradients: Tensor | None = None  # (H, 6)

    @property
    def place(self) -> tuple[int, str, str, tuple[int, ...]]:
        return self.step, self.layer, self.kind, self.heads

    def on_host(self) -> bool:
        """Whether reading its numbers waits for no device."""
        return self.summary.sums.device.type == "cpu"

    def take(self, heads: Collection[int]) -> Entry | None:
        chosen = [place for place, head in enumerate(self.heads) if head in heads]
        if not chosen:
            return None
        rows = torch.tensor(chosen, device=self.summary.sums.device)
        summary = HeadSummary(self.summary.columns, self.summary.sums[rows], self.summary.peaks[rows])
        names = tuple(self.heads[place] for place in chosen)
        return Entry(
            self.step, self.layer, self.kind, names, summary, None if self.gradients is None else self.gradients[rows]
        )

    def to_dicts(self) -> list[dict[str, Any]]:
        columns = {name: getattr(self.summary, name).tolist() for name in self.summary.columns}
        if self.gradients is not None:
            columns |= {name: column.tolist() for name, column in _gradient_columns(self.gradients).items()}
        keys = {"step": self.step, "layer": self.layer, "kind": self.kind}
        return [
            {**keys, "head": head, **{name: column[place] for name, column in columns.items()}}
            for place, head in enumerate(self.heads)
        ]


def _gradient_columns(sums: Tensor) -> dict[str, Tensor]:
    found = {}
    for name, place in (("q", 0), ("k", 3)):
        count = sums[:, place]
        found[f"grad_{name}_rms"] = (sums[:, place + 1] / count).sqrt()
        found[f"grad_{name}_median"] = sums[:, place + 2] / count
        found[f"grad_{name}_count"] = count
    return found


def join(first: Entry, second: Entry) -> Entry:
    """The same layer and step, of other rows."""
    if first.summary.columns != second.summary.columns:
        raise InputError(
            f"merge(): both records must hold the same signs for step {first.step} of {first.layer!r}; got "
            f"{first.summary.columns} and {second.summary.columns}. Watch both with the same signs=."
        )
    gradients = [part for part in (first.gradients, second.gradients) if part is not None]
    total = torch.stack(gradients).sum(0) if gradients else None
    return Entry(*first.place, first.summary.merge(second.summary), total)
