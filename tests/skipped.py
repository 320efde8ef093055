"""What was skipped and what it would need, at the end of a run. A reason begins with `needs`, or with `does not apply`."""

import re
from collections import Counter, defaultdict
from pathlib import Path

MISSING = re.compile(r"(?:Skipped: )?could not import '([\w.]+)'.*", re.DOTALL)  # what importorskip says by itself


def grouped(reports) -> dict[str, Counter[str]]:
    """Reason → how many tests of each file it concerns, the reason of most tests first."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for report in reports:
        path, _, reason = report.longrepr
        reason = MISSING.sub(r"needs the package \1", reason.removeprefix("Skipped: "))
        found[reason][Path(path).name] += 1
    return dict(sorted(found.items(), key=lambda group: (-group[1].total(), group[0])))


def pytest_terminal_summary(terminalreporter, config):
    groups = grouped(terminalreporter.stats.get("skipped", ()))
    if not groups:
        return
    total = sum(files.total() for files in groups.values())
    terminalreporter.section(f"{total} skipped, and why")
    for reason, files in groups.items():
        named = ", ".join(list(files)[:3]) + (f" and {len(files) - 3} more files" if len(files) > 3 else "")
        terminalreporter.write_line(f"{files.total():5}  {reason} ({named})")
    if config.option.markexpr == "not exhaustive":
        terminalreporter.write_line("       the marker exhaustive was left out: make test-all runs it")
