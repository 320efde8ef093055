"""One server for the tests that only ask it; axe-core for those of accessibility, from npm, in tests only."""

import os
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2] / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="session")
def axe() -> str:
    """The text of axe-core, to be run in a page."""
    path = Path(os.environ.get("ATTEMPER_AXE", HOME))
    if not path.is_file():
        pytest.skip("needs axe-core: make browser, or ATTEMPER_AXE=/path/to/axe.min.js")
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def live():
    """A server whose computations are those of stub_worker.py."""
    pytest.importorskip("fastapi", reason="needs the package fastapi")
    from page.served import serving

    with serving() as running:
        yield running
