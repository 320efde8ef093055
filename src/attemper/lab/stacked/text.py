"""text: the sources of the standard library as bytes, and windows of them.

All modules but tests, in an order that depends on their names alone, so that what is held out is like what is trained on.
Rows name the text by its length and hash: another Python has another text.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from ...errors import InputError
from ..engine.experiment import generator

VOCABULARY = 256
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SHARES = {"train": (0.0, 0.9), "validation": (0.9, 0.95), "test": (0.95, 1.0)}
LEAST = 1_000_000  # bytes


@functools.cache
def sources() -> tuple[Tensor, str]:
    """The text, uint8, and what names it: its length and hash."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = [path for path in folder.rglob("*.py") if not LEFT_OUT & set(path.relative_to(folder).parts)]
    found.sort(key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest())
    content = b"\n".join(path.read_bytes() for path in found)
    if len(content) < LEAST:
        raise InputError("stacked: this Python has no source files of its standard library. Use one that has.")
    name = f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()[:16]}"
    return torch.frombuffer(bytearray(content), dtype=torch.uint8), name


def ends(part: str) -> tuple[int, int]:
    """Where a part of the text begins and ends."""
    size = len(sources()[0])
    return int(SHARES[part][0] * size), int(SHARES[part][1] * size)


def starts(part: str, shape: tuple[int, ...], length: int, *names: object) -> Tensor:
    """Where windows of one byte more than ``length`` begin, drawn from a stream that the names decide."""
    low, high = ends(part)
    return torch.randint(
        low, high - length, shape, generator=generator("cpu", "stacked text", part, *names), device="cpu"
    )
