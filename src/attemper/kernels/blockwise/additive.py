"""Additive scores: a block whose score is Σ_e w_e tanh(q_e + k_e) in place of q·k, and its gradients.

Softmax, masks, vitals and dz do not depend on the score. With u = 1 - tanh²(q_e + k_e),

    dq_e = w_e Σ_keys dz u      dk_e = w_e Σ_rows dz u      dw_e = Σ dz tanh(q_e + k_e)

A tile of scores is filled from cells of E × rows × keys, small enough to stay in L2, and each cell is summed before the next is
made. The backward computes tanh twice, for the scores and for its slope. Keeping it would take E times the memory, or tiles so
small that the overhead of each op costs what is saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..contract import Gradients, NeedsGrad, Problem
from .block import HeadBlock, ScoreGradients
from .plan import Heads, Plan

# numbers in a cell, and its rows: a CPU's L2 holds one and what is made of it; a GPU wants fewer, larger launches
CPU_CELL = (1 << 18, 32)
GPU_CELL = (1 << 25, 256)


def block_of(problem: Problem, plan: Plan, heads: Heads) -> HeadBlock:
    """The block of these heads, for the scores that the problem asks for."""
    return (HeadBlock if problem.weight is None else AdditiveBlock)(problem, plan, heads)


class AdditiveBlock(HeadBlock):
    """A block of heads with additive scores. Each of its Z = C · repeat query heads is computed by itself."""

    def __init__(self, problem: Problem, plan: Plan, heads: Heads) -> None:
        assert problem.weight is not None
        self.query_heads = slice(heads.group.start * plan.repeat, heads.group.stop * plan.repeat)
        each = problem.weight[heads.batch, self.query_heads]
        self.weight = each.flatten(0, 1).unsqueeze(-1).contiguous()  # [Z, E, 1]
        super().__init__(problem, plan, heads)
        self.upright = self.key.mT.contiguous()  # [C, E, Lk]

    def gradients(self, needs_grad: NeedsGrad) -> ScoreGradients:
        return AdditiveGradients(self, needs_grad)

    def _largest_score(self) -> float:
        """|tanh| < 1, so no score is larger than ‖w‖₁."""
        return self.weight.abs().sum(1).max().item() if self.weight.numel() else 0.0

    def across(self, query: Tensor) -> Tensor:
        """The queries of a tile, [C, R·M, E] → [Z, E, M]."""
        return self.by_head(query).mT.contiguous()

    def scores(self, query: Tensor, gain: Tensor | None, keys: slice, cap_slope: Tensor | None = None) -> Tensor:
        """Logits of a tile before any mask, [C, M, N]."""
        z = self.buffer("z", (*query.shape[:2], keys.stop - keys.start))
        by_head = self.by_head(z)
        for place, t in self.cells(self.across(query), keys):
            summed = torch.bmm(self.weight[place[0]].mT, t.flatten(2))
            by_head[place] = summed.view(t.shape[0], *t.shape[2:])
        return z

    def by_head(self, tile: Tensor) -> Tensor:
        """[C, R·M, ...] → [Z, M, ...]"""
        repeat = self.plan.repeat
        return tile.view(tile.shape[0] * repeat, tile.shape[1] // repeat, tile.shape[2])

    def cells(self, query: Tensor, keys: slice) -> Iterator[tuple[tuple[slice, slice, slice], Tensor]]:
        """tanh(q + k) of a tile, cell by cell: its heads, rows and columns, and a [z, E, m, n] buffer to overwrite."""
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


class AdditiveGradients:
    """The gradients of additive scores: query [Z, E, M], before its factor w, key [C, E, Lk] and weight [Z, E, 1]."""

    def __init__(self, block: AdditiveBlock, needs_grad: NeedsGrad) -> None:
        self.block, self.needed = block, needs_grad.query or needs_grad.key or needs_grad.weight
        self.dkey, self.dweight = torch.zeros_like(block.upright), torch.zeros_like(block.weight)

    def begin(self, query: Tensor, gain: Tensor | None) -> None:
        self.query = self.block.across(query)
        self.dquery = torch.zeros_like(self.query)

    def add(self, keys: slice, dz: Tensor) -> None:
        if not self.needed:
            return
        block, by_head = self.block, self.block.by_head(dz)
        part = self.dkey.new_zeros((*self.query.shape[:2], dz.shape[2]))  # [Z, E, N]
        one = part.new_ones(())
        for place, t in block.cells(self.query, keys):
            heads, rows, columns = place
            g = by_head[place].contiguous()
            self.dweight[heads].baddbmm_(t.flatten(2), g.flatten(1).unsqueeze(-1))
            slope = torch.addcmul(one, t, t, value=-1, out=t).mul_(g.unsqueeze(1))
            self.dquery[heads, :, rows] += slope.sum(3)
            part[heads, :, columns] += slope.sum(2)
        self.dkey[:, :, keys] += part.mul_(block.weight).unflatten(0, (-1, block.plan.repeat)).sum(1)

    def write_rows(self, rows: slice, result: Gradients) -> None:
        if result.query.numel():
            dquery = self.dquery.mul_(self.block.weight).mT.unflatten(0, (-1, self.block.plan.repeat))
            self.block.view(result.query)[:, :, rows] = dquery

    def write(self, result: Gradients) -> None:
        block = self.block
        if result.key.numel():
            block.write_group(result.key, self.dkey.mT)
        if result.weight.numel():
            part = result.weight[block.heads.batch, block.query_heads]
            part.copy_(self.dweight.view(part.shape))
