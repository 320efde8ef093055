"""What changed since an older scan, for a terminal: one line per layer and change, with its heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ..._display import plural
from ...health import LEVELS
from ..document import Json
from .format import COLOURS, broken, number, safe, where

LINES = 8
"""How many of each are shown; what is left out is counted."""


def since(document: Json, width: int) -> Iterator[RenderableType]:
    """The older scan, what was not compared, and what changed."""
    found = document["baseline"]
    yield Text.assemble(("Since ", "bold"), (safe(found["file"]), "bold"), f" ({safe(found['created'])})")
    for line in found["says"]:
        yield Text(f"{line[:1].upper()}{safe(line[1:])}", style=COLOURS["warn"])
    if found["uncompared"]:
        number = len(found["uncompared"])
        yield Text(f"{plural(number, 'note')} of this scan {'was' if number == 1 else 'were'} not compared.")
    lines = list(_lines(found))
    if not lines:
        heads = f"{found['compared']} of {plural(len(document['heads']), 'head')}"
        signs = f"no sign moved, in {heads}" if found["compared"] else "signs were not compared"
        yield Text(f"Nothing changed: the same findings, the same scales; {signs}.")
    for line in lines:
        yield Text(broken(line, width))


def _lines(found: Json) -> Iterator[str]:
    levels = found["levels"]
    worse = [one for one in levels if LEVELS.index(one["after"]["level"]) > LEVELS.index(one["before"]["level"])]
    milder = [one for one in levels if one not in worse]
    yield from _cut(found["new"], _about, lambda some: _finding("new", some), "new findings")
    yield from _cut(worse, _step, lambda some: _change("worse", some), "findings that are worse")
    yield from _cut(milder, _step, lambda some: _change("milder", some), "findings that are milder")
    yield from _cut(found["gone"], _about, lambda some: _finding("gone", some), "findings that are gone")
    yield from _cut(found["scales"], lambda one: (_scale(one["before"]), _scale(one["after"])), _scales, "scales")
    signs = f"signs that moved by over {found['factor']} times"
    yield from _cut(found["moved"], lambda one: (one["layer"], one["kind"], one["sign"]), _moved, signs)


def _cut(
    all_of_them: Sequence[Json],
    alike: Callable[[Json], tuple[Any, ...]],
    line: Callable[[list[Json]], str],
    called: str,
) -> Iterator[str]:
    """A line for each group, and how many entries are in the lines that are left out."""
    groups: dict[tuple[Any, ...], list[Json]] = {}
    for one in all_of_them:
        groups.setdefault(alike(one), []).append(one)
    lines = list(groups.values())
    yield from map(line, lines[:LINES])
    more = sum(map(len, lines[LINES:]))
    if more:
        yield f"and {more} more {called}; --json has them"


def _about(one: Json) -> tuple[Any, ...]:
    return tuple(one[name] for name in ("level", "name", "fault", "layer", "kind"))


def _step(one: Json) -> tuple[Any, ...]:
    return one["before"]["level"], *_about(one["after"])


def _finding(word: str, some: list[Json]) -> str:
    first, most = some[0], max(some, key=_past)
    place = where(first["layer"], first["kind"], (one["head"] for one in some))
    which = f". Head {most['head']}:" if len(some) > 1 else ":"
    return f"{word}: {first['level']} {safe(first['name'])}, {place}{which} {safe(most['says'])}"


def _past(finding: Json) -> float:
    """How far a finding is past its threshold, on either side."""
    value, threshold = finding["value"], finding["threshold"]
    return 0.0 if value is None or threshold is None else abs(value - threshold)


def _change(word: str, some: list[Json]) -> str:
    most = max(some, key=lambda one: _past(one["after"]))
    before, after = most["before"], most["after"]
    place = where(after["layer"], after["kind"], (one["after"]["head"] for one in some))
    values = f" {before['value']:.4g} → {after['value']:.4g}" if None not in (before["value"], after["value"]) else ""
    which = f" in head {after['head']}" if len(some) > 1 and values else ""
    return f"{word}: {after['name']}{values}{which} ({before['level']} → {after['level']}), {place}"


def _scale(applied: float | None) -> str:
    return "one that could not be measured" if applied is None else f"{applied:.4g}"


def _scales(some: list[Json]) -> str:
    first = some[0]
    more = f" and {plural(len(some) - 1, 'more layer')}" if len(some) > 1 else ""
    place = where(first["layer"], first["kind"], ())
    return f"scale: {place}{more} applied {_scale(first['before'])}, now {_scale(first['after'])}"


def _moved(some: list[Json]) -> str:
    """The heads of a layer in which one sign moved; the first moved the most."""
    first = some[0]
    ends = [f"× {end(one['times'] for one in some):.2f}" for end in (min, max)]
    place = where(first["layer"], first["kind"], sorted(one["head"] for one in some))
    step = f"{number(first['before'], 2)} → {number(first['after'], 2)}"
    if len(some) == 1:
        return f"moved: {place}: {first['sign']} {step} ({ends[0]})"
    times = ends[0] if ends[0] == ends[1] else " to ".join(ends)
    return f"moved: {place}: {first['sign']} {times}, most in head {first['head']}: {step}"
