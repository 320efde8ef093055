"""The device under test, and the kernels that the table says serve it: one of these that is missing fails its tests."""

import os

import torch

from attemper.kernels import KERNELS

DEVICE = os.environ.get("ATTEMPER_TEST_DEVICE", "cpu")
SEED = int(os.environ.get("ATTEMPER_TEST_SEED", "0"))
"""The seed of every test. A bound that holds for one seed must hold for others."""


def serving(device: str, dtype: torch.dtype = torch.float32) -> list[str]:
    """Kernels by what the table says of devices and dtypes. Whether one is built here is not asked: then its test fails."""
    kind = torch.device(device).type
    fits = {name: serves.devices is None or kind in serves.devices for name, serves in KERNELS.items()}
    return [name for name, serves in KERNELS.items() if fits[name] and dtype in serves.dtypes]


ON_CPU = serving("cpu")
FUSED = [name for name in serving(DEVICE) if name != "reference"]


def fused(dtype: torch.dtype) -> list[str]:
    """The kernels that serve tensors of this dtype on the device under test, but the definition itself."""
    return [name for name in serving(DEVICE, dtype) if name != "reference"]
