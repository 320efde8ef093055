"""More models, wrong and right, written after the checks were: what failed at first was mended."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scan.wrong import (
    EACH,
    HEADS,
    LENGTH,
    WIDTH,
    WORDS,
    Attention,
    Case,
    Model,
    causal,
    ids,
    llama,
    lower,
    model,
    padded,
    scores,
)


class NanoGPT(nn.Module):
    """Everything in one forward, as in a lecture; the mask is given as an argument of `fill`."""

    def __init__(self, hide: Callable[[Tensor], Tensor], value: float = float("-inf")) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.packed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))
        self.hide, self.value = hide, value

    def forward(self, idx: Tensor) -> Tensor:
        batch, length = idx.shape
        x = self.words(idx) + self.places(torch.arange(length))
        q, k, v = (part.view(batch, length, HEADS, EACH).transpose(1, 2) for part in self.packed(x).split(WIDTH, 2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.hide(self.bias[:, :, :length, :length]), self.value)
        y = F.softmax(att, dim=-1) @ v
        return x + self.out(y.transpose(1, 2).contiguous().view(batch, length, WIDTH))


class PackedWrongly(Attention):
    """One projection, cut in memory order."""

    def __init__(self) -> None:
        super().__init__(causal)
        del self.q, self.k, self.v
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed(x).reshape(x.shape[0], 3, HEADS, x.shape[1], EACH).unbind(1)
        return self.out(self.join(self.attend(q, k, v)))


class AddedOnes(nn.Module):
    """nn.MultiheadAttention with weights, given a floating-point mask of 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, attn_mask=lower(x.shape[1]).to(x.dtype))[0]


class Single(nn.Module):
    """One head, as (B, L, L), and a softmax over its first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.Softmax(dim=0)(scores(self.q(x), self.k(x))) @ self.v(x)


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, Lq, Lk, H): the last dimension is the heads."""
    weights = torch.einsum("bhqd,bhkd->bqkh", q, k).div(EACH**0.5).softmax(-1)
    return torch.einsum("bqkh,bhkd->bhqd", weights, v)


class Crossed(nn.Module):
    """Cross-attention that normalises over the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            part(y).unflatten(-1, (HEADS, EACH)).transpose(1, 2)
            for part, y in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        return (scores(q, k).softmax(dim=2) @ v).transpose(1, 2).flatten(2)


def padding_times(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (scores(q, k) * mask[:, None, None, :]).softmax(-1) @ v


class BothSides(Attention):
    """A convolution padded on both sides, and the right end not cut off."""

    def __init__(self) -> None:
        super().__init__(causal)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 5, padding="same", groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.conv(x.mT).mT)


class BatchStatistics(Attention):
    """A norm over the batch, in evaluation too."""

    def __init__(self) -> None:
        super().__init__(causal)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.batch_norm(x.mT, None, None, training=True).mT)


def turned(x: Tensor, start: int) -> Tensor:
    angle = (torch.arange(x.shape[2]) + start)[:, None] / 100 ** (torch.arange(x.shape[3] // 2) / (x.shape[3] // 2))
    angle = torch.cat([angle, angle], -1).to(x.dtype)
    one, two = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-two, one], -1) * angle.sin()


class RotaryCache(nn.Module):
    """Rotary positions, which begin again at 0 in every step unless `counts`."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.counts = counts

    def forward(self, input_ids: Tensor, kv_cache: Any = None) -> tuple[Tensor, Any]:
        x = self.words(input_ids)
        q, k, v = (part(x).unflatten(-1, (HEADS, EACH)).transpose(1, 2) for part in (self.q, self.k, self.v))
        seen = 0 if kv_cache is None else kv_cache[0].shape[2]
        q, k = (turned(part, seen if self.counts else 0) for part in (q, k))
        if kv_cache is not None:
            k, v = torch.cat([kv_cache[0], k], 2), torch.cat([kv_cache[1], v], 2)
        hidden = torch.ones(q.shape[2], k.shape[2]).triu(1 + k.shape[2] - q.shape[2]).bool()
        out = scores(q, k).masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return self.out(out.transpose(1, 2).flatten(2)), (k, v)


def causal_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores as (B, Lq, Lk, H), a causal mask, and the softmax over dim=1; masked_fill leaves another layout in memory."""
    a = torch.einsum("bhqd,bhkd->bqkh", q, k) / math.sqrt(EACH)
    a = a.masked_fill(~lower(q.shape[2])[None, :, :, None], -torch.inf)
    return torch.einsum("bqkh,bhkd->bhqd", F.softmax(a, dim=1), v)


def keys_reshaped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A shape that fits the product, and numbers of other tokens in it."""
    k = k.reshape(*k.shape[:2], EACH, k.shape[2])
    return (q @ k / math.sqrt(EACH)).softmax(-1) @ v


class Pooled(nn.Module):
    """An encoder whose attention hides padding, and a pooling by ``pool(x, mask)``."""

    def __init__(self, pool: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.layer, self.pool = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True), pool

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places.weight[: input_ids.shape[1]]
        return self.pool(self.layer(x, src_key_padding_mask=attention_mask == 0), attention_mask)


class Extended(nn.Module):
    """The mask of BERT without `1 -`: padding keeps its scores, and words lose theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.attention = Attention(lambda q, k, v: v)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places.weight[: input_ids.shape[1]]
        extended = attention_mask[:, None, None, :].to(x.dtype) * -10000.0
        self.attention.attend = lambda q, k, v: (scores(q, k) + extended).softmax(-1) @ v
        return x + self.attention(x)


def rolled_cache() -> Case:
    """A Llama of which one layer's cache is one step too far when a token is added."""
    inner = llama()
    layer = inner.model.layers[1].self_attn
    forward = layer.forward

    def rolling(hidden_states: Tensor, **others: Any) -> Any:
        cache = others.get("past_key_values")
        if cache is not None and hidden_states.shape[1] == 1:
            cache.layers[1].keys = cache.layers[1].keys.roll(1, -2)
        return forward(hidden_states=hidden_states, **others)

    layer.forward = rolling
    return Case(inner, {"input_ids": ids()}, also=("cache_differs",))


def mean(x: Tensor, mask: Tensor) -> Tensor:
    kept = mask[..., None].to(x.dtype)
    return (x * kept).sum(1) / kept.sum(1)


WRONG: dict[str, Callable[[], Case]] = {
    "(B, Lq, Lk, H), causal, softmax over the queries": lambda: Case(
        model(causal_over_queries), faults=("over_queries",)
    ),
    "keys reshaped, not transposed": lambda: Case(model(keys_reshaped), faults=("heads_mixed",)),
    "BERT's mask without 1 −": lambda: Case(Extended(), padded(), faults=("padding_inverted",), also=("padding_leak",)),
    "a mean over padding": lambda: Case(Pooled(lambda x, mask: x.mean(1)), padded(), also=("padding_leak",)),
    "a Llama whose cache is shifted": rolled_cache,
    "nanoGPT with == 1 for == 0": lambda: Case(NanoGPT(lambda bias: bias == 1), faults=("inverted_mask",)),
    "nanoGPT with −1e-9": lambda: Case(NanoGPT(lambda bias: bias == 0, -1e-9), faults=("weak_mask",)),
    "one packed projection, cut in memory order": lambda: Case(
        Model(PackedWrongly(), PackedWrongly()), faults=("heads_mixed",), also=("future_leak", "position_leak")
    ),
    "nn.MultiheadAttention with weights, ones added": lambda: Case(
        Model(AddedOnes(), AddedOnes()), faults=("weak_mask",)
    ),
    "one head, softmax over the batch": lambda: Case(Model(Single()), faults=("over_batch",), also=("batch_leak",)),
    "heads in the last dimension": lambda: Case(model(heads_last), faults=("over_heads",)),
    "cross-attention over the queries": lambda: Case(
        Crossed(), (torch.randn(2, LENGTH, WIDTH), torch.randn(2, 7, WIDTH)), faults=("over_queries",)
    ),
    "padding times scores": lambda: Case(model(padding_times), padded(), ("weak_mask",), ("padding_leak",)),
    "a convolution on both sides": lambda: Case(Model(BothSides(), BothSides()), also=("future_leak",)),
    "a norm over the batch": lambda: Case(
        Model(BatchStatistics(), BatchStatistics()), also=("future_leak", "batch_leak")
    ),
    "rotary positions that begin again": lambda: Case(RotaryCache(False), ids(1), also=("cache_differs",)),
}


class Differential(Attention):
    """The difference of two softmaxes."""

    def __init__(self) -> None:
        super().__init__(self.difference)

    def difference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = ~lower(q.shape[2])
        one, two = (
            scores(a, b).masked_fill(hidden, float("-inf")).softmax(-1)
            for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        return (one - 0.3 * two) @ v


class Relative(Attention):
    """A learned bias for every distance."""

    def __init__(self) -> None:
        super().__init__(self.biased)
        self.bias = nn.Embedding(64, HEADS)

    def biased(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        distance = (places[:, None] - places).clamp(-31, 31) + 31
        return (scores(q, k) + self.bias(distance).permute(2, 0, 1)).softmax(-1) @ v


def packed_documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two texts in one sequence, each causal by itself."""
    text = torch.arange(q.shape[2]) // 7
    return F.scaled_dot_product_attention(q, k, v, attn_mask=lower(q.shape[2]) & (text == text[:, None]))


def strict(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A token does not see itself; the first one sees nothing."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=lower(q.shape[2]).tril(-1))


class Chunked(Attention):
    """Every row sees to the end of its chunk, as in streaming recognition; an attribute says so."""

    def __init__(self) -> None:
        super().__init__(self.chunked)
        self.chunk_size = 4

    def chunked(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        part = torch.arange(q.shape[2]) // self.chunk_size
        return F.scaled_dot_product_attention(q, k, v, attn_mask=part <= part[:, None])


class Latents(nn.Module):
    """A Perceiver: learned queries read the tokens, and then one another."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 6, WIDTH))
        self.read, self.think = (nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(x.shape[0], -1, -1)
        latents = self.read(latents, x, x, need_weights=False)[0]
        return self.think(latents, latents, latents, need_weights=False)[0]


class Axial(nn.Module):
    """Attention along rows, then along columns, of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = (Attention(F.scaled_dot_product_attention) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, _ = x.shape
        x = x + self.rows(x.flatten(0, 1)).view_as(x)
        turned_over = x.transpose(1, 2).reshape(batch * width, height, -1)
        return x + self.columns(turned_over).view(batch, width, height, -1).transpose(1, 2)


class Transposing(nn.Module):
    """Tokens (batch, length), and layers that take (length, batch, width), with the transposes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        hidden = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], dtype=x.dtype)
        return self.layer(x.transpose(0, 1), src_mask=hidden).transpose(0, 1)


class Experts(Attention):
    """A causal attention, and experts that a router picks for every token by itself."""

    def __init__(self) -> None:
        super().__init__(causal)
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        gates = self.router(x).softmax(-1)
        return sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Repeated(Attention):
    """Grouped heads, repeated."""

    def __init__(self) -> None:
        super().__init__(causal)
        self.k, self.v = nn.Linear(WIDTH, 2 * EACH), nn.Linear(WIDTH, 2 * EACH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x))
        k, v = (part(x).unflatten(-1, (2, EACH)).transpose(1, 2).repeat_interleave(2, 1) for part in (self.k, self.v))
        return self.out(self.join(self.attend(turned(q, 0), turned(k, 0), v)))


def upcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In another dtype between product and softmax, with finfo.min twice."""
    a = (q @ k.mT).double() / math.sqrt(EACH)
    low = torch.finfo(torch.float32).min
    hidden = torch.zeros(q.shape[2], q.shape[2]).masked_fill(~lower(q.shape[2]), low)
    return (a + hidden).clamp(min=low).softmax(-1).to(q.dtype) @ v


def largest_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every row sees the four keys of its largest scores."""
    a = scores(q, k).masked_fill(~lower(q.shape[2]), -torch.inf)
    return a.masked_fill(a < a.topk(4, -1).values[..., -1:], -torch.inf).softmax(-1) @ v


def above_mean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every row sees the keys whose scores are above its mean: as many as there are, in every head others."""
    a = scores(q, k)
    return a.masked_fill(a < a.mean(-1, keepdim=True), -torch.inf).softmax(-1) @ v


class Recurrent(nn.Module):
    """An LSTM in both directions orders the tokens; attention follows, and one row for each item is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = (
            nn.Embedding(WORDS, WIDTH),
            nn.LSTM(WIDTH, WIDTH // 2, 1, True, True, bidirectional=True),
        )
        self.attention, self.weight = Attention(F.scaled_dot_product_attention), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.attention(self.lstm(self.words(ids))[0])
        return (self.weight(x).softmax(1) * x).sum(1)


class Classifier(nn.Module):
    """A decoder that returns the classes of its last token: as many numbers for an item as it has tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.classes = model(causal), nn.Linear(WORDS, LENGTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.classes(self.inner(input_ids)[:, -1])


RIGHT: dict[str, Callable[[], Case]] = {
    "the largest scores alone": lambda: Case(model(largest_scores)),
    "scores above their mean": lambda: Case(model(above_mean)),
    "an LSTM, attention, one row": lambda: Case(Recurrent()),
    "as many classes as tokens": lambda: Case(Classifier()),
    "a mean over real tokens": lambda: Case(Pooled(mean), padded()),
    "nanoGPT": lambda: Case(NanoGPT(lambda bias: bias == 0)),
    "differential attention": lambda: Case(Model(Differential(), Differential())),
    "a bias for every distance": lambda: Case(Model(Relative(), Relative())),
    "texts packed into one": lambda: Case(model(packed_documents)),
    "a token does not see itself": lambda: Case(model(strict)),
    "chunks, declared": lambda: Case(Model(Chunked(), Chunked())),
    "a Perceiver": lambda: Case(Latents(), torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(8))),
    "axial attention": lambda: Case(Axial(), torch.randn(2, 6, 7, WIDTH, generator=torch.Generator().manual_seed(8))),
    "batch second, transposed": lambda: Case(Transposing(), {"input_ids": ids()}),
    "experts": lambda: Case(Model(Experts(), Experts())),
    "grouped heads, repeated and rotated": lambda: Case(Model(Repeated(), Repeated())),
    "scores in float64": lambda: Case(model(upcast)),
    "rotary positions with a cache": lambda: Case(RotaryCache(True), ids(1)),
}
