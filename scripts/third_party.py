"""Watches and clips small models of other people's packages: outputs, signs, layers, clips. Run it with `make third-party`.

    python scripts/third_party.py                        all of them, the table and results.json; exit code 1 if any fails
    python scripts/third_party.py --resume               go on where a run ended
    python scripts/third_party.py --only timm:cait       models whose package:name contains this

Every package has a process of its own; if that dies, the model that it was at has failed and the next ones run in another.
What is asked of a model is in tests/third_party/check.py, the models in tests/third_party/models.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests")]

from scripts import children  # noqa: E402  # from whatever folder this is run

LIMIT = 300  # seconds for a model
LEAST = (60, 8)  # models and packages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--resume", action="store_true", help="keep the results of a run that was ended")
    parser.add_argument("--only", default="", help="models whose package:name contains this")
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"seconds for a model; {LIMIT} by default")
    parser.add_argument("-o", dest="path", type=Path, default=ROOT / "build" / "third-party.json", help="the results")
    parser.add_argument("--run", nargs="+", metavar="PACKAGE NAME", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        run(asked.run[0], asked.run[1:], asked.limit)
        return 0
    from third_party.models import PACKAGES

    results = json.loads(asked.path.read_text()) if asked.resume and asked.path.exists() else {}
    asked.path.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    for package, models in PACKAGES.items():
        titles = [f"{package}:{model.name}" for model in models]
        missing = [title for title in titles if asked.only in title and title not in results]
        while missing:
            for title, result in process(package, missing, asked.limit):
                results[title] = result
                asked.path.write_text(json.dumps(results, indent=1))
                print(f"{len(results):3} {time.monotonic() - begun:6.0f} s  {row(title, result)}", flush=True)
            missing = [title for title in missing if title not in results]
    wanted = {f"{package}:{model.name}" for package, models in PACKAGES.items() for model in models}
    return report({title: results[title] for title in results if title in wanted and asked.only in title}, asked.only)


def process(package: str, titles: list[str], limit: int) -> Any:
    """Run models of a package in one process; the last result is a failure if the process ended before its time."""
    names = [title.partition(":")[2] for title in titles]
    found = children.answers(__file__, limit, package, names, ATTEMPER_STRICT="1")
    for (answer, why), title in zip(found, titles, strict=False):
        yield title, {"failures": [why]} if answer is None else answer


def run(package: str, names: list[str], limit: int) -> None:
    """In the process of a package: a line of JSON for each model, on what was standard output before packages printed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from third_party.check import Result, examine
    from third_party.models import PACKAGES
    from third_party.stand_in import load_torchvision

    load_torchvision()

    def late(*_: Any) -> None:
        raise TimeoutError(f"took longer than {limit} s")

    signal.signal(signal.SIGALRM, late)
    for model in PACKAGES[package]:
        if model.name not in names:
            continue
        begun = time.monotonic()
        signal.alarm(limit)
        try:
            result = examine(model)
        except ModuleNotFoundError as error:
            result = Result(failures=[f"not installed: {error}"])
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            at = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[:-4:-1])
            result = Result(failures=[f"{type(error).__name__}: {str(error)[:200]} ({at})"])
        signal.alarm(0)
        found = {**asdict(result), "seconds": round(time.monotonic() - begun, 1), "version": version(package)}
        print(json.dumps(found), file=answers, flush=True)


def version(package: str) -> str:
    names = metadata.packages_distributions().get(package, [package])
    try:
        return f"{names[0]} {metadata.version(names[0])}"
    except metadata.PackageNotFoundError:
        return package


def row(title: str, result: dict[str, Any]) -> str:
    failures, remarks = result["failures"], result.get("remarks", [])
    numbers = f"{result.get('layers', 0):3} layers  {result.get('heads', ''):>4} heads"
    clips = f"{result.get('clipped', 0):3} clipped  {result.get('refused', 0):3} refused"
    said = failures[0] if failures else "; ".join(remarks)
    return f"{title:48} {numbers} {clips}  {'FAIL' if failures else 'ok':4}  {said[:110]}"


def report(results: dict[str, Any], only: str) -> int:
    """The table, what failed, and the exit code."""
    failed = {title: result["failures"] for title, result in results.items() if result["failures"]}
    print(f"\n{'model':48} result")
    for title, result in results.items():
        print(row(title, result))
    packages = {title.partition(":")[0] for title in results if title not in failed}
    print(f"\n{len(results) - len(failed)} of {len(results)} models of {len(packages)} packages hold.")
    for title, failures in failed.items():
        print(f"{title}:")
        print("".join(f"    {failure}\n" for failure in failures[:12]), end="")
    few = not only and (len(results) < LEAST[0] or len({title.partition(":")[0] for title in results}) < LEAST[1])
    if few:
        print(f"fewer than {LEAST[0]} models of {LEAST[1]} packages ran.")
    return 1 if failed or few else 0


if __name__ == "__main__":
    sys.exit(main())
