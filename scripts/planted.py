"""Plants bugs, one at a time, and says which test of the area finds each. Run it in a tree that nobody else uses.

Every change is undone. Run it in the foreground: background jobs of a shell ignore Ctrl-C, so the tests of Ctrl-C would fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BASES = (ROOT / "src" / "attemper", ROOT / "src", ROOT)
"""The folders that a bug's file may be relative to."""


class Bug(NamedTuple):
    """A line of the source, the wrong line that replaces it, and the tests of that area."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str


BUGS = (
    Bug("C: lse_low is lost", "kernels/cpu/c/kernel/finish.h", "keep_where(m - m == 0, lost(m, log_l))",
        "keep_where(m != m, lost(m, log_l))", "kernels"),
    Bug("blockwise: sum_p2 is not squared", "kernels/blockwise/forward.py", "(norm / l).square_()", "(norm / l)", "kernels"),
    Bug("lower_right with a window is off by one", "kernels/contract.py", "return window - 1 - offset,",
        "return window - offset,", "kernels torch_compat"),
    Bug("half gradients without the low bits", "vitals.py",
        "whole = (short.view(torch.int32) + low).view(torch.float32)", "whole = short", "kernels"),
    Bug("watch: evaluation counts", "watch/observer.py", "(1 + module.training) * recording)", "2)", "watch"),
    Bug("watch: padding counts", "operation/padding.py", "return kept | strict",
        "return any_query | True", "watch"),
    Bug("record: a cut line stays", "watch/record/jsonl.py", "            os.ftruncate(file, end)\n",
        "            pass\n", "watch"),
    Bug("audit: scaled twice is not found", "scan/audit/judge.py", "    if _twice(scale):",
        "    if _twice(scale) and scale.head_dim < 0:", "scan"),
    Bug("health: a peak of 60 is no warning", "health/thresholds.py", '50,\n        "warn",', '70,\n        "warn",',
        "scan report"),
    Bug("lab: one degree of freedom too many", "attemper_lab/maths/stats.py", "error, count - 1)", "error, count)", "lab"),
    Bug("studies: failing and healthy runs are swapped", "research/studies/alarm.py",
        "separation.wins([statistic(run, sign)], [statistic(one, sign, run[\"event\"]) for one in good])",
        "1 - separation.wins([statistic(run, sign)], [statistic(one, sign, run[\"event\"]) for one in good])",
        "lab/test_studies.py"),
    Bug("studies: a healthy run counts whole", "research/studies/alarm.py", "statistic(one, sign, run[\"event\"])",
        "statistic(one, sign)", "lab/test_studies.py"),
    Bug("studies: leads are reversed", "research/studies/alarm.py", "max(0.0, run[\"event\"] - alarm)",
        "max(0.0, alarm - run[\"event\"])", "lab/test_studies.py"),
    Bug("studies: an alarm after the event counts", "research/studies/alarm.py",
        "end = min(run[\"event\"], before)", "end = before", "lab/test_studies.py"),
    Bug("studies: what came before a fault counts", "research/studies/alarm.py",
        "row[\"fault_step\"] if row[\"fault\"] and math.isfinite(left) else ", "",
        "lab/test_studies.py"),
    Bug("studies: rescued where the loss is far above the twin", "research/studies/rescue.py", "return loss <= twin + NOTHING",
        "return loss >= twin + NOTHING", "lab/test_studies.py"),
    Bug("lab: the kurtosis of q·k", "attemper_lab/maths/theory.py", "return 3 + 6 / d", "return 3 + 3 / d", "lab"),
    Bug("heads: saturated at another weight", "heads.py", "SATURATED_WEIGHT = 0.99", "SATURATED_WEIGHT = 0.9",
        "definition watch"),
)  # fmt: skip


def build() -> None:
    """Build the C library again."""
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"], cwd=ROOT, check=True)


def first_failure(bug: Bug) -> str | None:
    """The first test that fails; None if all pass."""
    folders = [f"tests/{name}" for name in bug.tests.split()]
    command = [sys.executable, "-m", "pytest", *folders, "-q", "-x", "-m", "not exhaustive", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), None)


def main(asked: list[str]) -> int:
    missed = 0
    for bug in (bug for bug in BUGS if not asked or any(word in bug.name for word in asked)):
        path = next(base / bug.file for base in BASES if (base / bug.file).exists())
        source = path.read_text(encoding="utf-8")
        assert bug.right in source, f"{bug.file} has no {bug.right!r}"
        start = time.monotonic()
        try:
            path.write_text(source.replace(bug.right, bug.wrong, 1), encoding="utf-8")
            if path.suffix == ".h":
                build()
            failure = first_failure(bug)
        finally:
            path.write_text(source, encoding="utf-8")
            if path.suffix == ".h":
                build()
        missed += failure is None
        print(f"{time.monotonic() - start:4.0f} s  {bug.name}: {failure or 'MISSED'}", flush=True)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
