"""output: rows to a file whose suffix says the form: json, csv, parquet, or a figure as svg, png, pdf or html."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attemper.extension import files as _files

from .experiment import Experiment, Rows

FIGURES = (".svg", ".png", ".pdf", ".html")
SUFFIXES = (".json", ".csv", ".parquet", *FIGURES)
EXTRA = "lab"


def check(path: Path | None, force: bool) -> None:
    """Refuse a file that cannot or should not be written, before the work."""
    _files.check(path, SUFFIXES, force)
    if path is not None:
        suffix = path.suffix.lower()
        for package in ("pyarrow",) if suffix == ".parquet" else ("altair", "vl_convert") if suffix in FIGURES else ():
            _files.load(f"-o *{suffix}", package, EXTRA)


def write(path: Path, experiment: Experiment, rows: Rows) -> None:
    """Write rows, or the figure made from them."""
    suffix = path.suffix.lower()
    _files.save(path, _FORMS[suffix](experiment, rows) if suffix in _FORMS else _figure(suffix, experiment, rows))


def document(experiment: Experiment, rows: Rows) -> dict[str, Any]:
    """The rows with the question and what they say, as plain data without NaN or infinity."""
    verdict = experiment.verdict(rows)
    content = {
        "experiment": experiment.name,
        "question": experiment.question,
        "finding": verdict.sentence,
        "agrees": verdict.agrees,
        "expectations": [{**vars(number), "agrees": number.agrees} for number in verdict.expectations],
        "rows": list(rows),
    }
    return dict(_files.finite(content))


_FORMS: dict[str, Callable[[Experiment, Rows], bytes]] = {
    ".json": lambda experiment, rows: _files.json_bytes(document(experiment, rows)),
    ".csv": lambda experiment, rows: _files.csv_bytes(rows),
    ".parquet": lambda experiment, rows: _files.parquet_bytes(rows, EXTRA),
}


def _figure(suffix: str, experiment: Experiment, rows: Rows) -> bytes:
    _files.load(f"-o *{suffix}", "altair", EXTRA)
    return render(experiment.chart(rows).to_json(), suffix)


def render(specification: str, suffix: str) -> bytes:
    """A Vega-Lite chart as the bytes of a file; nothing is fetched."""
    convert = _files.load(f"-o *{suffix}", "vl_convert", EXTRA)
    if suffix == ".png":
        return bytes(convert.vegalite_to_png(specification, scale=2))
    if suffix == ".pdf":
        return bytes(convert.vegalite_to_pdf(specification))
    if suffix == ".svg":
        return str(convert.vegalite_to_svg(specification)).encode()
    return str(convert.vegalite_to_html(specification, bundle=True)).encode()
