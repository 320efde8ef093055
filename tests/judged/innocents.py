"""Correct models of unusual design: a scan must find no fault in any of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import INNOCENTS, Case
from .attending import HEAD
from .base import (
    GPT,
    HEADS,
    WIDTH,
    WORDS,
    Bidirectional,
    Block,
    Encoder,
    Placed,
    Rotary,
    SelfAttention,
    angles,
    padded,
    rotate,
    rows,
    tokens,
)
from .masking import Classifier, Fused
from .placing import Cached, Pair, captioned


def innocent(
    model: Callable[..., nn.Module] | None = None, batch: Callable[[], Any] | None = None
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def add(made: type[nn.Module]) -> type[nn.Module]:
        within = model
        if within is None and issubclass(made, SelfAttention):
            within = GPT if made.causal else Encoder
        build = (lambda: within(made)) if within else made
        assert made.__name__ not in INNOCENTS
        INNOCENTS[made.__name__] = Case(made.__name__, "own", build, batch or tokens())
        return made

    return add


# masks


@innocent()
class PrefixMask(SelfAttention):
    """The first four tokens see one another, as in a prefix LM."""

    def visible(self, scores):
        return super().visible(scores) | (torch.arange(scores.shape[-1]) < 4)


@innocent()
class ReadsFromTheRight(SelfAttention):
    direction = "backward"

    def visible(self, scores):
        return torch.ones(scores.shape[-2:], dtype=torch.bool).triu()


@innocent()
class OneTokenOfLookahead(SelfAttention):
    lookahead = 1

    def visible(self, scores):
        return torch.ones(scores.shape[-2:], dtype=torch.bool).tril(1)


@innocent()
class WindowOnBothSides(Bidirectional):
    def visible(self, scores):
        positions = torch.arange(scores.shape[-1])
        return (positions[:, None] - positions[None, :]).abs() <= 2


@innocent()
class DilatedWindow(SelfAttention):
    """Every second key, as in a strided sparse transformer."""

    def visible(self, scores):
        positions = torch.arange(scores.shape[-1])
        return super().visible(scores) & ((positions[:, None] - positions[None, :]) % 2 == 0)


@innocent()
class CausalChunks(SelfAttention):
    """A chunk of four tokens sees itself and all chunks before it, as in a streaming encoder of speech."""

    causal = False

    def visible(self, scores):
        chunk = torch.arange(scores.shape[-1]) // 4
        return chunk[:, None] >= chunk[None, :]


@innocent()
class ChunksApart(SelfAttention):
    """Causal within chunks of four, as in Llama 4."""

    def visible(self, scores):
        chunk = torch.arange(scores.shape[-1]) // 4
        return super().visible(scores) & (chunk[:, None] == chunk[None, :])


@innocent()
class WindowsByHead(SelfAttention):
    def __init__(self):
        super().__init__()
        self.windows = (2, 4, 8, 16)

    def visible(self, scores):
        positions = torch.arange(scores.shape[-1])
        return super().visible(scores) & (
            positions[:, None] - positions[None, :] < torch.tensor(self.windows)[:, None, None]
        )


@innocent()
class HalfOfTheHeadsEachWay(Bidirectional):
    """Two heads read from the left, two from the right."""

    def visible(self, scores):
        left = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return torch.stack([left, left, left.mT, left.mT])


@innocent()
class GlobalTokens(Bidirectional):
    """A band, and two tokens that see all and that all see."""

    def visible(self, scores):
        positions = torch.arange(scores.shape[-1])
        band = (positions[:, None] - positions[None, :]).abs() <= 2
        return band | (positions < 2) | (positions[:, None] < 2)


@innocent()
class LargestScores(Bidirectional):
    """Only the four keys with the largest scores."""

    def hide(self, scores, padding):
        scores = super().hide(scores, padding)
        return scores.masked_fill(scores < scores.topk(4).values[..., -1:], -torch.inf)


# weights other than a softmax of all keys


@innocent()
class OneMoreInTheSum(SelfAttention):
    """softmax1: exp(z) / (1 + Σ exp(z))."""

    def weigh(self, scores, padding):
        scores = self.hide(scores, padding)
        return F.pad(scores, (1, 0)).softmax(-1)[..., 1:]


@innocent()
class LearnedSink(SelfAttention):
    """A learned logit per head that takes weight but has no value, as in gpt-oss."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def weigh(self, scores, padding):
        scores = self.hide(scores, padding)
        sinks = self.sinks[None, :, None, None].expand(len(scores), -1, scores.shape[2], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


@innocent()
class TalkingHeads(SelfAttention):
    def __init__(self):
        super().__init__()
        self.before, self.after = (nn.Parameter(torch.eye(HEADS) + torch.randn(HEADS, HEADS) * 0.1) for _ in range(2))

    def weigh(self, scores, padding):
        weights = super().weigh(torch.einsum("bhij,hg->bgij", scores, self.before), padding)
        return torch.einsum("bhij,hg->bgij", weights, self.after)


def counted(scores: Tensor) -> Tensor:
    """How many keys each row sees."""
    return (scores > torch.finfo(scores.dtype).min / 2).sum(-1, keepdim=True).clamp(min=1)


@innocent()
class SigmoidWeights(SelfAttention):
    def weigh(self, scores, padding):
        scores = self.hide(scores, padding)
        return (scores - counted(scores).log()).sigmoid()


@innocent()
class SquaredRelu(Bidirectional):
    def weigh(self, scores, padding):
        scores = self.hide(scores, padding)
        return scores.relu().square() / counted(scores)


@innocent()
class DifferenceOfTwo(SelfAttention):
    """Differential attention: one map less a part of another."""

    def __init__(self):
        super().__init__()
        self.share = nn.Parameter(torch.tensor(0.4))

    def split(self, x):
        return x.view(*x.shape[:2], 2, -1).transpose(1, 2)

    def forward(self, x, attention_mask=None, source=None):
        q, k, v = self.project(x, x)
        first, second = (
            self.weigh(self.score(a, b), attention_mask) for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        return self.out_proj(self.join((first - self.share * second) @ v))


@innocent()
class AdditiveScores(Bidirectional):
    """Bahdanau's: v · tanh(q + k)."""

    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.randn(HEAD))

    def score(self, q, k):
        return (q[..., :, None, :] + k[..., None, :, :]).tanh() @ self.v


@innocent()
class NearestKeys(Bidirectional):
    """Scores fall with the squared distance of q and k."""

    def score(self, q, k):
        return -torch.cdist(q, k).square() / (2 * math.sqrt(HEAD))


@innocent()
class LinearAttention(SelfAttention):
    """Running sums of φ(k) vᵀ: causal without scores."""

    def forward(self, x, attention_mask=None, source=None):
        q, k, v = self.project(x, x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        k = k if attention_mask is None else k * attention_mask[:, None, :, None]
        state, total = (k[..., :, None] * v[..., None, :]).cumsum(2), k.cumsum(2)
        out = (q[..., None, :] @ state)[..., 0, :] / (q * total).sum(-1, keepdim=True)
        return self.out_proj(self.join(out))


# scales


@innocent()
class NormsAndATemperature(SelfAttention):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.full((HEADS, 1, 1), 10.0).log())

    def score(self, q, k):
        return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.temperature.exp()


@innocent()
class CappedScores(SelfAttention):
    attn_logit_softcapping = 20.0

    def score(self, q, k):
        return self.attn_logit_softcapping * (super().score(q, k) / self.attn_logit_softcapping).tanh()


@innocent()
class WidthScaled(SelfAttention):
    """1/d_k, as in μP, with larger initial queries."""

    def __init__(self):
        super().__init__()
        self.scale = 1 / HEAD
        nn.init.normal_(self.q_proj.weight, std=WIDTH**-0.5 * 2)

    def score(self, q, k):
        return q @ k.mT * self.scale


@innocent()
class ScaleInTheWeights(SelfAttention):
    """No scale, as in T5, whose initial queries are smaller by √d_k."""

    scaling = 1.0

    def __init__(self):
        super().__init__()
        nn.init.normal_(self.q_proj.weight, std=(WIDTH * HEAD) ** -0.5)

    def score(self, q, k):
        return q @ k.mT


@innocent()
class LogOfTheLength(SelfAttention):
    """The scale grows with the logarithm of how many keys a row sees."""

    def score(self, q, k):
        return super().score(q, k) * torch.arange(2, q.shape[-2] + 2).log()[:, None] / math.log(8)


@innocent()
class FourthRootOfEach(Bidirectional):
    """openai/guided-diffusion#38: q and k are scaled by d_k^−¼ each, which is right."""

    def score(self, q, k):
        return (q * HEAD**-0.25) @ (k * HEAD**-0.25).mT


# positions


@innocent(model=Placed)
class InterleavedRotary(SelfAttention):
    """The pairs (0, 1), (2, 3), … of GPT-J."""

    def place(self, q, k):
        turned = angles(q.shape[-2], HEAD)
        cos, sin = (part.repeat_interleave(2, -1).to(q.dtype) for part in (turned.cos(), turned.sin()))
        return (x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin for x in (q, k))


@innocent(model=Placed)
class PartlyRotary(SelfAttention):
    def place(self, q, k):
        turned = angles(q.shape[-2], HEAD // 2)
        return (torch.cat([rotate(x[..., : HEAD // 2], turned), x[..., HEAD // 2 :]], -1) for x in (q, k))


@innocent(model=Placed)
class NoTableAtAll(SelfAttention):
    """No position embedding: only the causal mask orders the tokens (NoPE)."""


@innocent(model=Placed)
class DistancesOfShaw(SelfAttention):
    """A vector for each distance, added to the keys."""

    def __init__(self):
        super().__init__()
        self.near = nn.Embedding(17, HEAD)

    def score(self, q, k):
        positions = torch.arange(q.shape[-2])
        near = self.near((positions[None, :] - positions[:, None]).clamp(-8, 8) + 8)
        return (q @ k.mT + torch.einsum("bhid,ijd->bhij", q, near)) / math.sqrt(HEAD)


@innocent()
class ShiftByOne(GPT):
    """A token is mixed with the one before it."""

    def embed(self, input_ids, attention_mask):
        x = super().embed(input_ids, attention_mask)
        return (x + F.pad(x, (0, 0, 1, -1))) / 2


@innocent()
class CausalConvolution(GPT):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)

    def embed(self, input_ids, attention_mask):
        x = super().embed(input_ids, attention_mask)
        return x + self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


@innocent()
class RunningMean(GPT):
    """Subtracts half the mean of the tokens so far."""

    def embed(self, input_ids, attention_mask):
        x = super().embed(input_ids, attention_mask)
        return x - x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None] / 2


# projections


@innocent()
class QueriesAreKeys(SelfAttention):
    """One projection for both, as in Reformer."""

    def __init__(self):
        super().__init__()
        del self.k_proj

    def project(self, x, source):
        q = self.split(self.q_proj(x))
        return q, F.normalize(q, dim=-1) * math.sqrt(HEAD), self.split(self.v_proj(x))


@innocent()
class KeysAreValues(SelfAttention):
    """The keys serve as values; there is no v_proj."""

    def __init__(self):
        super().__init__()
        del self.v_proj

    def project(self, x, source):
        k = self.split(self.k_proj(source))
        return self.split(self.q_proj(x)), k, k


@innocent()
class OneHeadOfKeys(SelfAttention):
    def __init__(self):
        super().__init__()
        self.num_key_value_heads = 1
        self.k_proj, self.v_proj = nn.Linear(WIDTH, HEAD), nn.Linear(WIDTH, HEAD)

    def project(self, x, source):
        return self.split(self.q_proj(x)), self.k_proj(source)[:, None], self.v_proj(source)[:, None]


@innocent()
class LatentKeys(SelfAttention):
    """Keys and values from a narrow latent."""

    def __init__(self):
        super().__init__()
        self.down, self.k_proj, self.v_proj = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)

    def project(self, x, source):
        latent = self.down(source)
        return self.split(self.q_proj(x)), self.split(self.k_proj(latent)), self.split(self.v_proj(latent))


@innocent()
class ZeroOutput(GPT):
    """The last projection of each block begins at zero, as in adaLN-Zero and LoRA."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            nn.init.zeros_(block.attn.out_proj.weight)
            nn.init.zeros_(block.attn.out_proj.bias)


@innocent()
class OneLayerTwice(GPT):
    """The same layer at every depth, as in ALBERT."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * 3)


@innocent()
class Frozen(GPT):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


@innocent()
class Halves(GPT):
    def __init__(self):
        super().__init__(Fused)
        self.bfloat16()


# queries and sources


@innocent(batch=rows(2, 9, "x"))
class SetOfVectors(nn.Module):
    """A Set Transformer: inducing points, and a pooled vector that does not depend on the order."""

    def __init__(self):
        super().__init__()
        self.points, self.seed = nn.Parameter(torch.randn(1, 4, WIDTH)), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.down, self.up, self.pool = Bidirectional(), Bidirectional(), Bidirectional()

    def forward(self, x):
        small = self.down(self.points.expand(len(x), -1, -1), source=x)
        return self.pool(self.seed.expand(len(x), -1, -1), source=self.up(x, source=small))[:, 0]


@innocent(batch=padded())
class PooledByAQuery(Encoder):
    """A learned query reads the words, and not the padding."""

    def __init__(self):
        super().__init__()
        self.query, self.pool = nn.Parameter(torch.randn(1, 1, WIDTH)), Bidirectional()

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids, attention_mask)
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.pool(self.query.expand(len(x), -1, -1), attention_mask, source=self.norm(x))[:, 0]


@innocent()
class Registers(Encoder):
    """Four learned tokens before the input, dropped at the end."""

    def __init__(self):
        super().__init__()
        self.registers = nn.Parameter(torch.randn(1, 4, WIDTH))

    def forward(self, input_ids, attention_mask=None):
        x = torch.cat([self.registers.expand(len(input_ids), -1, -1), self.embed(input_ids, attention_mask)], 1)
        mask = None if attention_mask is None else F.pad(attention_mask, (4, 0), value=1)
        for block in self.blocks:
            x = block(x, mask)
        return self.lm_head(self.norm(x[:, 4:]))


@innocent(batch=captioned)
class GatedCross(Pair):
    """A gate that starts at zero, as in Flamingo."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, decoder_input_ids, encoder_hidden_states):
        x = self.words(decoder_input_ids)
        x = x + self.self_attn(x)
        return self.out(x + self.gate.tanh() * self.cross_attn(x, source=encoder_hidden_states))


@innocent(batch=lambda: {"x": torch.randn(2, 4, 5, WIDTH, generator=torch.Generator().manual_seed(3))})
class RowsThenColumns(nn.Module):
    """Attention along the width of a picture, then along its height."""

    def __init__(self):
        super().__init__()
        self.across, self.down = Bidirectional(), Bidirectional()

    def forward(self, x):
        b, h, w, c = x.shape
        x = x + self.across(x.reshape(b * h, w, c)).view(b, h, w, c)
        return x + self.down(x.transpose(1, 2).reshape(b * w, h, c)).view(b, w, h, c).transpose(1, 2)


@innocent(batch=rows(2, 12, "x"))
class KeysOfFewerPlaces(nn.Module):
    """Keys and values are averages of three tokens, as in a pyramid."""

    def __init__(self):
        super().__init__()
        self.attn, self.norm = Bidirectional(), nn.LayerNorm(WIDTH)

    def forward(self, x):
        small = F.avg_pool1d(x.transpose(1, 2), 3, ceil_mode=True).transpose(1, 2)
        return x + self.attn(self.norm(x), source=self.norm(small))


@innocent()
class KeysOfTheNeighbourToo(SelfAttention):
    """Each key is averaged with the key of the token before it."""

    def project(self, x, source):
        q, k, v = super().project(x, source)
        return q, (k + F.pad(k, (0, 0, 1, -1))) / 2, v


@innocent(batch=rows(12, 2, "x"))
class LengthFirst(nn.Module):
    """torch's layer on (length, batch, width), which is what it takes by default."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0)

    def forward(self, x):
        return self.layer(x)


class Objects(nn.Module):
    """Object queries that read the features of a picture, as in DETR."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(5, WIDTH))
        self.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True)

    def forward(self, x):
        return self.decoder(self.queries.expand(len(x), -1, -1), x)


innocent(batch=rows(2, 16, "x"))(Objects)


@innocent(model=lambda layer: ModelForMaskedLM(layer), batch=padded())
class MaskedLanguage(Bidirectional):
    pass


class ModelForMaskedLM(Encoder):
    pass


innocent(batch=padded())(Classifier)
innocent()(Cached)


@innocent(batch=padded(left=True))
class PaddedOnTheLeft(GPT):
    """Positions count real tokens only."""


@innocent()
class RecurrentAndAttending(GPT):
    """A GRU before the layers."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def embed(self, input_ids, attention_mask):
        return self.gru(super().embed(input_ids, attention_mask))[0]


@innocent()
class AttentionAndMLPAtOnce(GPT):
    """x + attention(norm x) + mlp(norm x), as in GPT-J."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Parallel(Rotary()) for _ in range(2))


class Parallel(Block):
    def __init__(self, attention):
        super().__init__(attention)
        del self.norm2

    def forward(self, x, attention_mask=None):
        normed = self.norm1(x)
        return x + self.attn(normed, attention_mask) + self.mlp(normed)


@innocent(batch=lambda: {"pixels": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))})
class Patches(nn.Module):
    """A ViT with 2-d rotary embeddings: queries and keys turn by the row and column of their patch."""

    def __init__(self):
        super().__init__()
        self.patch, self.layer, self.head = nn.Conv2d(3, WIDTH, 4, 4), Block(TwoDimensions()), nn.Linear(WIDTH, WORDS)

    def forward(self, pixels):
        return self.head(self.layer(self.patch(pixels).flatten(2).transpose(1, 2)).mean(1))


class TwoDimensions(Bidirectional):
    def place(self, q, k):
        side, half = math.isqrt(q.shape[-2]), HEAD // 2
        turned = angles(side, half)
        down, across = turned.repeat_interleave(side, 0), turned.repeat(side, 1)
        return (torch.cat([rotate(x[..., :half], down), rotate(x[..., half:], across)], -1) for x in (q, k))
