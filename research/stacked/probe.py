"""probe: the signs of every head in a stack while it trains, kept on the device until somebody reads them.

Signs of a head are over the rows of a few sequences that see eight keys or more; ``peak`` is over all rows. The others are
published rivals, which read weights and inputs: the largest singular value of W_q W_kᵀ and its share of the sum of squares
(arXiv:2505.21910); the entropy of the spectrum of what a step adds to W_q W_kᵀ, Δ = dW_q W_kᵀ + W_q dW_kᵀ (arXiv:2606.28116;
here of order 2, −ln Σ p², which takes products alone: over six runs its ranks and those of Shannon's correlate by 0.98); and how
far the inputs of a layer lie on one side of the largest singular vector of [W_q W_k] (arXiv:2510.04202): 0 where as many are on
either side, 1 where all are on one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .language import Dimensions

ATTENTION = (
    *(
        "peak",
        "logit_mean",
        "logit_std",
        "lse",
        "entropy",
        "evenness",
        "effective_keys",
        "sum_p2",
        "top_weight",
        "saturated",
    ),
)
WEIGHTS = ("spectral_norm", "concentration", "increment_entropy", "alignment")
SIGNS = (*ATTENTION, *WEIGHTS)
FALLING = ("entropy", "evenness", "effective_keys", "increment_entropy")
"""What is worse where it is smaller."""
SATURATED = 0.99  # as in heads.py
LEAST_KEYS = 8
ROUNDS = 12  # of the power method


def logits_of(query: Tensor, key: Tensor) -> Tensor:
    """Queries and keys (runs, B, H, T, E) → causal logits, at least in float32, −inf where hidden."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    logits = query.to(wide) @ key.to(wide).mT
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
    return logits.masked_fill(hidden, -math.inf)


class Probe:
    """``found`` is (probes, signs, layers, runs, heads); ``count`` says how many probes have been taken."""

    def __init__(self, runs: int, size: Dimensions, probes: int, like: Tensor) -> None:
        self.found = like.new_full((probes, len(SIGNS), size.layers, runs, size.heads), math.nan)
        self.count = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.top = like.new_ones(size.layers, runs, size.width, 1)  # where the last search for a singular vector ended

    def _write(self, sign: str, layer: int, values: Tensor) -> None:
        place = self.found[:, SIGNS.index(sign), layer]
        place.index_copy_(0, self.count.clamp(max=len(place) - 1), values[None].to(place.dtype))

    @torch.no_grad()
    def take(self, layer: int, query: Tensor, key: Tensor) -> None:
        """The signs of one layer's logits."""
        logits = logits_of(query, key)
        self._write("peak", layer, logits.amax((1, 3, 4)))
        rows = logits[..., LEAST_KEYS - 1 :, :]
        seen = torch.arange(LEAST_KEYS, logits.shape[-2] + 1, device=logits.device, dtype=logits.dtype)[:, None]
        shown = rows.masked_fill(rows == -math.inf, 0.0)
        mean = shown.sum(-1, keepdim=True) / seen
        variance = ((rows - mean).masked_fill(rows == -math.inf, 0.0).square().sum(-1) / seen[:, 0]).mean((1, 3))
        self._write("logit_mean", layer, mean.mean((1, 3, 4)).abs())
        self._write("logit_std", layer, variance.sqrt())
        self._write("lse", layer, rows.logsumexp(-1).mean((1, 3)))
        surprise = rows.log_softmax(-1)
        weights = surprise.exp()
        entropy = -(weights * surprise.masked_fill(surprise == -math.inf, 0.0)).sum(-1)
        self._write("entropy", layer, entropy.mean((1, 3)))
        self._write("effective_keys", layer, entropy.exp().mean((1, 3)))
        self._write("evenness", layer, (entropy / seen[:, 0].log()).mean((1, 3)))
        self._write("sum_p2", layer, weights.square().sum(-1).mean((1, 3)))
        top = weights.amax(-1)
        self._write("top_weight", layer, top.mean((1, 3)))
        self._write("saturated", layer, (top > SATURATED).to(top.dtype).mean((1, 3)))

    @torch.no_grad()
    def weights(self, products: list[tuple[Tensor, Tensor]]) -> None:
        """The signs of each layer's W_q and W_k, (runs, heads, width, head_dim)."""
        for layer, (query, key) in enumerate(products):
            first, second = (
                query.mT @ query,
                key.mT @ key,
            )  # W_q W_kᵀ has the squares of its singular values in their product
            vector = torch.ones_like(first[..., :1])
            for _ in range(ROUNDS):
                vector = first @ (second @ vector)
                vector = vector / torch.linalg.vector_norm(vector, dim=-2, keepdim=True)
            largest = torch.linalg.vector_norm(first @ (second @ vector), dim=(-2, -1))
            self._write("spectral_norm", layer, largest.sqrt())
            self._write("concentration", layer, largest / (first * second.mT).sum((-2, -1)))

    @torch.no_grad()
    def increments(self, layer: int, now: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """The entropy of the spectrum of what a step added to W_q W_kᵀ; W_q and W_k (runs, heads, width, head_dim)."""
        change = [one - other for one, other in zip(now, before, strict=True)]
        size = sum(torch.linalg.vector_norm(one, dim=(-2, -1), keepdim=True) for one in change)
        query, key = now
        left = torch.cat([change[0] / size, query], -1)  # Δ is left @ right.mT, of rank 2 head_dim at most
        right = torch.cat([key, change[1] / size], -1)
        square = (left.mT @ left) @ (right.mT @ right)  # its eigenvalues are the squares of Δ's singular values
        total = square.diagonal(dim1=-2, dim2=-1).sum(-1)
        self._write("increment_entropy", layer, 2 * total.log() - (square * square.mT).sum((-2, -1)).log())

    @torch.no_grad()
    def align(self, layer: int, inputs: Tensor, weight: Tensor) -> None:
        """On which side of the largest singular vector of a weight, (runs, width, outputs), its inputs lie."""
        vector = self.top[layer]
        for _ in range(ROUNDS):
            vector = weight @ (weight.mT @ vector)
            vector = vector / torch.linalg.vector_norm(vector, dim=-2, keepdim=True)
        self.top[layer].copy_(vector)
        sided = (inputs.to(vector.dtype) @ vector)[..., 0].sign().mean(1).abs()
        self._write("alignment", layer, sided[:, None].expand(-1, self.found.shape[-1]))

    def series(self, run: int) -> dict[str, list[float]]:
        """Each sign over the probes taken: its worst head over all layers; and the mean of all heads as ``NAME_mean`` for those
        of attention."""
        taken = self.found[: int(self.count), :, :, run].double().flatten(2)
        found = {
            sign: (taken[:, index].amin(1) if sign in FALLING else taken[:, index].amax(1)).tolist()
            for index, sign in enumerate(SIGNS)
        }
        return found | {f"{sign}_mean": taken[:, SIGNS.index(sign)].mean(1).tolist() for sign in ATTENTION}
