"""sentences: what the embedded MiniLM reads in the experiments on its heads, and the model itself.

Both sentences of a pair have the same syntax and the same number of tokens, with other words, so that a head can be compared with
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from attemper.extension.inputs import SENTENCE, embedded

from ..engine.experiment import Cell, generator

PAIRS = (
    (SENTENCE, "The cat watched the bird because it was loud."),
    ("She put the book on the table and left the room.", "He took the cup from the shelf and shut the door."),
    ("When the rain stopped, the children ran to the river.", "When the music ended, the guests walked to the garden."),
    (
        "The old engine was repaired by a young mechanic last week.",
        "The new bridge was painted by a local artist last year.",
    ),
    ("If you heat water to a hundred degrees, it boils.", "If you cool metal to a hundred degrees, it shrinks."),
    ("My brother lives in a small house near the sea.", "Our teacher works in a large school near the park."),
    ("The company that bought the factory closed it in March.", "The farmer who sold the field missed it in autumn."),
    ("Nobody knew why the lights in the tower went out.", "Everyone saw how the clouds over the valley moved on."),
)


@cache
def loaded(device: str) -> tuple[Any, Any]:
    """The model on a device, and its tokenizer; loaded once in a process."""
    model, tokenizer = embedded()
    return model.to(device), tokenizer


def chosen(cell: Cell) -> list[tuple[str, str]]:
    """As many pairs as the cell asks for, drawn by its seed."""
    order = torch.randperm(len(PAIRS), generator=generator("cpu", "sentences", cell["seed"]), device="cpu")
    return [PAIRS[index] for index in sorted(order[: int(cell["pairs"])].tolist())]


def batch(texts: Sequence[str], device: str) -> Any:
    """Sentences as the model takes them, padded to the longest."""
    _, tokenizer = loaded(device)
    return tokenizer(list(texts), padding=True, return_tensors="pt").to(device)
