"""Runs a study of lab/studies, and makes what docs/ shows of it.

`python scripts/stacked.py run NAME --results FOLDER --seconds 250 --device cuda`
                        measures what is missing in FOLDER/NAME.jsonl; the same command continues it. --preset tiny tries it out
`python scripts/stacked.py show NAME --results FOLDER`
                        the finding and the table of the rows in FOLDER
`python scripts/stacked.py pack FOLDER`
                        rows of FOLDER into docs/data/, and the figures docs/figures/full-NAME.svg

Training needs torch alone; figures need `attemper[lab]`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from attemper.lab.engine.experiment import Row
from attemper.lab.stacked.study import Study, work
from attemper.lab.studies import STUDIES, study


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
    import full_size

    from attemper.lab.engine import output

    for path in sorted(folder.glob("*.jsonl")):
        if path.stem in STUDIES:
            rows = rows_of(path)
            full_size.write(path.stem, rows)
            found = study(path.stem)
            chart = found.draw(rows, found.finding(rows))
            target = full_size.DOCS / "figures" / f"full-{path.stem}.svg"
            target.write_bytes(output.render(chart.to_json(), ".svg"))
            print(f"{target.name}: {found.finding(rows)}")


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
