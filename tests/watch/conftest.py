"""Shared by the tests of watch()."""

import pytest

from attemper.watch.attach.attachment import attachment
from attemper.watch.attach.intercept import Interception


@pytest.fixture(autouse=True)
def no_round_before(monkeypatch):
    """As in a process that just began: after many watches, functions stay between the measured steps of one."""
    monkeypatch.setattr(attachment.interception, "rounds", 0)


@pytest.fixture
def kinds(monkeypatch):
    """How each pass was followed: "full", "intercepted", or "converted" from intercepted to full."""
    found = []
    end = Interception.end

    def ended(self, current, complete):
        intercepted = current.begun_intercepted is not None
        found.append("full" if not intercepted else "converted" if current.intercepted is None else "intercepted")
        end(self, current, complete)

    monkeypatch.setattr(Interception, "end", ended)
    return found
