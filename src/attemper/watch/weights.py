"""The logits and weights of chosen rows, keys or offsets of a call, whichever route it took; never the whole matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.contract import Problem, measuring_dtype
from ..kernels.reference import logits as scores_of
from ..operation.call import prepare
from ..vitals import NEG_INF, Vitals
from .call import AttentionCall

BUDGET = 2**22  # weights in memory at a time: 16 MiB of float32


def weights_of_rows(call: AttentionCall, vitals: Vitals, rows: Tensor, place: int | None = None) -> Tensor:
    """The weights of some query rows, (R,), on all keys, (B, H, R, Lk), float32; a row that sees no key is zero.

    For one item of the batch, ``place``, B is 1. The result takes B·H·R·Lk numbers: see ``chunks``.
    """
    logits = logits_of_rows(call, rows.to(vitals.lse.device), place)
    if not logits.shape[-1]:
        return logits.float()
    # not exp(logit - lse): far from zero that difference is rounding, and the row is whole anyway
    empty = logits.amax(-1, keepdim=True) == NEG_INF
    return logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0).float()


def chunks(call: AttentionCall, rows: Tensor) -> Iterator[Tensor]:
    """The rows in parts whose weights, for one item of the batch, fit the budget: n × n is never in memory."""
    yield from rows.split(max(1, BUDGET // max(1, call.info.heads * call.info.keys)))


def logits_of_rows(call: AttentionCall, rows: Tensor, place: int | None = None) -> Tensor:
    """The logits of some query rows, (B, H, R, Lk), in the dtype of vitals; -inf where the row may not look."""
    if call.logits is not None:
        return call.logits[_one(place)][:, :, rows].to(measuring_dtype(call.logits.dtype))
    problem = _problem(call, place)
    mask = problem.mask
    if mask is not None and mask.shape[2] > 1:
        mask = mask[:, :, rows]
    gain = None if problem.gain is None else problem.gain[:, :, rows]
    keys = torch.arange(problem.key.shape[2], device=rows.device)
    logits = _banded(problem._replace(query=problem.query[:, :, rows], mask=mask, gain=gain), rows, keys)
    return logits if problem.sink is None else torch.cat((logits, problem.sink[:, :, rows].unsqueeze(-1)), -1)


def logits_of_keys(call: AttentionCall, place: int, keys: Tensor) -> Tensor:
    """The logits of all rows of one item of the batch on some keys, (H, Lq, K), as above. O(n·E) for each key."""
    if call.logits is not None:
        return call.logits[place][..., keys].to(measuring_dtype(call.logits.dtype))
    problem = _problem(call, place)
    mask = problem.mask
    if problem.sink is not None and (keys == call.info.keys - 1).any():  # the last column is the sink
        ours = keys[keys < call.info.keys - 1]
        logits = logits_of_keys(replace(call, sink=None, info=replace(call.info, keys=call.info.keys - 1)), place, ours)
        whole = problem.sink[0].unsqueeze(-1).expand(*logits.shape[:-1], len(keys)).clone()
        whole[..., keys < call.info.keys - 1] = logits
        return whole
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., keys]
    chosen = problem._replace(key=problem.key[:, :, keys], mask=mask)
    return _banded(chosen, torch.arange(problem.query.shape[2], device=keys.device), keys)[0]


def logits_of_offset(call: AttentionCall, offset: int) -> Tensor:
    """The logit of every query on the key ``offset`` places after its own, (B, H, Lq), as above; -inf where there is none.

    For a self-attention with as many queries as keys.
    """
    before, after = call.sink_columns
    if call.logits is not None:
        square = call.logits[..., before : call.info.keys - after]
        z = square.diagonal(offset, -2, -1).to(measuring_dtype(call.logits.dtype))
    else:
        problem = _problem(call)
        length = problem.query.shape[2]
        from_, to = max(0, -offset), length - max(0, offset)
        key = problem.key[:, :, from_ + offset : to + offset]
        key = key.repeat_interleave(problem.query.shape[1] // key.shape[1], dim=1)
        z = (problem.query[:, :, from_:to] * key).sum(-1) * problem.scale
        if problem.gain is not None:
            z = z * problem.gain[:, :, from_:to]
        if problem.softcap is not None:
            z = problem.softcap * torch.tanh(z / problem.softcap)
        if problem.mask is not None:
            mask = problem.mask.expand(*problem.mask.shape[:2], length, length).diagonal(offset, -2, -1)
            z = z.masked_fill(~mask, NEG_INF) if mask.dtype == torch.bool else z + mask
        if (problem.left is not None and offset < -problem.left) or (
            problem.right is not None and offset > problem.right
        ):
            z = torch.full_like(z, NEG_INF)
    return torch.nn.functional.pad(z, (max(0, -offset), max(0, offset)), value=NEG_INF)


def _problem(call: AttentionCall, place: int | None = None) -> Problem:
    """The call, or one item of it, as kernels are given it, in the dtype of vitals."""
    problem = prepare("weights", call.query, call.key, None, signs=(), **call.options()).problem
    wide, row, mask = measuring_dtype(problem.query.dtype), _one(place), problem.mask
    if mask is not None and mask.shape[0] > 1:
        mask = mask[row]
    gain, sink = (None if each is None else each[row] for each in (problem.gain, problem.sink))
    query, key = problem.query[row].to(wide), problem.key[row].to(wide)
    return problem._replace(query=query, key=key, mask=mask, gain=gain, sink=sink)


def _one(place: int | None) -> slice:
    return slice(None) if place is None else slice(place, place + 1)


def _banded(chosen: Problem, rows: Tensor, keys: Tensor) -> Tensor:
    """The logits of chosen rows and keys, whose numbers say which of them the band lets through."""
    z, keep, _ = scores_of(chosen._replace(left=None, right=None))
    i, j = rows.unsqueeze(-1), keys
    if chosen.left is not None:
        keep = keep & (j >= i - chosen.left)
    if chosen.right is not None:
        keep = keep & (j <= i + chosen.right)
    return z.masked_fill(~keep, NEG_INF)
