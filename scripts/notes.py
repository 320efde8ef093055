"""Makes docs/notes.md: the five notes, sentence by sentence, with verdicts measured now; and its figures.

`python scripts/notes.py`            the page and its figures
`python scripts/notes.py --page`     the page alone

Claims about training take minutes: their verdicts are those of the table in docs/why-sqrt-dk.md, which scripts/figures.py makes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from blocks import filled

from attemper.lab import NAMES, experiment
from attemper.lab.claims import claims
from attemper.lab.claims.note_claims import NOTE_CLAIMS
from attemper.lab.engine import output
from attemper.lab.notes.page import page

DOCS = Path(__file__).parents[1] / "docs"
LINE = re.compile(r"^\| (C\d+) \| .*? \| \*\*([\w ]+)\*\*(?:: (.*?))? \| (.*?) \|", flags=re.MULTILINE)


def kept(text: str) -> dict[str, tuple[str, str, str]]:
    """Verdict, condition and the first numbers of every claim in the table of docs/why-sqrt-dk.md."""
    found = {}
    for claim, verdict, condition, numbers in LINE.findall(text):
        found[claim] = (verdict, condition, "; ".join(numbers.partition("; *")[0].split("; ")[:2]))
    return found


def main(options: list[str]) -> None:
    own = {claim.id for claim in NOTE_CLAIMS}
    if "--page" not in options:
        for name in (name for name in NAMES if set(experiment(name).claims) & own):
            print(f"docs/figures/{name}.svg", file=sys.stderr)
            found = experiment(name)
            output.write(DOCS / "figures" / f"{name}.svg", found, found.run())
    judged = claims.run(note=lambda line: print(line, file=sys.stderr))
    table = kept((DOCS / "why-sqrt-dk.md").read_text(encoding="utf-8"))
    (DOCS / "notes.md").write_text(filled(page(judged, table)), encoding="utf-8")
    print("docs/notes.md", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
