"""fit: trains a stack of language models to its end, and returns what its runs showed as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attemper_lab.engine.experiment import Row

from .language import Dimensions, LanguageStack
from .study import Deadline, Settings
from .text import sources

SHARED = ("layers", "length", "batch", "steps", "warm_up")
WAIT = 20  # steps between two looks at the clock: the device is waited for then


def fit(
    cells: Sequence[Mapping[str, Any]],
    width: int,
    head_dim: int,
    settings: Settings,
    device: str,
    deadline: Deadline,
    made: type[LanguageStack] = LanguageStack,
) -> LanguageStack | None:
    """Train the runs of these cells; None if there is no time for them."""
    size = Dimensions(width=width, head_dim=head_dim, **{name: settings[name] for name in SHARED})
    compute = getattr(torch, settings["compute"])
    stack = made(size, cells, device, compute=compute, every=settings["every"])
    began = deadline.spent
    while stack.done < size.steps:
        if deadline.over:
            return None
        stack.train()
        if stack.done % WAIT == 0 or stack.done == size.steps:
            lowest = float(stack.losses[:, stack.done - 1].nan_to_num(nan=math.inf).min())
            speed = stack.done / max(deadline.spent - began, 1e-9)
            tokens, left = speed * len(cells) * size.batch * size.length, (size.steps - stack.done) / speed
            deadline.say(
                f"step {stack.done} of {size.steps}, {speed:.2f} steps/s, {tokens / 1e6:.2f} M tokens/s, "
                f"this stack needs {left:.0f} s more; lowest loss {lowest:.3f}"
            )
            if left > deadline.left:
                deadline.say(f"this stack needs {left:.0f} s more, and there are {deadline.left:.0f}", always=True)
                return None
    return stack


def about(size: Dimensions) -> Row:
    """The columns of every row that describe the model and its text."""
    seen = size.steps * size.batch * size.length
    return {"parameters": size.parameters, "tokens": seen, "text": sources()[1], "steps": size.steps}


def short(values: Sequence[float]) -> list[float]:
    """Round to four digits, so that rows that hold whole series stay small."""
    return [float(f"{value:.4g}") for value in values]
