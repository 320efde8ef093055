"""The page's random numbers in Python. Entry i of row j is the same number, however many rows and columns are drawn.

A 32-bit hash of the seed, the stream and the entry's index gives two uniform numbers, and Box and Muller's formula makes a normal
one of them. The page does the same in modules/maths/random.js.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WIDEST = 1024  # every draw is a corner of a table with this many columns
STREAMS = {"query": 1, "key": 2, "gradient": 3, "weight": 4}


def normal(what: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """The page's unit normal numbers as float32, (rows, columns).

    Args:
        what: "query", "key", "gradient" (that of the loss with respect to the weights) or "weight" (of the additive score).
        rows: how many vectors.
        columns: how many entries of each, at most 1024.
        seed: the page's seed.

    Example:
        >>> from attemper_lab.page import normal
        >>> bool((normal("query", 2, 8)[:, :4] == normal("query", 2, 4)).all())
        True
    """
    import torch

    index = torch.arange(rows, device="cpu")[:, None] * WIDEST + torch.arange(columns, device="cpu")
    base = _hash(_hash(torch.tensor(seed, device="cpu")) ^ STREAMS[what])
    first, second = _hash(base ^ (2 * index)), _hash(base ^ (2 * index + 1))
    radius = (-2 * ((first.double() + 0.5) / 2**32).log()).sqrt()
    return (radius * (2 * torch.pi * second.double() / 2**32).cos()).float()


def _hash(number: Tensor) -> Tensor:
    """Mix 32 bits: each bit of the input changes about half of those of the output."""
    number = (number + 0x9E3779B9) & 0xFFFFFFFF
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        number = _product(number ^ (number >> shift), factor)
    return number ^ (number >> 15)


def _product(number: Tensor, factor: int) -> Tensor:
    """The low 32 bits of a product that may not fit into 63."""
    low = number * (factor & 0xFFFF)
    high = (number * (factor >> 16)) & 0xFFFF
    return (low + (high << 16)) & 0xFFFFFFFF
