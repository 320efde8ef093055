"""The native kernel as tests reach into it: its module, and the variants that this processor runs; none where it is not built."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from attemper.errors import KernelUnavailable
from attemper.kernels import load

try:
    native = load("cpu") and sys.modules["attemper.kernels.cpu.native"]
    VARIANTS = native.VARIANTS[: native.VARIANTS.index(native.variant) + 1]
except KernelUnavailable:
    native, VARIANTS = None, ()

needed = pytest.mark.skipif(not VARIANTS, reason="the native kernel is not built here; `attemper env` says why")

WAYS = tuple(f"cpu:{name}" for name in VARIANTS)
"""The native kernel by each of its variants, for `judge`."""


@contextmanager
def variant(name: str) -> Iterator[None]:
    """Run a variant of the native kernel, forward or backward; "" is the one that would run anyhow."""
    if not name:
        yield
        return
    before, native._VARIANT = native._VARIANT, native.VARIANTS.index(name)
    try:
        yield
    finally:
        native._VARIANT = before
