"""Makes the documents that come with the page: src/attemper/page/data/training.json and claims.json.

`python scripts/page_data.py`            both; the claims take half a minute
`python scripts/page_data.py training`   the recorded runs, from the rows in docs/data/
`python scripts/page_data.py claims`     every claim, judged now; those about training as docs/why-sqrt-dk.md has them
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from full_size import DOCS, unpack
from notes import LINE

from attemper import __version__, _files
from attemper.lab.claims import claims
from attemper.lab.claims.judgement import NOT_RUN
from attemper.lab.notes.page import TITLES
from attemper.lab.notes.reading import ONE_LINE, TAKEAWAYS
from attemper.lab.training.runs import runs
from attemper.page.data import figures, training

HERE = Path(training.__file__).parent
SETTINGS = {
    "recall": {"rule": ("sqrt_dk", "none", "dk"), "which": "d", "fixed": ("batch", "pairs", "steps")},
    "charlm": {"rule": ("sqrt_dk", "none"), "which": "init", "fixed": ("layers", "d_model", "heads", "batch", "length", "steps")},
}  # fmt: skip
DIGITS = 3


def rounded(value: float, digits: int = DIGITS) -> float | None:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def of_steps(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs of one setting as columns: at each step the median over seeds, the least and the most."""
    seeds = list(runs(rows, "seed").values())
    names = [name for name in training.SHOWN if name in rows[0]]
    found: dict[str, Any] = {"seeds": len(seeds), "median": {}, "least": {}, "most": {}}
    for name in names:
        columns = list(zip(*([row[name] for row in run] for run in seeds), strict=True))
        for words, fold in (("median", statistics.median), ("least", min), ("most", max)):
            found[words][name] = [rounded(fold(column)) for column in columns]
    return found


def recorded() -> dict[str, Any]:
    experiments = {}
    for name, about in SETTINGS.items():
        rows = unpack(name)
        kept = []
        for rule in about["rule"]:
            for value in sorted({row[about["which"]] for row in rows}):
                for lr in sorted({row["lr"] for row in rows}):
                    some = [r for r in rows if (r["rule"], r[about["which"]], r["lr"]) == (rule, value, lr)]
                    if some:
                        steps = [row["step"] for row in next(iter(runs(some, "seed").values()))]
                        kept.append({"rule": rule, about["which"]: value, "lr": lr, "steps": steps, **of_steps(some)})
        made = {key: rows[0][key] for key in ("attemper", "torch", "device")}
        experiments[name] = {"settings": {key: rows[0][key] for key in about["fixed"]}, "made": made, "runs": kept}
    return experiments


def judged() -> dict[str, Any]:
    """The document of `attemper claims`, the claims about training as docs/why-sqrt-dk.md has them, and each claim's figure."""
    found = claims.document(claims.run(note=lambda line: print(line, file=sys.stderr)))
    trained = kept((DOCS / "why-sqrt-dk.md").read_text(encoding="utf-8"))
    for one in found["claims"]:
        if one["verdict"] == NOT_RUN:
            one |= trained[one["id"]]
        one["numbers"], one["context"] = (
            {k: rounded(v, 4) for k, v in one[part].items()} for part in ("numbers", "context")
        )
        one["figure"] = figures.drawn(one)
    machine = found["environment"]
    made = {"attemper": machine["attemper"], "torch": machine["torch"], "cpu": machine["cpu"]["model"]}
    takeaways = [{"says": says, "found": words, "claims": list(about)} for says, words, about in TAKEAWAYS]
    return {"made": made, "one_line": ONE_LINE, "takeaways": takeaways, "notes": TITLES, "claims": found["claims"]}


def kept(text: str) -> dict[str, dict[str, Any]]:
    """The claims as the table of docs/why-sqrt-dk.md has them."""
    found = {}
    for claim, verdict, condition, numbers in LINE.findall(text):
        deciding, _, beside = numbers.partition("; *")
        found[claim] = {
            "verdict": verdict,
            "condition": condition.replace("\\|", "|"),
            "numbers": _numbers(deciding),
            "context": _numbers(beside.rstrip("*")),
        }
    return found


def _numbers(words: str) -> dict[str, float]:
    parts = (part.replace("\\|", "|").rpartition(" ") for part in words.split("; ") if part)
    return {name: float(value.replace("∞", "inf").replace("−", "-").replace(",", "")) for name, _, value in parts}


def write(name: str, document: dict[str, Any]) -> None:
    text = json.dumps(_files.finite(document), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    (HERE / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
    print(f"{name}.json: {len(text) / 1000:.0f} kB, attemper {__version__}", file=sys.stderr)


def main(names: list[str]) -> None:
    if not names or "training" in names:
        write("training", recorded())
    if not names or "claims" in names:
        write("claims", judged())


if __name__ == "__main__":
    main(sys.argv[1:])
