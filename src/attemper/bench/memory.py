"""memory: the most memory a call holds at once beyond its inputs, outputs and gradients.

Each measurement is a fresh process (`python -m attemper.bench.memory CASE`), so that no earlier call leaves memory to reuse.
On a CPU it is the high-water mark of the resident set, reset after the inputs exist and a tiny call has loaded all libraries;
on CUDA it is the peak of torch's allocator.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError
from .candidates import CANDIDATES, Case, call

MIB = 1 << 20
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
    order = json.dumps({"candidate": candidate, "case": asdict(case), "threads": torch.get_num_threads()})
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, order], capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"bench: {CANDIDATES[candidate]} on {case} took more than {timeout:.0f} s. Use smaller --length."
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"signal {-done.returncode}"])[-1]
        raise InputError(f"bench: measuring {CANDIDATES[candidate]} on {case} failed: {last}. Use smaller --length.")
    answer = json.loads(done.stdout.splitlines()[-1])
    return Peak(candidate, case, answer["beyond"], answer["results"], answer["kernel"])


def probe(candidate: str, case: Case) -> dict[str, int | str | None]:
    """Measure one call in this process, which should be fresh."""
    tiny = replace(case, shape=(1, 1, min(WARM_LENGTH, case.shape[2]), case.shape[3]))
    call(candidate, tiny.tensors())()
    tensors = case.tensors()
    risen, results = rise(call(candidate, tensors), case.device)
    # an expanded result holds less than its shape, a slice of scratch memory more: count the smaller of the two
    size = sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in results)
    return {"beyond": max(0, risen - size), "results": size, "kernel": tensors.kernel(candidate)}


def rise(run: Callable[[], tuple[Tensor, ...]], device: str) -> tuple[int, tuple[Tensor, ...]]:
    """How many bytes one call adds at its peak to what this process holds, and its results; reliable in a fresh process only."""
    measure = _on_cuda if torch.device(device).type == "cuda" else _on_cpu
    return measure(run)


def _on_cuda(run: Callable[[], tuple[Tensor, ...]]) -> tuple[int, tuple[Tensor, ...]]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, results


def _on_cpu(run: Callable[[], tuple[Tensor, ...]]) -> tuple[int, tuple[Tensor, ...]]:
    gc.collect()
    _return_free_memory()
    _reset_high_water()
    before = _resident()
    results = run()
    return _high_water() - before, results


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


def _return_free_memory() -> None:
    """Return the pages that malloc keeps after a free: reusing them would not show. glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _reset_high_water() -> None:
    """Linux: VmHWM starts again from the present size. If that is refused, the mark can only be too high."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _resident() -> int:
    return _status("VmRSS") or _most_ever()


def _high_water() -> int:
    return _status("VmHWM") or _most_ever()


def _status(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)


def _most_ever() -> int:
    """The largest resident set since the process began: without /proc, a peak below it does not show."""
    import resource  # not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def main() -> None:
    order = json.loads(sys.argv[1])
    torch.set_num_threads(order["threads"])
    case = Case(**{**order["case"], "shape": tuple(order["case"]["shape"])})
    print(json.dumps(probe(order["candidate"], case)))


if __name__ == "__main__":
    main()
