"""Judges the scan with models that were written without a look at it: how many faults it names, how many right ones it accuses.

    python scripts/judge_scan.py                    all of tests/judged (`make judge-scan`); exit code 1 if a bar is broken
    python scripts/judge_scan.py --only masking     cases whose group or name contains this
    python scripts/judge_scan.py --kind faults      faults (with their right twins) alone; or innocents

A fault is *named right* if a finding that its right twin does not get says, in the words of its class, what is wrong; *named
wrong* if there are only findings of other classes; *not judged* if there is none and the headline says that something was not
judged; *called healthy* if the headline says so, and *missed* if it says what it says of the twin. An innocent is *accused* if a
finding of level warn or above says anything of it, and *declared* if its design cannot be told from a fault and the declaration
that the finding names settles it; it is *not judged* if no attention was found in it, which accuses nobody.

Every group has a process of its own; if that dies, the model that it was at has failed and the next ones run in another.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests")]

from scripts import children  # noqa: E402  # from whatever folder this is run

LIMIT = 120  # seconds for a model and its twin
NAMED, ACCUSED, LEAST = 0.8, 0.02, 60  # the bars: faults named, innocents accused, cases of each kind


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose group:name contains this")
    parser.add_argument("--kind", choices=("faults", "innocents"), help="one kind alone")
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"seconds for a model; {LIMIT} by default")
    parser.add_argument("-o", dest="path", type=Path, default=ROOT / "build" / "judged.json", help="the results")
    parser.add_argument("--run", nargs="+", metavar="KIND NAME", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        run(asked.run[0], asked.run[1:], asked.limit)
        return 0
    asked.path.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    for kind, cases in all_cases().items():
        if asked.kind not in (None, kind):
            continue
        chosen = [case for case in cases.values() if asked.only in f"{case.group}:{case.name}"]
        for group in dict.fromkeys(case.group for case in chosen):
            missing = [case.name for case in chosen if case.group == group]
            while missing:
                for name, result in process(kind, missing, asked.limit):
                    results[name] = result | {"kind": kind, "group": group}
                    asked.path.write_text(json.dumps(results, indent=1))
                    print(line(name, results[name]), flush=True)
                missing = [name for name in missing if name not in results]
    return report(results, whole=not asked.only)


def all_cases() -> dict[str, dict[str, Any]]:
    import judged

    judged.load()
    return {"faults": judged.FAULTS, "innocents": judged.INNOCENTS}


def process(kind: str, names: list[str], limit: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run cases in one process; the last result says so if the process ended before its time."""
    for (answer, why), name in zip(children.answers(__file__, limit, kind, names), names, strict=False):
        yield name, {"state": "not run", "said": [why]} if answer is None else answer


def run(kind: str, names: list[str], limit: int) -> None:
    """In the process of a group: a line of JSON for each case, on what was standard output before packages printed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    from judged.judging import judge_fault, judge_innocent
    from third_party.stand_in import load_torchvision

    load_torchvision()
    cases = all_cases()[kind]

    def late(*_: Any) -> None:
        raise TimeoutError(f"took longer than {limit} s")

    signal.signal(signal.SIGALRM, late)
    for name in names:
        begun = time.monotonic()
        signal.alarm(limit)
        try:
            result = (judge_fault if kind == "faults" else judge_innocent)(cases[name])
        except ModuleNotFoundError as error:
            result = {"state": "not installed", "said": [str(error)]}
        except Exception as error:
            result = {"state": "not run", "said": [f"{type(error).__name__}: {str(error)[:300]}"]}
        signal.alarm(0)
        print(json.dumps(result | {"seconds": round(time.monotonic() - begun, 1)}), file=answers, flush=True)


def line(name: str, result: dict[str, Any]) -> str:
    words = "; ".join(one.split(",", 1)[0] for one in result["said"]) if result["state"] != "passed" else ""
    words = result["said"][0] if result["state"] in ("not run", "not installed") else words
    twin = "   TWIN ACCUSED: " + "; ".join(one.split(",", 1)[0] for one in result["twin"]) if result.get("twin") else ""
    return f"{result['state']:15} {name:46} {words[:110]}{twin}"


def report(results: dict[str, dict[str, Any]], whole: bool) -> int:
    """The totals, and 1 if a bar is broken."""
    broken = []
    faults = {name: one for name, one in results.items() if one["kind"] == "faults"}
    innocents = {
        name: one for name, one in results.items() if one["kind"] == "innocents" and one["state"] != "not installed"
    }
    print()
    if faults:
        print(
            f"{len(faults)} faults: "
            + ", ".join(
                f"{count} {state}"
                for state, count in Counter(fault["state"] for fault in faults.values()).most_common()
            )
        )
        share = sum(fault["state"] == "named right" for fault in faults.values()) / len(faults)
        print(f"  named right: {share:.0%} (bar: at least {NAMED:.0%})")
        if whole and (share < NAMED or len(faults) < LEAST):
            broken.append(f"{share:.0%} of {len(faults)} faults were named")
        for name, one in faults.items():
            if one["state"] == "called healthy" and one["wild"]:
                broken.append(f"{name} has NaN or infinity in its output and was called healthy")
            if one["state"] == "called healthy" and one["undecided"]:
                broken.append(f"{name} was called healthy with {', '.join(one['undecided'])} skipped")
        twins = [name for name, one in faults.items() if one.get("twin")]
        print(f"  right twins accused: {len(twins)} {', '.join(twins)}")
    if innocents:
        accused = [name for name, one in innocents.items() if one["state"] in ("accused", "not run")]
        declared = sum(one["state"] == "declared" for one in innocents.values())
        own = sum(one["group"] == "own" for one in innocents.values())
        print(
            f"{len(innocents)} innocents ({len(innocents) - own} of other packages): {len(accused)} accused or not run"
            f" (bar: at most {ACCUSED:.0%}), {declared} more pass with the declaration that the finding names"
        )
        if whole and (len(accused) > ACCUSED * len(innocents) or len(innocents) < LEAST):
            broken.append(f"{len(accused)} of {len(innocents)} innocents were accused: {', '.join(accused)}")
    for one in broken:
        print(f"broken: {one}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
