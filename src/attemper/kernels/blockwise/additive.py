"""The tiles of additive attention: blockwise's own, with Σ_e w_e tanh(q_e + k_e) where it has a product.

Softmax, masks, vitals and dz are blockwise's, so what is tested there holds here. New is the score, and its derivative: with
u = 1 - tanh²(q_e + k_e),

    dq_e = w_e Σ_keys dz u      dk_e = w_e Σ_rows dz u      dw_e = Σ dz tanh(q_e + k_e)

A tile of scores is filled from cells of E × rows × keys, small enough to stay in L2, that are gone once they are summed. The
backward computes tanh twice, once for the scores and once for its slope: keeping it between the two takes E times the memory,
or tiles so small that starting operations costs what it saves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import BIT, Measured, Problem, Upstream, measuring_dtype, room
from .backward import RowTile
from .block import Block
from .forward import Rows, views
from .plan import Heads, Plan

# numbers in a cell, and its rows: a CPU's L2 holds one and what is made of it; a GPU wants fewer, larger launches
CPU_CELL = (1 << 18, 32)
GPU_CELL = (1 << 25, 256)


class Wants(NamedTuple):
    """Which gradients are asked for; the others come back empty."""

    query: bool
    key: bool
    value: bool
    weight: bool
    mask: bool


class Gradients(NamedTuple):
    """Each in the shape and dtype of its input."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    mask: Tensor


def forward(problem: Problem, weight: Tensor, signs: int) -> Measured:
    """Output and vitals; `weight` is (H, E) in the dtype of measuring."""
    plan = Plan(problem)
    result = room(problem, signs)
    if problem.mask is None and signs & BIT["visible"]:
        result.visible.copy_(plan.visible(problem.query.device).expand(result.visible.shape))
    for heads in plan.head_blocks():
        block = _AdditiveBlock(problem, plan, heads, weight)
        part = views(result, block)
        for rows in plan.row_tiles():
            state = Rows(block, rows, signs)
            state.see_all()
            state.write(part)
    return result


def backward(problem: Problem, weight: Tensor, saved: Measured, upstream: Upstream, wants: Wants) -> Gradients:
    plan = Plan(problem)
    wide = measuring_dtype(problem.query.dtype)

    def start(wanted: bool, like: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        if not wanted or like is None:
            return weight.new_empty(0)
        return torch.zeros(like.shape, dtype=dtype or like.dtype, device=like.device)

    result = Gradients(
        query=start(wants.query, problem.query),
        key=start(wants.key, problem.key),
        value=start(wants.value, problem.value),
        weight=start(wants.weight, weight),
        mask=start(wants.mask, problem.mask, wide),  # summed over what it repeats before it is rounded
    )
    for heads in plan.head_blocks():
        block = _AdditiveBlock(problem, plan, heads, weight)
        assert block.value is not None
        dkey, dvalue, dweight = (torch.zeros_like(t) for t in (block.upright, block.value, block.weight))
        for rows in plan.row_tiles():
            tile = RowTile(block, rows, saved, upstream)
            query = block.across(tile.query)
            dquery = torch.zeros_like(query)
            for keys in plan.key_tiles(rows):
                p, dz = tile.dz(keys, result.mask)
                if wants.value and tile.g_output is not None:
                    dvalue[:, keys].baddbmm_(p.mT, tile.g_output)
                if wants.query or wants.key or wants.weight:
                    block.add_slopes(query, keys, dz, dquery, dkey, dweight)
            if wants.query:
                dquery = dquery.mul_(block.weight).mT.unflatten(0, (dkey.shape[0], plan.repeat))
                block.view(result.query)[:, :, rows] = dquery
        for into, found in ((result.key, dkey.mT), (result.value, dvalue)):
            if into.numel():
                part = into[heads.batch, heads.group]
                part.copy_(found.reshape(part.shape))
        if wants.weight:
            part = result.weight[block.query_heads]
            part += dweight.view(heads.batch.stop - heads.batch.start, *part.shape).sum(0)
    return result if problem.mask is None else result._replace(mask=result.mask.to(problem.mask.dtype))


class _AdditiveBlock(Block):
    """A block of heads with additive scores. Here each of its Z = C · repeat query heads stands alone."""

    def __init__(self, problem: Problem, plan: Plan, heads: Heads, weight: Tensor) -> None:
        self.query_heads = slice(heads.group.start * plan.repeat, heads.group.stop * plan.repeat)
        each = weight.expand(plan.batch, *weight.shape)[heads.batch, self.query_heads]
        self.weight = each.flatten(0, 1).unsqueeze(-1).contiguous()  # [Z, E, 1]
        super().__init__(problem, plan, heads)
        self.upright = self.key.mT.contiguous()  # [C, E, Lk]

    def _largest_score(self) -> float:
        """tanh lies between -1 and 1, so no score is beyond ‖w‖₁."""
        return self.weight.abs().sum(1).max().item() if self.weight.numel() else 0.0

    def across(self, query: Tensor) -> Tensor:
        """The queries of a tile, [C, R·M, E] → [Z, E, M]."""
        return self._by_head(query).mT.contiguous()

    def scores(self, query: Tensor, gain: Tensor | None, keys: slice, cap_slope: Tensor | None = None) -> Tensor:
        """Logits of a tile before any mask, [C, M, N]."""
        z = self.buffer("z", (*query.shape[:2], keys.stop - keys.start))
        by_head = self._by_head(z)
        for place, t in self._cells(self.across(query), keys):
            summed = torch.bmm(self.weight[place[0]].mT, t.flatten(2))
            by_head[place] = summed.view(t.shape[0], *t.shape[2:])
        return z

    def add_slopes(self, query: Tensor, keys: slice, dz: Tensor, dquery: Tensor, dkey: Tensor, dweight: Tensor) -> None:
        """Add what a tile's dz [C, M, N] gives: to dquery [Z, E, M], still to be multiplied by w, dkey [C, E, Lk] and dweight."""
        by_head = self._by_head(dz)
        part = dkey.new_zeros((query.shape[0], query.shape[1], dz.shape[2]))  # [Z, E, N]
        one = part.new_ones(())
        for place, t in self._cells(query, keys):
            heads, rows, columns = place
            g = by_head[place].contiguous()
            dweight[heads].baddbmm_(t.flatten(2), g.flatten(1).unsqueeze(-1))
            slope = torch.addcmul(one, t, t, value=-1, out=t).mul_(g.unsqueeze(1))
            dquery[heads, :, rows] += slope.sum(3)
            part[heads, :, columns] += slope.sum(2)
        dkey[:, :, keys] += part.mul_(self.weight).unflatten(0, (dkey.shape[0], self.plan.repeat)).sum(1)

    def _by_head(self, tile: Tensor) -> Tensor:
        """[C, R·M, ...] → [Z, M, ...]"""
        repeat = self.plan.repeat
        return tile.view(tile.shape[0] * repeat, tile.shape[1] // repeat, tile.shape[2])

    def _cells(self, query: Tensor, keys: slice) -> Iterator[tuple[tuple[slice, slice, slice], Tensor]]:
        """tanh(q + k) of a tile, cell by cell: which heads, rows and columns, and [z, E, m, n] of scratch to spoil."""
        key = self.upright[:, :, keys]
        if self.plan.repeat > 1:
            key = key.repeat_interleave(self.plan.repeat, 0)  # [Z, E, N]
        heads, dim, rows = query.shape
        columns = key.shape[2]
        most, side = CPU_CELL if query.device.type == "cpu" else GPU_CELL
        most //= max(1, dim)
        n = max(1, min(columns, most // max(1, min(rows, side))))
        m = max(1, min(rows, most // n))
        z = max(1, most // (m * n))
        scratch = query.new_empty(min(z, heads) * dim * m * n)
        for i in range(0, heads, z):
            for j in range(0, rows, m):
                for k in range(0, columns, n):
                    place = slice(i, i + z), slice(j, j + m), slice(k, k + n)
                    q = query[place[0], :, place[1]].unsqueeze(3)
                    across = key[place[0], :, place[2]].unsqueeze(2)
                    shape = (*q.shape[:3], across.shape[3])
                    t = scratch[: math.prod(shape)].view(shape)
                    yield place, torch.add(q, across, out=t).tanh_()
