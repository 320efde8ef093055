"""Files, by suffix: the report as html, the document as json, the heads as csv or parquet."""

from __future__ import annotations

from pathlib import Path

from ... import _files
from ...errors import InputError
from ...report import html
from ..document import Json
from .checks import sentences

SUFFIXES = (".html", ".json", ".csv", ".parquet")


def check(path: Path | None, force: bool) -> None:
    """Refuse a file that could not or should not be written, before the work and not after it."""
    _files.check(path, SUFFIXES, force)
    if path is not None and path.suffix.lower() == ".parquet":
        _files.load("-o *.parquet", "pyarrow.parquet", "record")


def write(path: Path, document: Json) -> None:
    """Write a file; one that was there is replaced once the new one is whole."""
    suffix = path.suffix.lower()
    if suffix == ".html":
        said = [f"check {line}." for line in sentences(document)]  # the page shows notes as they are
        content = html({**document, "notes": [*document["notes"], *said]}).encode()
    elif suffix == ".json":
        content = _files.json_bytes(document)
    elif suffix == ".csv":
        content = _files.csv_bytes(document["heads"])
    elif suffix == ".parquet":
        content = _files.parquet_bytes(document["heads"], "record")
    else:
        raise InputError(
            f"Scan.write(): `path` must end in {', '.join(SUFFIXES)}; got {path.name!r}. Use 'report.html'."
        )
    _files.save(path, content)
