"""The device under test, and the kernels that the table says serve it: one of these that is missing fails its tests."""

import os

import torch

from attemper.kernels import KERNELS

DEVICE = os.environ.get("ATTEMPER_TEST_DEVICE", "cpu")
SEED = int(os.environ.get("ATTEMPER_TEST_SEED", "0"))
"""From which every test draws: a bound that holds for one seed must hold for others."""


def serving(device: str) -> list[str]:
    """Kernels by what they say of devices alone. Whether one is built here is not asked: then it raises, and its test fails."""
    kind = torch.device(device).type
    return [name for name, serves in KERNELS.items() if serves.devices is None or kind in serves.devices]


FUSED = [name for name in serving(DEVICE) if name != "reference"]
