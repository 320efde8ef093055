"""Makes docs/images/: the README's pictures of the terminal, and of the report and the page where there is a browser for them."""

from __future__ import annotations

import io
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

import attemper

IMAGES = Path(__file__).parents[1] / "docs" / "images"
BROWSER = Path(__file__).with_name("browser.sh")
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


def report(target: Path) -> str:
    """The report of `attemper scan --token it` on the embedded model, as a reader first sees it, as PNG; says what it did."""
    return shot(target, lambda file: attemper.scan(token="it").write(file), "button.cell")


def why(target: Path) -> str:
    """The page as it opens."""
    from attemper_lab.page import offline

    return shot(target, offline.write, ".opening path.bars")


def shot(target: Path, write: Callable[[Path], object], ready: str) -> str:
    """A page as a reader first sees it, as PNG, once `ready` is there; says what it did."""
    browser = subprocess.run([BROWSER, "--path"], capture_output=True, text=True, check=False).stdout.strip()
    if not browser:
        return f"{target.name} is left as it was: there is no browser here. Type make browser."
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "page.html"
        write(page_file)
        sandbox = [] if os.geteuid() else ["--no-sandbox"]
        chromium = playwright.chromium.launch(
            executable_path=browser, args=["--disable-background-networking", *sandbox]
        )
        page = chromium.new_page(viewport={"width": 1280, "height": 720}, reduced_motion="reduce")
        page.goto(page_file.as_uri())
        page.locator(ready).first.wait_for()
        page.screenshot(path=target)
        chromium.close()
    return f"{target.name} written"


if __name__ == "__main__":
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / "explain.svg").write_text(explain(), encoding="utf-8")
    (IMAGES / "flow.svg").write_text(attemper.explain("Love Apple phones").flow() + "\n", encoding="utf-8")
    print(report(IMAGES / "report.png"))
    print(why(IMAGES / "why.png"))
