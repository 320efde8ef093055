"""Makes the documents that come with the page: src/attemper_lab/page/data/training.json, claims.json and heads.json.

`python -m research.page_data`            all; the claims take half a minute
`python -m research.page_data training`   the recorded runs, from the rows in docs/data/
`python -m research.page_data claims`     every claim, judged now
`python -m research.page_data heads`      the heads of the embedded model on the page's two sentences
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from attemper import __version__
from attemper.extension import files as _files
from attemper_lab.claims import claims
from attemper_lab.notes.lines import ONE_LINE
from attemper_lab.page.data import embedded, training
from attemper_lab.training.runs import runs

from .claim_figures import drawn
from .full_size import unpack
from .notes import TITLES
from .reading import TAKEAWAYS

HERE = Path(training.__file__).parent
SETTINGS: dict[str, Any] = {
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
    """The document of `attemper claims`, and each claim's figure."""
    found = claims.document(claims.run(note=lambda line: print(line, file=sys.stderr)))
    for one in found["claims"]:
        one["numbers"], one["context"] = (
            {k: rounded(v, 4) for k, v in one[part].items()} for part in ("numbers", "context")
        )
        one["figure"] = drawn(one)
    machine = found["environment"]
    made = {"attemper": machine["attemper"], "torch": machine["torch"], "cpu": machine["cpu"]["model"]}
    takeaways = [{"says": says, "found": words, "claims": list(about)} for says, words, about in TAKEAWAYS]
    return {"made": made, "one_line": ONE_LINE, "takeaways": takeaways, "notes": TITLES, "claims": found["claims"]}


def write(name: str, document: dict[str, Any]) -> None:
    text = json.dumps(_files.finite(document), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    (HERE / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
    print(f"{name}.json: {len(text) / 1000:.0f} kB, attemper {__version__}", file=sys.stderr)


def main(names: list[str]) -> None:
    if not names or "training" in names:
        write("training", recorded())
    if not names or "claims" in names:
        write("claims", judged())
    if not names or "heads" in names:
        write("heads", embedded.heads())


if __name__ == "__main__":
    main(sys.argv[1:])
