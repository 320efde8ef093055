"""output: rows to a file whose suffix says the form: json, csv, parquet, or a figure as svg, png, pdf or html."""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ... import _files
from ..._files import save as save
from ...errors import MissingExtra
from .experiment import Experiment, Rows

FIGURES = (".svg", ".png", ".pdf", ".html")
SUFFIXES = (".json", ".csv", ".parquet", *FIGURES)


def check(path: Path | None, suffixes: tuple[str, ...], force: bool) -> None:
    """Refuse a file that could not or should not be written, before the work and not after it."""
    _files.check(path, suffixes, force)
    if path is not None:
        for package in _needs(path.suffix.lower()):
            _load(package, path.suffix.lower())


def write(path: Path, experiment: Experiment, rows: Rows) -> None:
    """Write rows, or the figure made from them."""
    suffix = path.suffix.lower()
    save(path, _FORMS[suffix](experiment, rows) if suffix in _FORMS else _figure(suffix, experiment, rows))


def plain(value: Any) -> Any:
    """The same data with null for NaN and the infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def text(found: Any, indent: int | None = None) -> str:
    """One strict JSON document."""
    return json.dumps(plain(found), indent=indent, ensure_ascii=False, allow_nan=False)


def document(experiment: Experiment, rows: Rows) -> dict[str, Any]:
    """The rows with the question and what they say, as plain data that JSON takes."""
    verdict = experiment.verdict(rows)
    found = {
        "experiment": experiment.name,
        "question": experiment.question,
        "finding": verdict.sentence,
        "agrees": verdict.agrees,
        "expectations": [{**vars(one), "agrees": one.agrees} for one in verdict.expectations],
        "rows": list(rows),
    }
    return dict(plain(found))


def columns(rows: Rows) -> list[str]:
    """Every column that a row has, in the order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _json(experiment: Experiment, rows: Rows) -> bytes:
    return (text(document(experiment, rows), indent=1) + "\n").encode()


def _csv(experiment: Experiment, rows: Rows) -> bytes:
    sheet = io.StringIO()
    writer = csv.DictWriter(sheet, columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(dict(row) for row in rows)
    return sheet.getvalue().encode()


def _parquet(experiment: Experiment, rows: Rows) -> bytes:
    arrow = _load("pyarrow", ".parquet")
    parquet = _load("pyarrow.parquet", ".parquet")
    table = arrow.table({name: [row.get(name) for row in rows] for name in columns(rows)})
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()


_FORMS: dict[str, Callable[[Experiment, Rows], bytes]] = {".json": _json, ".csv": _csv, ".parquet": _parquet}


def _figure(suffix: str, experiment: Experiment, rows: Rows) -> bytes:
    _load("altair", suffix)
    from .. import figures

    return render(figures.chart(experiment.chart, rows, experiment.finding(rows)).to_json(), suffix)


def render(specification: str, suffix: str) -> bytes:
    """A Vega-Lite chart as the bytes of a file; nothing is fetched from outside."""
    convert = _load("vl_convert", suffix)
    if suffix == ".png":
        found: bytes = convert.vegalite_to_png(specification, scale=2)
        return found
    if suffix == ".pdf":
        return bytes(convert.vegalite_to_pdf(specification))
    drawn = (
        convert.vegalite_to_svg(specification)
        if suffix == ".svg"
        else convert.vegalite_to_html(specification, bundle=True)
    )
    return str(drawn).encode()


def _needs(suffix: str) -> tuple[str, ...]:
    return ("pyarrow",) if suffix == ".parquet" else ("altair", "vl_convert") if suffix in FIGURES else ()


def _load(package: str, suffix: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise MissingExtra(f"-o *{suffix} needs {package.split('.')[0]}. Type pip install 'attemper[lab]'.") from None
