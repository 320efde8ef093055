"""What the tests of the clip share: a model with heads of different sizes, its peaks, and what may be left of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import attemper
from treat.architectures import Built

Inputs = dict[str, Any]


def made(build: Callable[[], Built], seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Inputs]:
    """A model whose heads have peaks of many sizes, in evaluation mode. Biases and gains are not at 0 or 1."""
    torch.manual_seed(seed)
    model, inputs = build()
    model = as_dtype(model.eval(), dtype)
    inputs = {n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in inputs.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.shape[0] != 64:  # an embedding
                parameter.mul_(4)
    return model, inputs


def as_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """In this dtype. Grouped experts have no float64 in torch; one by one they have."""
    experts = getattr(model, "set_experts_implementation", None)
    if experts is not None:
        experts("eager")
    return model.to(dtype)


def watched(model: nn.Module, inputs: Inputs) -> attemper.Record:
    with torch.no_grad(), attemper.watch(model) as watch:
        model(**inputs)
    return watch.record


def first(record: attemper.Record, sign: str = "peak") -> tuple[tuple[str, str], Tensor]:
    """The first layer that ran, since later ones get other inputs once it is clipped: its place, and the peaks of its heads."""
    rows = record.to_dicts()
    place = (rows[0]["layer"], rows[0]["kind"])
    peaks = [row[sign] for row in rows if (row["layer"], row["kind"]) == place]
    return place, torch.tensor(peaks, dtype=torch.float64)


def middle(peaks: Tensor) -> float:
    """A tau that half of the heads are above."""
    ordered = peaks.sort().values.tolist()
    return ordered[0] / 2 if len(ordered) == 1 else (ordered[len(ordered) // 2 - 1] + ordered[len(ordered) // 2]) / 2


def twin(model: nn.Module) -> nn.Module:
    """The same weights, to judge by: what half precision stores, in float64 arithmetic."""
    return copy.deepcopy(model).double()
