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

from full_size import unpack

from attemper import __version__, _files
from attemper.lab.training.runs import runs
from attemper.page.data import training

HERE = Path(training.__file__).parent
SETTINGS = {
    "recall": {"rule": ("sqrt_dk", "none", "dk"), "which": "d", "fixed": ("batch", "pairs", "steps")},
    "charlm": {"rule": ("sqrt_dk", "none"), "which": "init", "fixed": ("layers", "d_model", "heads", "batch", "length", "steps")},
}  # fmt: skip
DIGITS = 3


def rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


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


def write(name: str, document: dict[str, Any]) -> None:
    text = json.dumps(_files.finite(document), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    (HERE / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
    print(f"{name}.json: {len(text) / 1000:.0f} kB, attemper {__version__}", file=sys.stderr)


def main(names: list[str]) -> None:
    if not names or "training" in names:
        write("training", recorded())
    if not names or "claims" in names:
        from attemper.page.data import judged

        write("claims", judged.document())


if __name__ == "__main__":
    main(sys.argv[1:])
