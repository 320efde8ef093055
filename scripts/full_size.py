"""Makes what docs/ shows of runs on another machine, from the rows in docs/data/.

`python scripts/full_size.py`          figures full-*.svg, the end of docs/training.md, the timings in docs/numbers.md, and the
                                       rows that come with the package (lab/stored/)
`python scripts/full_size.py FOLDER`   first packs the results that `attemper run --results` kept in FOLDER, and the documents
                                       that `attemper run -o` wrote there, into docs/data/

`make figures` and `python scripts/figures.py training` write the pages that this one adds to, and keep what it added.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from attemper import _files
from attemper.lab import experiment, stored
from attemper.lab.claims import claims
from attemper.lab.engine import output
from attemper.lab.engine.experiment import Experiment, Row, Rows, key
from attemper.lab.studies import STUDIES
from attemper.lab.training import charlm

DOCS = Path(__file__).parents[1] / "docs"
DATA = DOCS / "data"
STORED = Path(stored.__file__).with_name("charlm.json")
TIMED = ("additive_cost", "parallel")
FULL = ("<!-- full size -->", "<!-- /full size -->")
TIMINGS = ("<!-- timings -->", "<!-- /timings -->")
STUDIED = ("<!-- studies -->", "<!-- /studies -->")


def pack(folder: Path) -> None:
    """Rows as columns, what never changes once, four digits: a few hundred kB that say all that the figures need."""
    DATA.mkdir(exist_ok=True)
    for path in sorted(folder.glob("*.json*")):
        name = path.name.split(".")[0]
        if name not in STUDIES:  # those are packed by scripts/stacked.py
            write(name, json.loads(path.read_text())["rows"] if path.suffix == ".json" else _stored(path))


def write(name: str, rows: Rows) -> None:
    """docs/data/NAME.json."""
    columns = _files.columns(rows)
    always = [one for one in columns if one in rows[0] and all(row.get(one) == rows[0][one] for row in rows)]
    fixed = {one: _short(rows[0][one]) for one in always}
    moving = [one for one in columns if one not in fixed]
    table = [[_short(row.get(one)) for one in moving] for row in rows]
    text = json.dumps({"fixed": fixed, "columns": moving}, ensure_ascii=False)[:-1]
    lines = ",\n".join(json.dumps(line, separators=(",", ":")) for line in table)
    (DATA / f"{name}.json").write_text(f'{text}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def _stored(path: Path) -> Rows:
    """The rows of a results file in the order of the cells; settings that did not get all of their seeds are left out."""
    found = experiment(path.stem)
    cells = {key(one["cell"]): one for one in map(json.loads, path.read_text(encoding="utf-8").splitlines()[1:])}
    asked = {p.name: tuple(dict.fromkeys(one["cell"][p.name] for one in cells.values())) for p in found.parameters}
    asked |= {
        name: tuple(sorted(values)) for name, values in asked.items() if name in ("d", "lr", "seed", "kappa", "layers")
    }
    whole = [
        cell
        for cell in found.cells(asked)
        if all(key({**cell, "seed": seed}) in cells for seed in asked["seed"])
    ]  # fmt: skip
    return [row for cell in whole for row in cells[key(cell)]["rows"]]


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(one) for one in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None


def unpack(name: str) -> list[Row]:
    return stored.unpacked(json.loads((DATA / f"{name}.json").read_text(encoding="utf-8")))


def store() -> None:
    """The rows of docs/data/charlm.json that come with the package: the rules that claims compare, the columns that they read."""
    content = json.loads((DATA / "charlm.json").read_text(encoding="utf-8"))
    places = [content["columns"].index(one) for one in stored.COLUMNS]
    wanted = [line for line in content["rows"] if line[0] in stored.RULES and line[1] == stored.INIT]
    text = json.dumps({"fixed": content["fixed"], "columns": stored.COLUMNS}, ensure_ascii=False)[:-1]
    lines = ",\n".join(json.dumps([line[place] for place in places], separators=(",", ":")) for line in wanted)
    STORED.write_text(f'{text}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def insert(page: Path, marks: tuple[str, str], lines: list[str]) -> None:
    """Lines between two marks of a page, at its end where it has none yet."""
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(marks[0])
    tail = rest.partition(marks[1])[2]
    page.write_text(f"{head.rstrip()}\n\n" + "\n".join([marks[0], *lines, marks[1]]) + (tail or "\n"), encoding="utf-8")


def kept(page: Path, marks: tuple[str, str]) -> str:
    """What stands between two marks of a page, with them: whoever writes the page anew appends it."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    inside = text.partition(marks[0])[2].partition(marks[1])[0]
    return f"{marks[0]}{inside}{marks[1]}\n" if inside else ""


EARLIER = "These rows are older than the validation set: each learning rate was chosen by the numbers that are shown."
"""What rows without the column `validation` are."""


def unrun(found: Experiment, rows: Rows) -> list[str]:
    """What the full preset has and the rows have not: values that nothing was run with, then what is missing by learning rate."""
    asked = {name: some for name, some in found.settings(preset="full").items() if name != "device" and name in rows[0]}
    there = {name: {row[name] for row in rows} for name in asked}
    words = [
        f"{name} {', '.join(map(str, gone))}"
        for name in asked
        if (gone := [v for v in asked[name] if v not in there[name]])
    ]
    first, *_ = asked  # the rule, the score, κ: what the experiment compares
    for value in asked[first]:
        rates = {row["lr"] for row in rows if row[first] == value}
        gone = [lr for lr in asked["lr"] if lr not in rates and lr in there["lr"]] if rates else []
        words += [f"{value} with lr {', '.join(f'{lr:g}' for lr in gone)}"] if gone else []
    return words


def verdicts() -> list[str]:
    """The claims about training, judged from these rows as `attemper claims --train` judges its own."""
    from figures import numbered, table

    evidence = {name: unpack(name) for name in ("recall", "charlm", "depth") if (DATA / f"{name}.json").exists()}
    rows = [
        {
            "": one.claim.id,
            "claim": one.claim.sentence,
            "verdict": f"**{one.verdict}**: {one.condition}",
            "numbers": numbered(one),
        }
        for one in claims.judge(evidence)
        if one.claim.trains and one.numbers
    ]
    return ["### The claims at this size", "", table(rows), ""] if rows else []


def full_size() -> None:
    from figures import SUMMARIES, expectations, table

    lines = ["", "# Full size", "", (DATA / "README.md").read_text(encoding="utf-8").strip(), ""]
    for name, summary in SUMMARIES.items():
        if not (DATA / f"{name}.json").exists():
            continue
        found, rows = experiment(name), unpack(name)
        print(f"docs/figures/full-{name}.svg", file=sys.stderr)
        output.write(DOCS / "figures" / f"full-{name}.svg", found, rows)
        first, runs = rows[0], len({tuple(row.get(p.name) for p in found.parameters) for row in rows})
        fixed = [p.name for p in found.parameters if len({row.get(p.name) for row in rows}) == 1 and p.name in first]
        lines += [f"### {name}", "", f"{found.finding(rows)}.", "", f"![{name}](figures/full-{name}.svg)", ""]
        lines += [
            f"{runs} runs; " + ", ".join(f"{one} {first[one]}" for one in fixed) + f"; torch {first['torch']}.",
            "",
        ]
        left = unrun(found, rows)
        lines += [f"Of the preset, not run yet: {'; '.join(left)}.", ""] if left else []
        lines += [EARLIER, ""] if "validation" not in first else []
        lines += [table(summary(rows)), "", *expectations(found, rows)]
        if name == "charlm":
            lines += [table(charlm.summary(rows)), ""]
    lines += verdicts()
    waiting = [name for name in SUMMARIES if not (DATA / f"{name}.json").exists()]
    if waiting:
        lines += [f"Not run at this size yet: {', '.join(waiting)}.", ""]
    insert(DOCS / "training.md", FULL, lines)


def timings() -> None:
    from figures import table

    lines = [
        "",
        "## Timings",
        "",
        "These depend on the machine: no test holds them. Two cores of a Xeon with AVX-512 that other programs shared,",
        "`OMP_NUM_THREADS=2 attemper run NAME`; medians, the factor with its 95 % interval.",
        "",
    ]
    for name in TIMED:
        rows = unpack(name)
        output.write(DOCS / "figures" / f"{name}.svg", experiment(name), rows)
        wanted = [
            one for one in rows[0] if one in ("n", "d", "threads") or one.endswith(("_ms", "_mib")) or "factor" in one
        ]
        lines += [f"`{name}`, torch {rows[0]['torch']}: {experiment(name).finding(rows)}.", ""]
        lines += [table([{one: row[one] for one in wanted} for row in rows]), ""]
    insert(DOCS / "numbers.md", TIMINGS, lines)


def main(words: list[str]) -> None:
    if words:
        pack(Path(words[0]))
    store()
    full_size()
    timings()


if __name__ == "__main__":
    main(sys.argv[1:])
