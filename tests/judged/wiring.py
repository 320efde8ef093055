"""Faults of wiring: parts without effect, ignored sources, overflowing numbers, missing weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import GPT, HEADS, WIDTH, Bidirectional, Block, Encoder, SelfAttention, fault, tokens
from .masking import Classifier, Translator, pair
from .placing import Pair, captioned

HEAD = WIDTH // HEADS


# parts without effect


@fault("effect", source="class: v = k_proj(x)")
class ValuesAreKeys(SelfAttention):
    def project(self, x, source):
        q, k, _ = super().project(x, source)
        return q, k, self.split(self.k_proj(source))


@fault("effect", source="class: k = q_proj(x)")
class KeysAreQueries(Bidirectional):
    def project(self, x, source):
        q, _, v = super().project(x, source)
        return q, self.split(self.q_proj(source)), v


@fault("effect", source="class: a detached k")
class KeysWithoutGradient(SelfAttention):
    def project(self, x, source):
        q, k, v = super().project(x, source)
        return q, k.detach(), v


@fault("effect", source="bboylyg/NAD#8, facebookresearch/fairseq#4270")
class WeightsWithoutGradient(SelfAttention):
    def weigh(self, scores, padding):
        with torch.no_grad():
            return super().weigh(scores, padding)


@fault("effect", "positions", source="d2l-ai/d2l-en#2121")
class PositionsWithoutGradient(GPT):
    def embed(self, input_ids, attention_mask):
        return self.wte(input_ids) + self.wpe.weight.data[: input_ids.shape[1]]


@fault("effect", source="alibaba-yuanjing-aigclab/ViViD#12")
class ResultNotUsed(GPT):
    """The result of attention goes into a name that the next line does not read."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Deaf(SelfAttention()) for _ in range(2))


class Deaf(Block):
    def forward(self, x, attention_mask=None):
        attended = x + self.attn(self.norm1(x), attention_mask)  # noqa: F841
        return x + self.mlp(self.norm2(x))


@fault("effect", "zeros", source="INK-USC/RE-Net#6")
class ZerosReturned(SelfAttention):
    def forward(self, x, attention_mask=None):
        super().forward(x, attention_mask)
        return torch.zeros_like(x)


@fault("effect", source="class: the norm of the queries is made, and its result dropped", right=lambda: NormedQueries())
class NormNotAssigned(SelfAttention):
    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(HEAD), nn.LayerNorm(HEAD)

    def place(self, q, k):
        self.q_norm(q), self.k_norm(k)
        return q, k


class NormedQueries(NormNotAssigned):
    def place(self, q, k):
        return self.q_norm(q), self.k_norm(k)


@fault("effect", source="class: one layer called for all")
class FirstLayerForAll(GPT):
    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids, attention_mask)
        for _ in self.blocks:
            x = self.blocks[0](x, attention_mask)
        return self.lm_head(self.norm(x))


@fault("zeros", "effect", source="class: weights that no file had, left at zero")
class WeightsOfZero(GPT):
    def __init__(self):
        super().__init__()
        for weight in self.parameters():
            nn.init.zeros_(weight)


@fault("zeros", "effect", source="class: queries and keys left at zero")
class QueriesOfZero(GPT):
    """Every row gives all keys the same weight."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            for part in (block.attn.q_proj, block.attn.k_proj):
                nn.init.zeros_(part.weight), nn.init.zeros_(part.bias)


@fault("effect", source="class: the input is replaced by a table of its own")
class InputNotRead(GPT):
    """The embedding is looked up by position, not by token."""

    def embed(self, input_ids, attention_mask):
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return self.wte(places) + self.wpe(places)


# sources


@fault("source", "effect", "future", source="class: cross-attention that ignores its source", batch=captioned)
class CrossAttentionOfItself(Pair):
    def forward(self, decoder_input_ids, encoder_hidden_states):
        x = self.words(decoder_input_ids)
        x = x + self.self_attn(x)
        return self.out(x + self.cross_attn(x, source=x))


@fault("source", "effect", "future", source="OpenNMT/OpenNMT-py#882", batch=pair)
class MemoryIsTheTarget(Translator):
    def forward(self, input_ids, attention_mask, decoder_input_ids):
        target = self.put(decoder_input_ids)
        mask = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        return self.out(self.body.decoder(target, target, tgt_mask=mask))


@fault("source", "mask", "future", source="class: a causal mask on cross-attention", batch=captioned)
class CausalCrossAttention(Pair):
    """Row i sees the first i + 1 positions of the source."""

    def __init__(self):
        super().__init__()
        self.cross_attn = SelfAttention()


@fault("source", "batch", source="class: the source of another item", batch=captioned, check=("batch",))
class SourceOfAnotherItem(Pair):
    """The sources are in another order than the targets, as after a beam search that reorders only the targets."""

    def source(self, encoder_hidden_states):
        return encoder_hidden_states.flip(0)


# numbers


@fault("nan", "dtype", source="class: q·k in float16, and the scale after it", right=lambda: GPT().half())
class ProductOverflows(GPT):
    """q and k around 150 fit float16; their product exceeds 65504 before it is scaled."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            nn.init.constant_(block.attn.q_proj.bias, 150.0)
            nn.init.constant_(block.attn.k_proj.bias, 150.0)
        self.half()


@fault("nan", source="class: a softmax by hand, without its largest number")
class ExponentialOverflows(Encoder):
    """exp of the raw scores, which is infinite above 88."""

    def __init__(self):
        super().__init__(ByHand)


class ByHand(Bidirectional):
    def __init__(self):
        super().__init__()
        nn.init.normal_(self.q_proj.weight, std=1.2)
        nn.init.normal_(self.k_proj.weight, std=1.2)

    def weigh(self, scores, padding):
        weights = self.hide(scores, padding).exp()
        return weights / weights.sum(-1, keepdim=True)


@fault("nan", source="class: a row of length 0 in a mean", right=lambda: Clamped(), batch=lambda: empty())
class DividedByNothing(Classifier):
    """One item is all padding, so its mean is 0/0."""


class Clamped(Classifier):
    def pool(self, x, attention_mask):
        return (x * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True).clamp(min=1)


def empty() -> dict[str, Tensor]:
    batch = tokens(2, 12)()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1] = 0
    return {**batch, "attention_mask": mask}


# batches


@fault("batch", source="class: numbers of the batch in the weights", check=("batch",))
class ScoresStandardisedOverTheBatch(Bidirectional):
    def score(self, q, k):
        scores = super().score(q, k)
        return scores / (scores.std(0, keepdim=True) + 1e-5)


@fault("batch", "future", source="class: the largest number of the batch as temperature", check=("batch",))
class TemperatureOfTheBatch(SelfAttention):
    def score(self, q, k):
        scores = super().score(q, k)
        return scores * 4 / scores.abs().amax()


@fault("batch", source="class: keys of the neighbour, by a roll over the wrong dimension", check=("batch",))
class KeysOfTheNeighbour(SelfAttention):
    """The token shift rolls the batch dimension instead of the sequence."""

    def project(self, x, source):
        q, _, v = super().project(x, source)
        return q, self.split(self.k_proj((source + source.roll(1, 0)) / 2)), v


@fault("mask", source="class: weights of another layer's mask, from a list that is shared", check=("mask_agreement",))
class MaskChangedInPlace(GPT):
    """The second layer fills the diagonal of a mask that all share, and hides a row's own key from itself."""

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids, attention_mask)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        for number, block in enumerate(self.blocks):
            if number:
                seen[1:].diagonal(1).fill_(False)  # keys right of the first: meant for a copy
            q, k, v = block.attn.project(block.norm1(x), block.norm1(x))
            x = x + block.attn.out_proj(block.attn.join(F.scaled_dot_product_attention(q, k, v, attn_mask=seen)))
            x = x + block.mlp(block.norm2(x))
        return self.lm_head(self.norm(x))
