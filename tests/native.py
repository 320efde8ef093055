"""The native kernel as tests reach into it: its module, and the variants that this processor runs; none where it is not built."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest

from attemper.errors import KernelUnavailable
from attemper.kernels import load

try:
    native = load("cpu") and sys.modules["attemper.kernels.cpu.native"]
    VARIANTS = native.VARIANTS[: native.VARIANTS.index(native.variant) + 1]
except KernelUnavailable:
    native, VARIANTS = None, ()

needed = pytest.mark.skipif(not VARIANTS, reason="needs the native kernel; `attemper env` says why it is not there")

WAYS = tuple(f"cpu:{name}" for name in VARIANTS)
"""The native kernel by each of its variants, for `judge`."""


@contextmanager
def configured(**changed: int) -> Iterator[None]:
    """Run the native kernel otherwise: `variant`, `poison`, `parallel`."""
    before = native.configure(**changed)
    try:
        yield
    finally:
        native.configure(**before)


def variant(name: str) -> AbstractContextManager[None]:
    """Run a variant of the native kernel, forward or backward; "" is the one that would run anyhow."""
    return configured(variant=native.VARIANTS.index(name)) if name else nullcontext()
