"""altair, imported only when a figure is drawn: measuring needs torch alone."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("altair"), name)
