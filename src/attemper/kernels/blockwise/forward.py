"""Forward of blockwise: online softmax over key tiles, and every vital sign from the same scores.

For each row, over the keys seen so far, with a reference M and e = exp(z - M):

    l = Σ e      a = Σ e (z - M)      s = Σ e²      and the count, mean and summed squares of z

M is the largest logit of the first tile. A tile that would raise it rescales the sums: with d = M - M' and c = exp(d),
a ← c (a + d l),  l ← c l,  s ← c² s. On a CPU that waits until a logit exceeds M by more than SLACK, which float32
holds with ease, so that most tiles pay for no rescaling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..seam import ARGMAX_BIT, BIT, Measured, Problem, measuring_dtype
from .scores import Block, dropout_tile
from .tiles import LOWEST, Plan, Tile

SLACK = 20.0


def forward(problem: Problem, signs: int) -> Measured:
    plan = Plan(problem)
    query, value = problem.query, problem.value
    dtype = measuring_dtype(query.dtype)
    shape = query.shape[:3]

    def rows_of(bit: int, kind: torch.dtype = dtype) -> Tensor:
        return query.new_empty(shape if signs & bit else 0, dtype=kind)

    moments = signs & (BIT["mean"] | BIT["variance"])
    result = Measured(
        output=query.new_empty(0 if value is None else (*shape, value.shape[-1])),
        argmax=rows_of(ARGMAX_BIT, torch.int64),
        lse_low=query.new_empty(shape, dtype=dtype),
        visible=rows_of(BIT["visible"], torch.int32),
        mean=rows_of(BIT["mean"]),
        variance=rows_of(BIT["variance"]),
        peak=rows_of(BIT["peak"]),
        lse=query.new_empty(shape, dtype=dtype),
        entropy=rows_of(BIT["entropy"]),
        p2=rows_of(BIT["p2"]),
    )
    if problem.mask is None and signs & BIT["visible"]:
        result.visible.copy_(plan.visible(query.device).expand(shape))
    linear = problem.mask is None and problem.softcap is None and problem.left is None and problem.right is None

    for heads in plan.head_blocks():
        block = Block(problem, plan, heads)
        if moments and linear:
            _whole_row_moments(block, _views(result, block))
        for rows in plan.row_tiles():
            state = _Rows(block, rows, signs, moments=bool(moments) and not linear)
            for keys in plan.key_tiles(rows):
                state.see(keys)
            state.write(_views(result, block))
    return result


def _views(result: Measured, block: Block) -> Measured:
    """The part of each result that belongs to a block of heads, as (C, R, Lq, ...)."""
    return Measured(*(block.view(t) if t.dim() > 1 else t for t in result))


def _whole_row_moments(block: Block, result: Measured) -> None:
    """Mean and variance where z is linear in k and every key is seen: z̄ = q·k̄ and qᵀ Cov(K) q, no score needed."""
    if not block.plan.keys:
        for sign in (result.mean, result.variance):
            sign.zero_()
        return
    center = block.key.mean(1, keepdim=True)  # [C, 1, E]
    spread = block.key - center
    covariance = torch.bmm(spread.mT, spread).div_(block.plan.keys)  # [C, E, E]
    for rows in block.plan.row_tiles():
        query, gain = block.rows(rows)  # [C, M, E]
        factor = block.scale if gain is None else block.scale * gain.squeeze(-1)
        if result.mean.numel():
            result.mean[:, :, rows] = block.unfold(torch.bmm(query, center.mT).squeeze(-1) * factor)
        if result.variance.numel():
            product = torch.bmm(query, covariance, out=block.buffer("z", query.shape))
            variance = product.mul_(query).sum(-1).clamp_(min=0)
            result.variance[:, :, rows] = block.unfold(variance * factor * factor)


def _rounding_of_sum(a: Tensor, b: Tensor) -> Tensor:
    """What a + b lost to rounding, exactly (Knuth's two-sum)."""
    total = a + b
    b_part = total - a
    return (a - (total - b_part)) + (b - b_part)


class _Rows:
    """The running sums of a tile of rows of a block of heads, each [C, M] with M = repeat × rows."""

    def __init__(self, block: Block, rows: slice, signs: int, moments: bool) -> None:
        self.block, self.rows, self.signs, self.moments = block, rows, signs, moments
        self.query, self.gain = block.rows(rows)  # [C, M, E]
        shape = self.query.shape[:2]
        new = self.query.new_zeros
        self.lazy = self.query.device.type == "cpu"
        self.peak = self.reference = new(shape).fill_(float("-inf"))
        self.finite_reference = new((*shape, 1))
        self.l, self.a, self.s = new(shape), new(shape), new(shape)
        self.count, self.mean, self.squares = new(shape), new(shape), new(shape)
        self.argmax = torch.full(shape, -1, device=self.query.device) if signs & ARGMAX_BIT else None
        self.output = None if block.value is None else new((*shape, block.value.shape[-1]))

    def see(self, keys: slice) -> None:
        """Take in one tile of keys."""
        block, signs = self.block, self.signs
        tile = block.plan.tile(block.heads, self.rows, keys, self.query.dtype, self.query.device)
        z = block.scores(self.query, self.gain, keys)  # [C, M, N]
        block.apply_mask(z, tile)
        if self.moments:
            self._see_moments(z, tile)

        peak = z.amax(-1)
        if self.argmax is not None:
            # a later tile wins only when strictly larger, so ties go to the lowest key; NaN wins as in torch.max
            better = (peak > self.peak) | peak.isnan()
            self.argmax = torch.where(better, z.argmax(-1) + keys.start, self.argmax)
        self.peak = torch.maximum(self.peak, peak)
        # asking costs a GPU a wait and a CPU nothing
        if not self.lazy or bool((peak - self.reference > SLACK).any()):
            self._raise_reference()

        t = z.sub_(self.finite_reference)
        e = block.weights(t, tile)
        self.l += e.sum(-1)
        if signs & BIT["p2"]:
            self.s += torch.linalg.vector_norm(e, dim=-1).square_()
        if signs & BIT["entropy"]:
            self.a += t.mul_(e).sum(-1)
        if self.output is not None and block.value is not None:
            if block.dropout:
                e.mul_(dropout_tile(block, self.rows, keys, e))
            self.output.baddbmm_(e, block.value[:, keys])

    def _raise_reference(self) -> None:
        finite = self.peak.masked_fill(self.peak == float("-inf"), 0.0)  # a row without keys so far
        d = (self.reference - finite).clamp_(min=-1e4)  # -inf before the first key, when the sums are 0
        c = d.exp()
        self.a.add_(d * self.l).mul_(c)
        self.l *= c
        self.s *= c.square_()
        if self.output is not None:
            self.output *= d.exp_().unsqueeze(-1)
        self.reference, self.finite_reference = self.peak, finite.unsqueeze(-1)

    def _see_moments(self, z: Tensor, tile: Tile) -> None:
        """Chan's update with the tile's own mean, so that no shift of the logits can cancel the variance."""
        work = self.block.buffer("e", z.shape)
        if tile.seen is None:
            count = torch.full_like(self.count, z.shape[-1])
            mean = z.mean(-1)
            torch.sub(z, mean.unsqueeze(-1), out=work)
        else:
            # finite before the product: -inf * 0 is NaN
            part, weight = self.block.broadcast(work), tile.seen.to(z.dtype)
            seen = weight.sum(-1, keepdim=True).expand(*part.shape[:-1], 1)
            count = self.block.fold(seen.squeeze(-1))
            torch.clamp(z, min=LOWEST, out=work)
            part.mul_(weight)
            mean = work.sum(-1) / count.clamp(min=1)
            torch.clamp(z, min=LOWEST, out=work).sub_(mean.unsqueeze(-1))
            part.mul_(weight)
        squares = torch.linalg.vector_norm(work, dim=-1).square_()
        total = self.count + count
        share = count / total.clamp(min=1)
        step = mean - self.mean
        self.squares = self.squares + squares + step.square() * self.count * share
        self.mean = self.mean + step * share
        self.count = total

    def write(self, result: Measured) -> None:
        """Finish the sums and store them."""
        empty = self.peak == float("-inf")
        l = self.l.masked_fill(empty, 1.0)
        log_l = l.log()
        lse = self.reference + log_l
        self._store(result.lse, lse)
        self._store(result.lse_low, _rounding_of_sum(self.finite_reference.squeeze(-1), log_l))
        self._store(result.peak, self.peak)
        self._store(result.entropy, log_l - self.a / l)
        self._store(result.p2, self.s / l.square())
        if self.argmax is not None:
            self._store(result.argmax, self.argmax)
        if self.moments:
            self._store(result.mean, self.mean)
            self._store(result.variance, self.squares / self.count.clamp(min=1))
            if self.block.mask is not None:
                self._store(result.visible, self.count)
        elif self.block.mask is not None and result.visible.numel():
            self._store(result.visible, self.block.count_visible(self.rows))
        if self.output is not None:
            self._store(result.output, self.output.div_(l.unsqueeze(-1)))

    def _store(self, into: Tensor, rows: Tensor) -> None:
        if into.numel():
            into[:, :, self.rows] = self.block.unfold(rows)
