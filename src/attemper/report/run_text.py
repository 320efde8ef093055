"""run_text: a run's document as one screen of text: the verdict, the loss, the peak of every layer, and the findings."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from .._display import block, plural, safe
from ..health import LEVELS

MARKS = {"warn": "▲", "act": "◆", "critical": "■", "diverging": "✕"}
LAYERS = 12  # lines; of more layers those with the largest peaks are shown
NARROWEST, WIDEST = 40, 100


def text(run: Mapping[str, Any], width: int = 80) -> str:
    """The summary of a run, for a terminal of so many columns."""
    width = min(WIDEST, max(NARROWEST, width))
    steps, layers = run["steps"], run["layers"]
    heads = sum(len(layer["heads"]) for layer in layers)
    when = f", {steps['first']} to {steps['last']}" if steps["watched"] > 1 else f", number {steps['first']}"
    about = (
        f"{plural(steps['watched'], 'watched step')}{when if steps['watched'] else ''}; "
        f"{plural(len(layers), 'layer')}, {plural(heads, 'head')}."
    )
    lines = [*textwrap.wrap(safe(run["verdict"]["line"]), width), *textwrap.wrap(about, width), ""]
    lines += _curves(run, width)
    lines += ["", *_findings(run, width)]
    return "\n".join(lines)


def _curves(run: Mapping[str, Any], width: int) -> list[str]:
    """The loss and the peaks over time, each with its first and last number."""
    found: list[tuple[str, list[float | None], bool]] = []
    for name in ("loss", "eval_loss"):
        if name in run["logged"]:
            found.append((name, [value for _, value in run["logged"][name]], False))
    if "peak" in run["signs"]:
        found += _peaks(run)
    elif run["signs"]:
        sign = next(iter(run["signs"]))
        found.append((sign, _most(run["signs"][sign]), False))
    if not found:
        return []
    label = min(14, max(len(name) for name, *_ in found))
    room = max(6, min(60, width - label - 22))
    logs = [
        math.log(value) for *_, values, is_log in found if is_log for value in values if value is not None and value > 0
    ]
    shared = (min(logs), max(logs)) if logs else None
    return [_line(name, values, label, room, shared if is_log else None) for name, values, is_log in found]


def _peaks(run: Mapping[str, Any]) -> list[tuple[str, list[float | None], bool]]:
    """The largest peak of each layer; of many layers, those that end highest, in their order."""
    start, found = 0, []
    for layer in run["layers"]:
        rows = run["signs"]["peak"][start : start + len(layer["heads"])]
        start += len(layer["heads"])
        found.append((layer["layer"] or "the model", _most(rows), True))
    names = _short([name for name, *_ in found])
    found = [(f"peak {name}", values, is_log) for name, (_, values, is_log) in zip(names, found, strict=True)]
    if len(found) > LAYERS:
        ends = sorted((values[-1] if values[-1] is not None else math.inf for _, values, _ in found), reverse=True)
        found = [one for one in found if (one[1][-1] if one[1][-1] is not None else math.inf) >= ends[LAYERS - 1]][
            :LAYERS
        ]
    return found


def _short(names: Sequence[str]) -> list[str]:
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
    cells = [shares[int(place * len(shares) / count)] for place in range(count - 1)] + [shares[-1]]
    bar = "".join(block(share, "?") for share in cells)
    last = "NaN" if values[-1] is None else f"{values[-1]:.4g}"
    return f"{shown:<{label}}  {bar:<{room}}  {there[0]:.4g} → {last}"


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.0


def _findings(run: Mapping[str, Any], width: int) -> list[str]:
    """One line for each name and level: from which step on, and where."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in sorted(run["findings"], key=lambda one: (-LEVELS.index(one["level"]), one["step"])):
        groups.setdefault((one["level"], one["name"]), []).append(one)
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
