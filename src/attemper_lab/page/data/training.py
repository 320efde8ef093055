"""A small training run, row by row, while it trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

SHOWN = ("loss", "accuracy", "held_out", "entropy", "peak", "grad_q_median", "grad_q_rms")
"""The columns that the panel draws; recall has accuracy, the language model has held_out."""
TASK: dict[str, int | str] = {"batch": 32, "pairs": 32, "device": "cpu"}


def training_rows(rules: Sequence[str], d: int, lr: float, steps: int, seed: int) -> Iterator[dict[str, Any]]:
    """Train the recall task under each rule, on the same data from the same initial weights; yield each row as it is logged.

    ``done`` is the share of the whole that is trained, from 0 to 1.
    """
    from ...training import recall

    for trained, rule in enumerate(rules):
        cell: dict[str, int | float | str] = {**TASK, "d": d, "lr": lr, "steps": steps, "seed": seed}
        for row in recall.training(cell, rule):
            shown = {name: row[name] for name in SHOWN if name in row}
            yield {"rule": rule, "step": row["step"], **shown, "done": (trained + row["step"] / steps) / len(rules)}
