"""What tests of the native kernel share."""

from contextlib import nullcontext

import pytest
import torch

from native import VARIANTS, configured, native, variant


@pytest.fixture
def poisoned_workspace():
    """Workspaces of the native kernel are filled with NaN first."""
    with nullcontext() if native is None else configured(poison=1):
        yield


@pytest.fixture
def threads():
    """Set the number of threads with this; it is put back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=VARIANTS)
def every_variant(request, poisoned, poisoned_workspace, threads):
    """A test runs on every variant, with workspaces full of NaN; the number of threads is put back."""
    with variant(request.param):
        yield
