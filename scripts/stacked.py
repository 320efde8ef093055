"""Runs a study of lab/studies, and makes what docs/ shows of it.

`python scripts/stacked.py run NAME --results FOLDER --seconds 250 --device cuda`
                        measures what is missing in FOLDER/NAME.jsonl; the same command continues it. --preset tiny tries it out
`python scripts/stacked.py show NAME --results FOLDER`
                        the finding and the table of the rows in FOLDER
`python scripts/stacked.py pack FOLDER`
                        rows of FOLDER into docs/data/, the figures docs/figures/full-NAME.svg, and the end of docs/training.md

Training needs torch alone; figures need `attemper[lab]`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from attemper.lab.engine.experiment import Row
from attemper.lab.stacked.study import Study, work
from attemper.lab.studies import STUDIES, collapse, study


def rows_of(path: Path) -> list[Row]:
    """The rows of a results file."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [row for line in lines for row in json.loads(line)["rows"]]


def show(found: Study, rows: list[Row]) -> None:
    table = found.summary(rows)
    print(found.finding(rows))
    if table:
        print(*table[0], sep="\t")
        for row in table:
            print(*(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()), sep="\t")


def pack(folder: Path) -> None:
    """Rows into docs/data/, then the pages."""
    import full_size

    for path in sorted(folder.glob("*.jsonl")):
        if path.stem in STUDIES:
            full_size.write(path.stem, rows_of(path))
    pages()


def pages() -> None:
    """The figures, and the end of docs/training.md, from docs/data/."""
    import full_size

    from attemper.lab.engine import output
    from figures import table

    lines = ["", "# Studies", "", INTRO, ""]
    for name in STUDIES:
        if not (full_size.DATA / f"{name}.json").exists():
            continue
        found, rows = study(name), full_size.unpack(name)
        said = found.finding(rows)
        figure = full_size.DOCS / "figures" / f"full-{name}.svg"
        figure.write_bytes(output.render(found.draw(rows, said).to_json(), ".svg"))
        fixed = [one for one in ("parameters", "tokens", "steps", "text", "torch", "python") if one in rows[0]]
        facts = ", ".join(f"{one} {rows[0][one]}" for one in fixed if len({row.get(one) for row in rows}) == 1)
        lines += [f"### {name}", "", f"{found.question} {said}.", "", f"![{name}](figures/{figure.name})", ""]
        lines += [f"{len(rows)} rows; {facts}.", ""]
        for part in (found.summary(rows), collapse.fits(rows) if name == "collapse" else []):
            lines += [table(part), ""] if part else []
        print(f"{figure.name}: {said}")
    full_size.insert(full_size.DOCS / "training.md", full_size.STUDIED, lines)


INTRO = (
    "Hundreds of training runs, stacked on one H200: `python scripts/stacked.py run NAME --device cuda --results FOLDER`, then\n"
    "`python scripts/stacked.py pack FOLDER`, which writes this part. [lab.md](lab.md) says what each study is."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "show"):
        one = commands.add_parser(name)
        one.add_argument("name", choices=STUDIES)
        one.add_argument("--results", type=Path, default=Path("attemper-results"))
        if name == "run":
            one.add_argument("--preset", default="full")
            one.add_argument("--device", default="cpu")
            one.add_argument("--seconds", type=float, default=600.0)
    commands.add_parser("pack").add_argument("folder", type=Path)
    asked = parser.parse_args()
    if asked.command == "pack":
        pack(asked.folder)
        return
    found = study(asked.name)
    if asked.command == "run":
        if asked.preset not in found.presets:
            parser.error(f"unknown --preset {asked.preset!r}. Known: {', '.join(found.presets)}.")
        work(found, asked.preset, asked.results, asked.device, asked.seconds)
    show(found, rows_of(asked.results / f"{asked.name}.jsonl"))


if __name__ == "__main__":
    main()
