"""Open a document's report in a browser and hold it to what every report must be: silent, alone and without violations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attemper import report

# what a page must not let happen, counted before any of its own scripts run
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


@contextlib.contextmanager
def opened(browser: Any, document: dict[str, Any], folder: Path, *, at: str = "", **options: Any) -> Iterator[Any]:
    """The page of a report; afterwards: no console message, no error, no request but the file, no violation."""
    path = report.write(document, folder / "report.html")
    settings = {"viewport": {"width": 1280, "height": 720}, "reduced_motion": "reduce", **options}
    context = browser.new_context(**settings)
    said: list[str] = []
    asked: list[str] = []
    page = context.new_page()
    page.add_init_script(WATCH)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.goto(path.as_uri() + at)
    try:
        yield page
        assert page.evaluate("window.violations") == []
        assert said == []
        assert {url.partition("#")[0] for url in asked} == {path.as_uri()}
    finally:
        context.close()


def cell(page, layer, head):
    return page.locator(f'button.cell[data-head="{layer}.{head}"]')


def token(page, side, at):
    return page.locator(f'button.token[data-side="{side}"][data-at="{at}"]')
