"""A real Chromium for the report's tests; where there is none they are skipped, and one line says so."""

import os
import shutil
import sys

import pytest

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "google-chrome-stable")
# nothing that the browser does for itself: no updates, no sync, no reports
QUIET = [
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps"),
    *("--no-first-run", "--metrics-recording-only", "--disable-client-side-phishing-detection", "--no-pings"),
    "--disable-domain-reliability",
]


def found() -> str | None:
    return shutil.which(os.environ.get("ATTEMPER_BROWSER", "")) or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="session")
def browser():
    path = found()
    if path is None:
        pytest.skip(
            "browser tests did not run: there is no Chromium here. Type make browser, or set ATTEMPER_BROWSER to one"
        )
    api = pytest.importorskip("playwright.sync_api", reason="browser tests did not run: type pip install playwright")
    as_root = ["--no-sandbox"] if sys.platform != "win32" and os.geteuid() == 0 else []
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=[*QUIET, *as_root])
        yield launched
        launched.close()
