"""text: the sources of the standard library as bytes, and windows of them.

All modules but tests and generated tables, in an order that depends on their names alone, so that what is held out is like
what is trained on. A file is in one part only: the parts end where files end, and a file that is there twice is taken once.
Rows name the text by its length and hash: another Python has another text.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from attemper.errors import InputError
from attemper_lab.engine.experiment import generator

VOCABULARY = 256
UNTRAINED_LOSS = math.log(VOCABULARY)  # nats: the loss of a model that has learned nothing
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
TABLES = {"encodings", "pydoc_data"}  # generated, and much alike: one codec would tell what the next one says
SHARES = {"train": (0.0, 0.9), "validation": (0.9, 0.95), "test": (0.95, 1.0)}
LEAST = 1_000_000  # bytes


@functools.cache
def sources() -> tuple[Tensor, str]:
    """The text as uint8, and its length and hash, which identify it."""
    content = b"".join(_files())
    if len(content) < LEAST:
        raise InputError("stacked: this Python has no source files of its standard library. Use one that has.")
    name = f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()[:16]}"
    return torch.frombuffer(bytearray(content), dtype=torch.uint8), name


@functools.cache
def _files() -> tuple[bytes, ...]:
    """The content of every file, with a line end after it, in the order of the text."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = [
        path for path in folder.rglob("*.py") if not (LEFT_OUT | TABLES) & set(path.relative_to(folder).parts[:-1])
    ]
    found.sort(key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest())
    return tuple(dict.fromkeys(path.read_bytes() + b"\n" for path in found))


@functools.cache
def ends(part: str) -> tuple[int, int]:
    """Where a part of the text begins and ends: at the first end of a file after its share of the bytes."""
    places = [0, *itertools.accumulate(map(len, _files()))]
    low, high = (next(place for place in places if place >= share * places[-1]) for share in SHARES[part])
    return low, high


def starts(part: str, shape: tuple[int, ...], length: int, *names: object) -> Tensor:
    """Where windows of one byte more than ``length`` begin, drawn from a stream that the names decide."""
    low, high = ends(part)
    return torch.randint(
        low, high - length, shape, generator=generator("cpu", "stacked text", part, *names), device="cpu"
    )
