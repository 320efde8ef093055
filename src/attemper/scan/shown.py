"""shown: how the numbers, names and levels of a scan are written for a terminal."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Sequence

COLOURS = {
    "healthy": "green",
    "ok": "green",
    "note": "cyan",
    "warn": "yellow",
    "act": "dark_orange",
    "critical": "red",
    "diverging": "bold red",
}


def safe(words: object) -> str:
    """Text from a stranger: what would steer a terminal, or turn a line round, is shown as �."""
    return "".join(c if c == " " or unicodedata.category(c)[0] not in "CZ" else "�" for c in str(words))


def short_names(layers: Sequence[str]) -> tuple[dict[str, str], str]:
    """Layers without what all their names share, and that shared pattern: encoder.layer.*.attention → 0, 1, 2 …"""
    unique = list(dict.fromkeys(layers))
    parts = [name.split(".") for name in unique]
    if len(unique) < 2:
        return {name: name or "(the model)" for name in unique}, "layer"
    start = sum(1 for _ in itertools.takewhile(lambda words: len(set(words)) == 1, zip(*parts, strict=False)))
    ends = zip(*(reversed(words[start:]) for words in parts), strict=False)
    end = sum(1 for _ in itertools.takewhile(lambda words: len(set(words)) == 1, ends))
    end = min(end, min(map(len, parts)) - start - 1)
    if end < 0 or start + end == 0:
        return {name: name or "(the model)" for name in unique}, "layer"
    pattern = ".".join([*parts[0][:start], "*", *parts[0][len(parts[0]) - end :]])
    return {n: ".".join(w[start : len(w) - end]) for n, w in zip(unique, parts, strict=True)}, safe(pattern)


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
