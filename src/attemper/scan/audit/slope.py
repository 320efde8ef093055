"""Slope: a model's own logits regressed on q·k, entry by entry, at sampled rows: the scale that the softmax received."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.contract import HIDDEN_BIAS
from ...watch.examine import AttentionCall

ROWS, KEYS = 8, 64
"""How many rows of a head are sampled, and how many keys of a row: enough, because a scale leaves no residual."""

CLEAN = 0.999
"""The share of variance that q·k must explain. If a bias explains the rest, the traced factors are more accurate."""

LOW_PRECISION = 0.99
TINY = 1e-30


@dataclass(frozen=True)
class Slope:
    """One slope per head, and whether q·k explains the logits."""

    heads: Tensor  # (H,), float64
    clean: bool

    @property
    def number(self) -> float:
        return float(self.heads.mean())

    @property
    def spread(self) -> tuple[float, float]:
        return float(self.heads.min()), float(self.heads.max())


def slope(call: AttentionCall, cap: float | None = None) -> Slope | None:
    """Regress the logits of a hand-written call on its own q·k; None if they cannot be matched entry by entry.

    Hidden keys are left out, and each row's mean is subtracted from both, so that a shift of a whole row has no effect. A softcap
    is undone before the regression.
    """
    if call.logits is None or not call.as_product:
        return None
    left, right = (call.key, call.query) if call.flipped else (call.query, call.key)
    if right.dim() < 2:
        return None
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left, right = (part.expand(*lead, *part.shape[-2:]) for part in (left, right))
    found = _sample(call.logits, call.rows)
    if found is None:
        return None
    batch, head, row, key = found
    z = call.logits[batch, head, row, key].double()  # (H, rows, keys)
    stride = call.logits.stride()
    place = batch * stride[0] + head * stride[1] + row * stride[2] + key * stride[3]
    tall, wide = left.shape[-2], right.shape[-1]
    if int(place.max()) >= lead.numel() * tall * wide:
        return None
    where = torch.unravel_index(place // (tall * wide), lead) if lead else ()
    q = left[(*where, place % (tall * wide) // wide)].double()
    k = right.mT[(*where, place % wide)].double()
    return _fit(z, (q * k).sum(-1), cap, call.logits.dtype)


def _sample(logits: Tensor, rows: Tensor | None) -> tuple[Tensor, ...] | None:
    """Indices of entries, broadcastable to (H, rows, keys): the same for every run, and no draw from the model's own stream."""
    batch, heads, queries, keys = logits.shape
    real = torch.ones(batch, queries, dtype=torch.bool, device="cpu")
    if rows is not None and rows.shape[-1] == queries and len(rows) in (1, batch):
        real = rows.cpu().expand(batch, queries)
    places = real.nonzero()
    if not len(places) or keys < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    chosen = places[torch.randint(len(places), (heads, ROWS), generator=generator, device="cpu")]  # (H, rows, 2)
    columns = torch.stack([torch.randperm(keys, generator=generator, device="cpu")[:KEYS] for _ in range(ROWS)])
    head = torch.arange(heads, device="cpu")[:, None, None]
    found = (chosen[..., :1], head, chosen[..., 1:], columns[None])
    return tuple(part.to(logits.device) for part in found)


def _fit(z: Tensor, s: Tensor, cap: float | None, dtype: torch.dtype) -> Slope | None:
    visible = (z > HIDDEN_BIAS) & z.isfinite() & s.isfinite()
    if cap:
        visible = visible & (z.abs() < 0.99 * cap)
        z = cap * torch.atanh((z / cap).clamp(-0.99, 0.99))
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    z, s = ((part - part.where(visible, 0).sum(-1, keepdim=True) / count).where(visible, 0) for part in (z, s))
    power = s.square().sum((-2, -1))
    if not bool((power > TINY).all()) or not bool((z.square().sum((-2, -1)) > TINY).all()):
        return None  # equal logits show nothing
    heads = (z * s).sum((-2, -1)) / power
    left = (z - heads[:, None, None] * s).square().sum((-2, -1))
    explained = 1 - left / z.square().sum((-2, -1))
    bar = CLEAN if dtype in (torch.float32, torch.float64) else LOW_PRECISION
    return Slope(heads.cpu(), bool((explained >= bar).all()))
