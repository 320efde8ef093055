"""Measures the ratios that the documents promise, and compares them with those kept in benchmarks/ for a machine of this kind.

    python scripts/benchmarks.py                 measure and compare; exit code 1 if a ratio is worse, or is no longer measured
    python scripts/benchmarks.py --keep          keep what was measured; a commit makes it the next one to compare with
    python scripts/benchmarks.py --read FILE     compare what an earlier run wrote with -o

Each pass runs in a process of its own, because memory is laid out otherwise in each. A ratio is the median over the passes, and
its noise reaches from the lowest end of their intervals to the highest. It is worse if it rose by more than 5 % and the two
ranges of noise do not meet.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

KEPT = Path(__file__).parents[1] / "benchmarks"
LIMIT = 1.05
PASSES = 3
FAILURES = ("worse", "missing")
Document = dict[str, Any]


class Verdict(NamedTuple):
    """What became of one ratio: worse, better, the same, new or missing."""

    name: str
    word: str
    before: dict[str, float] | None
    now: dict[str, float] | None

    def __str__(self) -> str:
        shown = " → ".join("none" if one is None else spread(one) for one in (self.before, self.now))
        return f"{self.word:8} {self.name}: {shown}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep what was measured, in benchmarks/")
    parser.add_argument("--read", type=Path, metavar="FILE", help="do not measure: read what an earlier run wrote")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write what was measured here too")
    parser.add_argument("--passes", type=int, default=PASSES, help="how often everything is measured")
    parser.add_argument("bench", nargs="*", metavar="-- OPTION", help="options of `attemper bench promises`")
    options = parser.parse_args(arguments)
    now = read(options.read) if options.read else joined([measured(options.bench) for _ in range(options.passes)])
    file = KEPT / f"{kind(now['machine'])}.json"
    before = read(file) if file.exists() else None
    print(told(before, now))
    for target in [*([options.output] if options.output else []), *([file] if options.keep else [])]:
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.keep:
        print(f"Kept in benchmarks/{file.name}.")
    elif before is None:
        print(
            f"Nothing is kept for such a machine: benchmarks/{file.name}. Type make benchmarks KEEP=1, and commit it."
        )
    failed = before is not None and any(verdict.word in FAILURES for verdict in compared(before, now))
    return int(failed and not options.keep)


def measured(options: Sequence[str]) -> Document:
    """The document of `attemper bench promises`, in a new process."""
    command = [sys.executable, "-m", "attemper", "bench", "promises", "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"attemper bench promises ended with {done.returncode}")
    found: Document = json.loads(done.stdout)
    return found


def joined(passes: Sequence[Document]) -> Document:
    """What is kept: the machine, the versions, and each ratio over all passes."""
    environment = passes[0]["environment"]
    cpu, names = environment["cpu"], [row["name"] for row in passes[0]["promises"]]
    spreads = {
        name: [row["ratio"] for pass_ in passes for row in pass_["promises"] if row["name"] == name] for name in names
    }
    return {
        "machine": {
            "system": environment["system"],
            "cpu": cpu["model"],
            "simd": cpu["simd"],
            "gpu": next((gpu["name"] for gpu in environment["gpus"]), None),
        },
        "versions": {name: environment[name] for name in ("attemper", "python", "torch", "triton")},
        "date": date.today().isoformat(),
        "load": [pass_["load"] for pass_ in passes],
        "ratios": {
            name: {
                "median": round(statistics.median(one["median"] for one in found), 4),
                "low": min(one["low"] for one in found),
                "high": max(one["high"] for one in found),
            }
            for name, found in spreads.items()
        },
    }


def kind(machine: Document) -> str:
    """A file name for machines that are alike: system, processor, its instructions, GPU."""
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(filter(None, machine.values())).lower()).strip("-")


def read(path: Path) -> Document:
    found: Document = json.loads(path.read_text(encoding="utf-8"))
    return found


def compared(before: Document, now: Document) -> list[Verdict]:
    """A verdict on every ratio of either."""
    old, new = before["ratios"], now["ratios"]
    return [Verdict(name, _word(old.get(name), new.get(name)), old.get(name), new.get(name)) for name in {**old, **new}]


def _word(before: dict[str, float] | None, now: dict[str, float] | None) -> str:
    if before is None or now is None:
        return "new" if before is None else "missing"
    if now["median"] > LIMIT * before["median"] and now["low"] > before["high"]:
        return "worse"
    if before["median"] > LIMIT * now["median"] and before["low"] > now["high"]:
        return "better"
    return "same"


def told(before: Document | None, now: Document) -> str:
    """The comparison as lines of text, what is worse first and what to type last."""
    lines = [f"{now['machine']['cpu']}, {now['machine']['simd']}; ours ÷ torch", f"now:  {_about(now)}"]
    if before is None:
        return "\n".join([*lines, *(f"         {ratio}: {spread(found)}" for ratio, found in now["ratios"].items())])
    lines.append(f"kept: {_about(before)}")
    if before["versions"]["torch"] != now["versions"]["torch"]:
        lines.append("torch has another version: a ratio may differ because torch's own time does.")
    verdicts = sorted(compared(before, now), key=lambda one: (*FAILURES, "new", "better", "same").index(one.word))
    lines += map(str, verdicts)
    failed = [verdict for verdict in verdicts if verdict.word in FAILURES]
    if failed:
        lines.append(
            f"{len(failed)} of {len(verdicts)} ratios are worse by more than 5 % beyond noise, or are no longer measured."
        )
        lines.append("If nothing else ran, mend them; or type make benchmarks KEEP=1, and say why in the commit.")
    else:
        lines.append(f"None of {len(verdicts)} ratios is worse by more than 5 % beyond noise.")
    return "\n".join(lines)


def spread(one: dict[str, float]) -> str:
    return f"{one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f})"


def _about(document: Document) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items() if number)
    loads = [load for one in document["load"] for load in one.values() if load is not None]
    return f"{versions}; {document['date']}" + (f"; load up to {max(loads)}" if loads else "")


if __name__ == "__main__":
    sys.exit(main())
