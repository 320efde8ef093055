"""run: the record of a training as a document, and the document as one HTML file: every head over time, under its loss.

``document(record)`` is plain data, the schema "attemper.run/1". The page, the terminal's summary and ``--json`` are functions of
it. Long runs are joined into columns: the largest peak of the steps in a column, and the mean of every other sign.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import __version__, health
from ..errors import InputError
from ..health import LEVELS
from ..watch import Record
from . import _module, _page, _text, script, style

RUN_SCHEMA = "attemper.run/1"
RUN_SCRIPTS = ("runs/series.js", "runs/curve.js", "runs/board.js", "runs/run.js")
SIGNS = (
    *("peak", "variance", "evenness", "effective_keys", "saturated", "top_weight", "entropy"),
    *("grad_q_rms", "grad_k_rms"),
)
CELLS, FEWEST, MOST = 150_000, 40, 400  # cells of a sign, and how many columns that leaves
POINTS = 600  # of a curve
TOLD = LEVELS.index("warn")
RowPlace = tuple[str, str, int]


def document(record: Record, name: str = "") -> dict[str, Any]:
    """A record as plain data: a row for each head, a column for each step or several, what was logged, and when findings began.

    Args:
        record: of a watch or a callback; ``Record.read("run.jsonl")`` has all steps.
        name: what the page calls the run.
    """
    if not len(record):
        raise InputError("report: the record has no rows. Watch at least one step.")
    steps = record.steps
    by_step: dict[int, dict[RowPlace, Mapping[str, Any]]] = {step: {} for step in steps}
    places: dict[RowPlace, None] = {}
    for row in record.to_dicts():
        place = (row["layer"], row["kind"], row["head"])
        places[place] = None
        by_step[row["step"]][place] = row
    order = _ordered(places)
    columns = list(_columns(steps, len(order)))
    signs = [sign for sign in SIGNS if any(sign in row for rows in by_step.values() for row in rows.values())]
    joined = [
        {place: _join([by_step[step].get(place) for step in column], signs) for place in order} for column in columns
    ]
    found, verdict = _findings(record, joined, columns, order)
    layers = dict.fromkeys((layer, kind) for layer, kind, _ in order)
    return {
        "schema": RUN_SCHEMA,
        "attemper": __version__,
        "name": name,
        "verdict": verdict,
        "steps": {"first": steps[0], "last": steps[-1], "watched": len(steps)},
        "from": [column[0] for column in columns],
        "to": [column[-1] for column in columns],
        "layers": [
            {"layer": layer, "kind": kind, "heads": [head for *at, head in order if at == [layer, kind]]}
            for layer, kind in layers
        ],
        "keys": max((facts.keys for facts in record.facts.values()), default=2),
        "signs": {sign: [[_short(cells[place].get(sign)) for cells in joined] for place in order] for sign in signs},
        "logged": _curves(record.logged),
        "findings": found,
        "notes": list(record.notes),
    }


def html(run: Mapping[str, Any]) -> str:
    """A run's document as a page that asks for nothing outside itself; text from the record is only ever shown as text."""
    if run.get("schema") != RUN_SCHEMA:
        raise InputError(
            f"report: the document must have the schema {RUN_SCHEMA!r}; got {run.get('schema')!r}. "
            "Make it with attemper.report.run.document(record)."
        )
    code = script() + "".join(_module(name) for name in RUN_SCRIPTS) + _module("run_start.js")
    return _page(f"attemper report: {run.get('name') or 'a training'}", code, style() + _text("run.css"), run)


def _ordered(places: Mapping[RowPlace, None]) -> list[RowPlace]:
    """Layers as they ran, each with its heads in order."""
    layers = list(dict.fromkeys((layer, kind) for layer, kind, _ in places))
    return sorted(places, key=lambda place: (layers.index(place[:2]), place[2]))


def _columns(steps: Sequence[int], rows: int) -> Iterator[Sequence[int]]:
    """The steps in order, as many to a column as are needed."""
    most = min(MOST, max(FEWEST, CELLS // rows))
    width = math.ceil(len(steps) / most)
    for start in range(0, len(steps), width):
        yield steps[start : start + width]


def _join(rows: Sequence[Mapping[str, Any] | None], signs: Sequence[str]) -> dict[str, float]:
    """One row for the steps of a column. A number that is not finite stays so: it is the finding."""
    there = [row for row in rows if row is not None]
    found = {"rows": sum(row["rows"] for row in there)} if there else {}
    for sign in (*signs, "mean"):
        values = [row[sign] for row in there if sign in row]
        if values:
            broken = [value for value in values if not math.isfinite(value)]
            found[sign] = broken[0] if broken else max(values) if sign == "peak" else statistics.fmean(values)
    return found


def _findings(
    record: Record,
    joined: Sequence[Mapping[RowPlace, Mapping[str, float]]],
    columns: Sequence[Sequence[int]],
    order: Sequence[RowPlace],
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Findings from the level "warn" on, with the step at which each began or rose; and the verdict of the last column."""
    layers = [{"layer": layer, **facts.to_dict()} for (layer, _), facts in record.facts.items()]
    told: dict[tuple[Any, ...], str] = {}
    found: list[dict[str, Any]] = []
    last = []
    for column, cells in zip(columns, joined, strict=True):
        rows = [
            {"layer": layer, "kind": kind, "head": head, **cells[layer, kind, head]}
            for layer, kind, head in order
            if cells[layer, kind, head]
        ]
        last = health.findings(rows, layers)
        for one in last:
            key, level = (one.name, one.layer, one.kind, one.head), LEVELS.index(one.level)
            if level >= TOLD and (key not in told or LEVELS.index(told[key]) < level):
                told[key] = one.level
                found.append({"step": column[0], **one.to_dict()})
    worst, line = health.verdict(last, len(order))
    return found, {"level": worst, "line": line}


def _curves(logged: Mapping[int, Mapping[str, float]]) -> dict[str, list[list[float | None]]]:
    """What was logged, by name: [step, number] in the order of steps; long curves are means of neighbours."""
    names = dict.fromkeys(name for numbers in logged.values() for name in numbers)
    found: dict[str, list[list[float | None]]] = {}
    for name in names:
        points = [(step, logged[step][name]) for step in sorted(logged) if name in logged[step]]
        width = math.ceil(len(points) / POINTS)
        parts = [points[start : start + width] for start in range(0, len(points), width)]
        found[name] = [[part[0][0], _short(statistics.fmean(value for _, value in part))] for part in parts]
    return found


def _short(number: float | None) -> float | None:
    """Four digits are enough to look at; None where there is no finite number."""
    return float(f"{number:.4g}") if number is not None and math.isfinite(number) else None
