"""The tables of --what-if, --token and --baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..._display import plural
from ...health import LEVELS
from ..document import Json, plain
from ..what_if import summed_up
from .format import COLOURS, broken, grid_of, number, safe, short_names, where

HEADS, KEYS = 6, 3
"""How many are shown."""
WIDE = 64  # columns for the long titles


def compared(document: Json, width: int = 80) -> Iterator[RenderableType]:
    """The tables, each followed by an empty line."""
    for name, part in (("what_if", _what_if), ("token", _token), ("baseline", since)):
        if name in document:
            yield from part(document, width)
            yield Text()


def _what_if(document: Json, width: int) -> Iterator[RenderableType]:
    yield Text("What if the scale were different?", style="bold")
    wide = ("scale", "logit std", "peak", "effective keys", "saturated heads")
    grid = grid_of(*(wide if width >= WIDE else ("scale", "std", "peak", "keys", "saturated")), folded=("scale",))
    for row in (plain(summed_up("as it is", document["heads"])), *document["what_if"]):
        frozen = f"{row['saturated_heads']} of {len(row['heads'])}"
        numbers = (number(row["logit_std"], 2), number(row["peak"], 1), number(row["effective_keys"], 2))
        grid.add_row(safe(row["rule"]), *numbers, frozen)
    yield grid
    yield Text("saturated heads: over half of their tokens have 99 % of their attention on one", style="dim")


def _token(document: Json, width: int) -> Iterator[RenderableType]:
    token = document["token"]
    words = document["inputs"][token["input"]]["tokens"] or []
    best = token["best"]
    if best is None:
        asked = repr(safe(token["asked"]))
        if not token["heads"]:
            yield Text(f"{asked}: no self-attention call was found over this text.")
        else:
            yield Text(
                f"{asked} attends to nothing but itself, its neighbours and special tokens. Choose another --token."
            )
        return
    names = short_names((row["layer"], row["kind"]) for row in document["heads"])
    where = f"layer {names[best['layer'], best['kind']]} head {best['head']}"
    rest = "heads on a token that is not special or next to it"
    sentence = f"{best['weight']:.2f} in {where}, the largest weight in {len(token['heads'])} {rest}"
    if best.get("others") is not None:
        sentence += f"; other tokens give {safe(best['token'])} {best['others']:.2f} there on average"
    yield Text.assemble((f"{safe(token['token'])} → {safe(best['token'])}  ", "bold"), sentence)
    yield _token_heads(document, names, words)
    yield Text(
        "in brackets: the mean weight that other tokens give the same token; a large weight shows what a head reads, not what "
        f"{safe(token['token'])!r} refers to",
        style="dim",
    )
    if any("token" in rule for rule in document.get("what_if", ())):
        yield Text()
        yield from _token_under_rules(document, names)


def _token_heads(document: Json, names: dict[tuple[str, str], str], words: list[str]) -> Table:
    """The heads that give another token most, with what their other queries give it."""
    token = document["token"]
    grid = grid_of("layer", "head", "attends to", folded=("layer", "attends to"))
    special = document["inputs"][token["input"]]["special"] or [False] * len(words)

    def keys(row: Json, near: bool) -> list[tuple[float, int]]:
        """Its largest weights, without special tokens and itself; to rank heads, also without the neighbours."""
        heads = [
            (weight, place)
            for place, weight in enumerate(row["weights"])
            if weight and not special[place] and abs(place - token["position"]) > (0 if near else 1)
        ]
        return sorted(heads, reverse=True)[:KEYS]

    def rank(row: Json) -> float:
        return max((weight for weight, _ in keys(row, near=False)), default=0.0)

    def in_brackets(row: Json, place: int) -> str:
        others = (row.get("others") or {place: None})[place]
        return "" if others is None else f" ({others:.2f})"

    for row in sorted(token["heads"], key=rank, reverse=True)[:HEADS]:
        named = (
            f"{safe(words[place])} {weight:.2f}{in_brackets(row, place)}" for weight, place in keys(row, near=True)
        )
        grid.add_row(names[row["layer"], row["kind"]], str(row["head"]), "  ".join(named))
    return grid


def _token_under_rules(document: Json, names: dict[tuple[str, str], str]) -> Iterator[RenderableType]:
    """The weight between two tokens under each scale: in the head of the first table, and in the head that then gives most."""
    token, best = document["token"], document["token"]["best"]
    chosen, at = (best["layer"], best["kind"], best["head"]), best["position"]
    pair = f"{safe(token['token'])} → {safe(best['token'])}"
    yield Text.assemble((f"{pair}  ", "bold"), f"under other scales, in layer {names[chosen[:2]]} head {chosen[2]}")
    grid = grid_of("scale", "weight", "others", "largest", "of head", folded=("scale", "of head"))
    rescaled = [(run["rule"], run["token"]) for run in document["what_if"] if "token" in run]
    for rule, under in (("as it is", token), *rescaled):
        rows = {(row["layer"], row["kind"], row["head"]): row for row in under["heads"]}
        if chosen in rows:
            most = max(rows, key=lambda head: rows[head]["weights"][at] or 0.0)
            others = rows[chosen].get("others") or {at: None}
            weights = (rows[chosen]["weights"][at], others[at], rows[most]["weights"][at])
            grid.add_row(safe(rule), *(number(weight, 2) for weight in weights), f"{names[most[:2]]}.{most[2]}")
    yield grid
    yield Text("others: the mean weight of other tokens in that head; largest: of all heads", style="dim")


LINES = 8
"""How many of each are shown; the rest is counted."""


def since(document: Json, width: int) -> Iterator[RenderableType]:
    """The older scan, what was not compared, and what changed."""
    baseline = document["baseline"]
    yield Text.assemble(("Since ", "bold"), (safe(baseline["file"]), "bold"), f" ({safe(baseline['created'])})")
    for line in baseline["differences"]:
        yield Text(f"{line[:1].upper()}{safe(line[1:])}", style=COLOURS["warn"])
    if baseline["uncompared"]:
        number = len(baseline["uncompared"])
        yield Text(f"{plural(number, 'note')} of this scan {'was' if number == 1 else 'were'} not compared.")
    lines = list(_lines(baseline))
    if not lines:
        heads = f"{baseline['compared']} of {plural(len(document['heads']), 'head')}"
        signs = f"no sign moved, in {heads}" if baseline["compared"] else "signs were not compared"
        yield Text(f"Nothing changed: the same findings, the same scales; {signs}.")
    for line in lines:
        yield Text(broken(line, width))


def _lines(baseline: Json) -> Iterator[str]:
    levels = baseline["levels"]
    worse = [
        change for change in levels if LEVELS.index(change["after"]["level"]) > LEVELS.index(change["before"]["level"])
    ]
    milder = [change for change in levels if change not in worse]
    yield from _cut(baseline["new"], _about, lambda some: _finding("new", some), "new findings")
    yield from _cut(worse, _step, lambda some: _change("worse", some), "findings that are worse")
    yield from _cut(milder, _step, lambda some: _change("milder", some), "findings that are milder")
    yield from _cut(baseline["gone"], _about, lambda some: _finding("gone", some), "findings that are gone")
    yield from _cut(
        baseline["scales"], lambda change: (_scale(change["before"]), _scale(change["after"])), _scales, "scales"
    )
    signs = f"signs that moved by over {baseline['factor']} times"
    yield from _cut(baseline["moved"], lambda change: (change["layer"], change["kind"], change["sign"]), _moved, signs)


def _cut(
    changes: Sequence[Json],
    key: Callable[[Json], tuple[Any, ...]],
    line: Callable[[list[Json]], str],
    called: str,
) -> Iterator[str]:
    """A line for each group of changes with one key; beyond ``LINES`` of them, how many changes are left out."""
    groups: dict[tuple[Any, ...], list[Json]] = {}
    for change in changes:
        groups.setdefault(key(change), []).append(change)
    lines = list(groups.values())
    yield from map(line, lines[:LINES])
    more = sum(map(len, lines[LINES:]))
    if more:
        yield f"and {more} more {called}; --json has them"


def _about(change: Json) -> tuple[Any, ...]:
    return tuple(change[name] for name in ("level", "name", "fault", "layer", "kind"))


def _step(change: Json) -> tuple[Any, ...]:
    return change["before"]["level"], *_about(change["after"])


def _finding(word: str, some: list[Json]) -> str:
    first, most = some[0], max(some, key=_past)
    place = where(first["layer"], first["kind"], (change["head"] for change in some))
    which = f". Head {most['head']}:" if len(some) > 1 else ":"
    return f"{word}: {first['level']} {safe(first['name'])}, {place}{which} {safe(most['message'])}"


def _past(finding: Json) -> float:
    """How far a finding is past its threshold, on either side."""
    value, threshold = finding["value"], finding["threshold"]
    return 0.0 if value is None or threshold is None else abs(value - threshold)


def _change(word: str, some: list[Json]) -> str:
    most = max(some, key=lambda change: _past(change["after"]))
    before, after = most["before"], most["after"]
    place = where(after["layer"], after["kind"], (change["after"]["head"] for change in some))
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
    ends = [f"× {end(change['times'] for change in some):.2f}" for end in (min, max)]
    place = where(first["layer"], first["kind"], sorted(change["head"] for change in some))
    step = f"{number(first['before'], 2)} → {number(first['after'], 2)}"
    if len(some) == 1:
        return f"moved: {place}: {first['sign']} {step} ({ends[0]})"
    times = ends[0] if ends[0] == ends[1] else " to ".join(ends)
    return f"moved: {place}: {first['sign']} {times}, most in head {first['head']}: {step}"
