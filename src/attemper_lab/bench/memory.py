"""memory: the most memory a call holds at once beyond its inputs, outputs and gradients.

Each measurement is a fresh process (`python -m attemper_lab.bench.memory CASE`), so that no earlier call leaves memory to reuse.
On a CPU it is the high-water mark of the resident set, reset after the inputs exist and a tiny call has loaded all libraries;
on CUDA it is the peak of torch's allocator.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from attemper.errors import InputError

from ..memory import MIB as MIB
from ..memory import of_fresh_process, rise
from .candidates import CANDIDATES, Case, call

WARM_LENGTH = 128


@dataclass(frozen=True)
class Peak:
    """One measurement, in bytes."""

    candidate: str
    case: Case
    beyond: int  # the peak, less everything the call was given or gave back
    results: int  # outputs, signs and gradients
    kernel: str | None  # the one that ran, for attemper's own


def peak(candidate: str, case: Case, timeout: float = 900.0) -> Peak:
    """Measure one call in a process of its own."""
    order = {"candidate": candidate, "case": asdict(case), "threads": torch.get_num_threads()}
    try:
        return Peak(candidate, case, **of_fresh_process(__name__, order, timeout))
    except subprocess.TimeoutExpired:
        raise InputError(
            f"bench: {CANDIDATES[candidate]} on {case} took more than {timeout:.0f} s. Use smaller --length."
        ) from None
    except RuntimeError as error:
        raise InputError(
            f"bench: measuring {CANDIDATES[candidate]} on {case} failed: {error}. Use smaller --length."
        ) from None


def probe(candidate: str, case: Case) -> dict[str, int | str | None]:
    """Measure one call in this process, which should be fresh."""
    tiny = replace(case, shape=(1, 1, min(WARM_LENGTH, case.shape[2]), case.shape[3]))
    call(candidate, tiny.tensors())()
    tensors = case.tensors()
    beyond, results = rise(call(candidate, tensors), case.device)
    return {"beyond": beyond, "results": results, "kernel": tensors.kernel(candidate)}


def free(device: str) -> float:
    """The free memory of a device in bytes; infinity if it is unknown."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows
        return math.inf


def main() -> None:
    order = json.loads(sys.argv[1])
    torch.set_num_threads(order["threads"])
    case = Case(**{**order["case"], "shape": tuple(order["case"]["shape"])})
    print(json.dumps(probe(order["candidate"], case)))


if __name__ == "__main__":
    main()
