"""Rows that were measured on another machine and come with the package, so that a claim about training can be judged in seconds.

    charlm.json   the language model of `attemper run charlm --preset full` on an H200, with 1/√d_k and without a scale

scripts/full_size.py takes them from docs/data/, which has all rows and says how they were made.
"""

from __future__ import annotations

import json
import math
from importlib.resources import files
from typing import Any

from ..engine.experiment import Row

RULES, INIT = ("sqrt_dk", "none"), "unit"
COLUMNS = (
    "rule", "init", "lr", "seed", "step", "loss", "held_out", "effective_keys", "top_weight", "peak", "logit_std", "grad_q_rms",
    "grad_q_median",
)  # fmt: skip
"""What charlm.json keeps of the rows, and of which."""


def rows(name: str = "charlm") -> list[Row]:
    """The rows that are stored under a name."""
    return unpacked(json.loads((files(__name__) / f"{name}.json").read_text(encoding="utf-8")))


def unpacked(content: dict[str, Any]) -> list[Row]:
    """Rows from what they have in common (`fixed`), the names of the other columns, and a list for each row; null is NaN."""
    return [
        {**content["fixed"], **{c: math.nan if v is None else v for c, v in zip(content["columns"], line, strict=True)}}
        for line in content["rows"]
    ]
