"""show: claims and cards for a terminal, and the claims as one HTML file that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from rich.console import Console
from rich.text import Text

from attemper.extension.tools import hanging

from ..engine.render import number
from ..notes.sentences import said
from .cards import Card
from .claims import JudgedClaim, tally

WORD = re.compile(r"[a-z]+[ ,]")
STYLES = {"holds": "green", "holds with a condition": "yellow", "false": "red", "not decided": "cyan", "not run": "dim"}


SHORT = {"holds with a condition": "holds if", "not decided": "open"}
COUNTED = {"holds": "hold", "holds with a condition": "hold with a condition", "false": "are false"}
ID, VERDICT, SENTENCE = 5, 9, 38


def line(claim: JudgedClaim, console: Console) -> None:
    """Print a claim in one line, its short sentence, verdict and one number; a narrow terminal folds the line."""
    verdict = SHORT.get(claim.verdict, claim.verdict)
    number = claim.shown or claim.condition.rpartition(": ")[2]
    style = STYLES[claim.verdict]
    row = Text.assemble(
        (f"{claim.claim.id:{ID}}", "bold"), (f"{verdict:{VERDICT}}", style), f"{claim.claim.short:{SENTENCE}} ", (number, "dim")
    )  # fmt: skip
    if row.cell_len <= console.width:
        console.print(row, no_wrap=True)
    else:
        hanging(console, Text.assemble((verdict, style), f": {claim.claim.short}: ", (number, "dim")), claim.claim.id)


def closing(judged: Sequence[JudgedClaim], console: Console) -> None:
    """The tally, and where the rest of a claim is."""
    counts = ", ".join(f"{count} {COUNTED.get(verdict, verdict)}" for verdict, count in tally(judged).items())
    words = (
        f"{len(judged)} claims: {counts}. attemper claims C6 tells the whole story of one: its sentence, its condition and every "
        "number. What trained models say was measured before and comes with the package; --train trains here."
    )
    console.print()
    for part in Text(words).wrap(console, console.width):
        part.rstrip()
        console.print(part)


def story(claim: JudgedClaim, console: Console) -> None:
    """A claim whole: its sentence, who says it, the verdict with its condition, the numbers one by one, the command for more."""
    hanging(console, Text(claim.claim.sentence, style="bold"), claim.claim.id)
    for note, words in said(claim.claim.id):
        hanging(console, Text(f"Note {note}: {words}", style="italic dim"))
    condition = f": {claim.condition}" if claim.condition else ""
    hanging(console, Text.assemble("Verdict: ", (claim.verdict, STYLES[claim.verdict]), condition, "."))
    for intro, some in (
        ("Measured; each number can change the verdict:", claim.numbers),
        ("To compare:", claim.context),
    ):
        if some:
            hanging(console, Text(intro, style="dim"))
            for name, value in some.items():
                hanging(console, Text(f"- {_sentence(name)}: {number(value)}.", style="dim"))
    if claim.claim.look:
        hanging(console, Text(f"Measure more: attemper {claim.claim.look}", style="dim"))


def _sentence(label: str) -> str:
    """A label that begins with a word gets a capital; a symbol stays as it is written: d_k, softmax([7, 3])."""
    return label[:1].upper() + label[1:] if WORD.match(label) else label


def cards(deck: Iterable[Card], console: Console) -> None:
    """Every card: the question, the answer, and the number just measured."""
    for index, card in enumerate(deck, start=1):
        hanging(console, Text(card.question, style="bold"), f"{index:2}.")
        hanging(console, Text(card.answer))
        hanging(console, Text(f"measured now: {card.measured}", style="dim"))


STYLE = """
:root { color-scheme: light dark; --line: #8884; --holds: #0072b2; --cond: #b26a00; --false: #c0392b; --not: #777; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
article { border-top: 1px solid var(--line); padding: .8rem 0; display: grid; grid-template-columns: 3.5rem 1fr; }
article > b { font-variant-numeric: tabular-nums; }
p { margin: .2rem 0; } dl { margin: .4rem 0; display: grid; grid-template-columns: minmax(12rem, max-content) 1fr; gap: 0 1rem; }
dt { color: var(--not); } dd { margin: 0; font-variant-numeric: tabular-nums; } dd.context { color: var(--not); }
.v { font-weight: 600; } .holds { color: var(--holds); } .cond { color: var(--cond); } .false { color: var(--false); }
.not, .note { color: var(--not); } .note { font-style: italic; }
@media (prefers-color-scheme: dark) { :root { --holds: #56b4e9; --cond: #e69f00; --false: #ff7f6e; --not: #aaa; } }
"""
CLASSES = {"holds": "holds", "holds with a condition": "cond", "false": "false", "not decided": "not", "not run": "not"}


def page(document: dict[str, Any]) -> str:
    """What :func:`attemper_lab.claims.claims.document` returns, as a page."""
    judged = document["claims"]
    counts = {verdict: sum(claim["verdict"] == verdict for claim in judged) for verdict in CLASSES}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    machine = document["environment"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Common claims about √d_k, measured</title><style>{STYLE}</style></head><body>"
        f"<h1>Common claims about √d_k, measured</h1><p>{len(judged)} claims: {escape(summary)}. attemper "
        f"{escape(machine['attemper'])}, torch {escape(machine['torch'])}, {escape(machine['cpu']['model'])}.</p>"
        + "".join(map(_claim, judged))
        + "</body></html>"
    )


def _claim(claim: dict[str, Any]) -> str:
    numbers = "".join(
        f'<dt>{escape(name)}</dt><dd class="{group}">{"–" if value is None else format(value, ".4g")}</dd>'
        for group in ("numbers", "context")
        for name, value in claim[group].items()
    )
    condition = f": {escape(claim['condition'])}" if claim["condition"] else ""
    look = f"<p><code>{escape(claim['look'])}</code></p>" if claim["look"] else ""
    says = "".join(f"<p class='note'>Note {escape(each['note'])}: {escape(each['says'])}</p>" for each in claim["said"])
    return (
        f"<article><b>{claim['id']}</b><div><p>{escape(claim['claim'])}</p>{says}"
        f'<p><span class="v {CLASSES[claim["verdict"]]}">{claim["verdict"]}</span>{condition}</p>'
        f"<dl>{numbers}</dl>{look}</div></article>"
    )
