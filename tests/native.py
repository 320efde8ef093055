"""The native kernel as tests reach into it: its module, and the variants that this processor runs; none where it is not built."""

import sys

import pytest

from attemper.errors import KernelUnavailable
from attemper.kernels import load

try:
    native = load("cpu") and sys.modules["attemper.kernels.cpu.native"]
    VARIANTS = native.VARIANTS[: native.VARIANTS.index(native.variant) + 1]
except KernelUnavailable:
    native, VARIANTS = None, ()

needed = pytest.mark.skipif(not VARIANTS, reason="the native kernel is not built here; `attemper env` says why")
