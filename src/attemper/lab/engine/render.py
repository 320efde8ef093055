"""render: experiments, verdicts, claims and cards for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..._display import hanging, print_table
from .. import NAMES, experiment
from .experiment import Expectation, Experiment, Rows

if TYPE_CHECKING:
    from ..claims.cards import Card
    from ..claims.claims import Judged

MARKS = {True: "✓", False: "✗"}


def listing(console: Console) -> None:
    """Every experiment: what it asks, and its options with what they are when left out."""
    for name in NAMES:
        found = experiment(name)
        time = "minutes: it trains" if found.trains else "seconds"
        asks = f"  {found.question} ({', '.join((*found.claims, time))})"
        console.print(Text.assemble((name, "bold"), asks))
        for parameter in found.parameters:
            shown = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in parameter.default)
            hanging(console, Text.assemble(f"{parameter.flag} {shown}", (f"  {parameter.says}", "dim")))
        for preset in found.presets:
            hanging(console, Text(f"--preset {preset}"))


def show(found: Experiment, rows: Rows, console: Console) -> None:
    """What the rows say, and every expectation beside its measurement."""
    verdict = found.verdict(rows)
    console.print(found.question, style="bold")
    console.print(verdict.sentence + ".")
    if not verdict.expectations:
        console.print("\nNo closed form or published number is known for these settings.", style="dim")
        return
    console.print()
    print_table(console, expectations(verdict.expectations))
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
        hanging(console, Text(one.claim.sentence), one.claim.id)
        condition = f": {one.condition}" if one.condition else ""
        hanging(console, Text.assemble((one.verdict, styles[one.verdict]), condition))
        for intro, some in (("", one.numbers), ("beside it: ", one.context)):
            if some:
                shown = " · ".join(f"{name} {number(value)}" for name, value in some.items())
                hanging(console, Text(f"{intro}{shown}", style="dim"))
        if one.claim.look:
            hanging(console, Text(f"attemper {one.claim.look}", style="dim"))


def cards(found: Iterable[Card], console: Console) -> None:
    for place, card in enumerate(found, start=1):
        hanging(console, Text(card.question, style="bold"), f"{place:2}.")
        hanging(console, Text(card.answer))
        hanging(console, Text(f"measured now: {card.measured}", style="dim"))
