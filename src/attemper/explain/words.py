"""Words as they are shown: without what a terminal or a page would obey instead of showing, and no wider than reads well."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from itertools import accumulate

MOST_CELLS = 24
"""The widest a word is shown; a wide letter (漢) takes two cells."""
MOST_LETTERS = 2 * MOST_CELLS  # accents take no cell, and thousands may stand on one letter


def clean(text: str) -> str:
    """Without control and direction characters; one that is white space becomes a space."""
    return "".join(letter if letter.isprintable() else " " * letter.isspace() for letter in text)


def shown(word: str) -> str:
    """A word as a label; what was cut shows as an ellipsis, and one without a visible letter as a dot."""
    word = clean(word).strip() or "·"
    cells = list(accumulate(map(_cells, word)))
    if cells[-1] <= MOST_CELLS and len(word) <= MOST_LETTERS:
        return word
    return word[: min(bisect_right(cells, MOST_CELLS - 1), MOST_LETTERS)] + "…"


def _cells(letter: str) -> int:
    if unicodedata.category(letter) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in ("W", "F") else 1
