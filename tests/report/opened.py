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

SETTLED = """async () => {
  for (let i = 0; i < 2; i++) await new Promise((drawn) => requestAnimationFrame(drawn));
  await Promise.allSettled(document.getAnimations().map((one) => one.finished));
}"""
WORK = """() => {
  const began = performance.now();
  let sum = 0;
  for (let i = 0; i < 3e7; i++) sum += Math.sqrt(i);
  return sum && performance.now() - began;
}"""
QUIET = 80.0  # milliseconds that WORK takes on a core of 2023 that does nothing else
RESIZED = """async ({ width, height }) => {
  while (innerWidth !== width || innerHeight !== height) await new Promise((drawn) => requestAnimationFrame(drawn));
}"""
# the event comes later than the address; where that stays as it was, none comes
MOVED = """(state) => new Promise((read) => {
  const before = location.hash;
  window.addEventListener("hashchange", () => read(), { once: true });
  location.hash = state;
  if (location.hash === before) read();
})"""


_PAGES: dict[str, Any] = {}
"""A page for each set of options: a new one takes longer than most tests. Nothing of a report outlives about:blank."""


def _page(browser: Any, settings: dict[str, Any]) -> Any:
    viewport = settings["viewport"]
    key = f"{id(browser)} {sorted({**settings, 'viewport': None}.items())}"
    if key not in _PAGES:
        _PAGES[key] = browser.new_context(**settings).new_page()
        _PAGES[key].add_init_script(WATCH)
    resized(_PAGES[key], viewport)
    return _PAGES[key]


@contextlib.contextmanager
def opened(browser: Any, document: dict[str, Any], folder: Path, *, at: str = "", **options: Any) -> Iterator[Any]:
    """The page of a report; afterwards: no console message, no error, no request but the file, no violation."""
    path = folder / "report.html"
    path.write_text(report.html(document), encoding="utf-8", newline="\n")
    with visited(browser, path.as_uri(), at=at, **options) as page:
        yield page


@contextlib.contextmanager
def visited(browser: Any, address: str, *, at: str = "", within: str | None = None, **options: Any) -> Iterator[Any]:
    """The page at an address; afterwards: no console message, no error, no violation, no request beyond `within`.

    Without `within` the one request is the page's own. A blob is something that the page itself made.
    """
    settings = {"viewport": {"width": 1280, "height": 720}, "reduced_motion": "reduce", **options}
    said: list[str] = []
    asked: list[str] = []
    page = _page(browser, settings)
    listeners = {
        "console": lambda message: said.append(message.text),
        "pageerror": lambda error: said.append(str(error)),
        "request": lambda request: asked.append(request.url),
        "dialog": lambda dialog: (said.append(dialog.message), dialog.dismiss()),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    page.goto(address + at)
    try:
        yield page
        assert page.evaluate("window.violations") == []
        assert said == []
        places = {url.partition("#")[0] for url in asked if not url.startswith("blob:")}
        assert places == {address} if within is None else all(place.startswith(within) for place in places), places
    finally:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        colours = settings.get("color_scheme", "light")
        page.emulate_media(media="null", color_scheme=colours, reduced_motion=settings["reduced_motion"])
        page.mouse.move(0, 0)
        page.goto("about:blank")


def resized(page: Any, viewport: dict[str, int]) -> None:
    """Give the window another size, and wait until the page has it."""
    page.set_viewport_size(viewport)
    page.evaluate(RESIZED, viewport)


def settled(page: Any) -> None:
    """Wait until what was asked for is drawn, two frames, and nothing moves any more."""
    page.evaluate(SETTLED)


def in_time(page: Any, took: float, most: float) -> bool:
    """Whether something took fewer milliseconds than `most`; where a page's scripts are slow now, so many times as many."""
    return took < most or took < most * page.evaluate(WORK) / QUIET


def moved(page: Any, state: str) -> None:
    """Type another state into the page's address, and wait until the page has read it and drawn it."""
    page.evaluate(MOVED, state)
    settled(page)


def address(page: Any, part: str, there: bool = True) -> bool:
    """Wait until a part is in the page's address, or is not. False where that does not come.

    The browser tells of it after the page has changed it, and the page changes it at most every 150 ms.
    """
    from playwright.sync_api import TimeoutError as TooLate

    try:
        page.wait_for_url(lambda url: (part in url) is there)
    except TooLate:
        return False
    return True


def cell(page, layer, head):
    return page.locator(f'button.cell[data-head="{layer}.{head}"]')


def token(page, side, at):
    return page.locator(f'button.token[data-side="{side}"][data-at="{at}"]')
