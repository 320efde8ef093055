"""Shared by the tests of the scan."""

import pytest

from attemper.scan.demo import embedded
from watched import state


@pytest.fixture
def nothing_is_left_behind():
    before = state()
    yield
    assert state() == before


@pytest.fixture(scope="session")
def minilm():
    """The embedded model and its tokenizer; it is part of what the tests install."""
    return embedded()
