"""Files, by suffix: the report as html, the document as json, the heads as csv or parquet."""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import _files
from ...errors import InputError, MissingExtra
from ..document import Json

SUFFIXES = (".html", ".json", ".csv", ".parquet")


def check(path: Path | None, force: bool) -> None:
    """Refuse a file that could not or should not be written, before the work and not after it."""
    _files.check(path, SUFFIXES, force)
    if path is not None and path.suffix.lower() == ".parquet":
        _arrow()


def write(path: Path, document: Json) -> None:
    """Write a file; one that was there is replaced once the new one is whole."""
    if path.suffix.lower() not in _FORMS:
        raise InputError(f"Scan.write(): `path` must end in {', '.join(SUFFIXES)}; got {path.name!r}.")
    _files.save(path, _FORMS[path.suffix.lower()](document))


def _html(document: Json) -> bytes:
    from ...report import html

    return html(document).encode()


def _json(document: Json) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()


def _csv(document: Json) -> bytes:
    text, rows = io.StringIO(), document["heads"]
    writer = csv.DictWriter(text, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _parquet(document: Json) -> bytes:
    arrow, parquet = _arrow()
    rows = document["heads"]
    table = arrow.table({name: [row.get(name) for row in rows] for name in _columns(rows)})
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()


_FORMS: dict[str, Callable[[Json], bytes]] = {".html": _html, ".json": _json, ".csv": _csv, ".parquet": _parquet}


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _arrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise MissingExtra("-o *.parquet needs pyarrow. Type pip install 'attemper[record]'.") from None
