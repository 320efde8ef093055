"""A real Chromium for the report's tests; where there is none they are skipped, and one line says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FIND = Path(__file__).parents[2] / "scripts" / "browser.sh"
# nothing that the browser does for itself: no updates, no sync, no reports
QUIET = [
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps"),
    *("--no-first-run", "--metrics-recording-only", "--disable-client-side-phishing-detection", "--no-pings"),
    "--disable-domain-reliability",
]


def found() -> str | None:
    """Where a Chromium is; None where there is none, or no shell to look with."""
    try:
        return subprocess.run([FIND, "--path"], capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None


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
