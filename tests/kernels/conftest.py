"""What tests of the native kernel share."""

import pytest
import torch

from native import VARIANTS, native


@pytest.fixture(params=VARIANTS)
def every_variant(request, monkeypatch, poisoned):
    """A test runs on every variant, with workspaces full of NaN; the number of threads is put back."""
    monkeypatch.setattr(native, "_VARIANT", native.VARIANTS.index(request.param))
    monkeypatch.setattr(native, "_POISON", 1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
