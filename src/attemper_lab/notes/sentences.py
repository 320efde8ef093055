"""sentences: every factual sentence of five notes on √d_k (sentences.toml), in our words, with the claims that judge it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

DEFINITION, ARITHMETIC, VAGUE = "definition", "arithmetic", "not measurable"


class NoteSentence(NamedTuple):
    """One sentence: what it says, the claims that judge it, or why none does."""

    says: str
    claims: Sequence[str] = ()
    kind: str = ""
    remark: str = ""


def _notes() -> dict[str, tuple[NoteSentence, ...]]:
    content = tomllib.loads((files(__package__) / "sentences.toml").read_text(encoding="utf-8"))
    return {number: tuple(NoteSentence(**sentence) for sentence in note) for number, note in content.items()}


NOTES = _notes()
"""The sentences by the number of their note, 000 to 004."""


def said(claim: str) -> list[tuple[str, str]]:
    """Each note that makes a claim, and the sentence that makes it most directly: the claim comes first in its list."""
    sentences: list[tuple[str, str]] = []
    for number, note in NOTES.items():
        makes_it = [sentence for sentence in note if claim in sentence.claims]
        if makes_it:
            best = min(makes_it, key=lambda sentence: (sentence.claims.index(claim), len(sentence.claims)))
            sentences.append((number, best.says))
    return sentences
