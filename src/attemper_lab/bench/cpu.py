"""cpu: attemper against torch's SDPA on the CPU: short and long, full and causal, backward and decode, in one run.

The rounds of each case also time a matrix product or, for decode, a plain read of as many bytes, so that each rate can be
compared with that of the machine in the same seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..timing import interleave
from . import BenchRow
from .candidates import Case, call
from .speed import gemm, gemm_side

SHAPES = (
    (8, 12, 128, 64),
    (4, 12, 512, 64),
    (1, 8, 1024, 64),
    (1, 8, 2048, 64),
    (1, 8, 4096, 64),
    (1, 8, 1024, 128),
    (1, 4, 4096, 128),
    (1, 8, 8192, 128),
)
BACKWARD = ((8, 12, 128, 64), (4, 12, 512, 64), (1, 8, 1024, 64), (1, 8, 2048, 64), (1, 4, 2048, 128))
DECODE = ((1, 32, 4096, 128), (8, 12, 2048, 64), (1, 3, 32768, 64))
QUICK = ((2, 12, 128, 64), (1, 4, 1024, 64))
ROUNDS, BUDGET = 20, 5.0
EAGER_MATRIX = 300 << 20
"""Eager attention is measured if one n × n matrix is at most this large: it holds several, and is slow."""


def cases(quick: bool, kernel: str, dtype: str = "float32") -> list[tuple[str, Case]]:
    """The cases, each with the title of its table."""
    forward, backward = (QUICK, QUICK[:1]) if quick else (SHAPES, BACKWARD)
    decode = ((1, 8, 1024, 64),) if quick else DECODE
    masks = (("full", False), ("causal", True))
    listed = [
        (f"forward, {name}", Case(s, mask, "forward", dtype, kernel=kernel)) for name, mask in masks for s in forward
    ]
    for name, mask in masks:
        both = (Case(s, mask, "forward_backward", dtype, kernel=kernel) for s in backward)
        listed += [(f"forward + backward, {name}", case) for case in both]
    return listed + [("decode", Case(s, False, "forward", dtype, kernel=kernel, rows=1)) for s in decode]


def rows(*, quick: bool, kernel: str, dtype: str = "float32", note: Callable[[str], None]) -> list[BenchRow]:
    """Measure every case; one row each."""
    measured: list[BenchRow] = []
    for table, case in cases(quick, kernel, dtype):
        note(f"time: {case}")
        row = measure(table, case, rounds=5 if quick else ROUNDS, budget=1.0 if quick else BUDGET)
        row["growth"] = _growth(measured[-1], row) if measured and measured[-1]["table"] == table else None
        measured.append(row)
    return measured


def measure(table: str, case: Case, *, rounds: int, budget: float, host: bool = False) -> BenchRow:
    """Time attemper with vitals and without, torch's SDPA, eager with the same statistics, and the machine itself.

    With ``host`` in the processor time of this thread, as :func:`interleave` has it: for one thread.
    """
    tensors = case.tensors()
    batch, heads, length, _ = case.shape
    names = ["attemper", "attemper_bare", "sdpa"]
    if batch * heads * (case.rows or length) * length * 4 <= EAGER_MATRIX and not case.rows:
        names.append("eager_statistics")
    calls: dict[str, Callable[[], object]] = {name: call(name, tensors) for name in names}
    if case.rows:
        bytes_read = 2.0 * math.prod(case.shape) * tensors.inputs[1].element_size()
        block = torch.ones(int(bytes_read) // 4, device="cpu")
        calls["machine"] = block.sum
        work, least = bytes_read, bytes_read
    else:
        side = gemm_side(case.flops, case.device)
        calls["machine"] = gemm(case, side)
        work, least = case.flops, 2.0 * side**3
    times = interleave(calls, rounds=rounds, budget=budget, host=host)
    eager = times.speed("attemper", "eager_statistics").to_dict() if "eager_statistics" in names else None
    return {
        "table": table,
        "kernel": tensors.kernel("attemper"),
        "shape": list(case.shape),
        "dtype": case.dtype,
        "rounds": times.rounds,
        "ms": {name: round(1e3 * part, 4) for name, part in vars(times.spread("attemper")).items()},
        "sdpa_ms": round(1e3 * times.spread("sdpa").median, 4),
        "speed_vs_sdpa": times.speed("attemper", "sdpa").to_dict(),
        "bare_vs_sdpa": times.speed("attemper_bare", "sdpa").to_dict(),
        "speed_vs_eager_statistics": eager,
        "vitals_cost": round(times.speed("attemper_bare", "attemper").median - 1, 4),
        "rate": round(work / times.spread("attemper").median / 1e9, 1),
        "machine_rate": round(least / times.spread("machine").median / 1e9, 1),
        "of_machine": round(times.speed("attemper", "machine").median * work / least, 4),
    }


def geometric_mean(rows: Sequence[BenchRow]) -> float:
    """The geometric mean of the speeds against torch's SDPA."""
    return math.exp(sum(math.log(row["speed_vs_sdpa"]["median"]) for row in rows) / len(rows))


def _growth(before: BenchRow, row: BenchRow) -> float | None:
    """The ratio of the times of two rows, if only their lengths differ."""
    changed = [a != b for a, b in zip(before["shape"], row["shape"], strict=True)]
    if changed != [False, False, True, False]:
        return None
    return round(row["ms"]["median"] / before["ms"]["median"], 2)
