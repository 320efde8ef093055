"""Shared by the tests of integrations/."""

import pytest

from watched import state


@pytest.fixture
def nothing_is_left_behind():
    before = state()
    yield
    assert state() == before
