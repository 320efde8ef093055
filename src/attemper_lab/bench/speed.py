"""speed: the time of each candidate on each case, and how far it is from the matrix product alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..timing import Spread, interleave
from . import BenchRow
from .candidates import CANDIDATES, Case, call

BASELINES = ("sdpa", "eager_statistics")
GEMM = "gemm"
EAGER_LIMIT = 4 << 30
"""Eager candidates are left out when one n × n matrix is larger than this: they hold several."""
MOST_SIDE = 8192
"""The largest side of the timed matrix product: from here on its rate is constant, and three such matrices are held."""


def rows(cases: Iterable[Case], *, rounds: int, budget: float, note: Callable[[str], None]) -> list[BenchRow]:
    """Time every candidate on every case, one row each."""
    measured = []
    for case in cases:
        note(f"time: {case}")
        measured += measure(case, rounds=rounds, budget=budget, note=note)
    return measured


def measure(
    case: Case, *, rounds: int, budget: float, note: Callable[[str], None] = lambda line: None
) -> list[BenchRow]:
    """Time every candidate on one case, and a plain matrix product of as many operations in the same rounds."""
    tensors = case.tensors()
    names = [name for name in CANDIDATES if not name.startswith("eager") or _matrix(case) <= EAGER_LIMIT]
    if len(names) < len(CANDIDATES):
        note(f"  eager left out: one score matrix would take {_matrix(case) / 2**30:.0f} GiB")
    calls: dict[str, Callable[[], object]] = {name: call(name, tensors) for name in names}
    side = gemm_side(case.flops, case.device)
    calls[GEMM] = gemm(case, side)
    times = interleave(calls, rounds=rounds, budget=budget, device=case.device)

    work = case.flops / (2.0 * side**3)  # this case in units of that product
    rate = 2.0 * side**3 / times.spread(GEMM).median
    measured = []
    for name in names:
        seconds = times.spread(name)
        measured.append(
            {
                "candidate": name,
                "kernel": tensors.kernel(name),
                "shape": list(case.shape),
                "causal": case.causal,
                "direction": case.direction,
                "dtype": case.dtype,
                "device": case.device,
                "rounds": times.rounds,
                "ms": _scaled(seconds, 1e3).to_dict(),
                **{f"speed_vs_{than}": times.speed(name, than).to_dict() for than in BASELINES if than in names},
                "gflops": round(case.flops / seconds.median / 1e9, 1),
                "gemm_gflops": round(rate / 1e9, 1),
                "of_gemm": _scaled(times.speed(name, GEMM), work).to_dict(),
            }
        )
    return measured


def gemm_side(flops: float, device: str) -> int:
    """The side of the square product with about as many operations, or with enough of them to show the device's rate."""
    least = 256 if torch.device(device).type == "cpu" else 4096
    return min(MOST_SIDE, max(least, round((flops / 2) ** (1 / 3) / 64) * 64))


def gemm(case: Case, side: int) -> Callable[[], object]:
    """A plain matrix product, to be timed in the same rounds."""
    left, right = (torch.randn(side, side, device=case.device).to(getattr(torch, case.dtype)) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _matrix(case: Case) -> int:
    batch, heads, length, _ = case.shape
    return batch * heads * length**2 * max(4, getattr(torch, case.dtype).itemsize)


def _scaled(spread: Spread, factor: float) -> Spread:
    return Spread(spread.median * factor, spread.low * factor, spread.high * factor)
