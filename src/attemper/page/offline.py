"""offline: the page as one HTML file that needs nothing else: no network, no server, no other file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import report
from .._files import check, save
from .data import bundle
from .joined import ENTRY, script, style, template

LARGEST = 2_000_000  # bytes: a file that people can send
START = f'needed["{ENTRY}"].open(document);\n'


def html(data: Mapping[str, Any] | None = None) -> str:
    """The page as text; ``data`` is what its panels read, that of :func:`attemper.page.data.bundle` where None is given."""
    code, sheet = script() + START, style()
    policy = report.policy(code, sheet) + "; img-src blob:"  # a picture of the page's own, for PNG
    parts = {
        "meta": f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "style": f"<style>{sheet}</style>",
        "data": f'<script type="application/json" id="data">{report.encoded(bundle() if data is None else data)}</script>',
        "script": f'<script type="module">{code}</script>',
    }
    # in one pass: what is put in is not searched again, whatever it contains
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template())


def write(path: str | Path, *, force: bool = False) -> int:
    """Write the page as one HTML file, and return its size in bytes.

    Example:
        >>> attemper.page.write("why.html")      # doctest: +SKIP
    """
    target = Path(path)
    check(target, (".html",), force)
    content = html().encode()
    save(target, content)
    return len(content)
