"""How numbers, names, levels and checks are written for people."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..._display import plural
from ..._display import safe as safe
from ...health.faults import CHECKS
from ...health.finding import listed
from ...watch.examine import split_number
from ..document import Json

if TYPE_CHECKING:
    from rich.table import Table

NUMBER = re.compile(r"\d+")
GAP = 2  # columns of the terminal between two of a table
COLOURS = {
    "healthy": "green",
    "ok": "green",
    "note": "cyan",
    "warn": "yellow",
    "error": "dark_orange",
    "critical": "red",
    "diverging": "bold red",
}


LayerKey = tuple[str, str]
"""A layer's name and its kind, "self" or "cross"."""


def short_names(places: Iterable[LayerKey]) -> dict[LayerKey, str]:
    """Layers without what their names share: encoder.layer.0.attention.self → 0; with several stacks encoder.0, decoder.0 …

    A name keeps the words that distinguish its stack, from the left and no more than needed, and the numbers that differ within
    the stack, such as the call number of a shared layer; "cross" is added for cross-attention.
    """
    unique = list(dict.fromkeys(places))
    stacks: dict[tuple[str, str], list[LayerKey]] = {}
    for layer, kind in unique:
        stacks.setdefault((NUMBER.sub("#", split_number(layer)[0]), kind), []).append((layer, kind))
    patterns = {stack: stack[0].split(".") for stack in stacks}
    words = _distinguishing(patterns)
    short = {}
    for members in stacks.values():
        parts = [_parts(layer) for layer, _ in members]
        counts = {at for at, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1}
        for place, split in zip(members, parts, strict=True):
            shown = ".".join(part for at, part in enumerate(split) if at in counts or at in words)
            short[place] = (shown or place[0] or "(the model)") + (" cross" if place[1] == "cross" else "")
    if len(set(short.values())) < len(unique):
        short = {(layer, kind): layer + (" cross" if kind == "cross" else "") for layer, kind in unique}
    return {place: safe(name) for place, name in short.items()}


def _parts(layer: str) -> list[str]:
    """The words of a layer's name, and the number of its call."""
    name, number = split_number(layer)
    return [*name.split("."), str(number)]


def _distinguishing(patterns: Mapping[LayerKey, Sequence[str]]) -> set[int]:
    """The indices of the words that distinguish stacks of one kind."""
    chosen: set[int] = set()

    def alike() -> int:
        return len(
            {
                (kind, *(words[at] if at < len(words) else "" for at in sorted(chosen)))
                for (_, kind), words in patterns.items()
            }
        )

    for at in range(max(map(len, patterns.values()), default=0)):
        if alike() == len(patterns):
            break
        before = alike()
        chosen.add(at)
        if alike() == before:
            chosen.remove(at)
    return chosen


def where(layer: str, kind: str, heads: Iterable[int | None]) -> str:
    """A layer and some of its heads, in words."""
    numbers = [head for head in heads if head is not None]
    named = f"{'heads' if len(numbers) > 1 else 'head'} {listed(numbers)}" if numbers else ""
    return f"{safe(layer) or 'the model'}{' (cross)' if kind == 'cross' else ''} {named}".strip()


def broken(words: str, width: int) -> str:
    """Text in which words wider than a line are broken after a dot, if they have one."""
    return re.sub(r"\S+", lambda word: "\n".join(_at_dots(word[0], width)), words)


def _at_dots(word: str, width: int) -> Iterator[str]:
    while len(word) > width and "." in word[:width]:
        end = word.rindex(".", 0, width) + 1
        yield word[:end]
        word = word[end:]
    yield word


def mean(numbers: Iterable[float | None]) -> float | None:
    present = [number for number in numbers if number is not None]
    return sum(present) / len(present) if present else None


def number(value: float | None, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.2e}"


def count(number: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)


def summary(document: Json) -> str | None:
    """How many checks passed, failed, were not judged and did not apply, in a few words; None: the document has no checks."""
    checks = document.get("checks") or []
    if not checks:
        return None
    passed, failed = (sum(result["state"] == state for result in checks) for state in ("passed", "failed"))
    words = f"{passed} of {passed + failed} passed"
    if failed:
        words += f"; failed: {', '.join(_spaced(result) for result in checks if result['state'] == 'failed')}"
    skipped = [result for result in checks if result["state"] == "skipped"]
    for what, needs in (("not judged", True), ("not applicable", False)):
        some = [_spaced(check) for check in skipped if ("needs" in check) == needs]
        words += f"; {what}: {', '.join(some)}" if some else ""
    deep = sum(check.deep for check in CHECKS.values())
    return words if any(result["deep"] for result in checks) else f"{words}; --deep adds {plural(deep, 'experiment')}"


def sentences(document: Json) -> Iterator[str]:
    """A line for each experiment: its result, or what it needs."""
    for check in document.get("checks") or []:
        if check["deep"]:
            state, needs = ("not judged", f" (pass {check['needs']})") if "needs" in check else (check["state"], "")
            yield f"{_spaced(check)} {state}: {check['message'].rstrip('.')}{needs}"


def _spaced(check: dict[str, Any]) -> str:
    return str(check["name"]).replace("_", " ")


def grid_of(*titles: str, folded: Collection[str]) -> Table:
    """An empty table of numbers, and of text that may continue on the next line in the columns ``folded``."""
    from rich.table import Table

    grid = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
    for title in titles:
        if title in folded:
            grid.add_column(title, overflow="fold", min_width=5)
        else:
            grid.add_column(title, justify="right", no_wrap=True)
    return grid
