"""surrogate: a softmax whose backward has the Jacobian of another temperature, to tell a saturated forward from a lost gradient.

Forward P = softmax(z). Backward dL/dz = (diag(P′) − P′ P′ᵀ) dL/dP with P′ = softmax(ratio · z): with ratio = 1 it is softmax
itself. There is no factor of the ratio in the gradient, so that only the Jacobian is another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attemper import rule as rule_named

RATES = {"same": 0.0, "times": 0.5, "divided": -0.5}
"""What a cell calls the rates of W_Q and W_K → the power of d_k that they are multiplied by."""


class _Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ratio: Tensor) -> Tensor:
        ctx.save_for_backward((logits * ratio).softmax(-1))
        return logits.softmax(-1)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        (gradient,) = upstream
        return weights * (gradient - (weights * gradient).sum(-1, keepdim=True)), None


def surrogate_softmax(logits: Tensor, ratio: Tensor) -> Tensor:
    """softmax(logits) over the last dimension, whose gradient is taken at ratio · logits; hidden logits are −inf in both."""
    found: Tensor = _Surrogate.apply(logits, ratio)
    return found


def ratios(cells: Sequence[Mapping[str, Any]], head_dim: int, device: str, dtype: torch.dtype) -> Tensor | None:
    """Per run what the logits are multiplied by in the Jacobian: the scale of `jacobian` over that of `rule`. None where no cell
    names a Jacobian: then the softmax is torch's own."""
    if not any("jacobian" in cell for cell in cells):
        return None
    scales = [
        [float(rule_named(str(cell[name])).scale(head_dim=head_dim)) for name in ("jacobian", "rule")] for cell in cells
    ]
    return torch.tensor([one / other for one, other in scales], device=device, dtype=dtype)


def factors(cells: Sequence[Mapping[str, Any]], head_dim: int, device: str, dtype: torch.dtype) -> Tensor | None:
    """Per run what the updates of W_Q and W_K are multiplied by; None where all are 1."""
    powers = [RATES[str(cell.get("rates", "same"))] for cell in cells]
    found = [math.pow(head_dim, power) for power in powers]
    return torch.tensor(found, device=device, dtype=dtype) if any(powers) else None
