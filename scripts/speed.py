"""Writes the table of small calls in docs/performance.md from a document of `attemper bench cpu -o bench.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- calls -->", "<!-- /calls -->"


def table(document: dict[str, Any]) -> str:
    """The rows, with the machine that they were measured on."""
    found, rows = document["environment"], document["calls"]
    cpu = found["cpu"]
    lines = [
        f"{cpu['model']}, {cpu['simd']}, {cpu['threads']} thread(s), torch {found['torch']}, {rows[0]['dtype']}:",
        "",
        "| call | µs | `sdpa` ÷ torch | all signs ÷ torch | ÷ sliced |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        sliced = row["sdpa_over_sliced"]
        ratios = (row["sdpa_over_torch"]["median"], row["signs_over_torch"]["median"])
        cells = [row["name"], f"{row['us']['sdpa']:.0f}", *(f"{ratio:.2f}" for ratio in ratios)]
        lines.append(f"| {' | '.join(cells)} | {'' if sliced is None else format(sliced['median'], '.2f')} |")
    return "\n".join(lines)


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(document)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
