"""scale_rates(): learning rates of q and k that fall as the other side's weights grow (QuacK, arXiv 2511.21377)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import InputError, checked_options
from .finder import last_projections
from .table import LayerProjections, ProjectionPart, Projections, check_model, check_projections, parameters_of
from .write import check_there, check_whole, masters_of, rows_like, unwrapped


class ScaledRates:
    """Learning rates of q and k that are scaled at every step; made by :func:`scale_rates`."""

    def __init__(self, model: nn.Module, optimizer: Any, projections: Projections) -> None:
        self.layers = [layer for layer in projections.values() if layer.splits]
        self.model = model
        self.begin = [self._norms(layer) for layer in self.layers]
        self.before: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}  # of the last step, by parameter: one per row
        self._dims = {part.parameter: part.dim for layer in self.layers for part in layer.parts}
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._keep),
            optimizer.register_step_post_hook(self._scale),
        ]

    def remove(self) -> None:
        """Let the optimizer take its own steps again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> ScaledRates:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _norms(self, layer: LayerProjections) -> dict[str, Tensor]:
        """The norm of the rows of each head of q, and of k."""
        parameters = parameters_of(self.model)
        return {
            side: sum_of_squares([part for part in layer.parts if part.side == side], parameters, count).sqrt()
            for side, count in (("q", layer.heads), ("k", layer.key_heads))
        }

    def _keep(self, *_: object) -> None:
        """Before a step: the weights, and by how much their rates are to be scaled."""
        parameters = parameters_of(self.model)
        self.factors = {}
        for layer, begin in zip(self.layers, self.begin, strict=True):
            now = self._norms(layer)
            groups = layer.heads // layer.key_heads
            ratio = {side: begin[side] / now[side].clamp(min=1e-30) for side in ("q", "k")}
            ratio = {
                side: torch.where(begin[side] > 0, quotient, torch.ones_like(quotient))
                for side, quotient in ratio.items()
            }
            of = {"q": ratio["k"].repeat_interleave(groups), "k": ratio["q"].view(-1, groups).mean(-1)}
            for part in layer.parts:
                mine = part.owner >= 0
                factor = torch.where(
                    mine, of[part.side][part.owner.clamp(min=0)], torch.ones(1, dtype=torch.float64, device="cpu")
                )
                other = self.factors.get(part.parameter)
                self.factors[part.parameter] = factor if other is None else torch.where(mine, factor, other)
        self.before = {name: parameters[name].detach().clone() for name in self.factors}

    def _scale(self, *_: object) -> None:
        """After a step: shorten it. Every step is proportional to its rate, so this is a step with another rate."""
        parameters = parameters_of(self.model)
        with torch.no_grad():
            for name, before in self.before.items():
                parameter = parameters[name]
                rows = rows_like(self.factors[name], self._dims[name], parameter)
                wide = torch.promote_types(parameter.dtype, torch.float32)
                step = parameter.to(wide) - before.to(wide)
                parameter.copy_(torch.where(rows == 1, parameter.to(wide), before.to(wide) + rows * step))
        self.before = {}


def sum_of_squares(parts: list[ProjectionPart], parameters: dict[str, Tensor], heads: int) -> Tensor:
    """The sum of squares of the rows of each head, on the host."""
    sums = torch.zeros(heads, dtype=torch.float64, device="cpu")
    for part in parts:
        tensor = parameters[part.parameter].detach()
        others = [dim for dim in range(tensor.dim()) if dim != part.dim]
        square = tensor.float().square() if tensor.element_size() < 8 else tensor.square()
        rows = square.sum(others) if others else square
        gather = getattr(rows, "full_tensor", None)
        rows = (rows if gather is None else gather()).double().cpu()
        mine = part.owner >= 0
        sums.index_add_(0, part.owner[mine], rows[mine])
    return sums


@checked_options
def scale_rates(optimizer: Any, model: nn.Module, projections: Projections | None = None) -> ScaledRates:
    """Scale the learning rates of q and k by the norms of each other's weights, at every step (QuacK).

    A step of W_q changes a head's logits in proportion to ‖W_k‖. So the rate of each head's q rows is divided by how much the
    norm of its k rows has grown since this call, and the other way round. The change of the logits per step then stays what it
    is now. The step is shortened after the optimizer took it, which is the same as a smaller rate for every optimizer whose
    step is proportional to its rate (SGD, Adam, AdamW, Muon, …); schedulers and parameter groups are not touched.

    Args:
        optimizer: the optimizer, or a trainer's wrapper of it.
        model: its model.
        projections: the result of :func:`projections`; left out, its last result for this model.

    Returns:
        an object with ``remove()``, also for a ``with`` statement; ``factors`` has those of the last step, by parameter and
        row.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> projections = attemper.projections(model, torch.randn(1, 5, 16))
        >>> rates = attemper.scale_rates(optimizer, model)
        >>> rates.remove()
    """
    check_model("scale_rates", model)
    (inner,) = unwrapped("scale_rates", optimizer) or (None,)
    if inner is None:
        raise InputError("scale_rates(): `optimizer` must be a torch.optim.Optimizer; got None. Pass the optimizer.")
    known = projections if projections is not None else last_projections(model)
    if known is None:
        raise InputError(
            "scale_rates(): which parameters make q and k is not known yet. Call attemper.projections(model, batch) once, with "
            "what you call the model with."
        )
    check_projections("scale_rates", known)
    parameters = parameters_of(model)
    check_whole("scale_rates()", model, parameters)
    for name in dict.fromkeys(part.parameter for layer in known.values() for part in layer.parts):
        check_there("scale_rates()", name, parameters[name])
        if masters_of(parameters[name], inner, list(model.parameters())):
            raise InputError(
                f"scale_rates(): the optimizer keeps a float32 master of {name}, from which it writes the weight, so that a "
                "shortened step would be undone. Keep the weights in float32, with torch.autocast for half precision."
            )
    if not any(layer.splits for layer in known.values()):
        raise InputError(
            "scale_rates(): no layer has rows of its own for both q and k. Print attemper.projections(model, batch) to see why; "
            "attemper.qk_clip() needs q alone."
        )
    return ScaledRates(model, inner, known)
