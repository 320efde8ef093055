"""render: experiments, verdicts, claims and cards for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from . import NAMES, experiment
from .experiment import Expectation, Experiment, Rows

if TYPE_CHECKING:
    from .cards import Card
    from .claims import Judged

MARKS = {True: "✓", False: "✗"}


def listing(console: Console) -> None:
    """Every experiment: what it asks, and its options with what they are when left out."""
    for name in NAMES:
        found = experiment(name)
        time = "minutes: it trains" if found.trains else "seconds"
        console.print(f"{name}", style="bold", end="")
        console.print(f"  {found.question} ({', '.join((*found.claims, time))})")
        for parameter in found.parameters:
            shown = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in parameter.default)
            console.print(f"    --{parameter.name} {shown}", end="")
            console.print(f"  {parameter.says}", style="dim")
        for preset in found.presets:
            console.print(f"    --preset {preset}")


def show(found: Experiment, rows: Rows, console: Console) -> None:
    """What the rows say, and every expectation beside its measurement."""
    verdict = found.verdict(rows)
    console.print(found.question, style="bold")
    console.print(verdict.sentence + ".")
    if not verdict.expectations:
        console.print("\nNo closed form or published number is known for these settings.", style="dim")
        return
    console.print()
    console.print(expectations(verdict.expectations))
    agreeing = sum(one.agrees for one in verdict.expectations)
    console.print(f"\n{agreeing} of {len(verdict.expectations)} numbers lie within their interval.", style="dim")


def expectations(found: Iterable[Expectation]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("quantity", overflow="fold", ratio=3)
    for name in ("expected", "measured", "within"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("source", overflow="fold", ratio=2)
    for one in found:
        numbers = (number(one.expected), number(one.measured), f"±{number(one.within)}")
        table.add_row(one.quantity, *numbers, MARKS[one.agrees], one.source)
    return table


def number(value: float | None) -> str:
    """For people: NaN and None are a dash."""
    return "–" if value is None or value != value else "∞" if value == math.inf else f"{value:.4g}"


def claims(found: Iterable[Judged], console: Console) -> None:
    """Every claim: its sentence, its verdict, the numbers, the condition, and where to look further."""
    styles = {
        "holds": "green",
        "holds with a condition": "yellow",
        "false": "red",
        "not decided": "cyan",
        "not run": "dim",
    }
    for one in found:
        console.print(f"{one.claim.id:4}", style="bold", end="")
        console.print(one.claim.sentence)
        console.print(f"    {one.verdict}", style=styles[one.verdict], end="")
        console.print(f": {one.condition}" if one.condition else "")
        for intro, some in (("", one.numbers), ("beside it: ", one.context)):
            if some:
                shown = " · ".join(f"{name} {number(value)}" for name, value in some.items())
                console.print(f"    {intro}{shown}", style="dim")
        if one.claim.look:
            console.print(f"    attemper {one.claim.look}", style="dim")


def cards(found: Iterable[Card], console: Console) -> None:
    for place, card in enumerate(found, start=1):
        console.print(f"{place:2}. {card.question}", style="bold")
        console.print(f"    {card.answer}")
        console.print(f"    measured now: {card.measured}", style="dim")
