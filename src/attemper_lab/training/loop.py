"""loop: one training run, with the vital signs of its attention at every logged step.

Data and initialisation depend on the seed alone, so every rule and learning rate gets the same of both. The signs come from
`watch`; additive layers measure their own (additive scores are no product, and `watch` follows products), in the same columns.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attemper import watch

from ..engine.experiment import Row
from .layers import SIGNS, AttentionLayer

LOGGED = 15  # rows per run
KERNEL = "reference"  # many short sequences: one batched product beats tile after tile
COLUMNS = ("entropy", "effective_keys", "logit_std", "top_weight", "peak", "grad_q_rms", "grad_q_median")
HeadRows = list[dict[str, Any]]  # one per layer and head, as Record.to_dicts() gives them


def fitted(
    model: nn.Module,
    lr: float,
    steps: int,
    loss_of: Callable[[int], Tensor],
    evaluate: Callable[[bool], dict[str, float]],
    watched: Mapping[str, nn.Parameter],
    optimizer: str = "adam",
) -> Iterator[Row]:
    """Train, and yield one row per logged step: loss, evaluation, the vital signs, gradients of `watched`.

    ``evaluate`` is told whether this is the last step. A run whose loss is no longer a number has diverged, and ends there.
    """
    optim = optimizers(optimizer)(model.parameters(), lr)
    logged = sorted({round(step * steps / LOGGED) for step in range(LOGGED + 1)})
    for step in range(steps + 1):
        block: AbstractContextManager[HeadRows] = measured_heads(model) if step in logged else nullcontext([])
        with block as heads:
            loss = loss_of(step)
            optim.zero_grad(set_to_none=True)
            loss.backward()
        if step in logged:
            signs, ended = {**over_heads(heads), **gradients(watched)}, evaluate(step == steps)
            row = {"step": step, "loss": float(loss.detach()), **signs, **ended}
            yield row
            if not math.isfinite(row["loss"]):
                return
        optim.step()


def optimizers(name: str) -> Callable[[Any, float], torch.optim.Optimizer]:
    return {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor}[name]


def gradients(watched: Mapping[str, nn.Parameter]) -> Row:
    return {
        f"{name}_grad": float(parameter.grad.norm()) if parameter.grad is not None else 0.0
        for name, parameter in watched.items()
    }


@contextmanager
def measured_heads(model: nn.Module) -> Iterator[HeadRows]:
    """Around one forward and backward: yields a list that gets the signs of every head when the block ends."""
    heads: HeadRows = []
    layers = [part for part in model.modules() if isinstance(part, AttentionLayer)]
    additive = [layer for layer in layers if layer.name == "additive"]
    if not layers:  # a model without attention has no signs
        yield heads
    elif not additive:
        with watch(model, gradients=True, signs=SIGNS, kernel=KERNEL) as watching:
            yield heads
        heads += watching.record.to_dicts()
    else:
        for layer in additive:
            layer.measured = []
        try:
            yield heads
        finally:
            for layer in additive:
                heads += layer.measured or []
                layer.measured = None


def over_heads(heads: HeadRows) -> Row:
    """Means over layers and heads; the largest logit; of |dL/dq|, entry by entry, the root mean square and the median.

    The gradient is that of the query which enters the product: after the norm, where a rule norms it. NaN where nothing attends.
    """
    if not heads:
        return dict.fromkeys(COLUMNS, math.nan)

    def mean(sign: str) -> float:
        return statistics.fmean(head[sign] for head in heads)

    return {
        "entropy": mean("entropy"),
        "effective_keys": mean("effective_keys"),
        "logit_std": math.sqrt(mean("variance")),
        "top_weight": mean("top_weight"),
        "peak": max(head["peak"] for head in heads),
        "grad_q_rms": math.sqrt(statistics.fmean(head["grad_q_rms"] ** 2 for head in heads)),
        "grad_q_median": statistics.median(head["grad_q_median"] for head in heads),
    }
