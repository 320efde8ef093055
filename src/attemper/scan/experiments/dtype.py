"""dtype: the weights of some rows in the model's own dtype and in bfloat16: which layers attend to other keys?"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...vitals import Vitals
from ...watch.examine import AttentionCall, Examiner, examine, weights_of_rows
from ..input.batch import call as call_model
from .subject import CannotRun
from .trial import Answer, Moved, Trial

ROWS = 16
MIND = 0.25
"""The share of its weight that a layer must move to other keys, on average, to be named; attemper's own, no published number."""
TODO = "Nothing to do in float32. To run it in bfloat16, compute scores and softmax in float32, or add QK-norm."


@dataclass
class RowWeights(Examiner):
    """Examiner: the weights of some rows of every layer's first call."""

    layers: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> Tensor:
        length = call.facts.queries
        places = torch.linspace(0, length - 1, min(ROWS, length), device=call.query.device).long().unique()
        found = weights_of_rows(call, vitals, places)
        if rows is not None and rows.shape[-1] == length:
            found = found * rows[:, None, places, None]
        return found

    def keep(self, name: str, call: AttentionCall, seen: Tensor) -> None:
        self.layers.setdefault((name, call.facts.kind), seen)


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
    half = copy.deepcopy(model).bfloat16()
    batch = _narrowed(trial.subject.batch)
    trial.runner.take()
    after = weights_in(half, batch)
    moved = {
        place: float((weights - after[place]).abs().sum(-1).div(2).mean())
        for place, weights in own.items()
        if place in after and after[place].shape == weights.shape
    }
    if not moved:
        raise CannotRun("no layer of the copy in bfloat16 could be compared")
    (layer, _), most = max(moved.items(), key=lambda one: one[1])
    # one digit: the next one depends on the order in which a machine adds, and so rounds
    about = f"{10 * round(10 * most)}" if most >= 0.1 else f"{100 * most:.1g}"
    says = f"in bfloat16 a row moves about {about} % of its weight to other keys, on average, in {layer or 'the model'}"
    if most < MIND:
        return Answer(says)
    return trial.fault("dtype_changes", Moved(layer, most, 0), f"{says[0].upper()}{says[1:]}.", TODO)


def _narrowed(batch: object) -> object:
    if isinstance(batch, Tensor):
        return batch.bfloat16() if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {name: _narrowed(value) for name, value in batch.items()}
    return tuple(map(_narrowed, batch)) if type(batch) is tuple else batch
