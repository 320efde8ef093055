"""Forward of blockwise: online softmax over key tiles, and every vital sign from the same scores.

For each row, over the keys read so far, with a reference M and e = exp(z - M):

    l = Σ e      a = Σ e (z - M)      s = Σ e²      and the count, mean and summed squares of z

M is the largest logit of the first tile. A tile that would raise it rescales the sums: with d = M - M' and c = exp(d),
a ← c (a + d l),  l ← c l,  s ← c² s. On a CPU that waits until a logit exceeds M by more than SLACK, which float32
holds with ease, so that most tiles pay for no rescaling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...vitals import rounded_off, rounding_of_sum
from ..contract import ARGMAX_BIT, BIT, Problem, Results, empty_results, without_autocast
from .additive import block_of
from .block import HeadBlock, dropout_tile
from .plan import Plan, Tile

SLACK = 20.0


def forward(problem: Problem, sign_bits: int, saved: bool = False) -> tuple[Tensor | None, Results]:
    with without_autocast(problem.query):
        output, *signs = [tensor if tensor.dim() > 1 else None for tensor in _forward(problem, sign_bits)]
    return output, Results(None, *signs)  # type: ignore[arg-type]


def _forward(problem: Problem, sign_bits: int) -> Results:
    plan = Plan(problem)
    results = empty_results(problem, sign_bits)
    if problem.mask is None and sign_bits & BIT["visible"]:
        results.visible.copy_(plan.visible(problem.query.device).expand(results.visible.shape))

    for heads in plan.head_blocks():
        block = block_of(problem, plan, heads)
        part = Results(*(block.view(t) if t.dim() > 1 else t for t in results))  # (C, R, Lq, ...)
        for rows in plan.row_tiles():
            sums = RowSums(block, rows, sign_bits)
            sums.add_all()
            sums.write(part)
    return results


class RowSums:
    """The sums of a tile of rows of a block of heads, one [C, M] slot per tile of keys, with M = repeat × rows.

    Slots and views are made ahead: on a CPU the many small ops between the products are a large part of a tile's time.
    """

    def __init__(self, block: HeadBlock, rows: slice, sign_bits: int) -> None:
        self.block, self.rows = block, rows
        self.moments = bool(sign_bits & (BIT["mean"] | BIT["variance"]))
        self.entropy, self.sum_p2 = bool(sign_bits & BIT["entropy"]), bool(sign_bits & BIT["sum_p2"])
        self.query, self.gain = block.rows(rows)  # [C, M, E]
        self.tiles = list(block.plan.key_tiles(rows))
        shape = self.query.shape[:2]
        new = self.query.new_empty
        self.lazy = self.query.device.type == "cpu"
        self.slots = new((4, len(self.tiles), *shape)).unbind(0)  # peak, l, a and the norm of e, each [T, C, M]
        self.peaks, self.l, self.a, self.norm = (slot.unbind(0) for slot in self.slots)
        self.start = 0  # slots before this one have been merged into it
        self.reference = self.limit = new(shape).fill_(float("-inf"))
        self.finite_reference = torch.zeros_like(self.reference).unsqueeze(-1)
        if self.moments:
            # visible keys; those of them whose logit is not -inf, and the mean and summed squares of these
            self.count, self.met, self.mean, self.squares = self.query.new_zeros((4, *shape))
        self.argmax = torch.full(shape, -1, device=self.query.device) if sign_bits & ARGMAX_BIT else None
        self.best = self.reference  # the running peak, where the arg-max is followed
        self.output = None if block.value is None else new((*shape, block.value.shape[-1])).zero_()

    def add_all(self) -> None:
        for t, keys in enumerate(self.tiles):
            self._add(t, keys)

    def _add(self, t: int, keys: slice) -> None:
        """Take in one tile of keys."""
        block = self.block
        tile = block.plan.tile(block.heads, self.rows, keys, self.query.dtype, self.query.device)
        z = block.scores(self.query, self.gain, keys)  # [C, M, N]
        block.apply_mask(z, tile)
        if self.moments:
            self._add_moments(z, tile)
        peak = torch.amax(z, -1, out=self.peaks[t])
        if self.argmax is not None:
            # a later tile wins only when strictly larger, so ties go to the lowest key; NaN wins as in torch.max
            better = (peak > self.best) | peak.isnan()
            self.argmax = torch.where(better, z.argmax(-1) + keys.start, self.argmax)
            self.best = torch.maximum(self.best, peak)
        # reading the answer synchronises a GPU, and costs a CPU nothing
        if not self.lazy or bool((peak > self.limit).any()):
            self._raise_reference(t)

        shifted = z.sub_(self.finite_reference)
        e = block.weights(shifted, tile)
        torch.sum(e, -1, out=self.l[t])
        if self.sum_p2:
            torch.linalg.vector_norm(e, dim=-1, out=self.norm[t])
        if self.entropy:
            torch.sum(shifted.mul_(e), -1, out=self.a[t])
        if self.output is not None:
            if block.dropout:
                e.mul_(dropout_tile(block, self.rows, keys, e))
            self.output.baddbmm_(e, block.values(keys))

    def _sums(self, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """l, a and the norm over the tiles before `stop`."""
        if stop == 0:
            return (torch.zeros_like(self.reference),) * 3
        part = slice(self.start, stop)
        return (
            self.slots[1][part].sum(0),
            self.slots[2][part].sum(0),
            torch.linalg.vector_norm(self.slots[3][part], dim=0),
        )

    def _raise_reference(self, t: int) -> None:
        """Merge what was summed before tile t into one slot, in units of the new reference."""
        reference = torch.maximum(self.reference, self.peaks[t])
        finite = reference.masked_fill(reference == float("-inf"), 0.0)  # a row without keys so far
        if t:
            d = (self.reference - finite).clamp_(min=-1e4)  # -inf before the first key, when the sums are 0
            c = d.exp()
            l, a, norm = self._sums(t)
            self.start = t - 1
            self.l[self.start].copy_(l * c)
            self.a[self.start].copy_((a + d * l) * c)
            self.norm[self.start].copy_(norm * c)
            if self.output is not None:
                self.output *= c.unsqueeze(-1)
        self.reference, self.finite_reference = reference, finite.unsqueeze(-1)
        self.limit = reference + SLACK

    def _add_moments(self, z: Tensor, tile: Tile) -> None:
        """Chan's update with the tile's own mean, so that no shift of the logits can cancel the variance.

        A visible key with a logit of -inf is counted, and adds nothing.
        """
        work = self.block.buffer("e", z.shape)
        count = met = torch.full_like(self.count, z.shape[-1])
        mean = z.mean(-1) if tile.open else self.mean
        # reading the answer synchronises a GPU, and costs a CPU nothing
        if tile.open and self.lazy and bool(mean.isfinite().all()):
            torch.sub(z, mean.unsqueeze(-1), out=work)
        else:
            adds = z != float("-inf")
            if tile.visible is not None:
                part = self.block.broadcast(adds)
                part &= tile.visible
                count = self.block.join_rows(tile.visible.sum(-1, dtype=z.dtype).expand(part.shape[:-1]))
            met = adds.sum(-1, dtype=z.dtype)
            nothing = z.new_zeros(())
            mean = torch.where(adds, z, nothing, out=work).sum(-1) / met.clamp(min=1)
            torch.where(adds, z - mean.unsqueeze(-1), nothing, out=work)
        squares = torch.linalg.vector_norm(work, dim=-1).square_()
        total = self.met + met
        share = met / total.clamp(min=1)
        step = mean - self.mean
        self.squares = self.squares + squares + step.square() * self.met * share
        self.mean = self.mean + torch.where(step.isfinite(), step * share, mean)  # inf stays inf
        self.met, self.count = total, self.count + count

    def write(self, results: Results) -> None:
        """Finish the sums and store them."""
        l, a, norm = self._sums(len(self.tiles))
        peak = self.slots[0].amax(0) if self.tiles else self.reference
        l = l.masked_fill(peak == float("-inf"), 1.0)
        log_l = l.log()
        infinite = peak == float("inf")  # inf / inf makes the weights NaN, but peak and lse are +inf
        self._store(results.lse, (self.reference + log_l).masked_fill_(infinite, float("inf")))
        low = rounding_of_sum(self.finite_reference.squeeze(-1), log_l)
        self._store(results.lse_low, low.masked_fill_(infinite, 0.0))
        self._store(results.peak, peak)
        if self.entropy:
            self._store(results.entropy, log_l - a / l)
        if self.sum_p2:
            self._store(results.sum_p2, (norm / l).square_())
        if self.argmax is not None:
            self._store(results.argmax, self.argmax)
        if self.moments:
            count = self.count.clamp(min=1)
            mean = self.mean * (self.met / count)
            off = (self.met * (self.mean - mean).square()).masked_fill(self.met == self.count, 0.0)
            self._store(results.mean, mean)
            self._store(results.variance, (self.squares + off) / count)
            if self.block.mask is not None:
                self._store(results.visible, self.count)
        elif self.block.mask is not None and results.visible.numel():
            self._store(results.visible, self.block.count_visible(self.rows))
        if self.output is not None:
            output = self.output.div_(l.unsqueeze(-1))
            self._store(results.output, output)
            if results.output_low.numel():
                self._store(results.output_low, rounded_off(output, output.to(results.output.dtype)))

    def _store(self, into: Tensor, rows: Tensor) -> None:
        if into.numel():
            into[:, :, self.rows] = self.block.split_rows(rows)
