"""Makes docs/notes.md: the five notes, sentence by sentence, with verdicts measured now; and its figures.

`python -m research.notes`            the page and its figures
`python -m research.notes --page`     the page alone
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from attemper_lab import NAMES, experiment
from attemper_lab.claims import claims
from attemper_lab.claims.claims import NOTE_CLAIMS, JudgedClaim
from attemper_lab.engine import output
from attemper_lab.engine.render import number
from attemper_lab.notes.lines import ONE_LINE
from attemper_lab.notes.sentences import NOTES, NoteSentence
from scripts.blocks import filled

from .numbers import anchored, cell
from .reading import CREDITS, HINGLISH, SYMBOLS, TAKEAWAYS

DOCS = Path(__file__).parents[1] / "docs"

TITLES = {
    "000": "what d_k is, and the flow",
    "001": "why √d_k and not √d",
    "002": "an overview with a reading example",
    "003": "notes on a video",
    "004": "from plain to scaled dot products",
}

INTRO = """\
# The notes, sentence by sentence

<!-- made by `python -m research.notes`; do not edit -->

Five study notes on √d_k, of the kind that people learn from, restated in our words and checked by measurement. Every
factual sentence of a note has the verdict of one or more *claims* (C1 to C36), and one number of the first; the link leads to
its condition and all its numbers. A verdict is *holds*, *holds with a condition*, *false* or *not decided*. `attemper claims`
judges all claims on your machine, and `attemper claims C6` tells the story of one. The derivation in one piece is
[why-sqrt-dk.md](why-sqrt-dk.md).
"""


class ClaimLine(NamedTuple):
    """A claim as the page shows it: its verdict, its one number in words, and where its row is."""

    verdict: str
    shown: str
    link: str


def lines_of(judged: list[JudgedClaim]) -> dict[str, ClaimLine]:
    """The claims by their id."""
    found = {}
    for one in judged:
        page = "" if one.claim.from_notes else "why-sqrt-dk.md"
        found[one.claim.id] = ClaimLine(one.verdict, one.shown, f"[{one.claim.id}]({page}#{one.claim.id.lower()})")
    return found


def page(judged: list[JudgedClaim]) -> str:
    """The whole page."""
    lines = lines_of(judged)
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
    for says, found, ids in TAKEAWAYS:
        verdicts = ", ".join(f"{lines[claim].link} {lines[claim].verdict}" for claim in ids)
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
    yield "| | it says | verdict | measured |"
    yield "|---|---|---|---|"
    for index, one in enumerate(sentences, start=1):
        if one.claims:
            verdicts = ", ".join(f"{lines[claim].link} **{lines[claim].verdict}**" for claim in one.claims)
            cells = (f"{note}.{index}", one.says, verdicts, f"{lines[one.claims[0]].shown}. {one.remark}".strip(". "))
        else:
            cells = (f"{note}.{index}", one.says, one.kind, one.remark)
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
            cells = (
                one.claim.id,
                anchored(one.claim.id, one.claim.sentence),
                verdict,
                shown + (f"; *{beside}*" if beside else ""),
            )
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


def main(options: list[str]) -> None:
    own = {claim.id for claim in NOTE_CLAIMS}
    if "--page" not in options:
        for name in (name for name in NAMES if set(experiment(name).claims) & own):
            print(f"docs/figures/{name}.svg", file=sys.stderr)
            found = experiment(name)
            output.write(DOCS / "figures" / f"{name}.svg", found, found.run())
    judged = claims.run(note=lambda line: print(line, file=sys.stderr))
    (DOCS / "notes.md").write_text(filled(page(judged)), encoding="utf-8")
    print("docs/notes.md", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
