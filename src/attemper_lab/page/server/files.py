"""The page's files, served by name from a table that is made once. No name is ever used as a path on the disk."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from functools import cache

from attemper.extension.files import json_text

from ..data.bundle import STORED, bundle
from ..joined import script, style, template
from .guard import ICON

ENTRY = "page/shell/served.js"
ROOT, WAIT = '<div id="page">', "attemper opens the page …"
HTML, SCRIPT, SHEET, JSON = (
    f"{kind}; charset=utf-8" for kind in ("text/html", "text/javascript", "text/css", "application/json")
)


def page() -> str:
    """The page: a style sheet and a script, which fetches the data."""
    parts = {
        "meta": ICON,
        "style": '<link rel="stylesheet" href="page.css">',
        "script": '<script type="module" src="page.js"></script>',
    }
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: parts.get(match[1], ""), template())
    return text.replace(ROOT, f"{ROOT}<p>{WAIT}</p>", 1)


FILES: dict[str, tuple[str, Callable[[], str]]] = {
    "/": (HTML, page),
    "/page.js": (SCRIPT, lambda: script(ENTRY)),
    "/page.css": (SHEET, style),
    "/data": (JSON, lambda: json_text(bundle(STORED))),
}
"""Path → its type, and what makes its text. /data has the parts of the panels' document that come with the package."""


@cache
def content(path: str, packed: bool) -> bytes:
    """A file as bytes, packed with gzip if the browser takes that."""
    plain = FILES[path][1]().encode()
    return gzip.compress(plain, mtime=0) if packed else plain
