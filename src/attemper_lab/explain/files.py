"""Write an explanation as a picture, a page or data, by the suffix of the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attemper.extension import files as _files

from . import flow, html

if TYPE_CHECKING:
    from . import Explanation

SUFFIXES = (".svg", ".png", ".html", ".json")
EXTRA = "lab"


def check(path: Path | None, force: bool) -> None:
    """Refuse a file that cannot or should not be written, before anything is computed."""
    _files.check(path, SUFFIXES, force)
    if path is not None and path.suffix.lower() == ".png":
        _files.load("-o *.png", "vl_convert", EXTRA)


def write(path: Path, explanation: Explanation) -> None:
    """Write an explanation; :func:`check` comes first."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        content = _files.json_bytes(explanation.to_dict())
    elif suffix == ".html":
        content = html.page(explanation).encode()
    elif suffix == ".png":
        convert = _files.load("-o *.png", "vl_convert", EXTRA)
        content = bytes(convert.svg_to_png(flow.render(explanation, dark=False), scale=2))
    else:
        content = f"{flow.render(explanation)}\n".encode()
    _files.save(path, content)
