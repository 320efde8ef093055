"""Rows that were measured before and come with the package, so that claims about training are judged in seconds. On an H200:

    trained.json  `attemper run charlm --preset full` step by step: unit-variance q and k, 1/√d_k and no scale
    charlm.json   the ends of all of its runs
    recall.json   `attemper run recall --preset full` at d = 256
    depth.json    the ends of `attemper run depth --preset full`
    dmodel.json   the ends of `attemper run charlm` with √d_model and with √d_k, eight heads; on a CPU
    memorise.json `attemper run charlm --preset memorise` step by step, six seeds; on a CPU
    larger.json   the ends of `python -m research.run run ablation`: 32 M parameters, each rule at its best rate

research/full_size.py takes them from docs/data/, which has all rows and says how they were made.
"""

from __future__ import annotations

import json
import math
from importlib.resources import files
from typing import Any

from ..engine.experiment import Row


def rows(name: str = "trained") -> list[Row]:
    """The rows that are stored under a name."""
    return unpacked(json.loads((files(__name__) / f"{name}.json").read_text(encoding="utf-8")))


def unpacked(content: dict[str, Any]) -> list[Row]:
    """Rows from what they have in common (`fixed`), the names of the other columns, and a list for each row; null is NaN."""
    return [
        {**content["fixed"], **{c: math.nan if v is None else v for c, v in zip(content["columns"], line, strict=True)}}
        for line in content["rows"]
    ]
