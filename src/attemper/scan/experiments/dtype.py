"""dtype: compare the weights of some rows in the model's own dtype and in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...vitals import Vitals
from ...watch.examine import AttentionCall, Examiner, examine, weights_of_rows
from ..unchanged import call as call_model
from ..unchanged import converted
from .subject import CannotRun
from .trial import ERRORS, Answer, Moved, Trial

ROWS = 16
NOTABLE = 0.25
"""The share of its weight that a layer must move to other keys, on average, to be named; attemper's own, no published number."""


@dataclass
class RowWeights(Examiner):
    """Examiner: the weights of some rows of every layer's first call."""

    layers: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> Tensor:
        length = call.info.queries
        places = torch.linspace(0, length - 1, min(ROWS, length), device=call.query.device).long().unique()
        weights = weights_of_rows(call, vitals, places)
        if rows is not None and rows.shape[-1] == length:
            weights = weights * rows[:, None, places, None]
        return weights

    def keep(self, name: str, call: AttentionCall, seen: Tensor) -> None:
        self.layers.setdefault((name, call.info.kind), seen)


def weights_in(model: nn.Module, batch: object) -> dict[tuple[str, str], Tensor]:
    """The weights of some rows of every layer in one pass."""
    rows = RowWeights()
    with torch.no_grad(), examine(model, [rows], caller="scan"):
        call_model(model, batch)
    return rows.layers


def dtype(trial: Trial) -> Answer:
    """Whether bfloat16 attends to the same keys."""
    model = trial.subject.model
    known = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if known != {torch.float32}:
        raise CannotRun("the model is not in float32")
    own = trial.weights
    batch = _narrowed(trial.subject.batch)
    trial.runner.take()
    try:
        after = weights_in(converted(model, torch.bfloat16, tables=False), batch)
    except ERRORS:  # its tables are read in other ways too
        after = weights_in(converted(model, torch.bfloat16), batch)
    moved = {
        place: float((weights - after[place]).abs().sum(-1).div(2).mean())
        for place, weights in own.items()
        if place in after and after[place].shape == weights.shape
    }
    if not moved:
        raise CannotRun("no layer of the copy in bfloat16 could be compared")
    (layer, _), most = max(moved.items(), key=lambda item: item[1])
    # one digit: the next one differs between machines, which add in other orders
    about = f"{10 * round(10 * most)}" if most >= 0.1 else f"{100 * most:.1g}"
    answer = trial.fault("dtype_changes", Moved(layer, most, 0), percent=about, where=layer or "the model")
    return Answer(f"i{answer.message[1:].rstrip('.')}") if most < NOTABLE else answer


def _narrowed(batch: object) -> object:
    if isinstance(batch, Tensor):
        return batch.bfloat16() if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {name: _narrowed(value) for name, value in batch.items()}
    return tuple(map(_narrowed, batch)) if type(batch) is tuple else batch
