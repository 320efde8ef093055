"""claims: common claims about √d_k with their verdicts, conditions, numbers and figures, as they were judged last."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any


@functools.cache
def judged() -> dict[str, Any]:
    """The claims that come with the package; `python scripts/page_data.py claims` judges them and writes claims.json."""
    return dict(json.loads((files(__package__) / "claims.json").read_text(encoding="utf-8")))
