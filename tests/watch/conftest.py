"""Shared by the tests of watch()."""

import pytest
import torch

from watched import state


@pytest.fixture
def nothing_is_left_behind():
    before = state()
    yield
    assert state() == before


@pytest.fixture
def float64():
    """For two ways to the same number: in float64 they agree to 1e-9 on every machine, since rounding is far below that."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
