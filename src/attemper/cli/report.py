"""attemper report: the record of a training as one screen of text, or as a page with every head over time."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Annotated

import typer

from .._display import escaped_json
from .._files import check, json_bytes, save
from .app import AsJson, Force, finish, note
from .progress import progress

RecordFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="A .jsonl or .parquet file of watch(path=…) or of a callback.")
]
PageFile = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the page (.html), or the document that it shows (.json).")
]


def report(file: RecordFile, as_json: AsJson = False, output: PageFile = None, force: Force = False) -> None:
    """Show what a watch recorded of a training: the loss, every head over time, and findings."""
    check(output, (".html", ".json"), force)
    with progress() as note_progress:
        note_progress("loading torch")
        from ..report import run
        from ..watch.examine import read

        note_progress(f"reading {file.name}")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            record = read(file, "report")
    for warning in caught:
        note(f"Note: {str(warning.message).removeprefix('report: ')}")
    document = run.document(record, file.name)

    def write() -> None:
        if output is not None:
            html = output.suffix.lower() == ".html"
            save(output, run.html(document).encode() if html else json_bytes(document))
            note(f"{output} written" + ("; open it in a browser" if html else ""))

    shown = escaped_json(document) if as_json else run.text(document, shutil.get_terminal_size().columns)
    finish(lambda: print(shown), write)
