"""The definition: output, weights and every vital sign of attention in plain PyTorch, with the whole matrix in memory.

Read this first. Every other kernel is tested against it, value by value and gradient by gradient. It is differentiated by
PyTorch itself, any number of times, and it computes in the dtype it is given, so that float64 inputs make it the judge.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout

from .contract import HIDDEN_BIAS, Problem


class Definition(NamedTuple):
    output: Tensor | None  # (B, H, Lq, Ev)
    weights: Tensor  # (B, H, Lq, Lk), before dropout
    argmax: Tensor  # (B, H, Lq), -1 for a row without keys
    visible: Tensor
    mean: Tensor
    variance: Tensor
    peak: Tensor
    lse: Tensor
    entropy: Tensor
    p2: Tensor


def define(problem: Problem) -> Definition:
    """Attention, term by term."""
    z, keep, visible = logits(problem)
    shut = ~keep | (z == float("-inf"))
    empty = shut.all(-1)

    # softmax; a row without keys gets finite values here, so that its gradients are 0 and not NaN
    stand_in = z.masked_fill(shut & ~empty.unsqueeze(-1), float("-inf")).masked_fill(empty.unsqueeze(-1), 0.0)
    weights = stand_in.softmax(-1).masked_fill(shut, 0.0)
    peak, argmax = _peak(stand_in)
    # shifted by the peak: for large logits z - lse is mostly rounding error
    below = stand_in - peak.detach().unsqueeze(-1)
    log_sum = below.logsumexp(-1)
    lse = (peak.detach() + log_sum).masked_fill(peak == float("inf"), float("inf"))
    log_weights = (below - log_sum.unsqueeze(-1)).masked_fill(shut, 0.0)

    count = visible.sum(-1)
    some = count.clamp(min=1)
    hidden = ~visible | shut
    mean = z.masked_fill(hidden, 0.0).sum(-1) / some
    variance = (z - mean.unsqueeze(-1)).masked_fill(hidden, 0.0).square().sum(-1) / some

    return Definition(
        output=None if problem.value is None else _weighted_sum(problem, weights),
        weights=weights,
        argmax=argmax.masked_fill(empty, -1),
        visible=count.to(torch.int32),
        mean=mean,
        variance=variance,
        peak=peak.masked_fill(empty, float("-inf")),
        lse=lse.masked_fill(empty, float("-inf")),
        entropy=-(weights * log_weights).sum(-1),
        p2=weights.square().sum(-1),
    )


def lse_low(definition: Definition) -> Tensor:
    """The rounding error of lse: what is missing for exp(peak - lse) to be the largest weight. At finfo.min, all of ln Σe."""
    if not definition.weights.shape[-1]:
        return torch.zeros_like(definition.lse)
    low = definition.peak - definition.lse - definition.weights.amax(-1).log()
    return low.detach().masked_fill(~definition.lse.isfinite(), 0.0)


def matrix(problem: Problem) -> Tensor:
    """The weights alone, (B, H, Lq, Lk): as in `define`, without the signs."""
    z, keep, _ = logits(problem)
    if problem.mask is None and problem.left is None and problem.right is None:
        return z.softmax(-1)
    z = z.masked_fill(~keep, float("-inf"))
    if not z.shape[-1]:
        return z
    empty = z.detach().amax(-1, keepdim=True) == float("-inf")
    return z.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def logits(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """The scores after scale, softcap and bias, (B, H, Lq, Lk); which keys each row may use, and which it sees."""
    query, key = problem.query, problem.key
    rows, keys = query.shape[2], key.shape[2]
    z = query @ _per_query_head(key, query).mT * problem.scale
    if problem.gain is not None:
        z = z * problem.gain.unsqueeze(-1)
    if problem.softcap is not None:
        z = problem.softcap * torch.tanh(z / problem.softcap)

    i = torch.arange(rows, device=query.device).unsqueeze(-1)
    j = torch.arange(keys, device=query.device)
    keep = torch.ones(rows, keys, dtype=torch.bool, device=query.device)
    if problem.left is not None:
        keep = keep & (j >= i - problem.left)
    if problem.right is not None:
        keep = keep & (j <= i + problem.right)
    keep = keep.expand(z.shape)
    if problem.mask is None:
        return z, keep, keep
    if problem.mask.dtype == torch.bool:
        keep = keep & problem.mask
        return z, keep, keep
    bias = problem.mask.to(z.dtype)
    return z + bias, keep, keep & (bias > HIDDEN_BIAS)


def _weighted_sum(problem: Problem, weights: Tensor) -> Tensor:
    assert problem.value is not None
    if problem.dropout:
        weights = dropout(weights, problem.dropout)  # torch's own, with torch's own random numbers
    return weights @ _per_query_head(problem.value, problem.query)


def _peak(z: Tensor) -> tuple[Tensor, Tensor]:
    if z.shape[-1]:
        return z.max(-1)
    return z.new_zeros(z.shape[:-1]), torch.full(z.shape[:-1], -1, device=z.device)


def _per_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeat key/value heads so that each query head has its own."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) if tensor.shape[1] else tensor
