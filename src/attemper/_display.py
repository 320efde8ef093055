"""Text for people: numbers with their nouns, untrusted text without control characters, tables that fit the terminal."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
INDENT = 4
READABLE = 14  # the narrowest column of text
NOT_ASCII = re.compile(r"[^ -~]+")


def plural(number: int, noun: str) -> str:
    """A number with its noun: 1 head, 2 heads."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def block(share: float | None, missing: str) -> str:
    """A share from 0 to 1 as one of eight block characters, ▁ to █."""
    return missing if share is None else BLOCKS[min(len(BLOCKS) - 1, max(0, int(share * len(BLOCKS))))]


def safe(words: object) -> str:
    """One line without control characters and direction marks: white space becomes a space, the others become �."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "�" for c in str(words))


def escaped_json(document: Any) -> str:
    """A document as one line of JSON in which control characters are written as escapes."""
    written = json.dumps(document, ensure_ascii=False)
    return NOT_ASCII.sub(lambda run: "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in run[0]), written)


def hanging(console: Console, words: Text, start: str = "") -> None:
    """Print wrapped text indented by four columns; `start` stands in the indent of the first line. No trailing spaces."""
    from rich.text import Text

    for index, line in enumerate(words.wrap(console, max(1, console.width - INDENT), overflow="fold")):
        line.rstrip()
        console.print(Text.assemble((f"{'' if index else start:{INDENT}}", "bold"), line))


def print_table(console: Console, table: Table) -> None:
    """Print a table; if it is wider than the terminal, print each row as a block of lines, so that no column is cut."""
    from rich.measure import Measurement
    from rich.text import Text

    whole = Measurement.get(console, console.options.update(width=10_000), table).maximum
    for column in table.columns:
        widths = [max(map(len, text.splitlines()), default=0) for text in map(str, (column.header, *column.cells))]
        if not column.no_wrap:  # may be folded, as far as it stays readable
            whole -= max(0, max(widths) - READABLE)
    if whole <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(Text(str(table.title), style="bold"))
    titles = [str(column.header) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        name, *values = map(str, row)
        parts = [f"{title} {value}".strip() for title, value in zip(titles[1:], values, strict=True) if value]
        console.print(Text(name or titles[0]))
        hanging(console, Text(" · ".join(parts), style="dim"))
    if table.caption:
        console.print(Text(str(table.caption), style="dim"))
