"""Shared by the tests of watch()."""

import pytest

from attemper.watch.attach.attachment import attachment
from attemper.watch.attach.light import Interception


@pytest.fixture(autouse=True)
def no_round_before(monkeypatch):
    """As in a process that just began: after many watches, functions stay between the measured steps of one."""
    monkeypatch.setattr(attachment.interception, "rounds", 0)


@pytest.fixture
def kinds(monkeypatch):
    """How each pass was followed: "full", "light", or "converted" from light to full."""
    found = []
    end = Interception.end

    def ended(self, current, complete):
        light = current.begun_light is not None
        found.append("full" if not light else "converted" if current.light is None else "light")
        end(self, current, complete)

    monkeypatch.setattr(Interception, "end", ended)
    return found
