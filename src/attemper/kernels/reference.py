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
    sum_p2: Tensor


def define(problem: Problem) -> Definition:
    """Attention, term by term."""
    keys = problem.key.shape[2]
    z, keep, visible = _with_sink(problem, *logits(problem))
    shut = ~keep | (z == float("-inf"))
    empty, no_key = shut.all(-1), shut[..., :keys].all(-1)

    # softmax; a row without keys gets finite values here, so that its gradients are 0 and not NaN
    stand_in = z.masked_fill(shut & ~empty.unsqueeze(-1), float("-inf")).masked_fill(empty.unsqueeze(-1), 0.0)
    weights = stand_in.softmax(-1).masked_fill(shut, 0.0)
    peak, argmax = _peak(stand_in[..., :keys])  # a sink is no q·k
    largest = _peak(stand_in)[0].detach()
    # shifted by the largest: for large logits z - lse is mostly rounding error
    below = stand_in - largest.unsqueeze(-1)
    log_sum = below.logsumexp(-1)
    lse = (largest + log_sum).masked_fill(largest == float("inf"), float("inf"))
    log_weights = (below - log_sum.unsqueeze(-1)).masked_fill(shut, 0.0)

    count = visible.sum(-1)
    some = count.clamp(min=1)
    hidden = ~visible | shut
    mean = z.masked_fill(hidden, 0.0).sum(-1) / some
    variance = (z - mean.unsqueeze(-1)).masked_fill(hidden, 0.0).square().sum(-1) / some

    return Definition(
        output=None if problem.value is None else _weighted_sum(problem, weights[..., :keys]),
        weights=weights[..., :keys],
        argmax=argmax.masked_fill(no_key, -1),
        visible=count.to(torch.int32),
        mean=mean,
        variance=variance,
        peak=peak.masked_fill(no_key, float("-inf")),
        lse=lse.masked_fill(empty, float("-inf")),
        entropy=-(weights * log_weights).sum(-1),
        sum_p2=weights.square().sum(-1),
    )


def lse_low(definition: Definition) -> Tensor:
    """The rounding error of lse: what is missing for exp(peak - lse) to be the largest weight. At finfo.min, all of ln Σe."""
    if not definition.weights.shape[-1]:
        return torch.zeros_like(definition.lse)
    low = definition.peak - definition.lse - definition.weights.amax(-1).log()
    return low.detach().masked_fill(~low.isfinite(), 0.0)  # a sink may take all weight


def matrix(problem: Problem) -> Tensor:
    """The weights alone, (B, H, Lq, Lk): as in `define`, without the signs."""
    keys = problem.key.shape[2]
    z, keep, _ = _with_sink(problem, *logits(problem))
    if problem.mask is None and problem.left is None and problem.right is None and problem.documents is None:
        return z.softmax(-1)[..., :keys]
    z = z.masked_fill(~keep, float("-inf"))
    if not z.shape[-1]:
        return z
    empty = z.detach().amax(-1, keepdim=True) == float("-inf")
    return z.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)[..., :keys]


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
    if problem.documents is not None:
        keep, i, j = _within_documents(problem)
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


def _with_sink(problem: Problem, z: Tensor, *which: Tensor) -> tuple[Tensor, ...]:
    """What `logits` returned with the sink as one more column, which every row may use and sees."""
    if problem.sink is None:
        return z, *which
    column = problem.sink.to(z.dtype).unsqueeze(-1)
    there = column != float("-inf")  # a sink of -inf is none
    return torch.cat((z, column), -1), *(torch.cat((one.expand(z.shape), there), -1) for one in which)


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


def _within_documents(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Which keys are of a row's own document, and the place of each row and key within its document.

    (1 or B, 1, Lq, Lk), (1 or B, 1, Lq, 1) and (1 or B, 1, 1, Lk). No number is read, so a graph may be traced.
    """
    assert problem.documents is not None
    offsets = problem.documents.to(problem.query.device)
    of_rows, of_keys = offsets[0], offsets[-1]
    (row, i), (column, j) = (
        _places(ends, length) for ends, length in ((of_rows, problem.query.shape[2]), (of_keys, problem.key.shape[2]))
    )
    if problem.from_end:
        shift = of_keys.diff() - of_rows.diff()
        i = i + shift.gather(1, row.clamp(max=shift.shape[1] - 1)) if shift.shape[1] else i
    return (row[:, None, :, None] == column[:, None, None, :]), i[:, None, :, None], j[:, None, None, :]


def _places(offsets: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """For each token: the number of its document, and its place there."""
    places = torch.arange(length, device=offsets.device, dtype=offsets.dtype)
    number = (offsets.unsqueeze(1) <= places.unsqueeze(-1)).sum(-1) - 1
    return number, places - offsets.gather(1, number)
