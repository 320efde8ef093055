"""The page as one HTML file that needs no network, no server and no other file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from attemper.errors import InputError
from attemper.extension.files import check, save
from attemper.extension.tools import report

from .data import bundle
from .joined import ENTRY, script, style, template

LARGEST = 2_000_000  # bytes: a file that people can send
START = f'needed["{ENTRY}"].open(document);\n'


PICTURED = "Love Apple phones"  # what a picture of the page shows
TITLE, DESCRIPTION = (
    "Why divide by √d_k?",
    "One slider, and who gets the attention: without the divisor, and with it. It computes in the browser.",
)


def html(data: Mapping[str, Any] | None = None, address: str | None = None) -> str:
    """The page as text. Its panels read ``data``, or that of :func:`attemper_lab.page.data.bundle`; links name ``address``."""
    code, sheet = script() + START, style()
    policy = report.policy(code, sheet) + "; img-src blob:"  # a picture of the page's own, for PNG
    parts = {
        "meta": f'<meta http-equiv="Content-Security-Policy" content="{policy}">{_preview(address)}',
        "style": f"<style>{sheet}</style>",
        "data": f'<script type="application/json" id="data">{report.encoded(bundle() if data is None else data)}</script>',
        "script": f'<script type="module">{code}</script>',
    }
    # in one pass, so that the parts themselves are not searched
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template())


def _preview(address: str | None) -> str:
    """What a link to the page shows where it is posted; the picture and the link need the address."""
    picture = address and re.sub(r"(\.html?)?$", ".png", address.removesuffix("/"), count=1)
    about = {
        "og:title": TITLE,
        "og:description": DESCRIPTION,
        "og:type": "website",
        "og:url": address,
        "og:image": picture,
    }
    tags = [f'<meta property="{name}" content="{escape(value)}">' for name, value in about.items() if value]
    if address:
        tags += [
            '<meta name="twitter:card" content="summary_large_image">',
            f'<link rel="canonical" href="{escape(address)}">',
        ]
    return f'<meta name="description" content="{DESCRIPTION}">' + "".join(tags)


def write(path: str | Path, *, force: bool = False, address: str | None = None) -> int:
    """Write the page as one HTML file, and return its size in bytes.

    With ``address``, where the file will be on the web, links to it show a picture, which is written beside the file as .png,
    and *Copy link* gives that address.

    Example:
        >>> attemper.page.write("why.html")      # doctest: +SKIP
    """
    target = Path(path)
    check(target, (".html",), force)
    if address is not None:
        if not re.fullmatch(r"https?://[^\s\"'<>#?]+", address):
            raise InputError(
                f"page: --address must be one of the web, without # and ?, such as https://example.org/why.html; got {address!r}."
            )
        from ..explain import explain

        explain(PICTURED).write(target.with_suffix(".png"), force=force)
    content = html(address=address).encode()
    save(target, content)
    return len(content)
