"""The checks for people: how many passed, and what each experiment found or assumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..._display import plural
from ...health.faults import CHECKS
from ..document import Json


def summary(document: Json) -> str | None:
    """How many checks passed, failed and did not apply, in a few words; None: the document has no checks."""
    checks = document.get("checks") or []
    if not checks:
        return None
    passed, failed = (sum(one["state"] == state for one in checks) for state in ("passed", "failed"))
    words = f"{passed} of {passed + failed} passed"
    if failed:
        words += f"; failed: {', '.join(_spaced(one) for one in checks if one['state'] == 'failed')}"
    skipped = [_spaced(one) for one in checks if one["state"] == "skipped"]
    words += f"; not applicable: {', '.join(skipped)}" if skipped else ""
    deep = sum(check.deep for check in CHECKS.values())
    return words if any(one["deep"] for one in checks) else f"{words}; --deep adds {plural(deep, 'experiment')}"


def sentences(document: Json) -> Iterator[str]:
    """What each experiment found or assumed, one line for each."""
    for one in document.get("checks") or []:
        if one["deep"]:
            yield f"{_spaced(one)} {one['state']}: {one['says'].rstrip('.')}"


def _spaced(one: dict[str, Any]) -> str:
    return str(one["name"]).replace("_", " ")
