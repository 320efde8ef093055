"""schema: the published JSON Schema of a scan's document, from the file that is shipped beside this one."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def schema() -> dict[str, Any]:
    """JSON Schema 2020-12; what ``attemper scan --schema`` prints."""
    text = resources.files(__package__).joinpath("schema.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
