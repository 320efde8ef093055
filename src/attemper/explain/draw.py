"""The vectors and matrices of an explanation, drawn so that the same name and seed give the same numbers everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def embeddings(words: Sequence[str], width: int, seed: int) -> Tensor:
    """One row per word, N(0, 1): ``(words, width)``. The same word has the same row wherever it stands."""
    distinct = {word: place for place, word in enumerate(dict.fromkeys(words))}
    table = torch.stack([normal(f"word {word}", (width,), seed) for word in distinct])
    return table[torch.tensor([distinct[word] for word in words], device="cpu")]


def projection(name: str, head: int, rows: int, columns: int, seed: int, fan_in: int) -> Tensor:
    """One head's share of a matrix, N(0, 1/fan_in): unit variance in gives unit variance out.

    Each head is drawn on its own, so the one head of a plain call is the first of many.
    """
    return normal(f"matrix {name} {head}", (rows, columns), seed) * fan_in**-0.5


def normal(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """N(0, 1) in float64, from the name and the seed alone (Python's own hash differs from process to process)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
