"""Makes docs/images/*.svg, the README's pictures of the terminal, from what the command prints. Needs no browser."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

import attemper

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 120


def explain() -> str:
    """`attemper explain "Love Apple phones"` in a terminal of 120 columns, as SVG."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(attemper.explain("Love Apple phones"))
    # a fixed id, so that the same text gives the same file
    return offline(console.export_svg(title='attemper explain "Love Apple phones"', unique_id="explain"))


def offline(svg: str) -> str:
    """Without the web fonts that rich links to: the reader's own monospace font takes their place, and nothing is fetched."""
    svg = re.sub(r"@font-face\s*{.*?}\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code", "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


if __name__ == "__main__":
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / "explain.svg").write_text(explain(), encoding="utf-8")
