"""What tests of the native kernel share."""

import pytest
import torch

from native import VARIANTS, native


@pytest.fixture
def poisoned_workspace(monkeypatch):
    """Workspaces of the native kernel are filled with NaN first."""
    if native is not None:
        monkeypatch.setattr(native, "_POISON", 1)


@pytest.fixture
def threads():
    """Set the number of threads with this; it is put back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=VARIANTS)
def every_variant(request, monkeypatch, poisoned, poisoned_workspace, threads):
    """A test runs on every variant, with workspaces full of NaN; the number of threads is put back."""
    monkeypatch.setattr(native, "_VARIANT", native.VARIANTS.index(request.param))
