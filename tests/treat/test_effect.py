"""A clip has its effect, or does not happen: attention whose heads are not those of its weights, judged by its own arithmetic."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import attemper
from attemper.treat import Finder
from close import in_float64
from treat.clipping import middle

WIDTH, HEADS, EACH, LENGTH = 16, 4, 4, 9


class Model(nn.Module):
    """Attention by hand that keeps the logits of its last pass without what was added to them."""

    num_heads = HEADS

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def split(self, x):
        return (side(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for side in (self.q, self.k, self.v))

    def attend(self, scores, v):
        return scores.softmax(-1) @ v

    def forward(self, x):
        q, k, v = self.split(x)
        self.scores = q.detach() @ k.detach().mT / math.sqrt(EACH)
        return self.attend(q @ k.mT / math.sqrt(EACH), v).transpose(1, 2).flatten(2)


class Alibi(Model):
    def attend(self, scores, v):
        slopes = 2.0 ** -torch.arange(HEADS, dtype=scores.dtype).view(-1, 1, 1)
        return (scores + 300 * slopes * torch.arange(scores.shape[-1])).softmax(-1) @ v


class RelativeBias(Model):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(20 * torch.randn(HEADS, LENGTH, LENGTH))

    def attend(self, scores, v):
        return (scores + self.bias).softmax(-1) @ v


class TalkingHeads(Model):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(HEADS, HEADS))

    def attend(self, scores, v):
        return torch.einsum("bhij,hg->bgij", scores, self.mix).softmax(-1) @ v


class TalkingByLinear(TalkingHeads):
    def __init__(self):
        super().__init__()
        self.proj_l = nn.Linear(HEADS, HEADS)

    def attend(self, scores, v):
        return self.proj_l(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1) @ v


class TalkingAfter(TalkingHeads):
    """Weights are mixed, and not scores: a clip of a head is one of its own logits."""

    def attend(self, scores, v):
        return torch.einsum("bhij,hg->bgij", scores.softmax(-1), self.mix) @ v


class NormalisedScores(Model):
    """Scores that are divided by their own size."""

    def attend(self, scores, v):
        return (scores / scores.square().mean((-1, -2), keepdim=True).sqrt()).softmax(-1) @ v


class Rotated(Model):
    """The heads of the scores are rolled by one before the softmax."""

    def attend(self, scores, v):
        return torch.cat([scores[:, 1:], scores[:, :1]], 1).softmax(-1) @ v


class Relative(Model):
    """Relative positions that q alone meets, as Shaw et al. have them and conformers."""

    def __init__(self):
        super().__init__()
        self.relative = nn.Parameter(4 * torch.randn(LENGTH, LENGTH, EACH))

    def terms(self, q, k):
        return torch.einsum("bhid,ijd->bhij", q, self.relative)

    def forward(self, x):
        q, k, v = self.split(x)
        self.scores = q.detach() @ k.detach().mT / math.sqrt(EACH)
        return self.attend((q @ k.mT + self.terms(q, k)) / math.sqrt(EACH), v).transpose(1, 2).flatten(2)


class RelativeByProduct(Relative):
    """The same positions for all queries, one matrix per head."""

    def __init__(self):
        super().__init__()
        self.register_buffer("places", 4 * torch.randn(HEADS, LENGTH, EACH))

    def terms(self, q, k):
        return q @ self.places.mT


class RelativeOnBothSides(RelativeByProduct):
    """Content to position and position to content, as in DeBERTa."""

    def terms(self, q, k):
        return q @ self.places.mT + self.places @ k.mT


class RelativeAsMask(RelativeByProduct):
    def forward(self, x):
        q, k, v = self.split(x)
        self.scores = q.detach() @ k.detach().mT / math.sqrt(EACH)
        late = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        mask = (self.terms(q, k) / math.sqrt(EACH)).masked_fill(late, -torch.inf)
        return functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


class BiasAsMask(RelativeBias):
    """A learned mask that q has no part in."""

    def forward(self, x):
        q, k, v = self.split(x)
        self.scores = q.detach() @ k.detach().mT / math.sqrt(EACH)
        return functional.scaled_dot_product_attention(q, k, v, self.bias).transpose(1, 2).flatten(2)


class Sliced(Model):
    """One head after the other, as attention slicing in diffusers."""

    def forward(self, x):
        q, k, v = self.split(x)
        self.scores = q.detach() @ k.detach().mT / math.sqrt(EACH)
        parts = [functional.scaled_dot_product_attention(*(t[:, h] for t in (q, k, v))) for h in range(HEADS)]
        return torch.stack(parts, 1).transpose(1, 2).flatten(2)


class SlicedInPairs(Model):
    def forward(self, x):
        q, k, v = self.split(x)
        self.scores = q.detach() @ k.detach().mT / math.sqrt(EACH)
        halves = [(t[:, :2], t[:, 2:]) for t in (q, k, v)]
        parts = [functional.scaled_dot_product_attention(*part) for part in zip(*halves, strict=True)]
        return torch.cat(parts, 1).transpose(1, 2).flatten(2)


class SeveralLayers(Model):
    """Two layers in one module, as fx and export leave them."""

    def __init__(self):
        super().__init__()
        self.q2, self.k2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + super().forward(x)
        q, k, v = (side(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for side in (self.q2, self.k2, self.v))
        return (q @ k.mT / math.sqrt(EACH)).softmax(-1).matmul(v).transpose(1, 2).flatten(2)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(EACH) * 3)

    def forward(self, x):
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt()


class Normed(Model):
    """QK-norm behind projections with biases, one gain for all heads, as in Flux."""

    def __init__(self):
        super().__init__()
        self.norm_q, self.norm_k = Norm(), Norm()

    def split(self, x):
        q, k, v = super().split(x)
        return self.norm_q(q), self.norm_k(k), v


class Joint(Normed):
    """Text and image are projected and normalised apart, and attend together, as in Flux and SD3."""

    def __init__(self):
        super().__init__()
        self.add_q, self.add_k, self.norm_added_q = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Norm()

    def split(self, x):
        q, k, v = super().split(x)
        text_q, text_k = (
            side(x[:, :3]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for side in (self.add_q, self.add_k)
        )
        return torch.cat([self.norm_added_q(text_q), q[:, :, 3:]], 2), torch.cat([text_k, k[:, :, 3:]], 2), v


class Grouped(Model):
    def __init__(self):
        super().__init__()
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)

    def split(self, x):
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (s(x).unflatten(-1, (HEADS // 2, -1)).transpose(1, 2).repeat_interleave(2, 1) for s in (self.k, self.v))
        return q, k, v


class ByTwo(nn.Module):
    """The same layer twice, as ALBERT has it."""

    def __init__(self):
        super().__init__()
        self.inner = Model()

    def forward(self, x):
        return self.inner(x + self.inner(x))


EXACT = [Model, Alibi, RelativeBias, BiasAsMask, TalkingAfter, Grouped]
WHOLE = [Normed, Joint]
REFUSED = {
    TalkingHeads: "scores of several heads are mixed",
    TalkingByLinear: "scores of several heads are mixed",
    Rotated: "scores of several heads are mixed",
    NormalisedScores: "does not scale its logits by the same factor",
    **dict.fromkeys(
        [Relative, RelativeByProduct, RelativeOnBothSides, RelativeAsMask], "a term of its logits holds q without k"
    ),
    Sliced: "it attends several times in a pass",
    SlicedInPairs: "it attends several times in a pass",
    SeveralLayers: "it attends several times in a pass",
}


def built(kind):
    torch.manual_seed(5)
    model = kind().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(2 + 3 * torch.rand(len(parameter), 1))
    return model, torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)


def found_by(way, model, x, layer=""):
    """Projections by a pass of their own, or in the first step of a training."""
    if way == "projections()":
        return attemper.projections(model, x)[layer, "self"]
    finder = Finder(model)
    with attemper.watch(model, examiners=[finder]), finder:
        model(x).square().sum().backward()
    return finder.projections[layer, "self"]


def record_of(model, x):
    with torch.no_grad(), attemper.watch(model) as watch:
        model(x)
    return watch.record


@pytest.mark.parametrize("way", ["projections()", "in training"])
@pytest.mark.parametrize("kind", EXACT)
def test_heads_above_get_tau_and_others_keep_their_bits(kind, way):
    model, x = built(kind)
    found = found_by(way, model, x)
    assert found.how == "per head", found.why
    record, before = record_of(model, x), model.scores
    peaks = before.amax((0, 2, 3))
    tau = middle(peaks)
    clip = attemper.qk_clip(model, record, tau)
    record_of(model, x)
    above = peaks > tau
    assert [one.head for one in clip] == above.nonzero().flatten().tolist()
    assert model.scores.amax((0, 2, 3))[above].tolist() == [in_float64(tau, size=600)] * 2
    assert torch.equal(model.scores[:, ~above], before[:, ~above])
    assert not clip.skipped


@pytest.mark.parametrize("way", ["projections()", "in training"])
@pytest.mark.parametrize("kind", WHOLE)
def test_the_gain_behind_a_norm_is_scaled_and_nothing_before_it(kind, way):
    model, x = built(kind)
    found = found_by(way, model, x)
    assert found.how == "by layer", found.why
    assert {part.parameter.split(".")[0] for part in found.parts} == {
        name for name, _ in model.named_children() if name in ("norm_q", "norm_added_q")
    }
    record, before = record_of(model, x), model.scores
    tau = float(before.max()) / 3
    assert attemper.qk_clip(model, record, tau)
    record_of(model, x)
    assert float(model.scores.max()) == in_float64(tau)
    assert not attemper.qk_clip(model, record_of(model, x), tau * (1 + 1e-9))


@pytest.mark.parametrize("way", ["projections()", "in training"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_have_no_effect_is_refused_and_named(kind, way):
    if kind is SeveralLayers and way == "in training":
        pytest.skip("does not apply: a layer's own graph holds the earlier one there")
    model, x = built(kind)
    found_by(way, model, x)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    clip = attemper.qk_clip(model, record_of(model, x), 0.01)
    assert not clip.heads
    assert REFUSED[kind] in str(clip)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("way", ["projections()", "in training"])
def test_a_layer_that_runs_twice_is_still_one(way):
    model, x = built(ByTwo)
    assert found_by(way, model, x, "inner").how == "per head"


@pytest.mark.parametrize("frozen", ["q", "k", "qk"])
def test_frozen_sides(frozen):
    model, x = built(Model)
    for side in frozen:
        getattr(model, side).requires_grad_(False)
    attemper.projections(model, x)
    record = record_of(model, x)
    tau = middle(model.scores.amax((0, 2, 3)))
    clip = attemper.qk_clip(model, record, tau)
    record_of(model, x)
    if frozen == "qk":
        assert not clip.heads
        assert "is frozen" in str(clip)
    else:
        assert sorted(model.scores.amax((0, 2, 3)).tolist())[-2:] == [in_float64(tau)] * 2


def test_logits_are_not_kept_for_it():
    """What is taken of them for the check is let go when the module ends."""
    model, x = built(Alibi)
    kept = []

    class Keeps:
        def look(self, call, vitals, rows):
            kept.append(call)

        def keep(self, name, call, found):
            assert (call.logits, call.scores, call.graph) == (None, None, None)

    with attemper.watch(model, examiners=[Keeps()]):
        model(x)
    assert len(kept) == 1
