"""bundle: the one document that all panels read. Offline it is inside the file; the server sends it once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from . import claims, training
from .runs import recorded_runs


def _flow() -> Any:
    from . import embedded  # loads torch, which a server's own process does without

    return embedded.flow()


def _heads() -> Any:
    from . import embedded

    return embedded.heads()


# key → what makes its part; a part is plain data, as JSON has it
PARTS: dict[str, Callable[[], Any]] = {
    "bench": recorded_runs,
    "claims": claims.judged,
    "flow": _flow,
    "heads": _heads,
    "training": training.recorded,
}
STORED = ("bench", "claims", "training")
"""The parts that are read from files: a served page gets these at once, and asks for the others when it needs them."""


def bundle(names: Iterable[str] | None = None) -> dict[str, Any]:
    """Every part of the document, or those named."""
    return {name: PARTS[name]() for name in (PARTS if names is None else names)}
