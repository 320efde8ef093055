"""probe: the signs of every head in a stack while it trains, kept on the device until somebody reads them.

Signs of a head are over the rows of a few sequences that see eight keys or more; ``peak`` is over all rows. Weights have
signs too: the largest singular value of W_q W_kᵀ, and its share of the sum of squares.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .language import Dimensions

SIGNS = ("peak", "logit_std", "evenness", "p2", "top_weight", "saturated", "spectral_norm", "concentration")
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
        self._write("logit_std", layer, variance.sqrt())
        surprise = rows.log_softmax(-1)
        weights = surprise.exp()
        entropy = -(weights * surprise.masked_fill(surprise == -math.inf, 0.0)).sum(-1)
        self._write("evenness", layer, (entropy / seen[:, 0].log()).mean((1, 3)))
        self._write("p2", layer, weights.square().sum(-1).mean((1, 3)))
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

    def series(self, run: int) -> dict[str, list[float]]:
        """Each sign over the probes taken: its worst head, over all layers."""
        taken = self.found[: int(self.count)]
        return {
            sign: (taken[:, place, :, run].amin((1, 2)) if sign == "evenness" else taken[:, place, :, run].amax((1, 2)))
            .double()
            .tolist()
            for place, sign in enumerate(SIGNS)
        }
