"""The native kernel's corners, on every variant: rows that pad a strip, -inf scores, extreme scales and caps, ties, coins."""

import math
import sys

import pytest
import torch

import attemper
from attemper.errors import KernelUnavailable
from attemper.kernels import load

try:
    native = load("cpu") and sys.modules["attemper.kernels.cpu.native"]
    VARIANTS = native.VARIANTS[: native.VARIANTS.index(native.variant) + 1]
except KernelUnavailable:
    VARIANTS = ()

pytestmark = pytest.mark.skipif(not VARIANTS, reason="the native kernel is not built here; `attemper env` says why")


@pytest.fixture(params=VARIANTS, autouse=True)
def _variant(request, monkeypatch, poisoned):
    """Every test runs on every variant, with workspaces full of NaN; the number of threads is put back."""
    monkeypatch.setattr(native, "_VARIANT", native.VARIANTS.index(request.param))
    monkeypatch.setattr(native, "_POISON", 1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def attend(query, key, value, **options):
    return attemper.attention(query, key, value, kernel="cpu", **options)


def query_gradient(query, key, value, rows=slice(None), **options):
    query = query.clone().requires_grad_()
    output = attend(query, key, value, signs=(), **options).output
    return torch.autograd.grad(output[:, rows].sum(), query)[0]


@pytest.mark.parametrize(("threads", "groups"), [(1, 1), (2, 3)])
def test_a_nan_key_stays_in_its_head_and_its_rows(threads, groups):
    """101 rows fill no whole strip: what pads the last one must not be the rows of the next head."""
    torch.set_num_threads(threads)
    query, key = torch.randn(1, 3, 101, 16), torch.randn(1, groups, 800, 16)
    value = torch.randn(1, groups, 800, 16)
    if groups == 1:  # only the last row of each head sees the NaN
        key, value = key[:, :, :101].clone(), value[:, :, :101]
        key[0, 0, 100] = math.nan
        clean = query_gradient(query, key, value, causal=True)[:, :, :90]
    else:
        key[0, 2, 5] = math.nan
        clean = query_gradient(query, key, value, rows=slice(2))[:, :2]
    assert clean.isfinite().all()


def test_parts_of_the_keys_share_no_row():
    """5 rows and 8 parts: each part pads its own rows, and no worker's sum is lost, however often it runs."""
    torch.set_num_threads(4)
    query, key, value = (torch.randn(1, 1, n, 8) for n in (5, 3072, 3072))
    first = query_gradient(query, key, value)
    exact = query.double().requires_grad_()
    output = attemper.attention(exact, key.double(), value.double(), kernel="reference").output
    (expected,) = torch.autograd.grad(output.sum(), exact)
    torch.testing.assert_close(first.double(), expected, rtol=1e-4, atol=1e-5)
    for _ in range(300):
        assert torch.equal(query_gradient(query, key, value), first)
