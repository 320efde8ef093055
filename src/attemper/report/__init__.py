"""report: a scan's document as one HTML file that needs nothing else: no network, no server, no other file.

page.html and report.css are the page. data/ reads the document (numbers, text, weights). views/ shows the map of heads, findings,
sections and lanes. tokens/ shows the attention of one head, as a matrix, columns, running text or image patches.
start.js calls render(). joined.py makes one script of them.

    run         the record of a training as a document, as one screen of text, and as a page: runs/, run.css and run_start.js
                with the modules above
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from .._files import finite
from ..errors import InputError
from . import joined as joined

SCHEMA = "attemper.scan/1"
OUTDATED = "is of an older attemper, which wrote `says` and `todo` where this one writes `message` and `advice`"
# direction marks and control characters, which only the script can make visible
STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# characters that could end a script element or a line of JavaScript, as JSON escapes
ESCAPES = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def html(document: Mapping[str, Any]) -> str:
    """A scan's document as a page: the map of its heads, the audit, findings, what if, and the attention of any head.

    ``document`` is what ``Scan.to_dict()`` gives and ``attemper scan --json`` prints. The page asks for nothing outside itself,
    and its content security policy would not let it; text from the model or its tokenizer is shown as text only.
    """
    _check(document)
    name = (document.get("model") or {}).get("name") or "a model"
    return _page(f"attemper scan: {name}", script(), style(), document)


def _page(title: str, code: str, css: str, document: Mapping[str, Any]) -> str:
    """A document as a page that asks for nothing outside itself."""
    parts = {
        "policy": policy(code, css),
        "title": _shown(title),
        "verdict": _shown((document.get("verdict") or {}).get("line", "")),
        "style": css,
        "script": code,
        "document": encoded(document),
    }
    # in one pass, so that text that was put in is not searched for names
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _text("page.html"))


def script(entry: str = "start.js") -> str:
    """A page's modules as one script, from the last one on: start.js shows a document, run_start.js a run."""
    return joined.script(f"report/{entry}")


def style() -> str:
    """The report's style sheet; in another page it styles only what is inside ``.attemper``."""
    return _text("report.css")


def policy(code: str, style: str) -> str:
    """A content security policy that lets exactly ``code`` and ``style`` run, and nothing be fetched or sent."""
    return f"default-src 'none'; script-src '{_digest(code)}'; style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'"


def encoded(document: Mapping[str, Any]) -> str:
    """``document`` as JSON for a script element: without tags, and with null for NaN and infinity."""
    return json.dumps(finite(document), ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(ESCAPES)


def _check(document: Mapping[str, Any]) -> None:
    if not isinstance(document, Mapping):
        raise InputError(
            f"report.html(): `document` must be a scan's document, a dict; got {type(document).__name__}. Use scan.to_dict()."
        )
    if document.get("schema") != SCHEMA:
        raise InputError(
            f"report.html(): `document` must have the schema {SCHEMA!r}; got {document.get('schema')!r}. "
            "Use what attemper.scan(…).to_dict() gives or `attemper scan --json` prints."
        )
    if is_outdated(document):
        raise InputError(f"report.html(): `document` {OUTDATED}. Scan the model again.")


def is_outdated(document: Mapping[str, Any]) -> bool:
    """Whether a document was made before findings had a `message` and `advice`."""
    try:
        rows = [*document.get("findings", ()), *(layer.get("scale", ()) for layer in document.get("layers", ()))]
        return any("says" in row for row in rows)
    except (TypeError, AttributeError):  # damaged, which is another matter
        return False


def _shown(text: object) -> str:
    return escape(STEERING.sub("\ufffd", str(text)))


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
