"""Writes the tables of short calls and of host time in docs/ from documents of `attemper bench cpu` and `attemper bench host`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
Document = dict[str, Any]


def short_calls(document: Document) -> list[str]:
    """The rows of `bench cpu` on short calls, with the machine that they were measured on."""
    rows = document["calls"]
    head = ["call", "µs", "`sdpa` ÷ torch", "all signs ÷ torch", "÷ sliced"]
    cells = [
        [
            row["name"],
            f"{row['us']['sdpa']:.0f}",
            *(ratio(row[name]) for name in ("sdpa_over_torch", "signs_over_torch", "sdpa_over_sliced")),
        ]
        for row in rows
    ]
    return [machine(document, "cpu", rows[0]["dtype"]), "", *table(head, cells)] if rows else []


def host_time(document: Document, kind: str) -> list[str]:
    """The rows of `bench host` on CPUs or on GPUs: calls, watched layers, compiled steps."""
    rows = [row for row in document.get("host", ()) if row["device"].partition(":")[0] == kind]
    calls, layers, compiled = (
        [row for row in rows if row["table"] == name] for name in ("calls", "layers", "compiled")
    )
    if not calls:
        return []
    modes = {(row["length"], row["mode"]): row["torch_us"]["median"] for row in calls if row["call"] == "sdpa"}
    over = {(row["call"], row["length"], row["mode"]): row["over_torch"] for row in calls}
    head = ["÷ torch's SDPA", *(f"{n} tokens, {mode}" for n, mode in modes)]
    cells = [
        [call, *(ratio(over[call, *mode]) for mode in modes)] for call in dict.fromkeys(row["call"] for row in calls)
    ]
    cells.append(["torch's SDPA, µs", *(f"{time:.1f}" for time in modes.values())])
    lines = [machine(document, kind, calls[0]["dtype"]), "", *table(head, cells)]
    steps = {(row["model"], row["training"]): {} for row in layers}
    for row in layers:
        steps[row["model"], row["training"]][row["candidate"]] = row
    names = {"watched": "watched", "replaced": "`replace=True`", "by_hand": "`attention()` by hand"}
    head = ["µs per layer, and cost", "unwatched, ms", *names.values()]
    cells = [
        [
            step(model, training),
            f"{found['unwatched']['us']['median'] / 1000:.2f}",
            *(layer(found.get(name)) for name in names),
        ]
        for (model, training), found in steps.items()
    ]
    lines += ["", *table(head, cells)]
    if any("ms" in row for row in compiled):
        lines += ["", *table(*compiled_steps(compiled))]
    return lines


def compiled_steps(rows: list[Document]) -> tuple[list[str], list[list[str]]]:
    head = ["compiled", "ms", "instrumented", "watched", "graph breaks", "compiled again"]
    cells = []
    for model, training in dict.fromkeys((row["model"], row["training"]) for row in rows):
        found = {row["candidate"]: row for row in rows if row["training"] == training and "failed" not in row}
        costs = [ratio(found.get(f"compiled_{name}", {}).get("cost")) for name in ("instrumented", "watched")]
        counts = [str(found.get("counts", {}).get(name, "")) for name in ("graph_breaks", "recompilations")]
        cells.append([step(model, training), f"{found['compiled']['ms']['median']:.1f}", *costs, *counts])
    return head, cells


def step(model: str, training: bool) -> str:
    return f"{model}, {'training' if training else 'forward'}"


def layer(row: Document | None) -> str:
    return "" if row is None else f"{row['us_per_layer']['median']:.0f} ({ratio(row['cost'])})"


def ratio(spread: dict[str, float] | None) -> str:
    return "" if spread is None else f"{spread['median']:.2f}"


def machine(document: Document, kind: str, dtype: str) -> str:
    found = document["environment"]
    cpu = found["cpu"]
    names = [f"{cpu['model']}, {cpu['simd']}, {cpu['threads']} thread(s)"]
    names = names if kind == "cpu" else [gpu["name"] for gpu in found["gpus"][:1]] + names
    return f"{', '.join(names)}, torch {found['torch']}, {dtype}:"


def table(head: list[str], cells: list[list[str]]) -> list[str]:
    first, *rest = (f"| {' | '.join(row)} |" for row in (head, *cells))
    return [first, f"|{'---|' * len(head)}", *rest]


BLOCKS: list[tuple[str, str, Callable[[Document], list[str]]]] = [
    ("performance.md", "calls", short_calls),
    ("performance.md", "host", lambda document: host_time(document, "cpu")),
    ("gpu.md", "host", lambda document: host_time(document, "cuda")),
]
"""Page, marker, and what is written there, if the document has it."""


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for page, marker, lines in BLOCKS:
        if found := lines(document):
            before, begin, rest = (DOCS / page).read_text(encoding="utf-8").partition(f"<!-- {marker} -->\n")
            _, end, after = rest.partition(f"<!-- /{marker} -->\n")
            (DOCS / page).write_text(before + begin + "\n".join(found) + "\n" + end + after, encoding="utf-8")


if __name__ == "__main__":
    main()
