"""A real Chromium for the tests of the report and the page; where there is none they are skipped, and one line says so."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

FIND = Path(__file__).parents[1] / "scripts" / "browser.sh"
# nothing that the browser does for itself: no updates, no sync, no reports
QUIET = [
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps"),
    *("--no-first-run", "--metrics-recording-only", "--disable-client-side-phishing-detection", "--no-pings"),
    "--disable-domain-reliability",
]

SLOWER = float(os.environ.get("ATTEMPER_SLOW_BROWSER", "1"))
"""So many times slower do pages run their scripts, and their frames come late: a test that reads a page too early fails."""
LATE = """(() => {
  const soon = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (draw) => window.setTimeout(() => soon(draw), 100);
})()"""


def found() -> str | None:
    """Where a Chromium is; None where there is none, or no shell to look with."""
    try:
        return subprocess.run([FIND, "--path"], capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None


def missing() -> str | None:
    """Why there is no browser to test in; None where there is one."""
    if found() is None:
        return "browser tests did not run: there is no Chromium here. Type make browser, or set ATTEMPER_BROWSER to one"
    if importlib.util.find_spec("playwright") is None:
        return "browser tests did not run: playwright is not installed. Type pip install playwright"
    return None


def pytest_collection_modifyitems(items):
    """As a mark, so that the summary says it in a line per file and not once per test."""
    concerned = [item for item in items if "browser" in getattr(item, "fixturenames", ())]
    reason = missing() if concerned else None
    for item in concerned if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))


def slowed(browser, times):
    """A browser whose pages are so many times slower."""
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
        launched = playwright.chromium.launch(executable_path=found(), args=[*QUIET, *as_root])
        yield launched if SLOWER == 1 else slowed(launched, SLOWER)
        launched.close()
