"""Open the offline page in a browser, as tests/report/opened.py does a report: silent, alone and without violations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attemper.page import offline
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


def settled(page: Any) -> None:
    """Wait until what was asked for is drawn: two frames."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def address(page: Any, part: str, there: bool = True) -> bool:
    """Wait until a part is in the page's address, or is not: it changes at most every 150 ms. False where that does not come."""
    from playwright.sync_api import TimeoutError as TooLate

    try:
        page.wait_for_url(lambda url: (part in url) is there, timeout=3000)
    except TooLate:
        return False
    return True
