"""render: the list of experiments, and what one of them found, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attemper.extension.tools import hanging, print_table

from .. import NAMES, experiment
from .experiment import Expectation, Experiment, Rows

MARKS = {True: "✓", False: "✗"}


def listing(console: Console) -> None:
    """Every experiment: its question, and its options with their defaults."""
    console.print("Each experiment answers one question. Below it are its options, with their default values.")
    console.print("Claims such as C4 are those that `attemper claims` judges.")
    for name in NAMES:
        listed = experiment(name)
        console.print()
        console.print(Text.assemble((name, "bold"), f"  {listed.question}"))
        claims = f"claim{'s' if len(listed.claims) > 1 else ''} {', '.join(listed.claims)}; " if listed.claims else ""
        hanging(
            console, Text(f"{claims}takes {'minutes, since it trains' if listed.trains else 'seconds'}", style="dim")
        )
        for parameter in listed.parameters:
            shown = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in parameter.default)
            hanging(console, Text.assemble(f"{parameter.flag} {shown}", (f"  {parameter.help}", "dim")))
        for preset in listed.presets:
            hanging(console, Text(f"--preset {preset}"))


def show(subject: Experiment, rows: Rows, console: Console) -> None:
    """The finding, and every expected number with the measured one."""
    verdict = subject.verdict(rows)
    console.print(subject.question, style="bold")
    console.print(verdict.sentence + ".")
    if not verdict.expectations:
        console.print("\nNo closed form or published number is known for these settings.", style="dim")
        return
    console.print()
    print_table(console, expectations(verdict.expectations))
    agreeing = sum(number.agrees for number in verdict.expectations)
    console.print(f"\n{agreeing} of {len(verdict.expectations)} numbers are within their interval.", style="dim")


def expectations(numbers: Iterable[Expectation]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("quantity", overflow="fold", ratio=3)
    for name in ("expected", "measured", "within"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("source", overflow="fold", ratio=2)
    for row in numbers:
        expected, within = row.written()
        table.add_row(row.quantity, expected, number(row.measured), within, MARKS[row.agrees], row.source)
    return table


def number(value: float | None) -> str:
    """In four digits; NaN and None are a dash."""
    return "–" if value is None or value != value else "∞" if value == math.inf else f"{value:.4g}"
