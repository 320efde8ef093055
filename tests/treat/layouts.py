"""Layouts of attention that no list names. Each computes its own scores, which judge a clip without attemper."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

WIDTH, HEADS, EACH, LENGTH = 16, 4, 4, 9


def split(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Layout(nn.Module):
    """q, k and v of :meth:`made` meet; `peaks` are the largest scores of the last pass, by plain arithmetic."""

    peaks: Tensor
    values: Tensor

    def __init__(self, q: bool = True, k: bool = True) -> None:
        super().__init__()
        self.v = nn.Linear(WIDTH, WIDTH)
        if q:
            self.q = nn.Linear(WIDTH, WIDTH)
        if k:
            self.k = nn.Linear(WIDTH, WIDTH)

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return split(self.q(x)), split(self.k(x)), split(self.v(x))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.made(x)
        scores = q.detach() @ k.detach().repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[-1])
        late = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        self.peaks, self.values = scores.masked_fill(late, -math.inf).amax((0, 2, 3)), v.detach().clone()
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


class ByHeadDim(Layout):
    """One projection whose rows run through channels first, then heads, then q, k and v."""

    def __init__(self) -> None:
        super().__init__(q=False, k=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (EACH, HEADS, 3)).permute(4, 0, 3, 1, 2)
        return q, k, v


class Permuted(Layout):
    """One projection whose rows are in a random order."""

    order: Tensor

    def __init__(self) -> None:
        super().__init__(q=False, k=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("order", torch.randperm(3 * WIDTH))

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x)[..., self.order].chunk(3, -1)
        return split(q), split(k), split(v)


class OneLinearPerHead(Layout):
    def __init__(self) -> None:
        super().__init__(q=False, k=False)
        self.qs, self.ks = (nn.ModuleList(nn.Linear(WIDTH, EACH) for _ in range(HEADS)) for _ in range(2))

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (torch.stack([one(x) for one in side], 1) for side in (self.qs, self.ks))
        return q, k, split(self.v(x))


class Adapted(Layout):
    """A fused projection with an adapter on all of it."""

    def __init__(self) -> None:
        super().__init__(q=False, k=False)
        self.qkv, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, 3 * WIDTH, bias=False)

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.qkv(x) + self.up(self.down(x))).chunk(3, -1)
        return split(q), split(k), split(v)


class Tied(Layout):
    """One projection for q and k."""

    def __init__(self) -> None:
        super().__init__(k=False)

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = split(self.q(x))
        return q, q, split(self.v(x))


class TiedGain(Layout):
    """q and k are normalised, and one gain per channel multiplies both, as in nGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(3 + torch.rand(WIDTH))

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (functional.normalize(split(side(x)), dim=-1) for side in (self.q, self.k))
        return q * split(self.gain[None, None]), k * split(self.gain[None, None]), split(self.v(x))


class WeightNorm(Layout):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = parametrizations.weight_norm(self.q), parametrizations.weight_norm(self.k)


class SigmaReparam(Layout):
    """W / σ(W) with one gain for all heads."""

    def __init__(self) -> None:
        super().__init__(q=False)
        self.q, self.gain = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.tensor(2.0))

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = self.gain * self.q / torch.linalg.matrix_norm(self.q, 2)
        return split(x @ weight.T), split(self.k(x)).mean(1, keepdim=True), split(self.v(x)).mean(1, keepdim=True)


class Convolved(Layout):
    """A convolution over the sequence makes q, k and v."""

    def __init__(self) -> None:
        super().__init__(q=False, k=False)
        self.qkv = nn.Conv1d(WIDTH, 3 * WIDTH, 3, padding=2)

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x.mT)[..., :-2].mT.chunk(3, -1)
        return split(q), split(k), split(v)


class Depthwise(Layout):
    """A convolution of each channel behind the projections, as in Primer: only the last factor is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.after_q, self.after_k = (nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH) for _ in range(2))

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.after_q(self.q(x).mT)[..., :-2].mT
        return split(q), split(self.after_k(self.k(x).mT)[..., :-2].mT), split(self.v(x))


class Gated(Layout):
    """q is gated by another projection, which has no degree."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return split(self.q(x) * self.gate(x).sigmoid()), split(self.k(x)), split(self.v(x))


class TwoHalves(Layout):
    """Half of the heads from one projection, half from another one without a bias."""

    def __init__(self) -> None:
        super().__init__(q=False)
        self.first, self.second = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2, bias=False)

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return split(torch.cat([self.first(x), self.second(x.tanh())], -1)), split(self.k(x)), split(self.v(x))


class Bilinear(Layout):
    """q is the input itself: only keys have weights."""

    def __init__(self) -> None:
        super().__init__(q=False, k=False)
        self.form = nn.Parameter(torch.randn(HEADS, WIDTH, WIDTH) / 4)

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k = torch.einsum("bld,hde->bhle", x, self.form)
        return x[:, None].expand(-1, HEADS, -1, -1), k, split(self.v(x))


class KeysOfQueries(Layout):
    """k is made of q."""

    def __init__(self) -> None:
        super().__init__(k=False)
        self.form = nn.Parameter(torch.randn(HEADS, EACH, EACH))

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = split(self.q(x))
        return q, q @ self.form, split(self.v(x))


class WithInput(Layout):
    """The input is added to q, so that no factor of its weights scales it: keys take all of γ."""

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return split(self.q(x) + x), split(self.k(x)), split(self.v(x))


class Quantised(Layout):
    """int8 weights with learned steps per row: the steps are scaled."""

    stored: Tensor

    def __init__(self) -> None:
        super().__init__(q=False)
        self.register_buffer("stored", torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8))
        self.steps = nn.Parameter(torch.rand(WIDTH, 1) / 127)

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return split(x @ (self.stored * self.steps).T), split(self.k(x)), split(self.v(x))


class TwoDimensions(Layout):
    """Heads lie along two dimensions of one weight: the layer is scaled as a whole."""

    def __init__(self) -> None:
        super().__init__(q=False, k=False)
        self.q = nn.Parameter(torch.randn(WIDTH, 2, EACH, 2) / 2)
        self.kv = nn.Linear(WIDTH, WIDTH)

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self.kv(x).chunk(2, -1)
        return torch.einsum("bld,dger->bgrle", x, self.q).flatten(1, 2), split(k, 2), split(v, 2)


class AllInteger(Layout):
    """int8 weights without anything that is learned: nothing can be scaled."""

    stored: Tensor

    def __init__(self) -> None:
        super().__init__(q=False, k=False)
        self.register_buffer("stored", torch.randint(-9, 10, (2 * WIDTH, WIDTH), dtype=torch.int8))

    def made(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (x @ (self.stored / 9).to(x).T).chunk(2, -1)
        return split(q), split(k), split(self.v(x))


PER_HEAD = (
    *(
        ByHeadDim,
        Permuted,
        OneLinearPerHead,
        Adapted,
        Tied,
        TiedGain,
        WeightNorm,
        Convolved,
        Depthwise,
        Gated,
        TwoHalves,
    ),
    *(Bilinear, KeysOfQueries, WithInput, Quantised),
)
BY_LAYER = (SigmaReparam, TwoDimensions)
