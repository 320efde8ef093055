"""HeadBlock: some heads, in the dtype they are measured in, with their scores tile by tile; and the gradients of those scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..contract import Gradients, NeedsGrad, Problem, measuring_dtype
from .plan import FLOOR, Heads, Plan, Tile


class HeadBlock:
    """A block of C key/value heads, each with `repeat` query heads. Tensors are [C, ...]; rows of repeats are side by side."""

    def __init__(self, problem: Problem, plan: Plan, heads: Heads) -> None:
        self.plan, self.heads, self.mask = plan, heads, plan.mask
        self.softcap, self.dropout = problem.softcap, problem.dropout
        self.seed = int(problem.seed) if problem.seed is not None else 0
        self.dtype = measuring_dtype(problem.query.dtype)
        self.key = self._groups(problem.key)  # [C, Lk, E]
        self.value = None if problem.value is None else self._groups(problem.value)  # [C, Lk, Ev]
        self.query = self.part(problem.query)  # [C, R, Lq, E]
        self.scale, self.gain = problem.scale, None
        if problem.gain is not None:
            self.gain = self.part(problem.gain)  # [C, R, Lq]
        self._buffers: dict[tuple[str | int, ...], Tensor] = {}
        self._packed: dict[int, Tensor] = {}
        self._shallow = self.query.device.type == "cpu" and 2 * self._largest_score() < -FLOOR[self.dtype]

    def gradients(self, needs_grad: NeedsGrad) -> ScoreGradients:
        """Where the gradients of this block's scores are summed."""
        return DotGradients(self, needs_grad)

    def write_group(self, into: Tensor, values: Tensor) -> None:
        """Store what was found for this block's key/value heads, [C, Lk, ...], in a (B, G, Lk, ...) tensor."""
        part = into[self.heads.batch, self.heads.group]
        part.copy_(values.reshape(part.shape))

    def _groups(self, tensor: Tensor) -> Tensor:
        return tensor[self.heads.batch, self.heads.group].to(self.dtype).contiguous().flatten(0, 1)

    def part(self, tensor: Tensor, rows: slice = slice(None)) -> Tensor:
        """This block's part of a (B, H, Lq, ...) tensor, [C, R, M, ...]; floating ones in the dtype of measuring."""
        repeat, group = self.plan.repeat, self.heads.group
        part = tensor[self.heads.batch, group.start * repeat : group.stop * repeat, rows]
        if part.is_floating_point():
            part = part.to(self.dtype)
        return part.contiguous().unflatten(1, (-1, repeat)).flatten(0, 1)

    def _largest_score(self) -> float:
        """A bound on |score|: the longest query times the longest key (Cauchy-Schwarz)."""
        if not self.query.numel() or not self.key.numel():
            return 0.0
        gain = 1.0 if self.gain is None else self.gain.abs().max().item()
        longest = [torch.linalg.vector_norm(t, dim=-1).max().item() for t in (self.query, self.key)]
        return longest[0] * longest[1] * abs(self.scale) * gain

    def view(self, tensor: Tensor) -> Tensor:
        """A (B, H, Lq, ...) tensor of ours as this block's [C, R, Lq, ...]."""
        plan = self.plan
        return tensor.view(plan.batch * plan.groups, plan.repeat, *tensor.shape[2:])[self.heads.flat]

    def rows(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """The queries of a tile, [C, R·M, E], and their gain, [C, R·M, 1]."""
        gain = None if self.gain is None else self.gain[:, :, rows].flatten(1, 2).unsqueeze(-1)
        return self.query[:, :, rows].flatten(1, 2), gain

    def split_rows(self, rows: Tensor) -> Tensor:
        """[C, R·M, ...] → [C, R, M, ...]"""
        return rows.unflatten(1, (self.plan.repeat, -1))

    def join_rows(self, rows: Tensor) -> Tensor:
        """(batch, group, repeat, M) → [C, R·M]"""
        return rows.flatten(0, 1).flatten(1, 2)

    def broadcast(self, scores: Tensor) -> Tensor:
        """[C, R·M, N] as (batch, group, repeat, M, N), the shape that masks broadcast to."""
        entries = self.heads.batch.stop - self.heads.batch.start
        return scores.view(entries, -1, self.plan.repeat, scores.shape[1] // self.plan.repeat, scores.shape[2])

    def buffer(self, name: str, shape: Sequence[int]) -> Tensor:
        """Scratch memory for a tile, [C, M, N] or smaller, reused from tile to tile."""
        tensor = self._buffers.get((name, *shape))
        if tensor is None:
            if (name,) not in self._buffers:
                plan = self.plan
                largest = self.key.shape[0] * plan.repeat * plan.row_step * plan.key_step
                self._buffers[(name,)] = self.key.new_empty(largest)
            tensor = self._buffers[(name, *shape)] = self._buffers[(name,)][: math.prod(shape)].view(*shape)
        return tensor

    def keys_across(self, keys: slice) -> Tensor:
        """The keys of a tile, transposed, [C, E, N]; packed once where tiles line up, which makes the product faster."""
        step = self.plan.key_step
        if keys.start % step:
            return self.key[:, keys].mT
        if keys.start not in self._packed:
            self._packed[keys.start] = self.key[:, keys.start : keys.start + step].mT.contiguous()
        return self._packed[keys.start][:, :, : keys.stop - keys.start]

    def values(self, keys: slice) -> Tensor:
        """The values of a tile, [C, N, Ev]."""
        assert self.value is not None
        return self.value[:, keys]

    def scores(self, query: Tensor, gain: Tensor | None, keys: slice, cap_slope: Tensor | None = None) -> Tensor:
        """Logits of a tile before any mask, [C, M, N]. Scaled after the product: products of half precision are exact.

        `cap_slope` is where the softcap's slope is wanted: 1/cosh², since 1 - tanh² loses its digits.
        """
        key = self.keys_across(keys)
        z = self.buffer("z", (query.shape[0], query.shape[1], key.shape[2]))
        torch.baddbmm(z, query, key, beta=0, alpha=self.scale, out=z)
        if gain is not None:
            z.mul_(gain)
        if self.softcap is not None:
            z.div_(self.softcap)
            if cap_slope is not None:
                torch.cosh(z, out=cap_slope).square_().reciprocal_()
            z.tanh_().mul_(self.softcap)
        return z

    def apply_mask(self, z: Tensor, tile: Tile) -> None:
        """Add the bias and put -inf where a key is shut out."""
        if tile.open:
            return
        part = self.broadcast(z)
        if tile.bias is not None:
            part.add_(tile.bias)
        if tile.outside is not None:
            part.masked_fill_(tile.outside, float("-inf"))
        if tile.keep is not None:
            # ±inf and `minimum`: several times faster on a CPU than masked_fill where the mask has no pattern
            ceiling = tile.keep.to(z.dtype).sub_(0.5).mul_(float("inf"))
            torch.minimum(part, ceiling, out=part)

    def weights(self, t: Tensor, tile: Tile) -> Tensor:
        """exp of shifted logits, exactly 0 for a key that is masked out; `t` is clamped in place if it may be below the floor."""
        lowest = FLOOR[t.dtype]
        if not (tile.open and self._shallow):
            t.clamp_(min=lowest)
        e = torch.exp(t, out=self.buffer("e", t.shape))
        return e if tile.open else torch.threshold_(e, 2 * math.exp(lowest), 0.0)

    def count_visible(self, rows: slice) -> Tensor:
        """How many keys each row of a tile sees under a mask, [C, R·M], when no other sign needed the count."""
        count = torch.zeros(self._row_shape(rows), dtype=torch.int32, device=self.key.device)
        for keys in self.plan.key_tiles(rows):
            visible = self.plan.tile(self.heads, rows, keys, self.key.dtype, self.key.device).visible
            assert visible is not None
            count += visible.sum(-1, dtype=torch.int32)
        return self.join_rows(count)

    def _row_shape(self, rows: slice) -> tuple[int, ...]:
        entries = self.heads.batch.stop - self.heads.batch.start
        return (entries, self.heads.group.stop - self.heads.group.start, self.plan.repeat, rows.stop - rows.start)


def dropout_tile(block: HeadBlock, rows: slice, keys: slice, like: Tensor) -> Tensor:
    """0 or 1/(1-p), the same for a tile whenever it is drawn with the same seed."""
    plan, first = block.plan, block.heads.flat.start
    place = (first * (plan.rows + 1) + rows.start) * (plan.keys + 1) + keys.start
    generator = torch.Generator(device=like.device).manual_seed((block.seed + place) & (2**63 - 1))
    kept = block.buffer("kept", like.shape).bernoulli_(1 - block.dropout, generator=generator)
    return kept.div_(1 - block.dropout) if block.dropout < 1 else kept


class ScoreGradients(Protocol):
    """Sums the gradients of query, key and gain (or weight) over the dz of all tiles."""

    def begin(self, query: Tensor, gain: Tensor | None) -> None:
        """Go to the next tile of rows: its queries, [C, M, E], and their gain, [C, M, 1]."""

    def add(self, keys: slice, dz: Tensor) -> None:
        """Add a tile of keys; dz is [C, M, N]."""

    def write_rows(self, rows: slice, result: Gradients) -> None:
        """Store what belongs to the tile of rows."""

    def write(self, result: Gradients) -> None:
        """Store what belongs to the block."""


class DotGradients:
    """The gradients of a dot product: dq = scale · gain · dz K, dk = scale · dzᵀ (gain · q), d(gain) = scale · q · (dz K)."""

    def __init__(self, block: HeadBlock, needs_grad: NeedsGrad) -> None:
        self.block, self.rows = block, needs_grad.query or needs_grad.gain
        self.dkey = torch.zeros_like(block.key) if needs_grad.key else None

    def begin(self, query: Tensor, gain: Tensor | None) -> None:
        self.query, self.gain = query, gain
        self.gained = query if gain is None else query * gain
        self.raw = torch.zeros_like(query)  # dz K

    def add(self, keys: slice, dz: Tensor) -> None:
        if self.dkey is not None:
            self.dkey[:, keys].baddbmm_(dz.mT, self.gained, alpha=self.block.scale)
        if self.rows:
            self.raw.baddbmm_(dz, self.block.key[:, keys])

    def write_rows(self, rows: slice, result: Gradients) -> None:
        block, raw = self.block, self.raw.mul_(self.block.scale)
        if result.gain.numel():
            block.view(result.gain)[:, :, rows] = block.split_rows((raw * self.query).sum(-1))
        if result.query.numel():
            block.view(result.query)[:, :, rows] = block.split_rows(raw if self.gain is None else raw.mul_(self.gain))

    def write(self, result: Gradients) -> None:
        if self.dkey is not None:
            self.block.write_group(result.key, self.dkey)
