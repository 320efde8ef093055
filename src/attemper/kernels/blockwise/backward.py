"""Backward of blockwise: each tile's weights are recomputed from lse, so nothing of size Lq × Lk is ever kept.

With p = exp(z - lse) and the arriving gradients g of output and signs, δ = g_out · out (far from zero lse alone would leave
p unnormalised, so every row's coefficients carry the factor exp(-lse_low)):

    dz = p [dP - δ + g_lse - g_H (ln p + H) + 2 g_sum_p2 (p - sum_p2)]
         + [g_mean + 2 g_var (z - mean)] / visible  +  g_peak at the arg-max

then the softcap's own slope; dq, dk, d(gain) and d(mask) follow from dz.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...vitals import unrounded
from ..contract import Gradients, NeedsGrad, Problem, Results, Upstream, measuring_dtype, without_autocast
from .additive import block_of
from .block import HeadBlock, dropout_tile
from .plan import LOWEST, Plan, Tile, narrow, split_heads


def backward(problem: Problem, saved: Results, upstream: Upstream, needs_grad: NeedsGrad) -> Gradients:
    saved = Results(*[problem.query.new_empty(0) if tensor is None else tensor for tensor in saved])
    with without_autocast(problem.query):
        gradients = _backward(problem, saved, upstream, needs_grad)
    return Gradients(*[gradient if gradient.dim() > 1 else None for gradient in gradients])  # type: ignore[arg-type]


def _backward(problem: Problem, saved: Results, upstream: Upstream, needs_grad: NeedsGrad) -> Gradients:
    plan, mask = Plan(problem), problem.mask

    def start(name: str) -> Tensor:
        like = getattr(problem, name)
        if like is None or not getattr(needs_grad, name):
            return problem.query.new_empty(0)
        # a mask's gradient is summed over what it repeats before it is rounded
        dtype = measuring_dtype(problem.query.dtype) if name == "mask" else like.dtype
        return torch.zeros(like.shape, dtype=dtype, device=like.device)

    result = Gradients(*map(start, Gradients._fields))
    for heads in plan.head_blocks():
        block = block_of(problem, plan, heads)
        gradients = block.gradients(needs_grad)
        dvalue = torch.zeros_like(block.value) if needs_grad.value and block.value is not None else None
        for rows in plan.row_tiles():
            tile = RowTile(block, rows, saved, upstream)
            gradients.begin(tile.query, tile.gain)
            for keys in plan.key_tiles(rows):
                p, dz = tile.dz(keys, result.mask)
                if dvalue is not None and tile.g_output is not None:
                    dvalue[:, keys].baddbmm_(p.mT, tile.g_output)
                gradients.add(keys, dz)
            gradients.write_rows(rows, result)
        gradients.write(result)
        if dvalue is not None:
            block.write_group(result.value, dvalue)
    if needs_grad.mask and mask is not None:
        result = result._replace(mask=result.mask.to(mask.dtype))
    return result


class RowTile:
    """What a tile of rows needs to turn each tile of keys into dz. Row vectors are [C, M, 1]."""

    def __init__(self, block: HeadBlock, rows: slice, saved: Results, upstream: Upstream) -> None:
        self.block, self.rows = block, rows
        self.query, self.gain = block.rows(rows)  # [C, M, E]

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
        self.rest: Tensor | None = None  # where one tile holds all keys: δ is then Σ p dP, as exact as can be
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
        self.g_sum_p2 = some(upstream.sum_p2)
        if self.g_sum_p2 is not None:
            self.constant -= 2 * self.g_sum_p2 * row(saved.sum_p2)
            self.g_sum_p2 = self.g_sum_p2 * rest.square()
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
        if self.g_sum_p2 is not None:
            dz.addcmul_(p, self.g_sum_p2, value=2)
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
        if tile.visible is not None:
            self.block.broadcast(work).mul_(tile.visible.to(z.dtype))
        return work
