"""Figures: rows → an Altair chart. One question per file; theory is a line, measurement is points with their intervals."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any


def chart(name: str, rows: Sequence[Mapping[str, Any]], finding: str) -> Any:
    """The chart of that name, made from rows, under a title that states the finding."""
    return importlib.import_module(f".{name}", __name__).draw(rows, finding)
