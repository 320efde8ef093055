"""Open the offline page in a browser, as tests/report/opened.py does a report: silent, alone and without violations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attemper_lab.page import offline
from report.opened import visited

GROUP = "page"
"""Tests that open the page run in one process of pytest-xdist: one browser, and the page is made once, with its model's data."""
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 720}


@functools.cache
def text() -> str:
    return offline.html()


@contextlib.contextmanager
def opened(browser: Any, folder: Path, at: str = "", **options: Any) -> Iterator[Any]:
    """The offline page, at `#…`; `viewport`, `color_scheme` and other options are those of a browser's context."""
    path = folder / "why.html"
    path.write_text(text(), encoding="utf-8", newline="\n")
    with visited(browser, path.as_uri(), at=at, **options) as page:
        yield page
