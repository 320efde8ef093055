"""training: recorded runs with the scale and without, for the page's panel; and a small run, row by row, while it trains."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

SHOWN = ("loss", "accuracy", "held_out", "entropy", "peak", "grad_q_median", "grad_q_rms")
"""What a row of a run has for the panel; recall has accuracy, the language model has held_out."""
TASK: dict[str, int | str] = {"batch": 32, "pairs": 32, "device": "cpu"}


@functools.cache
def recorded() -> dict[str, Any]:
    """The runs that come with the package: the median over seeds, the least and the most, at each logged step.

    `python scripts/page_data.py training` makes training.json from the rows in docs/data/.
    """
    return dict(json.loads((files(__package__) / "training.json").read_text(encoding="utf-8")))


def training_rows(rules: Sequence[str], d: int, lr: float, steps: int, seed: int) -> Iterator[dict[str, Any]]:
    """Train the recall task under each rule, on the same data from the same beginning; a row per logged step, as it comes.

    A row says its rule and how far the whole is, from 0 to 1.
    """
    from ...lab.training import recall

    for place, rule in enumerate(rules):
        cell: dict[str, int | float | str] = {**TASK, "d": d, "lr": lr, "steps": steps, "seed": seed}
        for row in recall.training(cell, rule):
            found = {"rule": rule, "step": row["step"], **{name: row[name] for name in SHOWN if name in row}}
            yield {**found, "done": (place + row["step"] / steps) / len(rules)}
