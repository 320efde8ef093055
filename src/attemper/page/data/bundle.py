"""bundle: the one document that all panels read. Offline it is inside the file; the server sends it once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import embedded
from .runs import recorded_runs

# key → what makes its part; a part is plain data, as JSON has it
PARTS: dict[str, Callable[[], Any]] = {
    "bench": recorded_runs,
    "flow": embedded.flow,
    "heads": embedded.heads,
}


def bundle() -> dict[str, Any]:
    """Every part of the document."""
    return {name: make() for name, make in PARTS.items()}
