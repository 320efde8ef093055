"""Checks that version, changelog and citation are ready for a tag (--check v0.1.0), and prints its changes (--notes v0.1.0)."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACEHOLDER = "OWNER/attemper", "OWNER.github.io"
DATED = re.compile(r"^## \[[\d.]+\] - \d{4}-\d\d-\d\d$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--check", metavar="TAG", help="print what is missing, and exit 1 if anything is")
    chosen.add_argument("--notes", metavar="TAG", help="print the changes of this version, from CHANGELOG.md")
    options = parser.parse_args()
    if options.notes:
        print(changes(options.notes.removeprefix("v")))
        return 0
    missing = problems(options.check)
    print("\n".join(missing) or f"{options.check}: ready")
    return 1 if missing else 0


def version() -> str:
    """``__version__``, without importing attemper."""
    tree = ast.parse((ROOT / "src/attemper/__init__.py").read_text(encoding="utf-8"))
    values = (node.value for node in tree.body if isinstance(node, ast.Assign) and "__version__" in ast.unparse(node))
    return str(ast.literal_eval(next(values)))


def changes(number: str) -> str:
    """The section of CHANGELOG.md about a version; empty if there is none."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## \[{re.escape(number)}\][^\n]*\n(.*?)(?=^## \[|\Z)", text, re.MULTILINE | re.DOTALL)
    return section[1].strip() if section else ""


def unreleased() -> str:
    """The changelog above the newest version that has a date."""
    return DATED.split((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), maxsplit=1)[0]


def problems(tag: str) -> list[str]:
    """What is missing before this tag can be released, in sentences."""
    number, known = tag.removeprefix("v"), version()
    found = []
    if number != known:
        found.append(f"The tag is {tag}, but attemper.__version__ is {known}. Change one of them.")
    if not changes(number):
        found.append(f"CHANGELOG.md has no section for {number}. Write ## [{number}] - DATE below ## [Unreleased].")
    elif f"\n## [{number}]" in unreleased():
        found.append(f"The section {number} of CHANGELOG.md has no date. Write the day of the release, as 2026-01-31.")
    if changes("Unreleased"):
        found.append(f"CHANGELOG.md has entries under [Unreleased]. Move them to the section {number}.")
    if f"version: {number}\n" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8"):
        found.append(f"CITATION.cff names another version. Write version: {number}.")
    named = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in named:
        if name.endswith((".toml", ".cff", ".yml", ".yaml", ".md")):
            text = (ROOT / name).read_text(encoding="utf-8")
            if any(word in text for word in PLACEHOLDER):
                found.append(f"{name} still names OWNER. Write the account that owns the repository.")
    return found


if __name__ == "__main__":
    sys.exit(main())
