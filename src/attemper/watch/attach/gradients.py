"""Gradients: the root mean square and the median of |dq| and |dk|, per head, taken by hooks during the backward.

The gradient is that of the tensor that enters the product q·kᵀ, after position encodings, norms and other ops.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ...errors import internal_error
from ..call import AttentionCall
from .modes import leave_all, without_autograd_and_modes

COLUMNS = ("grad_q_count", "grad_q_square", "grad_q_median", "grad_k_count", "grad_k_square", "grad_k_median")
NO_GRADIENTS = (
    "gradients=True, but in step {step} no gradient reached q and k of {layers}: passes ran under no_grad or inference_mode, "
    "layers are frozen, or no backward ran before the step ended."
)


Turn = Callable[[Tensor], Tensor]
"""Brings a gradient to (..., L, E)."""


def _as_it_is(gradient: Tensor) -> Tensor:
    return gradient


def _transposed(gradient: Tensor) -> Tensor:
    return gradient.mT


class GradientHooks:
    """Sums per head for one layer and step. A median does not merge: passes are averaged, weighted by their entries."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.sums: Tensor | None = None  # (H, 6), float64
        self.handles: list[RemovableHandle] = []
        self.failure: str | None = None  # what went wrong while a gradient was measured

    def follow(self, call: AttentionCall) -> None:
        """Register hooks on q and k of this call."""
        (query, key), batch = (call.query, call.key), call.info.batch
        # a product has its right factor as (..., E, L)
        turns: list[Turn] = [
            _transposed if flipped else _as_it_is for flipped in (call.flipped, call.product and not call.flipped)
        ]
        if call.documents is not None:
            (query, key), batch, turns = call.documents.tensors, 1, [call.documents.flat] * 2
        for place, tensor, turn in ((0, query, turns[0]), (3, key, turns[1])):
            if not tensor.requires_grad or tensor.dim() < 2:
                continue
            rows = call.rows if place == 0 or call.info.kind == "self" else None
            handle = tensor.register_hook(self._hook(place, batch, turn, rows))
            if tensor.is_leaf:  # hooks on others end with their graph; a leaf would keep them
                self.handles.append(handle)

    def _hook(self, place: int, batch: int, turn: Turn, rows: Tensor | None) -> Callable[[Tensor], None]:
        # a weak reference: a graph that outlives the watch must not keep it
        mine = weakref.ref(self)

        def hook(gradient: Tensor) -> None:
            own = mine()
            if own is not None:
                try:
                    with without_autograd_and_modes(gradient.device.type):
                        own.add(place, turn(gradient.detach()), batch, rows)
                except RuntimeError as error:  # out of memory, for example: the backward goes on
                    leave_all()
                    own.failure = str(error)
                except Exception as error:
                    own.failure = internal_error(error)

        return hook

    def add(self, place: int, gradient: Tensor, batch: int, rows: Tensor | None) -> None:
        length, width = gradient.shape[-2:]
        if gradient.numel() % (batch * length * width):
            return  # a factor that is shared over the batch belongs to no single head
        parts = gradient.reshape(batch, -1, length, width)
        if parts.shape[1] != self.heads:
            if self.heads % parts.shape[1]:
                return
            # grouped heads: each query head gets the gradient of its group
            parts = parts.repeat_interleave(self.heads // parts.shape[1], dim=1)
        parts = parts.movedim(1, 0)  # (H, B, L, E)
        count: float | Tensor = float(batch * length * width)
        if rows is not None and rows.shape[-1] == length:
            keep = rows[None, :, :, None].expand(1, batch, length, 1)
            count = keep.double().sum() * width
            parts = parts.masked_fill(~keep, math.nan)
        size = parts.abs().flatten(1).to(torch.promote_types(parts.dtype, torch.float32))
        square = size.double().square().nansum(-1)
        median = size.nanmedian(-1).values.double().nan_to_num(0.0)
        if self.sums is None:
            self.sums = torch.zeros(self.heads, len(COLUMNS), dtype=torch.float64, device=parts.device)
        self.sums[:, place] += count
        self.sums[:, place + 1] += square
        self.sums[:, place + 2] += median * count

    def close(self) -> Tensor | None:
        """Remove the hooks; returns the sums."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        return self.sums
