"""layers: attention under any score, as the models that are trained here call it.

Dot products and cosines go through torch's own attention, as in most models, where `watch` can measure them. An additive layer
measures itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attemper import additive_attention
from attemper import rule as rule_named
from attemper.extension.calls import direction

OTHERS = ("additive", "cosine", "kappa")  # scores that are not a rule of the dot product
SIGNS = ("entropy", "effective_keys", "peak", "top_weight", "variance")


class AttentionLayer(nn.Module):
    """Attention over q, k, v of shape (B, H, L, d) by a score: a rule's name, ``additive``, ``cosine``, or ``kappa``.

    Learns the rule's gain, or the additive score's w, where there is one. ``cosine`` learns its scale from 10. ``kappa`` forces
    the logits' scale, as Wortsman et al. 2023 do in their figure 10: q and k are brought to an RMS of √kappa.
    """

    def __init__(self, name: str, heads: int, head_dim: int, layer: int = 0, kappa: float = 1.0) -> None:
        super().__init__()
        self.name, self.heads, self.head_dim, self.layer, self.kappa = name, heads, head_dim, layer, kappa
        self.rule = rule_named("none" if name in OTHERS else name)
        starts = {"additive": head_dim**-0.5, "cosine": 10.0}
        start = starts.get(name, self.rule.gain)
        shape = (heads, head_dim) if name == "additive" else (heads,)
        self.gain = None if start is None else nn.Parameter(torch.full(shape, float(start)))
        self.measured: list[dict[str, float]] | None = (
            None  # signs and gradients by head, if `measured_heads` asks for them
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
        if self.name == "additive":
            return self._additive(query, key, value, causal)
        if self.name in OTHERS or self.rule.unit:
            query, key = direction(query), direction(key)
        scale = self._scale(key.shape[-2])
        if isinstance(scale, Tensor):  # one per head, learned; torch's attention takes a plain number
            query, scale = query * scale[:, None, None], 1.0
        if self.rule.softcap is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
        logits = self.rule.softcap * torch.tanh(query @ key.mT * (scale / self.rule.softcap))
        if causal:
            hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
            logits = logits.masked_fill(hidden, -math.inf)
        return logits.softmax(-1) @ value

    def _scale(self, keys: int) -> float | Tensor:
        if self.name == "kappa":
            return self.kappa * math.sqrt(self.head_dim)
        if self.name == "cosine":
            assert self.gain is not None
            return self.gain
        scale = self.rule.scale(head_dim=self.head_dim, heads=self.heads, layer=self.layer, keys=keys, gain=self.gain)
        return scale if isinstance(scale, Tensor) else float(scale)

    def _additive(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        assert self.gain is not None
        heads = self.measured
        signs = () if heads is None else SIGNS
        output, vitals = additive_attention(query, key, value, self.gain, causal=causal, signs=signs)
        if heads is not None:
            heads += vitals.by_head().to_dicts()
            query.register_hook(lambda gradient: _add_gradient(heads, gradient))
        return output


def _add_gradient(heads: list[dict[str, float]], gradient: Tensor) -> None:
    """|dL/dq| of each head, entry by entry: its root mean square and its median, under the names that `watch` uses."""
    for head, size in zip(heads, gradient.detach().abs().movedim(1, 0).flatten(1), strict=True):
        head["grad_q_rms"] = float(size.double().square().mean().sqrt())
        head["grad_q_median"] = float(size.median())
