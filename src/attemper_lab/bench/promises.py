"""promises: the ratios that the documents promise, few enough for two minutes: our time divided by torch's in the same rounds.

On one thread, in the processor time of that thread, so that other processes count little. `make benchmarks` compares them with
those that the repository keeps. Below 1, attemper is faster; a row on `sliced` is divided by the same call on the visible keys
alone, a watched pass by the unwatched one, and decode on a GPU by a plain read of the cache.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import BenchRow, calls, cpu, cuda, host, watch
from .candidates import Case

SCENES = {
    "16 tokens": ("sdpa_over_torch", "signs_over_torch"),
    "decode, 512 keys": ("sdpa_over_torch", "signs_over_torch"),
    "decode, 2,048 keys stored (B, H, E, L)": ("sdpa_over_torch",),
    "64 rows on 32,768 keys, causal": ("sdpa_over_sliced",),
    "16 rows on 131,072 keys, the last 512": ("sdpa_over_sliced",),
}
LABELS = {"sdpa_over_torch": "sdpa()", "signs_over_torch": "all signs", "sdpa_over_sliced": "sdpa() ÷ sliced"}
CASES = (
    Case((4, 12, 512, 64), False),
    Case((1, 8, 2048, 64), False),
    Case((1, 8, 2048, 64), True),
    Case((1, 8, 1024, 64), False, dtype="bfloat16"),
    Case((1, 8, 1024, 64), True, dtype="bfloat16"),
    Case((1, 8, 1024, 64), False, "forward_backward"),
    Case((1, 8, 1024, 64), True, "forward_backward"),
    Case((8, 12, 2048, 64), False, rows=1),
)
QUICK_CASES = (Case((2, 12, 128, 64), True),)
ENCODER = (1, 512, False)
QUICK_ENCODER = (1, 64, False)
HOST_LENGTH, HOST_MODES = 4, ("no_grad", "backward")
ON_GPU = {"attemper": "all signs", "attemper_bare": "no signs"}


def rows(*, quick: bool, rounds: int, budget: float, note: Callable[[str], None]) -> list[BenchRow]:
    """One row for each ratio: its name, and the ratio with its 95 % interval."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = dict(_on_cpu(quick, rounds, budget, note))
    finally:
        torch.set_num_threads(threads)
    if torch.cuda.is_available():
        measured |= dict(_on_gpu(quick, rounds, budget, note))
    return [{"name": name, "ratio": ratio} for name, ratio in measured.items()]


Ratios = Iterator[tuple[str, dict[str, float]]]


def _on_cpu(quick: bool, rounds: int, budget: float, note: Callable[[str], None]) -> Ratios:
    timing: dict[str, Any] = {"rounds": rounds, "budget": budget}
    for scene in calls.SCENES:
        if scene.name in list(SCENES)[: 1 if quick else None]:
            note(f"promises: {scene.name}")
            row = calls.measure(scene, "auto", "float32", **timing, host=True)
            for name in SCENES[scene.name]:
                yield f"{scene.name}: {LABELS[name]}", row[name]
    for case in QUICK_CASES if quick else CASES:
        note(f"promises: {case}")
        row = cpu.measure("", case, **timing, host=True)
        yield f"{case}: all signs", _inverse(row["speed_vs_sdpa"])
        yield f"{case}: no signs", _inverse(row["bare_vs_sdpa"])
    if importlib.util.find_spec("transformers") is None:
        note("promises: watching is left out: transformers is missing. Type pip install 'attemper[hf]'")
    else:
        encoder = QUICK_ENCODER if quick else ENCODER
        for row in watch.rows((encoder,), rounds=rounds, budget=3 * budget, note=note, host=True):
            if row["candidate"] in ("off_cycle", "watched", "replaced"):
                yield f"MiniLM-sized encoder, {encoder[1]} tokens: {watch.CANDIDATES[row['candidate']]}", row["cost"]
    yield from _host("cpu", quick, timing, note)


def _on_gpu(quick: bool, rounds: int, budget: float, note: Callable[[str], None]) -> Ratios:
    for row in cuda.rows(quick=True, rounds=rounds, note=note):
        if row["candidate"] in ON_GPU:
            ratio = next(value for name, value in row.items() if name.startswith("time_vs_"))
            mask = "" if row["direction"] == "decode" else ", causal" if row["causal"] else ", full"
            where = f"GPU {row['direction']}, d {row['head_dim']}, n {row['length']}{mask}"
            yield f"{where}: {ON_GPU[row['candidate']]}", ratio
    yield from _host("cuda", quick, {"rounds": rounds, "budget": budget}, note)


def _host(device: str, quick: bool, timing: dict[str, Any], note: Callable[[str], None]) -> Ratios:
    """What a call of four tokens takes before its kernel."""
    timing = {**timing, "rounds": host.CALL_ROUNDS * timing["rounds"]}
    for mode in HOST_MODES[: 1 if quick else None]:
        note(f"promises: the host's time, {host.MODES[mode]}, on {device}")
        for row in host.call_rows(HOST_LENGTH, mode, device, **timing):
            if row["call"] in (host.ALL_SIGNS, "sdpa", "causal"):
                yield f"host, {HOST_LENGTH} tokens, {host.MODES[mode]}, {device}: {row['call']}", row["over_torch"]


def _inverse(speed: dict[str, float]) -> dict[str, float]:
    """A time over another, from how many times as fast it is."""
    return {name: round(1 / speed[end], 4) for name, end in (("median", "median"), ("low", "high"), ("high", "low"))}
