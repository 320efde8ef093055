"""seen: the vital signs of one training step, through `watch`, folded over layers and heads into the columns of a row.

Where a layer notes its own (additive scores are no product, and `watch` follows products), the columns are the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...watch import watch
from ...watch.examine import Entry
from ..engine.experiment import Row
from .layers import SIGNS, Own, Scores

KERNEL = "reference"  # many short sequences: one batched product beats tile after tile
COLUMNS = ("entropy", "effective_keys", "logit_std", "top_weight", "peak", "grad_q_rms", "grad_q_median")
Heads = list[dict[str, Any]]  # one per layer and head, as Record.to_dicts() gives them


@contextmanager
def looking(model: nn.Module) -> Iterator[Heads]:
    """Around one forward and backward; what is given is filled when the block ends."""
    found: Heads = []
    scores = [part for part in model.modules() if isinstance(part, Scores)]
    if not scores:  # a model without attention has no signs
        yield found
        return
    additive = [part for part in scores if part.name == "additive"]
    if not additive:
        with watch(model, gradients=True, signs=SIGNS, kernel=KERNEL) as watching:
            yield found
        found += watching.record.to_dicts()
        return
    for layer in additive:
        layer.own = Own(layer.heads)
    try:
        yield found
    finally:
        noted = [layer.own for layer in additive if layer.own is not None]
        for layer in additive:
            layer.own = None
    for place, own in enumerate(noted):
        assert own.summary is not None, "the model was not called"
        heads = tuple(range(own.gradients.heads))
        found += Entry(0, str(place), "self", heads, own.summary, own.gradients.close()).to_dicts()


def folded(heads: Heads) -> Row:
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
        "grad_q_rms": _root_mean_square([head["grad_q_rms"] for head in heads]),
        "grad_q_median": statistics.median(head["grad_q_median"] for head in heads),
    }


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value * value for value in values))
