"""language: the runs of a small causal language model as one model: pre-norm blocks, rotary positions, no biases.

Every run has its own rate, scale and treatment, and all of them may begin at a step of their own: tables with an entry per
run and step hold them, so that a recorded step needs nothing from outside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attemper import rule as rule_named
from attemper_lab.engine.experiment import generator

from .adam import StackedAdam
from .parameters import StackedParameters
from .probe import LEAST_KEYS, Probe, logits_of
from .repeated import Repeated
from .surrogate import factors, ratios, surrogate_softmax
from .text import VOCABULARY, sources, starts
from .treatments import FLOOR, Tables, clip, quack, tables

EPSILON = 1e-6  # under the root of a mean square
Z_LOSS = 1e-4
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Dimensions:
    """The sizes that all runs of a stack share."""

    width: int
    head_dim: int
    layers: int
    length: int
    batch: int
    steps: int
    warm_up: int = 100
    decay: float = 1e-4
    probed: int = 8  # sequences whose signs are taken

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in shapes(self).values())


def shapes(size: Dimensions) -> dict[str, tuple[int, ...]]:
    d = size.width
    found: dict[str, tuple[int, ...]] = {"token": (VOCABULARY, d), "read": (d, VOCABULARY)}
    for layer in range(size.layers):
        found |= {
            f"qkv{layer}": (d, 3 * d),
            f"out{layer}": (d, d),
            f"up{layer}": (d, 4 * d),
            f"down{layer}": (4 * d, d),
        }
        found |= {f"gain{layer}": (size.heads,)}
    return found


def initial(size: Dimensions, seed: int, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Unit-variance embeddings, queries, keys and values; what is added to the residual stream is small from the start."""
    stream, small = generator(device, "stacked language", size.width, size.layers, seed), (2 * size.layers) ** -0.5
    spread = {"token": 1.0, "read": 0.02, "qkv": 1.0, "up": 1.0, "out": small, "down": small}
    found = {}
    for name, shape in shapes(size).items():
        kind = name.rstrip("0123456789")
        if kind == "gain":
            found[name] = torch.ones(shape, device=device, dtype=dtype)
            continue
        std = spread[kind] * (1.0 if kind in ("token", "read") else shape[0] ** -0.5)
        found[name] = torch.randn(shape, generator=stream, device=device, dtype=dtype) * std
    return found


class LanguageStack:
    """Runs of one shape. A cell has ``rule``, ``lr``, ``seed``, and may have ``treatment``, ``start``, ``fault``,
    ``fault_step``, ``factor``, ``jacobian`` and ``rates`` (surrogate.py), ``spread`` (of W_Q and W_K) and ``warm_up``.

    Runs of a seed begin with the same weights and see the same windows. ``compute`` is the dtype of products; weights, norms,
    rotations, losses and Adam's state are in ``dtype``. ``losses``, ``norms``, ``moved`` and ``sizes`` are (runs, steps): the
    loss in nats per byte, the norm of the gradient before it is clipped at 1, that of the update, and, where signs are taken,
    that of all weights. ``gradient``, (runs, steps, 2), is taken there too: over the queries of all layers and heads, the median
    and the root mean square of |∂loss/∂(scale · q)|, the loss being that of one byte. It has no explicit factor of the scale.
    """

    probe_class = Probe
    """What takes the signs."""

    def __init__(
        self,
        size: Dimensions,
        cells: Sequence[Mapping[str, Any]],
        device: str,
        compute: torch.dtype = torch.bfloat16,
        dtype: torch.dtype = torch.float32,
        every: int = 10,
    ) -> None:
        self.size, self.device, self.compute, self.every, self.done = size, device, compute, every, 0
        self.seeds = sorted({int(cell["seed"]) for cell in cells})
        self.parameters = StackedParameters(shapes(size), len(cells), device, dtype)
        made = {seed: initial(size, seed, device, dtype) for seed in self.seeds}
        for run, cell in enumerate(cells):
            self.parameters.fill(run, made[int(cell["seed"])])
            for layer in range(size.layers if "spread" in cell else 0):
                self._qk(self.parameters.views[f"qkv{layer}"].detach())[run].mul_(float(cell["spread"]))
        self.ratio, self.factor = (of(cells, size.head_dim, device, dtype) for of in (ratios, factors))
        self.of_seed = torch.tensor([self.seeds.index(int(cell["seed"])) for cell in cells], device=device)
        self.tables: Tables = tables(cells, size.head_dim, size.steps, size.warm_up, device, dtype)
        unit = [rule_named(str(cell["rule"])).unit for cell in cells]
        self.unit = torch.tensor(unit, device=device).view(-1, 1, 1, 1, 1) if any(unit) else None
        decay = self.tables.schedule * size.decay
        self.adam = StackedAdam(
            self.parameters, self.tables.rate, BETAS, clip=1.0, decay=decay, decayed=self._decayed(device, dtype)
        )
        self._prepare_quack()
        self._prepare_text()
        self._prepare_buffers()

    def _decayed(self, device: str, dtype: torch.dtype) -> Tensor:
        """1 for matrices, 0 for gains."""
        found = torch.ones(self.parameters.flat.shape[1], device=device, dtype=dtype)
        for name, start in self.parameters.starts.items():
            if name.startswith("gain"):
                found[start : start + math.prod(self.parameters.shapes[name])] = 0.0
        return found

    def _prepare_quack(self) -> None:
        self.first_norms = [
            self._qk(self.parameters.views[f"qkv{layer}"].detach()).square().sum((1, 3)).sqrt()
            for layer in range(self.size.layers)
        ]  # each (runs, 2)

    def _qk(self, weight: Tensor) -> Tensor:
        """The queries' and keys' part of a projection: (runs, width, 2, width), a view."""
        return weight.view(len(weight), self.size.width, 3, self.size.width)[:, :, :2]

    def _prepare_text(self) -> None:
        size, device = self.size, self.device
        self.text = sources()[0].to(device)
        shape = (size.steps, size.batch)
        drawn = [starts("train", shape, size.length, size.length, size.batch, seed) for seed in self.seeds]
        self.starts = torch.stack(drawn).to(device)  # (seeds, steps, B)
        self.offsets = torch.arange(size.length + 1, device=device)
        self.letters = torch.arange(VOCABULARY, device=device)
        angles = torch.arange(size.length, dtype=torch.float64, device=device)[:, None] * 10_000.0 ** (
            -torch.arange(0, size.head_dim, 2, dtype=torch.float64, device=device) / size.head_dim
        )
        wide = torch.complex128 if self.parameters.flat.dtype == torch.float64 else torch.complex64
        self.turns = torch.polar(torch.ones_like(angles), angles).to(wide)  # (T, E / 2)

    def _prepare_buffers(self) -> None:
        runs, size = len(self.of_seed), self.size
        flat = self.parameters.flat
        self.losses, self.norms, self.moved, self.sizes = (
            flat.new_full((runs, size.steps), math.nan) for _ in range(4)
        )
        self.gradient = flat.new_full((runs, size.steps, 2), math.nan)
        self.queries: list[Tensor] = []  # of the forward pass in which signs are taken, by layer
        count = -(-size.steps // self.every)
        self.probe = self.probe_class(runs, size, count, flat)
        self.floored = self.tables.runs_with("floor")
        self.clipped = self.tables.runs_with("clip")
        self.rounded = self.tables.runs_rounded()
        pool = torch.cuda.graph_pool_handle() if self.device.startswith("cuda") else None
        self.plain = Repeated(lambda: self._step(False), self.device, pool)
        self.measured = Repeated(lambda: self._step(True), self.device, pool, warm_up=1)  # which is the first step

    def train(self) -> None:
        """One step of every run; the signs are measured at regular intervals."""
        (self.measured if self.done % self.every == 0 else self.plain)()
        self.done += 1

    def _step(self, measured: bool) -> None:
        now = self.adam.step.clamp(max=self.size.steps - 1)
        windows = self.starts.index_select(1, now)[:, 0, :, None] + self.offsets
        tokens = self.text[windows].long().index_select(0, self.of_seed)  # (runs, B, T + 1)
        losses, penalties, peaks = self.forward(tokens, now, measured, floor=self.floored is not None)
        total = losses.sum()
        if penalties is not None:
            total = total + (self.tables.floor.index_select(1, now)[:, 0] * penalties).sum()
        views = list(self.parameters.views.values())
        found = torch.autograd.grad(total, [*views, *self.queries], materialize_grads=True)
        found, at_query = found[: len(views)], found[len(views) :]
        self.queries = []  # nothing of a step is kept for the next
        self.losses.index_copy_(1, now, losses.detach()[:, None])
        before = [[one.clone() for one in both] for both in self._products()] if measured else []
        adjusts = self.tables.any_quack or self.factor is not None
        self.adam.update(self.parameters.gathered(found), self._adjust if adjusts else None)
        self.norms.index_copy_(1, now, self.adam.norm[:, None])
        self.moved.index_copy_(1, now, self.adam.moved[:, None])
        if measured:
            products = self._products()
            self.probe.weights(products)
            for layer, (one, other) in enumerate(zip(products, before, strict=True)):
                self.probe.increments(layer, one, other)
            self.sizes.index_copy_(1, now, torch.linalg.vector_norm(self.parameters.flat, dim=1)[:, None])
            self.probe.count += 1
            self.gradient.index_copy_(1, now, self._per_query(at_query)[:, None])
        if peaks is not None:
            clip(self.parameters, self.size, peaks, self.tables.tau.index_select(1, now)[:, 0])

    def _per_query(self, gradients: Sequence[Tensor]) -> Tensor:
        """Gradients (runs, B, H, T, E) of the mean loss, by layer → (runs, 2): the median and the root mean square of their norms
        over the queries of a few sequences, as if each byte's loss counted whole."""
        dtype, many = self.parameters.flat.dtype, self.size.batch * self.size.length
        norms = [
            torch.linalg.vector_norm(gradient[:, : self.size.probed].to(dtype), dim=-1).flatten(1)
            for gradient in gradients
        ]
        each = torch.cat(norms, 1).mul(many).sort(1).values
        return torch.stack([each[:, each.shape[1] // 2], each.square().mean(1).sqrt()], 1)

    def _adjust(self, change: Tensor) -> None:
        for layer in range(self.size.layers):
            name = f"qkv{layer}"
            part = self._qk(self.parameters.part(change, name))
            weight = self._qk(self.parameters.views[name].detach())
            if self.tables.any_quack:
                quack(part, weight, self.first_norms[layer], self.tables.quack)
            if self.factor is not None:
                part.mul_(self.factor[:, None, None, None])

    def _products(self) -> list[tuple[Tensor, Tensor]]:
        """Each layer's W_q and W_k by head: (runs, heads, width, head_dim)."""
        found = []
        for layer in range(self.size.layers):
            weight = self._qk(self.parameters.views[f"qkv{layer}"].detach())
            by_head = weight.unflatten(3, (self.size.heads, -1)).permute(2, 0, 3, 1, 4)
            found.append((by_head[0], by_head[1]))
        return found

    def forward(
        self, tokens: Tensor, now: Tensor, measured: bool = False, floor: bool = False, smooth: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Tokens (runs, B, T + 1), the step as a tensor (1,) → each run's loss, its penalty for too little entropy, and the
        largest logits (layers, runs, heads), both where a treatment needs them. Without ``smooth`` the loss is the
        cross-entropy alone."""
        views, dtype, compute = self.parameters.views, self.parameters.flat.dtype, self.compute
        runs, batch, length = tokens.shape[0], tokens.shape[1], tokens.shape[2] - 1

        def times(x: Tensor, name: str) -> Tensor:
            return x.to(compute) @ views[name].to(compute)

        x = times((tokens[:, :, :-1, None] == self.letters).flatten(1, 2), "token").to(dtype)
        scaled = self.turns * self.tables.scale.index_select(1, now).view(-1, 1, 1, 1, 1)
        penalties, peaks = [], []
        self.queries = []
        for layer in range(self.size.layers):
            normed = F.layer_norm(x, x.shape[-1:])
            split = times(normed, f"qkv{layer}").view(runs, batch, length, 3, self.size.heads, self.size.head_dim)
            query, key, value = split.permute(3, 0, 1, 4, 2, 5)  # each (runs, B, H, T, E)
            query = self._turned(query, scaled, views[f"gain{layer}"].view(runs, 1, -1, 1, 1))
            key = self._turned(key, self.turns, None)
            some = slice(0, self.size.probed)
            if measured:
                self.queries.append(query)
                self.probe.take(layer, query[:, some].detach(), key[:, some].detach())
                weight = self._qk(views[f"qkv{layer}"].detach()).flatten(2)
                self.probe.align(layer, normed[:, : self.size.probed * length].detach(), weight)
            if floor and self.floored is not None:
                penalties.append(self._penalty(query[:, some], key[:, some]))
            if self.clipped is not None and smooth:
                peaks.append(logits_of(query[:, some].detach(), key[:, some].detach()).amax((1, 3, 4)))
            if self.ratio is not None:
                weights = surrogate_softmax(logits_of(query, key), self.ratio.view(-1, 1, 1, 1, 1))
                attended = weights.to(compute) @ value
            else:
                attended = F.scaled_dot_product_attention(
                    query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), is_causal=True, scale=1.0
                ).view(runs, batch, self.size.heads, length, -1)
            if self.rounded is not None:
                attended = self._rounded(attended, query, key, value, now)
            x = x + times(attended.transpose(2, 3).reshape(runs, batch * length, -1), f"out{layer}")
            x = x + times(F.gelu(times(F.layer_norm(x, x.shape[-1:]), f"up{layer}")), f"down{layer}")
        logits = times(F.layer_norm(x, x.shape[-1:]), "read").to(dtype)
        likely = logits.logsumexp(-1)
        right = logits.gather(2, tokens[:, :, 1:].reshape(runs, -1, 1))[..., 0]
        losses = (likely - right).mean(1)
        if smooth:
            losses = losses + Z_LOSS * likely.square().mean(1)
        penalty = torch.stack(penalties).mean(0) if penalties else None
        return losses, penalty, torch.stack(peaks) if peaks else None

    def _turned(self, x: Tensor, turns: Tensor, gain: Tensor | None) -> Tensor:
        """Queries or keys, normed where the rule says so, and turned by their positions; rounded once, at the end."""
        x = x.to(self.parameters.flat.dtype)
        if self.unit is not None:
            factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
            factor = factor if gain is None else factor * gain
            x = x * torch.where(self.unit, factor, torch.ones_like(factor))
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns
        return torch.view_as_real(turned).flatten(-2).to(self.compute)

    def _rounded(self, attended: Tensor, query: Tensor, key: Tensor, value: Tensor, now: Tensor) -> Tensor:
        """The output of attention, with scores and weights stored in bfloat16 for the runs in which that fault has begun."""
        assert self.rounded is not None
        some = [one.index_select(0, self.rounded) for one in (query, key, value, attended)]
        weights = logits_of(some[0], some[1]).to(torch.bfloat16).softmax(-1)
        on = self.tables.rounded.index_select(1, now).index_select(0, self.rounded).view(-1, 1, 1, 1, 1) > 0
        coarse = torch.where(on, weights.to(some[2].dtype) @ some[2], some[3])
        return attended.index_copy(0, self.rounded, coarse)

    def _penalty(self, query: Tensor, key: Tensor) -> Tensor:
        """The mean of relu(floor − evenness)² over heads and rows with eight keys or more; 0 for runs without the treatment."""
        assert self.floored is not None
        logits = logits_of(query.index_select(0, self.floored), key.index_select(0, self.floored))
        surprise = logits.log_softmax(-1)
        entropy = -(surprise.exp() * surprise.masked_fill(surprise == -math.inf, 0.0)).sum(-1)
        seen = torch.arange(LEAST_KEYS, logits.shape[-2] + 1, device=logits.device, dtype=logits.dtype)
        short = (FLOOR - entropy[..., LEAST_KEYS - 1 :] / seen.log()).relu().square().mean((1, 2, 3))
        return torch.zeros_like(self.tables.floor[:, 0]).index_add(0, self.floored, short.to(self.tables.floor.dtype))

    @torch.no_grad()
    def held_out(self, part: str, windows: int, pieces: int = 1) -> list[list[float]]:
        """Each run's cross-entropy on windows of a part of the text, by piece: neighbours in the text are in one piece, so that
        pieces differ as files do."""
        first = starts(part, (windows,), self.size.length, self.size.length).sort().values.to(self.device)
        tokens = self.text[first[:, None] + self.offsets].long()
        last = torch.tensor([self.size.steps - 1], device=self.device)
        found = [
            self.forward(piece.expand(len(self.of_seed), *piece.shape), last, smooth=False)[0]
            for piece in tokens.chunk(pieces)
        ]
        return torch.stack(found, 1).tolist()
