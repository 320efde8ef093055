"""Shared by every test: a seed, the device, memory that is poisoned before a kernel uses it, the command, what a watch leaves,
what was skipped."""

import gc
import os
import socket
import sys

# before torch is imported: CUDA wants the first for deterministic mode; some virtual machines have AMX and hide the leaf of CPUID
# (0x1D) that oneDNN reads the palette of its tiles from: torch's own bfloat16 products then die of an illegal instruction
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("ATTEMPER_STRICT", "1")  # an error in attemper itself fails a test
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

from chromium import browser as browser
from chromium import pytest_collection_modifyitems as pytest_collection_modifyitems
from serving import DEVICE, SEED
from skipped import pytest_terminal_summary as pytest_terminal_summary


def pytest_collection_finish():
    """While no test has run: tests/forked.py says why.

    What was imported stays until the end, so the garbage collector need not look through it each time that a test calls it.
    """
    gc.collect()
    gc.freeze()
    if "forked" in sys.modules:
        sys.modules["forked"].prepare()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(SEED)


@pytest.fixture(scope="session")
def device() -> str:
    """The device that kernels are tested on: ATTEMPER_TEST_DEVICE, or cpu. One that was asked for must be there."""
    torch.empty(1, device=DEVICE)
    return DEVICE


@pytest.fixture
def free_port() -> int:
    """A port of this machine that nobody uses, for processes to meet."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def poisoned():
    """Fill every fresh tensor with NaN (integers: their largest value), so that a value never written shows."""
    torch.use_deterministic_algorithms(True)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    assert torch.ones(1).new_empty(3).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def attemper_command(capsys):
    """Runs the command in this process; gives exit code, stdout and stderr."""
    from attemper import cli

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in arguments])
        return ended.value.code or 0, *capsys.readouterr()

    return call


@pytest.fixture
def nothing_is_left_behind():
    """What a watch attaches is detached again."""
    from watched import state

    before = state()
    yield
    assert state() == before


@pytest.fixture
def float64():
    """For two ways to the same number: in float64 they agree to its rounding (tests/close.py) on every machine."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
