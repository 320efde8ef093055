"""show: claims and cards for a terminal, and the claims as one HTML file that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Any

from rich.console import Console
from rich.text import Text

from ..._display import hanging
from ..engine.render import number
from ..notes.sentences import said
from .cards import Card
from .claims import JudgedClaim

WORD = re.compile(r"[a-z]+[ ,]")
STYLES = {"holds": "green", "holds with a condition": "yellow", "false": "red", "not decided": "cyan", "not run": "dim"}


def claims(found: Iterable[JudgedClaim], console: Console) -> None:
    """Every claim: its sentence, who says it, the verdict with its condition, the numbers one by one, the command for more."""
    console.print(
        "Each claim is followed by what the notes of docs/notes.md say, in our words; by the verdict on it; by the numbers that "
        "decide the verdict, and others to compare them with; and by a command that measures more.\n"
    )
    for one in found:
        hanging(console, Text(one.claim.sentence, style="bold"), one.claim.id)
        for note, words in said(one.claim.id):
            hanging(console, Text(f"Note {note}: {words}", style="italic dim"))
        condition = f": {one.condition}" if one.condition else ""
        hanging(console, Text.assemble("Verdict: ", (one.verdict, STYLES[one.verdict]), condition, "."))
        for intro, some in (("Measured:", one.numbers), ("To compare:", one.context)):
            if some:
                hanging(console, Text(intro, style="dim"))
                for name, value in some.items():
                    hanging(console, Text(f"- {_sentence(name)}: {number(value)}.", style="dim"))
        if one.claim.look:
            hanging(console, Text(f"Measure more: attemper {one.claim.look}", style="dim"))
        console.print()


def _sentence(label: str) -> str:
    """A label that begins with a word gets a capital; a symbol stays as it is written: d_k, softmax([7, 3])."""
    return label[:1].upper() + label[1:] if WORD.match(label) else label


def cards(found: Iterable[Card], console: Console) -> None:
    """Every card: the question, the answer, and the number just measured."""
    for place, card in enumerate(found, start=1):
        hanging(console, Text(card.question, style="bold"), f"{place:2}.")
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
    """What :func:`attemper.lab.claims.claims.document` returns, as a page."""
    found = document["claims"]
    counts = {verdict: sum(one["verdict"] == verdict for one in found) for verdict in CLASSES}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    machine = document["environment"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Common claims about √d_k, measured</title><style>{STYLE}</style></head><body>"
        f"<h1>Common claims about √d_k, measured</h1><p>{len(found)} claims: {escape(summary)}. attemper "
        f"{escape(machine['attemper'])}, torch {escape(machine['torch'])}, {escape(machine['cpu']['model'])}.</p>"
        + "".join(map(_claim, found))
        + "</body></html>"
    )


def _claim(one: dict[str, Any]) -> str:
    numbers = "".join(
        f'<dt>{escape(name)}</dt><dd class="{group}">{"–" if value is None else format(value, ".4g")}</dd>'
        for group in ("numbers", "context")
        for name, value in one[group].items()
    )
    condition = f": {escape(one['condition'])}" if one["condition"] else ""
    look = f"<p><code>{escape(one['look'])}</code></p>" if one["look"] else ""
    says = "".join(f"<p class='note'>Note {escape(each['note'])}: {escape(each['says'])}</p>" for each in one["said"])
    return (
        f"<article><b>{one['id']}</b><div><p>{escape(one['claim'])}</p>{says}"
        f'<p><span class="v {CLASSES[one["verdict"]]}">{one["verdict"]}</span>{condition}</p>'
        f"<dl>{numbers}</dl>{look}</div></article>"
    )
