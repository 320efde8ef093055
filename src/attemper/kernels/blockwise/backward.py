"""Backward of blockwise: each tile's weights are recomputed from lse, so nothing of size Lq × Lk is ever kept.

With p = exp(z - lse) and the arriving gradients g of output and signs, δ = g_out · out (far from zero lse alone would leave
p unnormalised, so every row's coefficients carry the factor exp(-lse_low)):

    dz = p [dP - δ + g_lse - g_H (ln p + H) + 2 g_p2 (p - p2)]
         + [g_mean + 2 g_var (z - mean)] / visible  +  g_peak at the arg-max

then the softcap's own slope; dq, dk, d(gain) and d(mask) follow from dz.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import Gradients, Measured, Problem, Upstream, Wants, measuring_dtype, unrounded
from .block import Block, dropout_tile
from .plan import LOWEST, Heads, Plan, Tile, narrow, split_heads


def backward(problem: Problem, saved: Measured, upstream: Upstream, wants: Wants) -> Gradients:
    plan = Plan(problem)
    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask
    dtype = measuring_dtype(query.dtype)

    def room(wanted: bool, like: Tensor | None, kind: torch.dtype | None = None) -> Tensor:
        if not wanted or like is None:
            return query.new_empty(0)
        return torch.zeros(like.shape, dtype=kind or like.dtype, device=like.device)

    result = Gradients(
        query=room(wants.query, query),
        key=room(wants.key, key),
        value=room(wants.value, value),
        mask=room(wants.mask, mask, dtype),
        gain=room(wants.gain, problem.gain),
    )
    for heads in plan.head_blocks():
        block = Block(problem, plan, heads)
        dkey = torch.zeros_like(block.key) if wants.key else None
        dvalue = torch.zeros_like(block.value) if wants.value and block.value is not None else None
        for rows in plan.row_tiles():
            tile = RowTile(block, rows, saved, upstream)
            dquery = torch.zeros_like(tile.query)
            for keys in plan.key_tiles(rows):
                p, dz = tile.dz(keys, result.mask)
                if dvalue is not None and tile.g_output is not None:
                    dvalue[:, keys].baddbmm_(p.mT, tile.g_output)
                if dkey is not None:
                    dkey[:, keys].baddbmm_(dz.mT, tile.gained, alpha=problem.scale)
                if wants.query or wants.gain:
                    dquery.baddbmm_(dz, block.key[:, keys])
            _write_query(block, rows, dquery, result)
        if dkey is not None:
            _by_group(result.key, heads).copy_(dkey.view_as(_by_group(result.key, heads)))
        if dvalue is not None:
            _by_group(result.value, heads).copy_(dvalue.view_as(_by_group(result.value, heads)))
    if wants.mask and mask is not None:
        result = result._replace(mask=result.mask.to(mask.dtype))
    return result


def _by_group(tensor: Tensor, heads: Heads) -> Tensor:
    return tensor[heads.batch, heads.group]


def _write_query(block: Block, rows: slice, raw: Tensor, result: Gradients) -> None:
    """raw = dz K; the chain through scale and gain gives d(query) = scale · gain · raw and d(gain) = scale · query · raw."""
    query, gain = block.rows(rows)
    raw.mul_(block.scale)  # [C, M, E]
    if result.gain.numel():
        block.view(result.gain)[:, :, rows] = block.unfold((raw * query).sum(-1))
    if result.query.numel():
        block.view(result.query)[:, :, rows] = block.unfold(raw if gain is None else raw.mul_(gain))


class RowTile:
    """What a tile of rows needs to turn each tile of keys into dz. Row vectors are [C, M, 1]."""

    def __init__(self, block: Block, rows: slice, saved: Measured, upstream: Upstream) -> None:
        self.block, self.rows = block, rows
        self.query, self.gain = block.rows(rows)  # [C, M, E]
        self.gained = self.query if self.gain is None else self.query * self.gain

        def row(tensor: Tensor) -> Tensor:
            return block.part(tensor, rows).flatten(1, 2).unsqueeze(-1)

        def some(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else row(tensor)

        lse = row(saved.lse)
        self.lse = lse.masked_fill(lse.isneginf(), float("inf"))  # a row without keys: exp(z - inf) = 0
        low = row(saved.lse_low)
        rest = low.neg().exp()  # p = rest · exp(z - lse)
        self.constant = torch.zeros_like(lse)
        self.g_output = None
        self.rest: Tensor | None = (
            None  # where one tile holds all keys: δ is then Σ p dP, as exact as a row can have it
        )
        if upstream.output is not None:
            self.g_output = row(upstream.output).squeeze(-1)  # [C, M, Ev]
        if self.g_output is not None and sum(1 for _ in block.plan.key_tiles(rows)) == 1:
            self.rest = rest
        elif self.g_output is not None:
            output = row(saved.output).squeeze(-1)
            if saved.output_low.numel():
                output = unrounded(output, row(saved.output_low).squeeze(-1))
            self.constant -= (self.g_output * output).sum(-1, keepdim=True)
        if upstream.lse is not None:
            self.constant += row(upstream.lse)
        self.g_entropy = some(upstream.entropy)
        if self.g_entropy is not None:
            self.constant -= self.g_entropy * (row(saved.entropy) - low)
            self.g_entropy = self.g_entropy * rest
        self.g_p2 = some(upstream.p2)
        if self.g_p2 is not None:
            self.constant -= 2 * self.g_p2 * row(saved.p2)
            self.g_p2 = self.g_p2 * rest.square()
        if self.g_output is not None:
            self.g_output = self.g_output * rest
        self.constant *= rest
        self.g_peak = some(upstream.peak)
        self.argmax = row(saved.argmax) if self.g_peak is not None else lse

        # the moments' part of dz is level + slope · z
        self.level: Tensor | None = None
        self.slope: Tensor | None = None
        if upstream.mean is not None:
            self.level = row(upstream.mean) / row(saved.visible).clamp(min=1)
        if upstream.variance is not None:
            self.slope = 2 * row(upstream.variance) / row(saved.visible).clamp(min=1)
            self.level = (0 if self.level is None else self.level) - self.slope * row(saved.mean)

    def dz(self, keys: slice, dmask: Tensor) -> tuple[Tensor, Tensor]:
        """The dropped-out weights and the gradient of the scores of one tile, [C, M, N] each."""
        block = self.block
        tile = block.plan.tile(block.heads, self.rows, keys, self.query.dtype, self.query.device)
        shape = (*self.query.shape[:2], keys.stop - keys.start)
        cap_slope = None if block.softcap is None else block.buffer("cap", shape)
        z = block.scores(self.query, self.gain, keys, cap_slope)
        block.apply_mask(z, tile)
        moments = self._moments(z, tile)
        t = z.sub_(self.lse)
        p = block.weights(t, tile)
        dz = block.buffer("dz", z.shape)
        kept = dropout_tile(block, self.rows, keys, p) if block.dropout else None
        if self.g_output is None or block.value is None:
            dz.copy_(self.constant.expand_as(dz))
        else:
            torch.bmm(self.g_output, block.values(keys).mT, out=dz)
            if kept is not None:
                dz.mul_(kept)
            if self.rest is not None:
                delta = torch.mul(p, dz, out=block.buffer("pdp", dz.shape)).sum(-1, keepdim=True)
                dz.addcmul_(delta, self.rest, value=-1)
            dz.add_(self.constant)
        if self.g_entropy is not None:
            dz.addcmul_(t, self.g_entropy, value=-1)
        if self.g_p2 is not None:
            dz.addcmul_(p, self.g_p2, value=2)
        dz.mul_(p)
        if moments is not None:
            dz.add_(moments)
        if self.g_peak is not None:
            here = (self.argmax >= keys.start) & (self.argmax < keys.stop)
            place = (self.argmax - keys.start).clamp(0, dz.shape[-1] - 1)
            dz.scatter_add_(-1, place, self.g_peak.masked_fill(~here, 0.0))
        if dmask.numel():
            part = narrow(split_heads(dmask, block.plan.groups, block.plan.repeat), block.heads, self.rows, keys)
            part += block.broadcast(dz).sum_to_size(part.shape)
        if cap_slope is not None:
            dz.mul_(cap_slope)
        return p if kept is None else p.mul_(kept), dz

    def _moments(self, z: Tensor, tile: Tile) -> Tensor | None:
        if self.level is None:
            return None
        work = self.block.buffer("moments", z.shape)
        if self.slope is None:
            work.copy_(self.level.expand_as(work))
        else:
            torch.clamp(z, min=LOWEST, out=work).mul_(self.slope).add_(self.level)
        work.masked_fill_(z == float("-inf"), 0.0)  # a logit of -inf adds nothing to them
        if tile.seen is not None:
            self.block.broadcast(work).mul_(tile.seen.to(z.dtype))
        return work
