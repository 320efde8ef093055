"""pronouns: pairs of sentences that differ in one word, which decides what a pronoun refers to.

In a pair by *meaning* the word comes after "it", and only what the words mean decides: a ball is round, a dog is fast. In a pair
by *agreement* the pronoun itself is exchanged, and its form decides: "he" is the king. Every word that is named here is one token
of the embedded model, so both sentences of a pair have the same tokens but one. No pair was taken out for what it measured.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import NamedTuple


class PronounPair(NamedTuple):
    """A sentence with a gap ``{}``; the words that fill it refer the pronoun to ``first`` or to ``second``."""

    sentence: str
    first: str
    second: str
    for_first: str
    for_second: str

    @property
    def texts(self) -> tuple[str, str]:
        """Both sentences: about the first noun, about the second."""
        return self.sentence.format(self.for_first), self.sentence.format(self.for_second)


_WORDS = tomllib.loads((files(__package__) / "pronouns.toml").read_text(encoding="utf-8"))


def _meaning() -> tuple[PronounPair, ...]:
    fitting = [
        PronounPair(f"The {thing} did not fit {where} because it was too {{}}.", thing, where.split()[-1], *words)
        for thing, where, *words in _WORDS["fitting"]
    ]
    because = [
        PronounPair(f"The {said} because it was {{}}.", said.split()[0], said.split()[-1], *words)
        for said, *words in _WORDS["because"]
    ]
    return (*because, *fitting)


def _agreement() -> tuple[PronounPair, ...]:
    """Every couple in both orders, so that no place in the sentence belongs to one pronoun."""
    couples, meetings = _WORDS["couples"], _WORDS["meetings"]
    ordered = [(*couple, "he", "she") for couple in couples] + [(*couple[::-1], "she", "he") for couple in couples]
    return tuple(
        PronounPair(meetings[index % len(meetings)].format(first, second), first, second, *pronouns)
        for index, (first, second, *pronouns) in enumerate(ordered)
    )


PRONOUN_PAIRS = {"meaning": _meaning(), "agreement": _agreement()}
"""By what decides."""
