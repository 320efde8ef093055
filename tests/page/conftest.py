"""One server for the tests that only ask it."""

import pytest

pytest.importorskip("fastapi", reason="the page's server needs fastapi: pip install 'attemper[lab]'")

from page.served import serving


@pytest.fixture(scope="module")
def live():
    with serving() as running:
        yield running
