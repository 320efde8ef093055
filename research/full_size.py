"""Makes what docs/ shows of runs on another machine, from the rows in docs/data/.

`python -m research.full_size`          figures full-*.svg, the end of docs/training.md, the timings in docs/numbers.md, and the
                                       rows that come with the package (attemper_lab/stored/)
`python -m research.full_size FOLDER`   first packs the results that `attemper run --results` kept in FOLDER, and the documents
                                       that `attemper run -o` wrote there, into docs/data/

`make figures` and `python -m research.figures training` write the pages that this one adds to, and keep what it added.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attemper.extension import files as _files
from attemper_lab import experiment, stored
from attemper_lab.claims import claims
from attemper_lab.engine import output
from attemper_lab.engine.experiment import Experiment, Row, Rows, key
from attemper_lab.training import charlm

from .studies import STUDIES, ablation

DOCS = Path(__file__).parents[1] / "docs"
DATA = DOCS / "data"
STORED = Path(stored.__file__).parent
RULES, INIT = ("sqrt_dk", "none"), "unit"
TRAINED = (
    "rule", "init", "lr", "seed", "step", "loss", "held_out", "effective_keys", "top_weight", "peak", "logit_std",
    "grad_q_rms", "grad_q_median", "steps", "length", "d_model", "heads", "layers", "batch", "device",
)  # fmt: skip
RECALL = (
    "rule", "d", "lr", "seed", "step", "steps", "batch", "pairs", "device", "loss", "accuracy", "validation", "peak",
    "entropy", "w_q_grad",
)  # fmt: skip
PARTS = ("loss", "held_out", *(f"held_out_{place}" for place in range(1, 9)))
ENDS = (
    "rule", "init", "layers", "lr", "seed", "step", "steps", "batch", "length", "d_model", "heads", "text", "bigram",
    "device", "validation", "seen", "entropy", "top_weight", "peak", *PARTS,
)  # fmt: skip
LARGER = ("head_dim", "rule", "lr", "seed", "step", "steps", "parameters", *PARTS)
"""The columns of the rows that come with the package."""
TIMED = ("additive_cost", "parallel")
FULL = ("<!-- full size -->", "<!-- /full size -->")
TIMINGS = ("<!-- timings -->", "<!-- /timings -->")
STUDIED = ("<!-- studies -->", "<!-- /studies -->")


def pack(folder: Path) -> None:
    """Store rows as columns with four digits, and constants once: a few hundred kB with all that the figures need."""
    DATA.mkdir(exist_ok=True)
    for path in sorted(folder.glob("*.json*")):
        name = path.name.split(".")[0]
        if name not in STUDIES:  # those are packed by research/run.py
            write(name, json.loads(path.read_text())["rows"] if path.suffix == ".json" else _stored(path))


def write(name: str, rows: Rows) -> None:
    """docs/data/NAME.json."""
    columns = _files.columns(rows)
    always = [
        column for column in columns if column in rows[0] and all(row.get(column) == rows[0][column] for row in rows)
    ]
    fixed = {one: _short(rows[0][one]) for one in always}
    moving = [column for column in columns if column not in fixed]
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
    """The rows that come with the package, from docs/data/: the columns that claims read, of what claims compare."""
    for name, (source, wanted, columns) in KEPT.items():
        content = json.loads((DATA / f"{source}.json").read_text(encoding="utf-8"))
        fixed = {column: content["fixed"][column] for column in columns if column in content["fixed"]}
        moving = [column for column in columns if column in content["columns"]]
        places = [content["columns"].index(one) for one in moving]
        rows = [line for line, row in zip(content["rows"], stored.unpacked(content), strict=True) if wanted(row)]
        text = json.dumps({"fixed": fixed, "columns": moving}, ensure_ascii=False)[:-1]
        lines = ",\n".join(json.dumps([line[place] for place in places], separators=(",", ":")) for line in rows)
        (STORED / f"{name}.json").write_text(f'{text}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def _best_ablated(row: Mapping[str, Any]) -> bool:
    """The end of a run of docs/data/ablation.json at the best rate of its rule, which alone has three seeds."""
    return bool(row["step"] == row["steps"] and row["lr"] == _ablated()[row["head_dim"], row["rule"]])


@functools.cache
def _ablated() -> dict[tuple[int, str], float]:
    rows = unpack("ablation")
    return {
        (head_dim, rule): ablation.chosen_rate(
            [row for row in rows if (row["head_dim"], row["rule"]) == (head_dim, rule)]
        )
        for head_dim, rule in {(row["head_dim"], row["rule"]) for row in rows}
    }


KEPT: dict[str, tuple[str, Callable[[Mapping[str, Any]], bool], tuple[str, ...]]] = {
    "trained": ("charlm", lambda row: row["rule"] in RULES and row["init"] == INIT, TRAINED),
    "recall": ("recall", lambda row: row["d"] == 256 and row["rule"] in (*RULES, "dk"), RECALL),
    "charlm": ("charlm", lambda row: row["step"] == row["steps"], ENDS),
    "depth": ("depth", lambda row: row["step"] == row["steps"], ENDS),
    "dmodel": ("dmodel", lambda row: row["step"] == row["steps"], ENDS),
    "memorise": ("memorise", lambda row: True, ENDS),
    "larger": ("ablation", _best_ablated, LARGER),
}
"""Name in the package → where its rows come from, which of them, and which columns."""


def insert(page: Path, marks: tuple[str, str], lines: list[str]) -> None:
    """Lines between two marks of a page, at its end where it has none yet."""
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(marks[0])
    tail = rest.partition(marks[1])[2]
    page.write_text(f"{head.rstrip()}\n\n" + "\n".join([marks[0], *lines, marks[1]]) + (tail or "\n"), encoding="utf-8")


def kept(page: Path, marks: tuple[str, str]) -> str:
    """The part of a page between two marks, with the marks: whoever writes the page again appends it."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    inside = text.partition(marks[0])[2].partition(marks[1])[0]
    return f"{marks[0]}{inside}{marks[1]}\n" if inside else ""


EARLIER = "These rows are older than the validation set: each learning rate was chosen by the numbers that are shown."
"""Said of rows without the column `validation`."""


def unrun(found: Experiment, rows: Rows) -> list[str]:
    """What the full preset has and the rows lack: values that no run has, then what is missing by learning rate."""
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
    """The claims that these rows judge, as `attemper claims --train` judges its own."""
    from .figures import numbered, table

    evidence = {name: unpack(name) for name in ("recall", "charlm", "depth") if (DATA / f"{name}.json").exists()}
    rows = [
        {
            "": one.claim.id,
            "claim": one.claim.sentence,
            "verdict": f"**{one.verdict}**: {one.condition}",
            "numbers": numbered(one),
        }
        for one in claims.judge(evidence)
        if one.numbers
    ]
    return ["### The claims at this size", "", table(rows), ""] if rows else []


def full_size() -> None:
    from .figures import SUMMARIES, expectations, table

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
    from .figures import table

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
