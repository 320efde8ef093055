"""How numbers, names and levels are written for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..._display import safe as safe
from ...health.finding import listed

NUMBER = re.compile(r"\d+")
COLOURS = {
    "healthy": "green",
    "ok": "green",
    "note": "cyan",
    "warn": "yellow",
    "act": "dark_orange",
    "critical": "red",
    "diverging": "bold red",
}


LayerPlace = tuple[str, str]
"""A layer's name and its kind, "self" or "cross"."""


def short_names(places: Iterable[LayerPlace]) -> dict[LayerPlace, str]:
    """Layers without what their names share: encoder.layer.0.attention.self → 0; of several stacks encoder.0, decoder.0 …

    The words that distinguish stacks are kept, from the left and no more than needed, and the numbers that differ within a stack;
    "cross" is added for cross-attention.
    """
    unique = list(dict.fromkeys(places))
    stacks: dict[tuple[str, str], list[LayerPlace]] = {}
    for layer, kind in unique:
        stacks.setdefault((NUMBER.sub("#", layer), kind), []).append((layer, kind))
    patterns = {stack: stack[0].split(".") for stack in stacks}
    words = _telling(patterns)
    found = {}
    for members in stacks.values():
        parts = [layer.split(".") for layer, _ in members]
        counts = {at for at, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1}
        for place, split in zip(members, parts, strict=True):
            kept = ".".join(part for at, part in enumerate(split) if at in counts or at in words)
            found[place] = (kept or place[0] or "(the model)") + (" cross" if place[1] == "cross" else "")
    if len(set(found.values())) < len(unique):
        found = {(layer, kind): layer + (" cross" if kind == "cross" else "") for layer, kind in unique}
    return {place: safe(name) for place, name in found.items()}


def _telling(patterns: Mapping[LayerPlace, Sequence[str]]) -> set[int]:
    """The places of the words that distinguish stacks of one kind."""
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
    """A layer, and those of its heads that are meant."""
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
    there = [number for number in numbers if number is not None]
    return sum(there) / len(there) if there else None


def number(value: float | None, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.2e}"


def count(number: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)
