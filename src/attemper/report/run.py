"""The record of a training as a document, and the document as one HTML file or one screen of text.

``document(record)`` is plain data, the schema "attemper.run/1". The page, the text and ``--json`` are functions of it. Long runs
are joined into columns: the largest peak of the steps in a column, and the mean of every other sign.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import __version__, health
from .._display import block, plural, safe
from ..errors import InputError
from ..health import LEVELS
from ..watch import Record
from . import _page, _text, script, style

RUN_SCHEMA = "attemper.run/1"
SIGNS = (
    *("peak", "variance", "evenness", "effective_keys", "saturated", "top_weight", "entropy"),
    *("grad_q_rms", "grad_k_rms"),
)
CELLS, FEWEST, MOST = 150_000, 40, 400  # cells of a sign; columns
POINTS = 600  # of a curve
LEAST = LEVELS.index("warn")
HeadKey = tuple[str, str, int]  # layer, kind, head


def document(record: Record, name: str = "") -> dict[str, Any]:
    """A record as plain data: a row per head, a column per step or several, the logged numbers, and when findings began.

    Args:
        record: of a watch or a callback; ``Record.read("run.jsonl")`` has all steps.
        name: what the page calls the run.
    """
    if not len(record):
        raise InputError("report: the record has no rows. Watch at least one step.")
    steps = record.steps
    by_step: dict[int, dict[HeadKey, Mapping[str, Any]]] = {step: {} for step in steps}
    places: dict[HeadKey, None] = {}
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
    findings, verdict = _findings(record, joined, columns, order)
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
        "keys": max((info.keys for info in record.info.values()), default=2),
        "signs": {sign: [[_short(cells[place].get(sign)) for cells in joined] for place in order] for sign in signs},
        "logged": _curves(record.logged),
        "findings": findings,
        "notes": list(record.notes),
    }


def html(run: Mapping[str, Any]) -> str:
    """A run's document as a page that asks for nothing outside itself; text from the record is only ever shown as text."""
    if run.get("schema") != RUN_SCHEMA:
        raise InputError(
            f"report: `run` must have the schema {RUN_SCHEMA!r}; got {run.get('schema')!r}. "
            "Make it with attemper.report.run.document(record)."
        )
    code = script("run_start.js")
    return _page(f"attemper report: {run.get('name') or 'a training'}", code, style() + _text("run.css"), run)


def _ordered(places: Mapping[HeadKey, None]) -> list[HeadKey]:
    """Layers as they ran, each with its heads in order."""
    layers = list(dict.fromkeys((layer, kind) for layer, kind, _ in places))
    return sorted(places, key=lambda place: (layers.index(place[:2]), place[2]))


def _columns(steps: Sequence[int], rows: int) -> Iterator[Sequence[int]]:
    """The steps in order, grouped into at most ``MOST`` columns."""
    most = min(MOST, max(FEWEST, CELLS // rows))
    width = math.ceil(len(steps) / most)
    for start in range(0, len(steps), width):
        yield steps[start : start + width]


def _join(rows: Sequence[Mapping[str, Any] | None], signs: Sequence[str]) -> dict[str, float]:
    """One row for the steps of a column. A NaN or infinity among them wins, because it is a finding."""
    there = [row for row in rows if row is not None]
    joined = {"rows": sum(row["rows"] for row in there)} if there else {}
    for sign in (*signs, "mean"):
        values = [row[sign] for row in there if sign in row]
        if values:
            broken = [value for value in values if not math.isfinite(value)]
            joined[sign] = broken[0] if broken else max(values) if sign == "peak" else statistics.fmean(values)
    return joined


def _findings(
    record: Record,
    joined: Sequence[Mapping[HeadKey, Mapping[str, float]]],
    columns: Sequence[Sequence[int]],
    order: Sequence[HeadKey],
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Findings from the level "warn" on, with the step at which each began or rose; and the verdict of the last column."""
    layers = [{"layer": layer, **info.to_dict()} for (layer, _), info in record.info.items()]
    reported: dict[tuple[Any, ...], str] = {}
    findings: list[dict[str, Any]] = []
    last = []
    for column, cells in zip(columns, joined, strict=True):
        rows = [
            {"layer": layer, "kind": kind, "head": head, **cells[layer, kind, head]}
            for layer, kind, head in order
            if cells[layer, kind, head]
        ]
        last = health.findings(rows, layers)
        for finding in last:
            key, level = (finding.name, finding.layer, finding.kind, finding.head), LEVELS.index(finding.level)
            if level >= LEAST and (key not in reported or LEVELS.index(reported[key]) < level):
                reported[key] = finding.level
                findings.append({"step": column[0], **finding.to_dict()})
    worst, line = health.verdict(last, len(order))
    return findings, {"level": worst, "line": line}


def _curves(logged: Mapping[int, Mapping[str, float]]) -> dict[str, list[list[float | None]]]:
    """The logged numbers by name: [step, number] in the order of steps; long curves are averaged over neighbours."""
    names = dict.fromkeys(name for numbers in logged.values() for name in numbers)
    curves: dict[str, list[list[float | None]]] = {}
    for name in names:
        points = [(step, logged[step][name]) for step in sorted(logged) if name in logged[step]]
        width = math.ceil(len(points) / POINTS)
        parts = [points[start : start + width] for start in range(0, len(points), width)]
        curves[name] = [[part[0][0], _short(statistics.fmean(value for _, value in part))] for part in parts]
    return curves


def _short(number: float | None) -> float | None:
    """A number with four digits, enough for a picture; None if it is not finite."""
    return float(f"{number:.4g}") if number is not None and math.isfinite(number) else None


MARKS = {"warn": "▲", "error": "◆", "critical": "■", "diverging": "✕"}
LAYERS = 12  # lines; of more layers those with the largest peaks are shown
NARROWEST, WIDEST = 40, 100


def text(run: Mapping[str, Any], width: int = 80) -> str:
    """The summary of a run, for a terminal of ``width`` columns."""
    width = min(WIDEST, max(NARROWEST, width))
    steps, layers = run["steps"], run["layers"]
    heads = sum(len(layer["heads"]) for layer in layers)
    when = f", {steps['first']} to {steps['last']}" if steps["watched"] > 1 else f", number {steps['first']}"
    about = (
        f"{plural(steps['watched'], 'watched step')}{when if steps['watched'] else ''}; "
        f"{plural(len(layers), 'layer')}, {plural(heads, 'head')}."
    )
    lines = [*textwrap.wrap(safe(run["verdict"]["line"]), width), *textwrap.wrap(about, width), ""]
    lines += _curve_lines(run, width)
    lines += ["", *_finding_lines(run, width)]
    return "\n".join(lines)


def _curve_lines(run: Mapping[str, Any], width: int) -> list[str]:
    """The loss and the peaks over time, each with its first and last number."""
    curves: list[tuple[str, list[float | None], bool]] = []
    for name in ("loss", "eval_loss"):
        if name in run["logged"]:
            curves.append((name, [value for _, value in run["logged"][name]], False))
    if "peak" in run["signs"]:
        curves += _peaks(run)
    elif run["signs"]:
        sign = next(iter(run["signs"]))
        curves.append((sign, _most(run["signs"][sign]), False))
    if not curves:
        return []
    label = min(14, max(len(name) for name, *_ in curves))
    room = max(6, min(60, width - label - 22))
    logs = [
        math.log(value)
        for *_, values, is_log in curves
        if is_log
        for value in values
        if value is not None and value > 0
    ]
    shared = (min(logs), max(logs)) if logs else None
    return [_line(name, values, label, room, shared if is_log else None) for name, values, is_log in curves]


def _peaks(run: Mapping[str, Any]) -> list[tuple[str, list[float | None], bool]]:
    """The largest peak of each layer; of many layers, those that end highest, in their order."""
    start, curves = 0, []
    for layer in run["layers"]:
        rows = run["signs"]["peak"][start : start + len(layer["heads"])]
        start += len(layer["heads"])
        curves.append((layer["layer"] or "the model", _most(rows), True))
    names = _short_names([name for name, *_ in curves])
    curves = [(f"peak {name}", values, is_log) for name, (_, values, is_log) in zip(names, curves, strict=True)]
    if len(curves) > LAYERS:
        ends = sorted((values[-1] if values[-1] is not None else math.inf for _, values, _ in curves), reverse=True)
        lowest = ends[LAYERS - 1]
        curves = [curve for curve in curves if (math.inf if curve[1][-1] is None else curve[1][-1]) >= lowest][:LAYERS]
    return curves


def _short_names(names: Sequence[str]) -> list[str]:
    """Names without the parts that all of them share."""
    split = [name.split(".") for name in names]
    length = {len(parts) for parts in split}
    if len(names) < 2 or len(length) > 1:
        return [safe(name) for name in names]
    differ = [place for place in range(length.pop()) if len({parts[place] for parts in split}) > 1]
    return [safe(".".join(parts[place] for place in differ) or name) for parts, name in zip(split, names, strict=True)]


def _most(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The largest number of each column; None if any is missing, because it was not finite."""
    return [None if None in column else max(column) for column in zip(*rows, strict=True)]


def _line(name: str, values: Sequence[float | None], label: int, room: int, ends: tuple[float, float] | None) -> str:
    shown = name if len(name) <= label else f"{name[: label - 1]}…"
    there = [value for value in values if value is not None]
    if not there:
        return f"{shown:<{label}}  not finite"
    if ends is None:
        ends = (min(there), max(there))
        shares = [None if value is None else _share(value, *ends) for value in values]
    else:
        shares = [None if value is None else _share(math.log(max(value, 1e-9)), *ends) for value in values]
    count = min(room, len(shares))
    cells = [shares[int(index * len(shares) / count)] for index in range(count - 1)] + [shares[-1]]
    bar = "".join(block(share, "?") for share in cells)
    last = "NaN" if values[-1] is None else f"{values[-1]:.4g}"
    return f"{shown:<{label}}  {bar:<{room}}  {there[0]:.4g} → {last}"


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.0


def _finding_lines(run: Mapping[str, Any], width: int) -> list[str]:
    """One line for each name and level: from which step on, and where."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for finding in sorted(run["findings"], key=lambda finding: (-LEVELS.index(finding["level"]), finding["step"])):
        groups.setdefault((finding["level"], finding["name"]), []).append(finding)
    if not groups:
        return ["No finding from the level warn on."]
    lines = []
    for (level, _), group in groups.items():
        first = group[0]
        where = safe(first["layer"] or "the model") + ("" if first["head"] is None else f" head {first['head']}")
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        words = f"{MARKS[level]} {level}: {first['title']} from step {first['step']} on, {where}{more}"
        lines += textwrap.wrap(words, width, subsequent_indent="  ")
    return lines
