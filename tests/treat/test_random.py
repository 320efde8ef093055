"""10,000 heads with any largest logit, tau and alpha: the factor is tau / max(S, tau), and no weight is ever NaN."""

import math
import random

import pytest
import torch
from torch import nn

import attemper
from attemper.heads import HeadSummary
from attemper.watch.record.entry import Entry
from close import assert_float64
from treat.architectures import WIDTH, Odd

SIZES = [0.0, -0.0, -1.0, -math.inf, math.inf, math.nan, 1e-300, 1e300, 1.7e308, -1e300, 5e-324]


class Fused(nn.Module):
    """Four heads; fewer key heads, or a norm with a gain, as asked."""

    def __init__(self, keys=4, norm=None, shift=0.0):
        super().__init__()
        self.keys, self.shift = keys, shift
        self.qkv = nn.Linear(WIDTH, WIDTH + 8 * keys)
        self.gain = None if norm is None else nn.Parameter(torch.rand(norm))

    def forward(self, x):
        q, k, v = self.qkv(x).split([WIDTH, 4 * self.keys, 4 * self.keys], -1)
        q, k, v = (part.unflatten(-1, (-1, 4)) for part in (q, k, v))
        if self.gain is not None:
            q = q / q.square().mean(-1, keepdim=True).sqrt() * (self.gain + self.shift)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


class Latent(nn.Module):
    """Keys of two parts: one of each head, and one that all heads share."""

    def __init__(self):
        super().__init__()
        self.q, self.down = nn.Linear(WIDTH, 4 * 6), nn.Linear(WIDTH, 8 + 2)
        self.up = nn.Linear(8, 4 * 8)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 6)).transpose(1, 2)
        latent, shared = self.down(x).split([8, 2], -1)
        k, v = self.up(latent).unflatten(-1, (4, 8)).transpose(1, 2).chunk(2, -1)
        k = torch.cat([k, shared[:, None].expand(-1, 4, -1, -1)], -1)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Tied(nn.Module):
    """One projection for q and k."""

    def __init__(self):
        super().__init__()
        self.qk, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, v = (part(x).unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.qk, self.v))
        return nn.functional.scaled_dot_product_attention(q, q, v).transpose(1, 2).flatten(2)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        layouts = [Fused(), Fused(keys=2), Fused(keys=1), Latent(), Odd()]
        layouts += [Fused(norm=(4, 1)), Tied(), Fused(norm=4)]  # the last one's keys have no norm: they take the factor
        layouts += [Fused(keys=2, norm=4), Fused(keys=2, norm=4, shift=1.0)]
        self.layers = nn.ModuleList(layouts)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def drawn(rng):
    return rng.choice(SIZES) if rng.random() < 0.3 else 10 ** rng.uniform(-4, 6) * rng.choice([1, 1, 1, -1])


def record_of(found, sizes):
    entries = []
    for (layer, kind), peaks in zip(found, sizes, strict=True):
        peaks = torch.tensor(peaks, dtype=torch.float64)
        summary = HeadSummary(("rows", "peak"), torch.ones(len(peaks), 1, dtype=torch.float64), peaks)
        entries.append(Entry(3, layer, kind, tuple(range(len(peaks))), summary))
    return attemper.Record(entries)


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.exhaustive), torch.bfloat16], ids=str
)
def test_ten_thousand_heads(dtype):
    torch.manual_seed(3)
    rng = random.Random(int(dtype.itemsize))
    model = Both().double()
    found = attemper.projections(model, torch.randn(1, 6, WIDTH, dtype=torch.float64))
    assert [layer.how for layer in found.values()] == ["per head"] * 8 + ["by layer"] * 2
    model = model.to(dtype)
    begin = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    heads = 0
    while heads < 10_000 / 3:
        sizes = [[drawn(rng) for _ in range(layer.heads)] for layer in found.values()]
        tau, alpha = 10 ** rng.uniform(-3, 4), rng.choice([0, 0.3, 0.5, 1])
        model.load_state_dict(begin)
        shared = rng.choice(["query", "group"])
        clip = attemper.qk_clip(model, record_of(found, sizes), tau, alpha=alpha, shared=shared, projections=found)
        for name, parameter in model.state_dict().items():
            assert parameter.isfinite().all(), (name, sizes, tau)
        told = {(one.layer, one.head): one.factor for one in clip}
        for layer, peaks in zip(found.values(), sizes, strict=True):
            usable = [peak if math.isfinite(peak) else 0.0 for peak in peaks]
            gammas = [tau / max(peak, tau) for peak in usable]
            gammas = [min(gammas)] * len(gammas) if layer.how == "by layer" else gammas
            for head, gamma in enumerate(gammas):
                assert told.get((layer.layer, head), 1.0) == gamma
            for head, peak in enumerate(peaks):
                if math.isnan(peak) or peak == math.inf:
                    assert any(
                        (skipped_head.layer, skipped_head.head) == (layer.layer, head) for skipped_head in clip.skipped
                    )
            if dtype == torch.float64:
                check_rows(layer, gammas, alpha, shared, begin, model.state_dict())
        heads += sum(map(len, sizes))


def check_rows(layer, gammas, alpha, shared, before, now):
    """The factors of q and of k make γ, row by row, and nothing else of their parameters changed."""
    groups = layer.heads // layer.key_heads
    if shared == "group" and groups > 1 and layer.splits:
        gammas = [min(gammas[head // groups * groups : (head // groups + 1) * groups]) for head in range(layer.heads)]
    split = layer.splits and (groups == 1 or shared == "group")
    expected = {part.parameter: before[part.parameter] + part.offset for part in layer.parts}
    for part in layer.parts:
        powers = {"k": 1 - alpha if split else float(not layer.splits), "both": 0.5}
        for row, owner in enumerate(part.owner.tolist()):
            if owner >= 0:
                power = powers.get(part.side, alpha if split and not part.whole[row] else 1.0)
                gamma = gammas[owner * groups if part.side == "k" else owner]
                expected[part.parameter].select(part.dim, row).mul_(gamma**power)
    for part in layer.parts:
        assert_float64(now[part.parameter], expected[part.parameter] - part.offset, part.parameter)
