"""Memory: how many bytes a call adds at its peak to what the process holds, beyond its results.

On a CPU it is the high-water mark of the resident set, reset before the call; on CUDA it is what torch's allocator says.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MIB = 1 << 20


def rise(run: Callable[[], tuple[Tensor, ...]], device: str) -> tuple[int, int]:
    """How many bytes one call adds at its peak beyond its results, and the bytes of the results. Only a fresh process has no
    freed memory to reuse."""
    measure = _on_cuda if torch.device(device).type == "cuda" else _on_cpu
    risen, results = measure(run)
    # an expanded result holds less than its shape, a slice of scratch memory more: count the smaller of the two
    size = sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in results)
    return max(0, risen - size), size


def of_fresh_process(module: str, order: object, timeout: float | None = None) -> Any:
    """What ``python -m module ORDER`` prints, both as JSON; RuntimeError with the last line of its errors if it fails."""
    command = [sys.executable, "-m", module, json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"signal {-done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


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
    before = _status("VmRSS") or _most_ever()
    results = run()
    return _high_water() - before, results


def _return_free_memory() -> None:
    """Pages that malloc keeps after a free would be reused without a trace, so they are returned first. glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _reset_high_water() -> None:
    """Linux: VmHWM starts again from the present size. Where that is refused the mark can only read too high."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


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
