"""Scan: the result of a scan, as a document of plain data, a table and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _files
from ..errors import InputError
from ..report import html
from ..watch import Record
from .document import Document, Json, plain
from .show.format import sentences

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType


SUFFIXES = (".html", ".json", ".csv", ".parquet")


class Scan:
    """The result of :func:`attemper.scan`. ``print(scan)`` is the table; a notebook shows it as HTML.

    ``record`` has the vitals per layer and head. ``layers``, ``heads`` and ``findings`` (the worst first) are lists of dicts,
    ``verdict`` has a ``level`` and one ``line``, and ``notes`` says what was not measured and why. :meth:`to_dict` has it all.
    """

    def __init__(self, document: Document, record: Record, interrupted: bool = False) -> None:
        self.document: dict[str, Any] = plain(document)
        self.record = record
        self.interrupted = interrupted

    @property
    def verdict(self) -> dict[str, str]:
        """The level of the worst finding, and one line about it."""
        return dict(self.document["verdict"])

    @property
    def layers(self) -> list[dict[str, Any]]:
        """One dict per layer, in the order they ran, with its scale."""
        return list(self.document["layers"])

    @property
    def heads(self) -> list[dict[str, Any]]:
        """One dict per layer and head, with its signs."""
        return list(self.document["heads"])

    @property
    def findings(self) -> list[dict[str, Any]]:
        """One dict per finding, the worst first."""
        return list(self.document["findings"])

    @property
    def notes(self) -> list[str]:
        """What was not measured, and why."""
        return list(self.document["notes"])

    def to_dict(self, attention: bool = False) -> dict[str, Any]:
        """The whole document, as ``attemper scan --json`` prints it; its schema is ``attemper scan --schema``.

        Args:
            attention: include the attention weights and the images of their patches, which are most of its size.
        """
        return {name: part for name, part in self.document.items() if attention or name not in ("attention", "images")}

    def write(self, path: str | Path, attention: bool = False) -> None:
        """Write a file: the report, the document, or a row per head, by its suffix.

        Args:
            path: ending in ``.html``, ``.json``, ``.csv``, or ``.parquet``, which needs ``pip install 'attemper[record]'``. An
                existing file is replaced when the new one is complete.
            attention: include the attention weights in ``.json``; the report always has them.
        """
        path = Path(path)
        write_file(path, self.to_dict(attention or path.suffix.lower() == ".html"))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from .show.terminal import table

        yield table(self.document, options.max_width)

    def __str__(self) -> str:
        from .show.terminal import text

        return text(self.document)

    def __repr__(self) -> str:
        model, level = self.document["model"]["class"], self.document["verdict"]["level"]
        return (
            f"Scan({model}: {level}; layers {len(self.layers)}, heads {len(self.heads)}, findings {len(self.findings)})"
        )

    def _repr_html_(self) -> str:
        from html import escape

        text = escape(str(self)).rstrip()
        return f'<pre style="line-height:1.25">{text}</pre>{self.record._repr_html_()}'


def check_output(path: Path | None, force: bool) -> None:
    """Refuse a file that cannot or should not be written, before the work."""
    _files.check(path, SUFFIXES, force)
    if path is not None and path.suffix.lower() == ".parquet":
        _files.load("-o *.parquet", "pyarrow.parquet", "record")


def write_file(path: Path, document: Json) -> None:
    """Write a file; an existing one is replaced when the new one is complete."""
    suffix = path.suffix.lower()
    if suffix == ".html":
        checks = [f"check {line}." for line in sentences(document)]
        content = html({**document, "notes": [*document["notes"], *checks]}).encode()
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
