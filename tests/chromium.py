"""A real Chromium for the tests of the report and the page; where there is none they are skipped, and one line says so."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

FIND = Path(__file__).parents[1] / "scripts" / "browser.sh"
# no traffic of the browser's own: no updates, no sync, no reports
QUIET = [
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps"),
    *("--no-first-run", "--metrics-recording-only", "--disable-client-side-phishing-detection", "--no-pings"),
    "--disable-domain-reliability",
]

SLOWER = float(os.environ.get("ATTEMPER_SLOW_BROWSER", "1"))
"""How many times slower pages run; their frames come late too, so that a test that reads a page too early fails."""
LATE = """(() => {
  const soon = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (draw) => window.setTimeout(() => soon(draw), 100);
})()"""


def executable() -> str | None:
    """The path of a Chromium; None if there is none, or no shell to search with."""
    try:
        return subprocess.run([FIND, "--path"], capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None


def missing() -> str | None:
    """Why there is no browser to test in; None if there is one."""
    if executable() is None:
        return "needs a Chromium: make browser, or ATTEMPER_BROWSER=/path/to/one"
    if importlib.util.find_spec("playwright") is None:
        return "needs the package playwright"
    return None


def pytest_collection_modifyitems(items):
    """Skip by a mark, so that the summary has a line per file, not one per test."""
    concerned = [item for item in items if "browser" in getattr(item, "fixturenames", ())]
    reason = missing() if concerned else None
    for item in concerned if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))


def slowed(browser, times):
    """The browser, with pages slower by this factor."""
    contexts = browser.new_context

    def new_context(**options):
        context = contexts(**options)
        context.add_init_script(LATE)
        pages = context.new_page

        def new_page():
            page = pages()
            context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": times})
            return page

        context.new_page = new_page
        return context

    browser.new_context, browser.new_page = new_context, lambda **options: new_context(**options).new_page()
    return browser


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=executable(), args=[*QUIET, *as_root])
        yield launched if SLOWER == 1 else slowed(launched, SLOWER)
        launched.close()
