"""page: docs/notes.md, from the sentences of the notes and the claims that were just judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .. import NAMES, experiment
from ..claims.claims import JudgedClaim
from ..claims.judgement import NOT_RUN
from ..claims.note_claims import NOTE_CLAIMS
from ..claims.numbers import cell
from ..engine.render import number
from .reading import CREDITS, HINGLISH, ONE_LINE, SYMBOLS, TAKEAWAYS
from .sentences import NOTES, NoteSentence

SHOWN = 2
"""How many numbers of a claim stand in a line."""

TITLES = {
    "000": "what d_k is, and the flow",
    "001": "why √d_k and not √d",
    "002": "an overview with a reading example",
    "003": "notes on a video",
    "004": "from plain to scaled dot products",
}

INTRO = """\
# The notes, sentence by sentence

<!-- made by `python scripts/notes.py`; do not edit -->

Five study notes on √d_k, of the kind that people learn from, restated in our words and checked by measurement. Every
factual sentence of a note has the verdict of one or more *claims* (C1 to C36), the numbers that decide it, and a command
that measures more. A verdict is *holds*, *holds with a condition* (the condition follows), *false* or *not decided*.
`attemper claims` judges all claims on your machine. The derivation in one piece is [why-sqrt-dk.md](why-sqrt-dk.md).
"""


class ClaimLine(NamedTuple):
    """A claim as the page shows it: its verdict, its condition, its numbers in words, the command."""

    verdict: str
    condition: str
    numbers: str
    look: str


def lines_of(judged: list[JudgedClaim], kept: Mapping[str, tuple[str, str, str]]) -> dict[str, ClaimLine]:
    """The claims by their id; ``kept`` has verdict, condition and numbers of those that were not run now, from an earlier run."""
    found = {}
    for one in judged:
        shown = "; ".join(f"{name}: {number(value)}" for name, value in list(one.numbers.items())[:SHOWN])
        parts = (one.verdict, one.condition, shown)
        if one.verdict == NOT_RUN and one.claim.id in kept:
            parts = kept[one.claim.id]
        found[one.claim.id] = ClaimLine(*parts, f"attemper {one.claim.look}")
    return found


def page(judged: list[JudgedClaim], kept: Mapping[str, tuple[str, str, str]]) -> str:
    """The whole page."""
    lines = lines_of(judged, kept)
    parts = [INTRO, *_summary(lines), *_symbols()]
    for note, sentences in NOTES.items():
        parts += [f"## Note {note}: {TITLES[note]}\n", *_table(note, sentences, lines)]
    return "\n".join([*parts, *_details(judged), *_hinglish(), *_credits()]) + "\n"


def _summary(lines: Mapping[str, ClaimLine]) -> Iterator[str]:
    yield "## In one line, for an interview\n"
    yield f"> {ONE_LINE}\n"
    yield "## Takeaways\n"
    yield "| what is said | what was found | verdicts |"
    yield "|---|---|---|"
    for says, found, claims in TAKEAWAYS:
        verdicts = ", ".join(f"{claim} {lines[claim].verdict}" for claim in claims)
        yield f"| {cell(says)} | {cell(found)} | {verdicts} |"
    yield ""


def _symbols() -> Iterator[str]:
    yield "## Symbols\n"
    yield "| symbol | meaning | in attemper |"
    yield "|---|---|---|"
    yield from (f"| {' | '.join(map(cell, row))} |" for row in SYMBOLS)
    yield '\nThe same as a picture, with numbers (`attemper explain "Love Apple phones" -o flow.svg`):\n'
    yield "![The flow from words to context vectors](images/flow.svg)\n"


def _table(note: str, sentences: tuple[NoteSentence, ...], lines: Mapping[str, ClaimLine]) -> Iterator[str]:
    yield "| | it says | verdict | measured | command |"
    yield "|---|---|---|---|---|"
    for place, one in enumerate(sentences, start=1):
        if not one.claims:
            cells = (f"{note}.{place}", one.says, one.kind, one.remark, "")
        else:
            verdicts = "<br>".join(f"{claim} **{lines[claim].verdict}**" for claim in one.claims)
            main = lines[one.claims[0]]
            told = "; ".join(part for part in (main.condition, main.numbers) if part)
            remark = f"{one.remark} " if one.remark else ""
            looks = "<br>".join(dict.fromkeys(f"`{lines[claim].look}`" for claim in one.claims))
            cells = (f"{note}.{place}", one.says, verdicts, f"{remark}{told}", looks)
        yield f"| {' | '.join(map(cell, cells))} |"
    yield ""


def _details(judged: list[JudgedClaim]) -> Iterator[str]:
    """The claims that only the notes make, with every number, and the figures of the experiments behind them."""
    yield "## What the notes say in passing, measured\n"
    yield "The numbers decide the verdict, except those in italics, which are context.\n"
    yield "| | claim | verdict | numbers; *context* |"
    yield "|---|---|---|---|"
    own = {claim.id for claim in NOTE_CLAIMS}
    for one in judged:
        if one.claim.id in own:
            verdict = f"**{one.verdict}**" + (f": {one.condition}" if one.condition else "")
            shown, beside = (
                "; ".join(f"{name} {number(value)}" for name, value in some.items())
                for some in (one.numbers, one.context)
            )
            cells = (one.claim.id, one.claim.sentence, verdict, shown + (f"; *{beside}*" if beside else ""))
            yield f"| {' | '.join(map(cell, cells))} |"
    yield ""
    for name in (name for name in NAMES if set(experiment(name).claims) & own):
        yield f"{experiment(name).question}\n"
        yield f"```sh\nattemper run {name}\n```\n"
        yield f"![{experiment(name).question}](figures/{name}.svg)\n"


def _hinglish() -> Iterator[str]:
    yield "## The same in Hinglish\n"
    yield HINGLISH


def _credits() -> Iterator[str]:
    yield "## Credits\n"
    yield "The notes credit these sources. The wording on this page is ours.\n"
    yield from (f"- Note {note} credits {words}" for note, words in CREDITS)
