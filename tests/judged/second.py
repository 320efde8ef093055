"""A second draw of faults, in models of another hand: one fused projection, torch's fused call, hooks, einsum."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import WORDS, fault, padded, tokens
from .masking import Translator, pair

N, H = 48, 6


class CausalSelfAttention(nn.Module):
    """As in nanoGPT: c_attn makes q, k and v at once, and the mask is a buffer."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(N, 3 * N), nn.Linear(N, N)
        self.n_head, self.n_embd = H, N
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        return tuple(one.view(*x.shape[:2], H, N // H).transpose(1, 2) for one in (q, k, v))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))

    def masked(self, att: Tensor) -> Tensor:
        length = att.size(-1)
        return att.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))

    def mix(self, att: Tensor, v: Tensor) -> Tensor:
        return att @ v

    def forward(self, x):
        q, k, v = self.heads(x)
        att = F.softmax(self.masked(self.scores(q, k)), dim=-1)
        return self.c_proj(self.mix(att, v).transpose(1, 2).contiguous().view(*x.shape))


class NanoGPT(nn.Module):
    attention = CausalSelfAttention

    def __init__(self):
        super().__init__()
        self.wte, self.wpe, self.ln_f = nn.Embedding(WORDS, N), nn.Embedding(64, N), nn.LayerNorm(N)
        self.h = nn.ModuleList(self.layer() for _ in range(2))
        self.lm_head = nn.Linear(N, WORDS, bias=False)

    def layer(self) -> nn.Module:
        parts = {"ln_1": nn.LayerNorm(N), "attn": self.attention(), "ln_2": nn.LayerNorm(N), "mlp": nn.Linear(N, N)}
        return nn.ModuleDict(parts)

    def embed(self, idx: Tensor) -> Tensor:
        return self.wte(idx) + self.wpe(torch.arange(idx.size(1)))

    def forward(self, idx):
        x = self.embed(idx)
        for layer in self.h:
            x = x + layer["attn"](layer["ln_1"](x))
            x = x + F.gelu(layer["mlp"](layer["ln_2"](x)))
        return self.lm_head(self.ln_f(x))


def named() -> dict[str, Tensor]:
    return {"idx": tokens(2, 14)()["input_ids"]}


def in_nano(*classes: str, source: str = "class", check: tuple[str, ...] = ()):
    """An attention that goes into a NanoGPT."""

    def add(made: type[CausalSelfAttention]) -> type[CausalSelfAttention]:
        whole = type(made.__name__, (NanoGPT,), {"attention": made, "__module__": __name__})
        made.__name__ = made.__qualname__ = "CausalSelfAttention"
        fault(*classes, source=source, batch=named, check=check)(whole)
        return made

    return add


@in_nano("future", "mask", "nan")
class VisibleIsHidden(CausalSelfAttention):
    """== 1 where == 0 was meant."""

    def masked(self, att):
        length = att.size(-1)
        return att.masked_fill(self.bias[:, :, :length, :length] == 1, float("-inf"))


@in_nano("future", check=("future",))
class FusedPathWithoutCausal(CausalSelfAttention):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@in_nano("heads", "future")
class FusedProjectionCutByAView(CausalSelfAttention):
    def heads(self, x):
        return tuple(one.reshape(x.size(0), H, x.size(1), N // H) for one in self.c_attn(x).chunk(3, -1))


@in_nano("rows")
class LargestWeightsKept(CausalSelfAttention):
    """The three largest weights are kept after the softmax, and what is left does not add up to 1."""

    def mix(self, att, v):
        least = att.topk(3).values[..., -1:]
        return torch.where(att >= least, att, 0.0) @ v


@in_nano("rows", "axis", "future", "mask")
class WeightsTransposed(CausalSelfAttention):
    def mix(self, att, v):
        return att.transpose(-2, -1) @ v


@in_nano("scale")
class RootOfTheHeads(CausalSelfAttention):
    def scores(self, q, k):
        return (q @ k.transpose(-2, -1)) / math.sqrt(k.size(1))


@in_nano("scale")
class RootOfThePlaces(CausalSelfAttention):
    def scores(self, q, k):
        return (q @ k.transpose(-2, -1)) / math.sqrt(k.size(2))


@in_nano("scale", "effect")
class PrecedenceOfThePower(CausalSelfAttention):
    """d ** -1 // 2 is 0, so all keys get the same."""

    def scores(self, q, k):
        return (q @ k.transpose(-2, -1)) * (k.size(-1) ** -1 // 2)


@in_nano("effect", "scale")
class QueriesWithQueries(CausalSelfAttention):
    def scores(self, q, k):
        return super().scores(q, q)


@in_nano("window", "mask")
class WindowOfTheFarSide(CausalSelfAttention):
    """Keys at least three back, where those at most three back were meant; the first rows see all before them."""

    def masked(self, att):
        places = torch.arange(att.size(-1))
        near = (places[:, None] - places[None, :] < 3) & (places[:, None] >= 3)
        return super().masked(att).masked_fill(near, float("-inf"))


@in_nano("nan")
class ZeroTimesInfinity(CausalSelfAttention):
    def masked(self, att):
        length = att.size(-1)
        return att + (1 - self.bias[:, :, :length, :length]) * float("-inf")


@in_nano("nan", source="lucidrains/memory-compressed-attention#2")
class PlusInfinity(CausalSelfAttention):
    def masked(self, att):
        length = att.size(-1)
        return att.masked_fill(self.bias[:, :, :length, :length] == 0, -float("-inf"))


@in_nano("random")
class DropoutSwitchedOn(CausalSelfAttention):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def mix(self, att, v):
        return self.drop.train()(att) @ v


@in_nano("kept", "cache")
class ListAsDefault(CausalSelfAttention):
    """Values of the calls so far, in a list that is made once: their mean is added."""

    def mix(self, att, v, seen=[]):  # noqa: B006
        if seen and seen[-1].shape == v.shape and seen[-1].dtype == v.dtype:
            v = (v + seen[-1]) / 2
        seen.append(v.detach())
        return att @ v


@in_nano("batch", "heads")
class BatchAndLengthSwapped(CausalSelfAttention):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(N, H, batch_first=True)

    def forward(self, x):
        x = x.transpose(0, 1)
        return self.inner(x, x, x, need_weights=False)[0].transpose(0, 1)


@fault("future", source="class: a norm along the length", batch=named, check=("future",))
class NormOfTheLength(NanoGPT):
    def embed(self, idx):
        return F.layer_norm(super().embed(idx).transpose(1, 2), (idx.size(1),)).transpose(1, 2)


@fault("future", source="class: a sum from the wrong end", batch=named, check=("future",))
class SumOfWhatFollows(NanoGPT):
    def embed(self, idx):
        x = super().embed(idx)
        return x + x.flip(1).cumsum(1).flip(1) / idx.size(1)


@fault(
    "future", source="class: a dilated convolution with too little padding on the left", batch=named, check=("future",)
)
class DilationForgotten(NanoGPT):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(N, N, 3, dilation=2)

    def embed(self, idx):
        x = super().embed(idx)
        return x + self.conv(F.pad(x.transpose(1, 2), (2, 2))).transpose(1, 2)


@fault("kept", source="class: a table of positions that is added to in place", batch=named)
class TableAddedToInPlace(NanoGPT):
    def embed(self, idx):
        x = self.wpe.weight.data[: idx.size(1)]
        x += self.wte(idx).mean(0).detach() * 0.1
        return self.wte(idx) + x


class Padded(nn.Module):
    """Two layers of torch's attention over padded words."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(WORDS, N), nn.Embedding(64, N), nn.LayerNorm(N)
        self.layers = nn.ModuleList(nn.MultiheadAttention(N, H, batch_first=True) for _ in range(2))

    def attend(self, number: int, x: Tensor, hidden: Tensor) -> Tensor:
        return self.layers[number](x, x, x, key_padding_mask=hidden, need_weights=False)[0]

    def forward(self, input_ids, attention_mask):
        x = self.words(input_ids) + self.places(torch.arange(input_ids.size(1)))
        for number in range(2):
            x = self.norm(x + self.attend(number, x, attention_mask == 0))
        return x


@fault("padding", "mask", source="class: the mask reaches the first layer alone", batch=padded(), check=("padding",))
class FirstLayerMasked(Padded):
    def attend(self, number, x, hidden):
        return super().attend(number, x, hidden if number == 0 else None)


@fault("padding", source="class: padded values set to zero, and their weights kept", batch=padded(), check=("padding",))
class ValuesSetToZero(Padded):
    def attend(self, number, x, hidden):
        values = x.masked_fill(hidden[..., None], 0.0)
        return self.layers[number](x, x, values, need_weights=False)[0]


@fault("padding", "source", source="class: the memory's mask inverted", batch=pair, check=("padding",))
class MemoryMaskInverted(Translator):
    def options(self, attention_mask, length):
        return super().options(attention_mask, length) | {"memory_key_padding_mask": attention_mask == 1}


class Stepping(nn.Module):
    """A layer with learned positions and a cache."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe, self.attn = nn.Embedding(WORDS, N), nn.Embedding(64, N), CausalSelfAttention()
        self.lm_head = nn.Linear(N, WORDS)

    def first(self, past: Tensor | None) -> int:
        return 0 if past is None else past.size(2)

    def joined(self, past: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)

    def forward(self, input_ids, past_key_values=None):
        first = self.first(past_key_values[0] if past_key_values is not None else None)
        x = self.wte(input_ids) + self.wpe(torch.arange(first, first + input_ids.size(1)))
        q, k, v = self.attn.heads(x)
        if past_key_values is not None:
            k, v = self.joined(past_key_values, k, v)
        seen = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(k.size(2) - q.size(2))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.lm_head(x + self.attn.c_proj(out.transpose(1, 2).flatten(2))), (k, v)


@fault("cache", source="class: new keys before the old ones", check=("cache",))
class NewKeysFirst(Stepping):
    def joined(self, past, k, v):
        return torch.cat([k, past[0]], 2), torch.cat([v, past[1]], 2)


@fault("cache", source="class: keys kept as values", check=("cache",))
class KeysKeptAsValues(Stepping):
    def joined(self, past, k, v):
        return torch.cat([past[0], k], 2), torch.cat([past[0], v], 2)


@fault("cache", source="class: a step has the position of the token before it", check=("cache",))
class StepsOneTooEarly(Stepping):
    def first(self, past):
        return 0 if past is None else past.size(2) - 1
