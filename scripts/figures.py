"""Makes what docs/ shows of the lab.

`python scripts/figures.py`           figures of the exact experiments, docs/numbers.md, the claims in docs/why-sqrt-dk.md
`python scripts/figures.py training`  figures of the experiments that train, docs/training.md and their claims; minutes,
                                      resumed from attemper-results/ or the folder named after it
`python scripts/figures.py variance`  that figure alone
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from attemper.lab import NAMES, charlm, claims, depth, experiment, fold, numbers, output, recall, render, transplant
from attemper.lab.command import RESULTS
from attemper.lab.experiment import Row, Rows
from attemper.lab.sweep import sweep
from attemper.lab.verdicts import NOT_RUN

DOCS = Path(__file__).parents[1] / "docs"
TABLE = ("<!-- claims -->", "<!-- /claims -->")


def draw(name: str, results: Path | None = None) -> Rows:
    """Measure, or go on from results, and write the figure."""
    found = experiment(name)
    print(f"docs/figures/{name}.svg", file=sys.stderr)
    rows = sweep(found, found.settings(), results=results).rows
    output.write(DOCS / "figures" / f"{name}.svg", found, rows)
    return rows


def write_claims(judged: list[claims.Judged]) -> None:
    """The claims as a table in docs/why-sqrt-dk.md; a claim that was not run keeps the line of an earlier run."""
    page = DOCS / "why-sqrt-dk.md"
    head, rest = page.read_text(encoding="utf-8").split(TABLE[0])
    old, tail = rest.split(TABLE[1])
    kept = {line.split(" | ")[0]: line for line in old.splitlines()}
    lines = ["| | claim | verdict | numbers; *context* |", "|---|---|---|---|"]
    for one in judged:
        verdict = f"**{one.verdict}**" + (f": {one.condition}" if one.condition else "")
        shown = "; ".join(f"{name} {render.number(value)}" for name, value in one.numbers.items())
        beside = "; ".join(f"{name} {render.number(value)}" for name, value in one.context.items())
        shown += f"; *{beside}*" if beside else ""
        line = f"| {' | '.join(map(numbers.cell, (one.claim.id, one.claim.sentence, verdict, shown)))} |"
        lines.append(kept.get(f"| {one.claim.id}", line) if one.verdict == NOT_RUN else line)
    page.write_text("\n".join([f"{head}{TABLE[0]}", *lines, f"{TABLE[1]}{tail}"]), encoding="utf-8")


def exact() -> None:
    for name in NAMES:
        if not experiment(name).trains:
            draw(name)
    print("docs/numbers.md, docs/why-sqrt-dk.md", file=sys.stderr)
    (DOCS / "numbers.md").write_text(numbers.page(numbers.measured()), encoding="utf-8")
    write_claims(claims.run())


SUMMARIES: dict[str, Callable[[Rows], list[Row]]] = {
    "recall": recall.summary,
    "charlm": charlm.differences,
    "depth": lambda rows: [
        {"layers": layers, "none less 1/√d_k, nats": middle, "least": low, "most": high}
        for layers, (middle, low, high) in depth.costs(rows).items()
    ],
    "fold": fold.table,
    "transplant": lambda rows: [
        {"κ": kappa, "held-out loss": middle, "least": low, "most": high}
        for kappa, (middle, low, high) in transplant.losses(rows).items()
    ],
    "scores": lambda rows: recall.summary(rows, "score"),
}


def training(results: Path) -> None:
    lines = [
        "# Training",
        "",
        "<!-- made by `python scripts/figures.py training`; do not edit -->",
        "",
        "What the experiments that train found with their default settings, on a CPU. Medians over seeds with the least and the",
        "most; every rule at its own best learning rate where several were tried. `attemper run NAME` repeats one.",
        "",
    ]
    evidence = {}
    for name, summary in SUMMARIES.items():
        evidence[name] = rows = draw(name, results)
        found = experiment(name)
        first = rows[0]
        fixed = [p.name for p in found.parameters if len({row[p.name] for row in rows}) == 1 and p.name != "device"]
        lines += [
            f"## {name}",
            "",
            f"{found.question} {found.finding(rows)}.",
            "",
            f"![{name}](figures/{name}.svg)",
            "",
        ]
        lines += [
            ", ".join(f"{one} {first[one]}" for one in fixed) + f"; torch {first['torch']}.",
            "",
            table(summary(rows)),
            "",
        ]
    (DOCS / "training.md").write_text("\n".join(lines), encoding="utf-8")
    home, settings = claims.EVIDENCE["divisors"]  # C10 is judged before training and after it
    write_claims(claims.judge({**evidence, "divisors": experiment(home).run(**settings)}))


def table(rows: list[Row]) -> str:
    """Rows as a Markdown table."""
    head = list(rows[0])
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join(lines + [f"| {' | '.join(map(_cell, row.values()))} |" for row in rows])


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(names: list[str]) -> None:
    (DOCS / "figures").mkdir(exist_ok=True)
    if not names:
        exact()
    elif names[0] == "training":
        training(Path(names[1]) if names[1:] else RESULTS)
    else:
        for name in names:
            draw(name, RESULTS if experiment(name).trains else None)


if __name__ == "__main__":
    main(sys.argv[1:])
