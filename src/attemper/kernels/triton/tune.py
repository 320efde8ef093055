"""Tune: with ATTEMPER_TUNE=1 the tiles of a kernel are chosen by time, and kept in a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

from .launch import ON_GPU, Block, Launch, is_capturing

CHOSEN: dict[str, Block] = {}
"""The fastest block of each kernel that was tuned, by all that it is compiled for; kept in a file."""
REPEATS = 5


def is_choosing() -> bool:
    """Whether a launch that is made runs, to be timed."""
    return os.environ.get("ATTEMPER_TUNE") == "1" and ON_GPU and not is_capturing()


def tuned(block: Block, make: Callable[[Block], Launch]) -> Launch:
    """The launch with this block; if ATTEMPER_TUNE is 1, with the fastest of a few others too. Running it has no side effects."""
    launch = make(block)
    if not is_choosing():
        return launch
    sizes = [1 << (size - 1).bit_length() for size in launch.grid]
    untiled = {name: value for name, value in launch.constants.items() if name not in ("BM", "BN")}
    key = repr((torch.cuda.get_device_name(), launch.kernel.fn.__name__, sorted(untiled.items()), sizes))
    if not CHOSEN:
        CHOSEN.update(_read_chosen())
    if key not in CHOSEN:
        CHOSEN[key] = min(others(block), key=lambda other: _milliseconds(make, other))
        _write_chosen()
    return make(CHOSEN[key])


def others(block: Block) -> list[Block]:
    """A block, with twice the rows and warps, half and twice the keys, and one stage more."""
    plain = {name: size for name, size in block.items() if name != "maxnreg"}
    return [
        block,
        {**plain, "BM": 2 * block["BM"], "num_warps": 2 * block["num_warps"]},
        {**plain, "BN": max(32, block["BN"] // 2)},
        {**plain, "BN": 2 * block["BN"]},
        {**plain, "num_stages": block["num_stages"] + 1},
    ]


def _milliseconds(make: Callable[[Block], Launch], block: Block) -> float:
    try:
        launch = make(block)
        launch.run()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPEATS):
            launch.run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)
    except Exception:  # a tile that does not fit this card
        return math.inf


def _chosen_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attemper" / "tiles.json"


def _read_chosen() -> dict[str, Block]:
    try:
        return dict(json.loads(_chosen_file().read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _write_chosen() -> None:
    path = _chosen_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(CHOSEN, indent=1), encoding="utf-8")
        part.replace(path)
    except OSError:
        pass  # tuned again the next time
