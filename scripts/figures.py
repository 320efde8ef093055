"""Makes what docs/ shows of the lab: the figures, docs/numbers.md, and the claims' table in docs/why-sqrt-dk.md.

`python scripts/figures.py` makes all of it; with names, only those experiments' figures.
"""

from __future__ import annotations

import sys
from pathlib import Path

from attemper.lab import NAMES, claims, experiment, numbers, output

DOCS = Path(__file__).parents[1] / "docs"
TABLE = ("<!-- claims -->", "<!-- /claims -->")


def draw(name: str) -> None:
    found = experiment(name)
    rows = found.run()
    output.write(DOCS / "figures" / f"{name}.svg", found, rows)


def claims_table(judged: list[claims.Judged]) -> str:
    """The claims as a Markdown table."""
    lines = ["| | claim | verdict | numbers of this run |", "|---|---|---|---|"]
    for one in judged:
        verdict = f"**{one.verdict}**" + (f": {one.condition}" if one.condition else "")
        shown = "; ".join(f"{name} {value:.3g}" for name, value in one.numbers.items())
        lines.append(
            f"| {one.claim.id} | {numbers.cell(one.claim.sentence)} | {numbers.cell(verdict)} | {numbers.cell(shown)} |"
        )
    return "\n".join(lines)


def between(text: str, marks: tuple[str, str], content: str) -> str:
    """The text with what stands between two marks replaced."""
    head, _, rest = text.partition(marks[0])
    _, _, tail = rest.partition(marks[1])
    assert tail, f"{marks[0]} and {marks[1]} must be there"
    return f"{head}{marks[0]}\n{content}\n{marks[1]}{tail}"


def main(names: list[str]) -> None:
    (DOCS / "figures").mkdir(exist_ok=True)
    for name in names or [name for name in NAMES if not experiment(name).trains]:
        print(f"docs/figures/{name}.svg", file=sys.stderr)
        draw(name)
    if names:
        return
    print("docs/numbers.md", file=sys.stderr)
    (DOCS / "numbers.md").write_text(numbers.page(numbers.measured()), encoding="utf-8")
    page = DOCS / "why-sqrt-dk.md"
    print("docs/why-sqrt-dk.md", file=sys.stderr)
    page.write_text(between(page.read_text(encoding="utf-8"), TABLE, claims_table(claims.run())), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
