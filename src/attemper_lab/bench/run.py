"""run: the defaults and the checks of `attemper bench`; runs its parts and returns one document of rows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attemper.errors import InputError
from attemper.extension.machine import env
from attemper.extension.tools import nearest
from attemper.kernels import KERNELS

from . import calls, cpu, cuda, host, memory, promises, speed, watch, watch_cuda
from .candidates import CANDIDATES, DTYPES, Case

Shape = tuple[int, int, int, int]

PARTS = ("speed", "memory", "cpu", "cuda", "watch", "host", "promises")
USES = {
    "speed": ("--shape", "--causal", "--dtype", "--device", "--kernel", "--rounds"),
    "memory": ("--length", "--dtype", "--device", "--kernel"),
    "cpu": ("--dtype", "--kernel"),
    "cuda": ("--rounds",),
    "watch": ("--device", "--rounds"),
    "host": ("--device", "--rounds"),
    "promises": ("--rounds",),
}
"""The options that each part uses, besides --quick; any other would do nothing."""
EAGER_LENGTH = 8192
"""Longest length at which the memory of eager attention is measured, for contrast: it grows with the square."""

HELD = 8
"""Tensors of the shape that a forward and a backward hold at once: inputs, output, and as many gradients."""

BUSY = 0.5
"""Load per core by other processes, above which a note warns."""


@dataclass(frozen=True)
class BenchSettings:
    """What to measure. Start from :data:`DEFAULT` or :data:`QUICK`."""

    shapes: tuple[Shape, ...]
    masks: tuple[bool, ...]  # causal or not
    rounds: int
    budget: float  # seconds per case
    lengths: tuple[int, ...]  # of the memory table
    encoder: tuple[tuple[int, int, bool], ...]  # what is watched: batch, length, padded
    dtype: str = "float32"
    device: str = "cpu"
    kernel: str = "auto"
    parts: tuple[str, ...] = PARTS[:2]  # the others take longer, or need transformers, and are run by name


DEFAULT = BenchSettings(
    shapes=((1, 8, 2048, 64), (1, 4, 4096, 128)),
    masks=(False, True),
    rounds=15,
    budget=20.0,
    lengths=(8192, 16384, 32768),
    encoder=((1, 512, False), (4, 512, True)),
)
QUICK = replace(
    DEFAULT, shapes=((1, 4, 1024, 64),), rounds=5, budget=3.0, lengths=(2048, 4096), encoder=((1, 128, False),)
)


def settings(quick: bool, **options: Any) -> BenchSettings:
    """The defaults, replaced by the options that were given; None and () mean not given."""
    chosen = replace(QUICK if quick else DEFAULT, **{name: value for name, value in options.items() if value})
    check(chosen)
    return chosen


def check_options(part: str | None, given: Sequence[str]) -> None:
    """Refuse options that this part does not use.

    Args:
        part: one of ``PARTS``; None: the first two, which use all options between them.
        given: the options that were typed, as they are typed.
    """
    for option in given if part in USES else ():
        if option not in USES[str(part)]:
            others = [name for name, options in USES.items() if option in options]
            raise InputError(
                f"bench {part}: {option} does nothing there; it is for {' and '.join(others)}. Leave it out, or type "
                f"attemper bench {others[0]} {option} …"
            )


def parse_shape(text: str) -> Shape:
    """``"1,8,2048,64"`` → (1, 8, 2048, 64)."""
    try:
        batch, heads, length, head_dim = (int(part) for part in text.split(","))
        if min(batch, heads, length, head_dim) < 1:
            raise ValueError
    except ValueError:
        raise InputError(
            f"bench: --shape must be four whole numbers B,H,L,E above 0; got {text!r}. Type --shape 1,8,2048,64."
        ) from None
    return batch, heads, length, head_dim


def check(settings: BenchSettings) -> None:
    """Refuse what could only fail later, after minutes of measuring."""
    for part in settings.parts:
        if part not in PARTS:
            raise InputError(f"bench: unknown part {part!r}. {nearest(part, PARTS)} Leave it out for the first two.")
    if settings.dtype not in DTYPES:
        raise InputError(f"bench: unknown --dtype {settings.dtype!r}. {nearest(settings.dtype, DTYPES)}")
    if settings.kernel not in ("auto", *KERNELS):
        raise InputError(f"bench: unknown --kernel {settings.kernel!r}. {nearest(settings.kernel, ('auto', *KERNELS))}")
    env.check_device("bench", settings.device)
    _check_memory(settings)


def _check_memory(settings: BenchSettings) -> None:
    """Refuse what does not fit in memory: a system may grant it, and kill the process that uses it."""
    free = memory.free(settings.device)
    shapes = [*(settings.shapes if "speed" in settings.parts else ())]
    lengths = [*(settings.lengths if "memory" in settings.parts else ())]
    for option, shape in [("--shape", shape) for shape in shapes] + [("--length", (1, 1, n, 64)) for n in lengths]:
        needs = HELD * math.prod(shape) * getattr(torch, settings.dtype).itemsize
        if needs > free:
            typed = ",".join(map(str, shape)) if option == "--shape" else shape[2]
            known = "1,8,2048,64" if option == "--shape" else "8192"
            raise InputError(
                f"bench: {option} {typed} needs about {needs // 2**30:,} GiB in {settings.dtype}; {free / 2**30:,.0f} GiB are "
                f"free on {settings.device}. Type {option} {known}."
            )


def run(settings: BenchSettings, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure, calling `note` with the current case, and return one document for JSON."""
    environment = env.describe()
    load = {"before": _load()}
    _warn(load["before"], 0, environment["cpu"], note)
    document: dict[str, Any] = {"environment": environment, "load": load, **{part: [] for part in (*PARTS, "calls")}}
    quick = settings.shapes == QUICK.shapes
    if "speed" in settings.parts:
        document["speed"] = speed.rows(cases(settings), rounds=settings.rounds, budget=settings.budget, note=note)
    if "memory" in settings.parts:
        document["memory"] = memory_rows(settings, note)
    if "watch" in settings.parts:
        budget = 3 * settings.budget  # a whole model, five times a round
        if settings.device == "cpu":
            document["watch"] = watch.rows(settings.encoder, rounds=settings.rounds, budget=budget, note=note)
        else:
            options: dict[str, Any] = {"quick": quick, "rounds": settings.rounds, "budget": budget, "note": note}
            document["watch"] = watch_cuda.rows(**options, device=settings.device)
    if "cpu" in settings.parts:
        common: dict[str, Any] = {"quick": quick, "kernel": settings.kernel, "dtype": settings.dtype, "note": note}
        document["calls"] = calls.rows(**common)
        document["cpu"] = cpu.rows(**common)
    if "cuda" in settings.parts:
        document["cuda"] = cuda.rows(quick=quick, rounds=settings.rounds, note=note)
    if "host" in settings.parts:
        both = settings.device == "cpu" and torch.cuda.is_available()
        devices = ("cpu", "cuda") if both else (settings.device,)
        options = {"quick": quick, "rounds": settings.rounds, "budget": settings.budget, "devices": devices}
        document["host"] = host.rows(**options, note=note)
    if "promises" in settings.parts:
        options = {"quick": quick, "rounds": settings.rounds, "budget": settings.budget / 4}
        document["promises"] = promises.rows(**options, note=note)
    load["after"] = _load()
    _warn(load["after"], environment["cpu"]["threads"], environment["cpu"], note)
    return document


def cases(settings: BenchSettings) -> list[Case]:
    """Forward on every shape and mask; forward and backward on the first shape, causal where that was asked for."""
    common: dict[str, Any] = {"dtype": settings.dtype, "device": settings.device, "kernel": settings.kernel}
    forward = [Case(shape, causal, **common) for shape in settings.shapes for causal in settings.masks]
    backward = Case(settings.shapes[0], any(settings.masks), "forward_backward", **common)
    return [*forward, backward]


def memory_rows(settings: BenchSettings, note: Callable[[str], None]) -> list[dict[str, Any]]:
    """Peak memory at each length with its growth since the one before: B = H = 1, E = 64, causal; on a GPU E = 128."""
    measured, head_dim = [], 128 if torch.device(settings.device).type == "cuda" else 64
    for candidate, direction in (
        ("attemper", "forward"),
        ("attemper", "forward_backward"),
        ("sdpa", "forward_backward"),
        ("eager_statistics", "forward_backward"),
    ):
        before = 0
        for length in sorted(settings.lengths):
            if candidate.startswith("eager") and length > EAGER_LENGTH:
                break
            case = Case((1, 1, length, head_dim), True, direction, settings.dtype, settings.device, settings.kernel)
            note(f"memory of {CANDIDATES[candidate]}: {case}")
            peak = memory.peak(candidate, case)
            measured.append(
                {
                    "candidate": candidate,
                    "kernel": peak.kernel,
                    "direction": direction,
                    "length": length,
                    "dtype": settings.dtype,
                    "device": settings.device,
                    "beyond_mib": round(peak.beyond / memory.MIB, 1),
                    "results_mib": round(peak.results / memory.MIB, 1),
                    "growth": round(peak.beyond / before, 2) if before else None,
                }
            )
            before = peak.beyond
    return measured


def _warn(load: float | None, ours: int, cpu: dict[str, Any], note: Callable[[str], None]) -> None:
    """Threads that wait for each other lose a time slice at every step if another process uses one of their cores."""
    if load is not None and load - ours > BUSY * cpu["cores"] and cpu["threads"] > 1:
        note(
            f"the machine is busy (load {load}), which slows candidates with many short steps on several threads most. "
            "Wait, or type OMP_NUM_THREADS=1 attemper bench …"
        )


def _load() -> float | None:
    """The load average of the last minute; None on Windows."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
