"""The page and its modules as they are served: by name from a table that is made once. No name is ever a path on the disk."""

from __future__ import annotations

import re
from functools import cache
from html import escape

from ..._files import json_text
from ..data.bundle import STORED, bundle
from ..joined import modules, style, template

SERVED = "page/shell/served.js"
ROOT, WAIT = '<div id="page">', "attemper opens the page …"
SCRIPT, SHEET, PAGE = "text/javascript; charset=utf-8", "text/css; charset=utf-8", "text/html; charset=utf-8"


@cache
def served() -> dict[str, tuple[str, bytes]]:
    """Path below /modules/ → its type and content."""
    found = {name: (SCRIPT, text.encode()) for name, text in modules(SERVED).items()}
    return {**found, "page/page.css": (SHEET, style().encode())}


@cache
def page() -> bytes:
    """The page: it fetches its modules, then its data."""
    # without the list a browser would learn of a module only when it has read the one that imports it
    early = "".join(f'<link rel="modulepreload" href="/modules/{escape(name)}">' for name in modules(SERVED))
    parts = {
        "meta": f'<link rel="icon" href="data:,">{early}',  # the icon: so that no browser asks for one
        "style": '<link rel="stylesheet" href="/modules/page/page.css">',
        "script": f'<script type="module" src="/modules/{escape(SERVED)}"></script>',
    }
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: parts.get(found[1], ""), template())
    return text.replace(ROOT, f"{ROOT}<p>{WAIT}</p>", 1).encode()


@cache
def data() -> bytes:
    """The parts of the panels' document that come with the package."""
    return json_text(bundle(STORED)).encode()
