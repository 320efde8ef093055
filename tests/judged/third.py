"""A third set of faults, in models written by yet another author, and correct models that look unusual."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import FAULTS, INNOCENTS, Case

DIM, HEADS, KV, VOCAB, MOST = 32, 4, 2, 70, 48


def ids(items: int = 2, length: int = 12, **more: Any) -> Callable[[], dict[str, Tensor]]:
    return lambda: {
        "input_ids": torch.randint(3, VOCAB, (items, length), generator=torch.Generator().manual_seed(5)),
        **{name: make() for name, make in more.items()},
    }


def short(left: bool = False) -> dict[str, Tensor]:
    batch = ids()()
    seen = torch.ones(2, 12, dtype=torch.long)
    seen[1, slice(0, 4) if left else slice(8, None)] = 0
    return {"input_ids": batch["input_ids"] * seen, "attention_mask": seen}


def wrong(
    *classes: str,
    right: Callable[[], nn.Module],
    batch: Callable[[], Any] | None = None,
    source: str = "",
    check: tuple[str, ...] = (),
):
    def add(build):
        name = build.__name__
        if isinstance(build, type):
            parent = build.__mro__[1]
            build.__name__ = build.__qualname__ = "Model" if parent is nn.Module else parent.__name__
        FAULTS[name] = Case(name, "third", build, batch or ids(), classes, right, check, source)
        return build

    return add


def fine(build=None, *, batch: Callable[[], Any] | None = None):
    def add(made):
        INNOCENTS[made.__name__] = Case(made.__name__, "own", made, batch or ids())
        return made

    return add(build) if build else add


# --- a Llama: RMS norms, grouped heads, rotations by complex numbers, the fused call ---------------------------------


class Llama(nn.Module):
    """Each fault replaces one method."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(self.layer() for _ in range(depth))
        self.norm, self.output = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def layer(self) -> nn.Module:
        return LlamaLayer(self.attention())

    def attention(self) -> nn.Module:
        return LlamaAttention()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tok(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.output(self.norm(x))


class LlamaLayer(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention = attention
        self.w1, self.w2, self.w3 = (
            nn.Linear(DIM, 48, bias=False),
            nn.Linear(48, DIM, bias=False),
            nn.Linear(DIM, 48, bias=False),
        )

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), attention_mask)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def polar(length: int, size: int, base: float = 10000.0) -> Tensor:
    speeds = base ** (-torch.arange(0, size, 2) / size)
    turns = torch.outer(torch.arange(length), speeds)
    return torch.polar(torch.ones_like(turns), turns)


def turn(x: Tensor, freqs: Tensor) -> Tensor:  # (B, L, H, D)
    as_complex = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(as_complex * freqs[None, :, None]).flatten(3).type_as(x)


class LlamaAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = DIM // HEADS
        self.wq, self.wo = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.wk, self.wv = nn.Linear(DIM, KV * size, bias=False), nn.Linear(DIM, KV * size, bias=False)
        self.num_heads, self.num_key_value_heads, self.head_dim = HEADS, KV, size

    def rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        freqs = polar(q.shape[1], self.head_dim)
        return turn(q, freqs), turn(k, freqs)

    def seen(self, length: int, attention_mask: Tensor | None) -> Tensor:
        keep = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if attention_mask is not None:
            keep = (keep & attention_mask[:, None, None].bool()) | torch.eye(length, dtype=torch.bool)
        return keep

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        b, n, _ = x.shape
        q = self.wq(x).view(b, n, HEADS, self.head_dim)
        k, v = (w(x).view(b, n, KV, self.head_dim) for w in (self.wk, self.wv))
        q, k = self.rotated(q, k)
        k, v = (part.repeat_interleave(HEADS // KV, 2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.wo(self.attend(q, k, v, self.seen(n, attention_mask)).transpose(1, 2).reshape(b, n, DIM))


def llama(attention: type[nn.Module]) -> Callable[[], nn.Module]:
    class Made(Llama):
        def attention(self) -> nn.Module:
            return attention()

    Made.__name__ = Made.__qualname__ = "Llama"

    def build() -> nn.Module:
        attention.__name__ = attention.__qualname__ = "LlamaAttention"
        return Made()

    return build


def in_llama(*classes: str, batch=None, source="", check=(), right=LlamaAttention):
    def add(attention):
        name = attention.__name__
        FAULTS[name] = Case(name, "third", llama(attention), batch or ids(), classes, llama(right), check, source)
        return attention

    return add


def by_hand(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


class Hand(LlamaAttention):
    def attend(self, q, k, v, keep):
        return by_hand(q, k).masked_fill(~keep, float("-inf")).softmax(-1) @ v


@in_llama("heads", "effect", "axis", source="class: (batch, length, heads, width) given to the fused call")
class TransposeForgotten(LlamaAttention):
    def forward(self, x, attention_mask=None):
        b, n, _ = x.shape
        q = self.wq(x).view(b, n, HEADS, self.head_dim)
        k, v = (w(x).view(b, n, KV, self.head_dim).repeat_interleave(2, 2) for w in (self.wk, self.wv))
        q, k = self.rotated(q, k)
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(b, n, DIM))


class Capped(LlamaAttention):
    def attend(self, q, k, v, keep):
        scores = 5 * (by_hand(q, k) / 5).tanh()
        return scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v


@in_llama("weak", "future", right=Capped, source="class: a softcap after the mask", check=("future", "mask_strength"))
class CappedAfterTheMask(LlamaAttention):
    def attend(self, q, k, v, keep):
        scores = by_hand(q, k).masked_fill(~keep, float("-inf"))
        return (5 * (scores / 5).tanh()).softmax(-1) @ v


@in_llama(
    "weak", "future", right=Hand, source="class: scores clamped after the mask", check=("future", "mask_strength")
)
class ClampedAfterTheMask(LlamaAttention):
    def attend(self, q, k, v, keep):
        return by_hand(q, k).masked_fill(~keep, float("-inf")).clamp(-6, 6).softmax(-1) @ v


@in_llama("scale", source="class: head width from the number of key heads", check=("scale",))
class ScaleOfTheKeyHeads(LlamaAttention):
    def attend(self, q, k, v, keep):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=(DIM // KV) ** -0.5)


@in_llama("scale", source="class: the scale of another model, as a constant", check=("scale",))
class ScaleOfAnotherWidth(LlamaAttention):
    def attend(self, q, k, v, keep):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=0.0884)


@in_llama("future", source="class: the last rows of a large mask, not the first", check=("future",))
class MaskCroppedFromBelow(LlamaAttention):
    def seen(self, length, attention_mask):
        return torch.ones(MOST, MOST, dtype=torch.bool).tril()[None, None, -length:, :length]


@in_llama("future", right=Hand, source="lucidrains/local-attention (look_forward in a causal model)", check=("future",))
class LookOneBlockAhead(LlamaAttention):
    def attend(self, q, k, v, keep):
        n = q.shape[-2]
        block = torch.arange(n) // 4
        near = (block[:, None] - block[None]).abs() <= 1
        return by_hand(q, k).masked_fill(~near, float("-inf")).softmax(-1) @ v


class Sunk(LlamaAttention):
    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def weights(self, q, k, keep):
        scores = by_hand(q, k).masked_fill(~keep, float("-inf"))
        sinks = self.sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)

    def attend(self, q, k, v, keep):
        return self.weights(q, k, keep)[..., :-1] @ v


@in_llama(
    "future", "rows", right=Sunk, source="class: the sink's column is cut off at the wrong end", check=("future",)
)
class SinkCutAtTheWrongEnd(Sunk):
    def attend(self, q, k, v, keep):
        return self.weights(q, k, keep)[..., 1:] @ v


class Unit(LlamaAttention):
    axis = -1

    def attend(self, q, k, v, keep):
        q, k = F.normalize(q, dim=self.axis), F.normalize(k, dim=self.axis)
        return (8 * q @ k.transpose(-1, -2)).masked_fill(~keep, float("-inf")).softmax(-1) @ v


@in_llama("future", right=Unit, source="class: a norm along the length", check=("future",))
class UnitAlongTheLength(Unit):
    axis = -2


@in_llama("heads", "scale", right=Unit, source="class: F.normalize without dim")
class UnitWithoutDim(Unit):
    axis = 1


@in_llama("future", right=LlamaAttention, source="class: sigmoid attention, filled with 0", check=("future",))
class SigmoidOfZero(LlamaAttention):
    def attend(self, q, k, v, keep):
        return (by_hand(q, k).masked_fill(~keep, 0) - math.log(q.shape[-2])).sigmoid() @ v


class TopK(LlamaAttention):
    def attend(self, q, k, v, keep):
        scores = by_hand(q, k).masked_fill(~keep, float("-inf"))
        least = scores.topk(4, -1).values[..., -1:]
        return scores.masked_fill(scores < least, float("-inf")).softmax(-1) @ v


@in_llama(
    "batch",
    "future",
    right=TopK,
    source="class: the threshold of a top-k over the whole tensor",
    check=("batch", "future"),
)
class ThresholdOfTheWholeTensor(TopK):
    def attend(self, q, k, v, keep):
        scores = by_hand(q, k)
        least = scores.flatten().topk(scores.numel() // 3).values[-1]
        own = torch.eye(q.shape[-2], dtype=torch.bool)
        return scores.masked_fill(~keep | ((scores < least) & ~own), float("-inf")).softmax(-1) @ v


@in_llama("batch", "future", source="kyegomez/BitNet (one scale for all activations)", check=("batch", "future"))
class OneScaleForAllActivations(LlamaAttention):
    def forward(self, x, attention_mask=None):
        scale = 127 / x.abs().max()
        x = (x * scale).round() / scale
        return super().forward(x, attention_mask)


@in_llama("positions", source="class: interleaved pairs for q, halves for k")
class PairsOfHalvesForKeys(LlamaAttention):
    def rotated(self, q, k):
        freqs = polar(q.shape[1], self.head_dim)
        swap = torch.arange(self.head_dim).view(2, -1).t().flatten()
        back = swap.argsort()
        return turn(q, freqs), turn(k[..., swap], freqs)[..., back]


@in_llama(
    "positions", source="class: rotated in the heads' dimension, (batch, heads, length) read as (batch, length, heads)"
)
class TurnedByTheHead(LlamaAttention):
    def rotated(self, q, k):
        freqs = polar(8, self.head_dim)
        return tuple(turn(x.transpose(1, 2), freqs[: x.shape[2]]).transpose(1, 2) for x in (q, k))


@in_llama("positions", source="class: positions of keys are counted from the end")
class KeysCountedFromTheEnd(LlamaAttention):
    def rotated(self, q, k):
        freqs = polar(q.shape[1], self.head_dim)
        return turn(q, freqs), turn(k, freqs.flip(0))


@in_llama("positions", "long", source="huggingface/transformers#25104 (the base grows with the length)")
class BaseOfTheLength(LlamaAttention):
    def rotated(self, q, k):
        n = q.shape[1]
        freqs = polar(n, self.head_dim, 10000.0 * max(1.0, n / 8))
        return turn(q, freqs), turn(k, freqs)


@in_llama("effect", "shared", source="class: [nn.Linear(…)] * 3", right=LlamaAttention)
class OneProjectionThreeTimes(LlamaAttention):
    def __init__(self):
        super().__init__()
        self.projections = nn.ModuleList([nn.Linear(DIM, DIM, bias=False)] * 3)
        del self.wq, self.wk, self.wv

    def forward(self, x, attention_mask=None):
        b, n, _ = x.shape
        q, k, v = (p(x).view(b, n, HEADS, self.head_dim) for p in self.projections)
        q, k = self.rotated(q, k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.wo(self.attend(q, k, v, self.seen(n, attention_mask)).transpose(1, 2).reshape(b, n, DIM))


@in_llama("random", source="class: layers dropped in evaluation too")
class LayersDropped(LlamaAttention):
    def forward(self, x, attention_mask=None):
        keep = (torch.rand(x.shape[0], 1, 1) < 0.8).float()
        return super().forward(x, attention_mask) * keep / 0.8


class Temperature(LlamaAttention):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1) * 1.3)

    def attend(self, q, k, v, keep):
        return F.scaled_dot_product_attention(q * self.temperature, k, v, attn_mask=keep)


@in_llama("effect", right=Temperature, source="class: q.mul() where q.mul_() was meant")
class TemperatureDropped(Temperature):
    def attend(self, q, k, v, keep):
        q.mul(self.temperature)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


@in_llama(
    "padding",
    "rows",
    right=Hand,
    batch=short,
    source="autosome-ru/vigg_ribonanza#1 (weights times the mask)",
    check=("padding",),
)
class PaddingAfterTheSoftmax(LlamaAttention):
    def attend(self, q, k, v, keep):
        n = q.shape[-2]
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        return (by_hand(q, k).masked_fill(~causal, float("-inf")).softmax(-1) * keep) @ v


@in_llama(
    "padding",
    "mask",
    right=Hand,
    batch=lambda: short(left=True),
    source="EleutherAI (the padding mask of keys is laid on the queries)",
    check=("padding",),
)
class PaddingOfTheQueries(LlamaAttention):
    def seen(self, length, attention_mask):
        keep = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        return (
            keep
            if attention_mask is None
            else (keep & attention_mask[:, None, :, None].bool()) | torch.eye(length, dtype=torch.bool)
        )


class Numbered(LlamaAttention):
    def seen(self, length, attention_mask):
        keep = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        return keep & (attention_mask[:, None, :, None] == attention_mask[:, None, None, :])


@in_llama(
    "documents",
    "future",
    batch=lambda: ids(1)() | {"attention_mask": torch.tensor([[1] * 5 + [2] * 4 + [3] * 3])},
    source="class: documents numbered in the mask are read as one",
    check=(),
    right=Numbered,
)
class NumberedDocumentsReadAsOne(LlamaAttention):
    def seen(self, length, attention_mask):
        return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


# --- sums without a softmax ------------------------------------------------------------------------------------------


class Sums(LlamaAttention):
    """Linear attention: sums of values, weighted by features of the keys."""

    def attend(self, q, k, v, keep):
        q, k = F.elu(q) + 1, F.elu(k) + 1
        pairs = (k[..., :, None] * v[..., None, :]).cumsum(2)
        return torch.einsum("bhnd,bhnde->bhne", q, pairs) / torch.einsum("bhnd,bhnd->bhn", q, k.cumsum(2))[..., None]


@in_llama("future", right=Sums, source="idiap/fast-transformers (the whole sum in a causal model)", check=("future",))
class SumsOfAll(Sums):
    def attend(self, q, k, v, keep):
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(2)[..., None])


@in_llama("future", right=Sums, source="class: the sum of values is causal, and that of keys is not", check=("future",))
class DenominatorOfAll(Sums):
    def attend(self, q, k, v, keep):
        q, k = F.elu(q) + 1, F.elu(k) + 1
        pairs = (k[..., :, None] * v[..., None, :]).cumsum(2)
        return torch.einsum("bhnd,bhnde->bhne", q, pairs) / (q @ k.sum(2)[..., None])


class ExpertChoice(Llama):
    """Each expert takes its favourite tokens, so later tokens decide what an earlier one gets."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, 3), nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, input_ids, attention_mask=None):
        x = self.tok(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)
            likes = self.router(x).softmax(-1)
            added = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                value, index = likes[..., number].topk(x.shape[1] // 2, 1)
                index = index[..., None].expand(-1, -1, DIM)
                added = added.scatter_add(1, index, expert(x.gather(1, index)) * value[..., None])
            x = x + added
        return self.output(self.norm(x))


FAULTS["ExpertsChooseInADecoder"] = Case(
    "ExpertsChooseInADecoder",
    "third",
    ExpertChoice,
    ids(),
    ("future",),
    Llama,
    ("future",),
    "class: expert choice in a decoder",
)


# --- caches ----------------------------------------------------------------------------------------------------------


class CachedAttention(nn.Module):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.qkv, self.proj, self.number = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), number

    def slot(self) -> int:
        return self.number

    def updated(self, past, k, v):
        slot = self.slot()
        if slot in past:
            k, v = torch.cat([past[slot][0], k], 2), torch.cat([past[slot][1], v], 2)
        return k, v

    def forward(self, x, past):
        b, n, _ = x.shape
        q, k, v = (part.view(b, n, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        k, v = self.updated(past, k, v)
        keep = torch.ones(n, k.shape[2], dtype=torch.bool).tril(k.shape[2] - n)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.proj(out.transpose(1, 2).reshape(b, n, DIM)), (k, v)


class CachedModel(nn.Module):
    kind = CachedAttention

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(MOST, DIM)
        self.attn = nn.ModuleList(self.kind(number) for number in range(2))
        self.ln = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def start(self, past) -> int:
        return past[0][0].shape[2] if past else 0

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        past = dict(enumerate(past_key_values)) if past_key_values is not None else {}
        n, start = input_ids.shape[1], self.start(past)
        x = self.wte(input_ids) + self.wpe(torch.arange(start, start + n))
        new = []
        for norm, attn in zip(self.ln, self.attn, strict=True):
            added, kept = attn(norm(x), past)
            x = x + added
            new.append(kept)
        return self.head(x), tuple(new)


class FirstSlot(CachedAttention):
    def slot(self):
        return 0


class DroppedOldest(CachedAttention):
    def updated(self, past, k, v):
        k, v = super().updated(past, k, v)
        return (k, v) if not past else (k[:, :, 1:], v[:, :, 1:])


class KeysOfStepsOnly(CachedAttention):
    def updated(self, past, k, v):
        whole = super().updated(past, k, v)
        return whole[0], (v if not past else torch.cat([past[self.slot()][1][:, :, :1] * 0, whole[1][:, :, 1:]], 2))


def cached(kind):
    def build():
        made = type("CachedModel", (CachedModel,), {"kind": kind})
        kind.__name__ = kind.__qualname__ = "CachedAttention"
        return made()

    return build


for name, kind in {
    "CacheOfTheFirstLayer": FirstSlot,
    "OldestKeyDropped": DroppedOldest,
    "FirstValueZero": KeysOfStepsOnly,
}.items():
    FAULTS[name] = Case(name, "third", cached(kind), ids(), ("cache",), CachedModel, ("cache",), "class: " + name)


# --- encoders, with torch's own layers ---------------------------------------------------------------------------------


class Detector(nn.Module):
    """nn.MultiheadAttention with a 3-d mask, a matrix per item and head, as in models of video and text."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, DIM, padding_idx=0), nn.Parameter(torch.randn(1, MOST, DIM))
        self.mha = nn.ModuleList(nn.MultiheadAttention(DIM, HEADS, batch_first=True) for _ in range(2))
        self.out = nn.Linear(DIM, 5)

    def mask(self, seen: Tensor) -> Tensor:
        return (seen[:, None] == 0).expand(-1, seen.shape[1], -1).repeat_interleave(HEADS, 0)

    def forward(self, input_ids, attention_mask):
        x = self.emb(input_ids) + self.pos[0, (attention_mask.cumsum(1) - 1).clamp(min=0)]
        mask = self.mask(attention_mask)
        for mha in self.mha:
            x = x + mha(x, x, x, attn_mask=mask, need_weights=False)[0]
        return self.out(x)


@wrong(
    "padding",
    "batch",
    "mask",
    right=Detector,
    batch=short,
    source="line/lighthouse#77, ArrowLuo/CLIP4Clip#22",
    check=("padding", "batch"),
)
class MasksTiledOverHeads(Detector):
    def mask(self, seen):
        return (seen[:, None] == 0).expand(-1, seen.shape[1], -1).repeat(HEADS, 1, 1)


class OwnPadding(Detector):
    pad = 0

    def forward(self, input_ids):
        return super().forward(input_ids, (input_ids != self.pad).long())


def own_short():
    return {"input_ids": short()["input_ids"]}


@wrong("padding", right=OwnPadding, batch=own_short, source="hyunwoongko/transformer#11", check=("padding",))
class PadIdOfAnotherVocabulary(OwnPadding):
    pad = 1


class First(Detector):
    def forward(self, input_ids, attention_mask):
        rows = super().forward(input_ids, attention_mask)
        return rows.gather(1, attention_mask.argmax(1)[:, None, None].expand(-1, 1, rows.shape[-1]))[:, 0]


@wrong(
    "padding", right=First, batch=lambda: short(left=True), source="class: the first row is padding", check=("padding",)
)
class FirstRowIsPadding(Detector):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask)[:, 0]


class SumOfAll(Detector):
    def forward(self, input_ids, attention_mask):
        return (
            super()
            .forward(input_ids, attention_mask)
            .masked_fill(attention_mask[..., None] == 0, float("-inf"))
            .logsumexp(1)
        )


@wrong("padding", right=SumOfAll, batch=short, source="class: a sum over padding too", check=("padding",))
class PaddingInTheSum(Detector):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask).logsumexp(1)


class Both(nn.Module):
    """nn.Transformer as a translator, with padding masks of source and target."""

    def __init__(self) -> None:
        super().__init__()
        self.src, self.tgt, self.pos = (
            nn.Embedding(VOCAB, DIM),
            nn.Embedding(VOCAB, DIM),
            nn.Parameter(torch.randn(1, MOST, DIM)),
        )
        self.t = nn.Transformer(DIM, HEADS, 1, 1, 48, 0.1, batch_first=True)
        self.out = nn.Linear(DIM, VOCAB)

    def masks(self, src, tgt):
        return {"src_key_padding_mask": src == 0, "tgt_key_padding_mask": tgt == 0, "memory_key_padding_mask": src == 0}

    def forward(self, input_ids, decoder_input_ids, attention_mask, decoder_attention_mask):
        n = decoder_input_ids.shape[1]
        causal = torch.ones(n, n, dtype=torch.bool).triu(1)
        x = self.t(
            self.src(input_ids) + self.pos[:, : input_ids.shape[1]],
            self.tgt(decoder_input_ids) + self.pos[:, :n],
            tgt_mask=causal,
            **self.masks(attention_mask, decoder_attention_mask),
        )
        return self.out(x)


def two_sides():
    one, other = short(), ids(2, 12)()
    seen = torch.ones(2, 12, dtype=torch.long)
    seen[0, 9:] = 0
    return one | {"decoder_input_ids": other["input_ids"].flip(0) * seen, "decoder_attention_mask": seen}


@wrong(
    "padding",
    "source",
    right=Both,
    batch=two_sides,
    source="class: the target's padding for the memory",
    check=("padding",),
)
class MemoryMaskOfTheTarget(Both):
    def masks(self, src, tgt):
        return {"src_key_padding_mask": src == 0, "tgt_key_padding_mask": tgt == 0, "memory_key_padding_mask": tgt == 0}


class Prefix(nn.Module):
    """A prefix LM: tokens of the prefix see one another."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Llama()

    def lengths(self, prefix):
        return prefix

    def forward(self, input_ids, prefix):
        n = input_ids.shape[1]
        before = torch.arange(n) < self.lengths(prefix)[:, None]
        keep = torch.ones(n, n, dtype=torch.bool).tril() | (before[:, None, :] & before[:, :, None])
        for layer in self.body.layers:
            layer.attention.seen = lambda length, mask: keep[:, None, :length, :length]
        return self.body(input_ids)


@wrong(
    "batch",
    "future",
    "mask",
    right=Prefix,
    batch=ids(prefix=lambda: torch.tensor([3, 6])),
    source="class: the longest prefix for all",
    check=("batch",),
)
class PrefixOfTheLongest(Prefix):
    def lengths(self, prefix):
        return prefix.max().expand_as(prefix)


# --- relative positions ------------------------------------------------------------------------------------------------


class XL(Hand):
    def __init__(self):
        super().__init__()
        self.r = nn.Linear(DIM, DIM, bias=False)

    def rotated(self, q, k):
        return q, k

    def shifted(self, x):
        b, h, n, m = x.shape
        return F.pad(x, (1, 0)).view(b, h, m + 1, n)[:, :, 1:].view(b, h, n, m)

    def attend(self, q, k, v, keep):
        n = q.shape[-2]
        far = torch.arange(n - 1, -1, -1)[:, None] / 10.0 ** (torch.arange(DIM // 2) / 4)
        r = self.r(torch.cat([far.sin(), far.cos()], -1)).view(n, HEADS, -1).transpose(0, 1)
        scores = (q @ k.transpose(-1, -2) + self.shifted(q @ r.transpose(-1, -2)[None])) / math.sqrt(q.shape[-1])
        return scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v


@in_llama("positions", right=XL, source="ZhengkunTian/OpenTransformer#28 (the relative shift)")
class RelativeWithoutShift(XL):
    def shifted(self, x):
        return x


@in_llama("positions", right=XL, source="lucidrains/x-transformers#103 (a shift the other way)")
class RelativeShiftedTheOtherWay(XL):
    def shifted(self, x):
        return super().shifted(x.flip(-1))


# --- images, graphs, recurrences ---------------------------------------------------------------------------------------


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.pos = nn.Conv2d(3, DIM, 4, 4), nn.Parameter(torch.randn(1, 16, DIM))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(DIM, HEADS, 48, batch_first=True) for _ in range(2))
        self.head = nn.Linear(DIM, 5)

    def tokens(self, x):
        return self.patch(x).flatten(2).transpose(1, 2)

    def forward(self, pixel_values):
        x = self.tokens(pixel_values) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def pixels():
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}


@wrong("heads", "patches", right=Picture, batch=pixels, source="class: patches by a reshape")
class PatchesByAReshape(Picture):
    def tokens(self, x):
        return self.patch(x).reshape(x.shape[0], 16, DIM)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(5))

    def masked(self, scores, adjacency):
        return scores.masked_fill(adjacency[:, None] == 0, float("-inf"))

    def forward(self, nodes, adjacency):
        x = self.inp(nodes)
        b, n, _ = x.shape
        q, k, v = (w(x).view(b, n, HEADS, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        out = self.masked(by_hand(q, k), adjacency).softmax(-1) @ v
        return x + self.out(out.transpose(1, 2).reshape(b, n, DIM))


def graph():
    torch.manual_seed(2)
    near = (torch.rand(2, 10, 10) < 0.4).float()
    return {"nodes": torch.randn(2, 10, DIM), "adjacency": ((near + near.mT + torch.eye(10)) > 0).float()}


@wrong("mask", "weak", right=Graph, batch=graph, source="class: scores times the adjacency", check=("mask_strength",))
class ScoresTimesAdjacency(Graph):
    def masked(self, scores, adjacency):
        return scores * adjacency[:, None]


class Bahdanau(nn.Module):
    """A recurrent translator with additive attention."""

    dim = 1

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.enc, self.dec = nn.GRU(DIM, DIM, batch_first=True), nn.GRUCell(2 * DIM, DIM)
        self.wq, self.wk, self.score, self.out = (
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, 1),
            nn.Linear(DIM, VOCAB),
        )

    def forward(self, input_ids, decoder_input_ids):
        memory, last = self.enc(self.emb(input_ids))
        state, rows = last[0], []
        for word in self.emb(decoder_input_ids).unbind(1):
            scores = self.score((self.wq(state)[:, None] + self.wk(memory)).tanh())
            read = (scores.softmax(self.dim) * memory).sum(1)
            state = self.dec(torch.cat([word, read], -1), state)
            rows.append(self.out(state))
        return torch.stack(rows, 1)


def words():
    return {"input_ids": ids(3, 9)()["input_ids"], "decoder_input_ids": ids(3, 6)()["input_ids"]}


@wrong(
    "axis", "batch", right=Bahdanau, batch=words, source="class: additive attention over the batch", check=("batch",)
)
class AdditiveOverTheBatch(Bahdanau):
    dim = 0


@wrong("axis", "effect", right=Bahdanau, batch=words, source="class: a softmax over one number")
class AdditiveOverOneNumber(Bahdanau):
    dim = -1


class Pooled(LlamaAttention):
    """Attends to strided means of the keys, those that lie wholly before the row."""

    whole = True

    def attend(self, q, k, v, keep):
        n = q.shape[-2]
        kp, vp = (F.avg_pool1d(one.flatten(0, 1).mT, 3, 3).mT.view(*one.shape[:2], -1, one.shape[-1]) for one in (k, v))
        ends = torch.arange(kp.shape[2]) * 3 + (2 if self.whole else 0)
        far = ends[None] <= torch.arange(n)[:, None]
        scores = torch.cat(
            [
                by_hand(q, kp).masked_fill(~far, float("-inf")),
                by_hand(q, k).masked_fill(~torch.eye(n, dtype=torch.bool), float("-inf")),
            ],
            -1,
        )
        return scores.softmax(-1) @ torch.cat([vp, v], 2)


@in_llama(
    "future",
    right=Pooled,
    source="lucidrains/memory-compressed-attention (means across the diagonal)",
    check=("future",),
)
class MeansAcrossTheDiagonal(Pooled):
    whole = False


# --- correct models ----------------------------------------------------------------------------------------------------------

for right in (Capped, Sunk, Unit, Temperature, TopK, Sums, XL, Pooled):
    INNOCENTS["Third" + right.__name__] = Case("Third" + right.__name__, "own", llama(right), ids())
INNOCENTS["RotaryLeftPadded"] = Case("RotaryLeftPadded", "own", Llama, lambda: short(left=True))
for right, batch in (
    (CachedModel, ids()),
    (Detector, short),
    (OwnPadding, own_short),
    (Both, two_sides),
    (Picture, pixels),
    (Graph, graph),
    (Bahdanau, words),
    (Prefix, ids(prefix=lambda: torch.tensor([3, 6]))),
):
    INNOCENTS["Third" + right.__name__] = Case("Third" + right.__name__, "own", right, batch)


def right_llama(attention):
    INNOCENTS[attention.__name__] = Case(attention.__name__, "own", llama(attention), ids())
    return attention


@right_llama
class LargestOfTheWholeTensorSubtracted(LlamaAttention):
    def attend(self, q, k, v, keep):
        scores = by_hand(q, k).masked_fill(~keep, float("-inf"))
        weights = (scores - scores.max()).exp()
        return weights / weights.sum(-1, keepdim=True) @ v


@right_llama
class Retention(LlamaAttention):
    def attend(self, q, k, v, keep):
        n = q.shape[-2]
        far = torch.arange(n)[:, None] - torch.arange(n)
        decay = (1 - 2.0 ** (-2 - torch.arange(HEADS)))[:, None, None] ** far.clamp(min=0) * (far >= 0)
        return (by_hand(q, k) * decay) @ v


@right_llama
class NullKey(LlamaAttention):
    def __init__(self):
        super().__init__()
        self.null = nn.Parameter(torch.randn(2, DIM // HEADS))

    def attend(self, q, k, v, keep):
        b, h, _, d = q.shape
        k, v = (torch.cat([null.expand(b, h, 1, d), one], 2) for null, one in zip(self.null, (k, v), strict=True))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=F.pad(keep, (1, 0), value=True))


@right_llama
class SigmoidOfMinusInfinity(LlamaAttention):
    def attend(self, q, k, v, keep):
        return (by_hand(q, k) - 2).masked_fill(~keep, float("-inf")).sigmoid() @ v


@right_llama
class SquaredPositivePart(LlamaAttention):
    def attend(self, q, k, v, keep):
        n = keep.sum(-1, keepdim=True)
        return by_hand(q, k).masked_fill(~keep, 0).relu().square() / n @ v


@right_llama
class Differential(LlamaAttention):
    def __init__(self):
        super().__init__()
        self.much = nn.Parameter(torch.tensor(0.4))

    def attend(self, q, k, v, keep):
        (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
        first, second = (by_hand(a, b).masked_fill(~keep, float("-inf")).softmax(-1) for a, b in ((q1, k1), (q2, k2)))
        return (first - self.much * second) @ v


@right_llama
class DeltaRule(LlamaAttention):
    def attend(self, q, k, v, keep):
        k = F.normalize(k, dim=-1)
        state, rows = torch.zeros(*q.shape[:2], q.shape[-1], q.shape[-1]), []
        for i in range(q.shape[2]):
            old = torch.einsum("bhde,bhd->bhe", state, k[:, :, i])
            state = state + torch.einsum("bhd,bhe->bhde", k[:, :, i], 0.5 * (v[:, :, i] - old))
            rows.append(torch.einsum("bhd,bhde->bhe", q[:, :, i], state))
        return torch.stack(rows, 2)


@right_llama
class ScaleLearnedPerLayer(LlamaAttention):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(-0.9))

    def attend(self, q, k, v, keep):
        return (q @ k.mT * self.log_scale.exp()).masked_fill(~keep, float("-inf")).softmax(-1) @ v


@right_llama
class PartlyRotated(LlamaAttention):
    def rotated(self, q, k):
        freqs = polar(q.shape[1], 4)
        return tuple(torch.cat([turn(x[..., :4], freqs), x[..., 4:]], -1) for x in (q, k))


@right_llama
class SharedQueriesAndKeys(LlamaAttention):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(DIM))
        self.wk = nn.Linear(DIM, DIM)
        self.wv = nn.Linear(DIM, DIM)
        del self.wq

    def forward(self, x, attention_mask=None):
        b, n, _ = x.shape
        both, v = (w(x).view(b, n, HEADS, -1) for w in (self.wk, self.wv))
        q, k = self.rotated(both + self.shift.view(HEADS, -1), both)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.wo(self.attend(q, k, v, self.seen(n, attention_mask)).transpose(1, 2).reshape(b, n, DIM))


@fine(batch=pixels)
class CrossCovariance(nn.Module):
    """Attention over channels (XCiT)."""

    def __init__(self):
        super().__init__()
        self.patch, self.pos = nn.Conv2d(3, DIM, 4, 4), nn.Parameter(torch.randn(1, 16, DIM))
        self.qkv, self.proj, self.t, self.head = (
            nn.Linear(DIM, 3 * DIM),
            nn.Linear(DIM, DIM),
            nn.Parameter(torch.ones(HEADS, 1, 1)),
            nn.Linear(DIM, 5),
        )

    def forward(self, pixel_values):
        x = self.patch(pixel_values).flatten(2).transpose(1, 2) + self.pos
        b, n, _ = x.shape
        q, k, v = (part.view(b, n, HEADS, -1).permute(0, 2, 3, 1) for part in self.qkv(x).chunk(3, -1))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        weights = (q @ k.mT * self.t).softmax(-1)
        x = x + self.proj((weights @ v).permute(0, 3, 1, 2).reshape(b, n, DIM))
        return self.head(x.mean(1))


@fine(batch=pixels)
class Axial(nn.Module):
    """Attends along rows, then along columns."""

    def __init__(self):
        super().__init__()
        self.patch, self.pos = nn.Conv2d(3, DIM, 4, 4), nn.Parameter(torch.randn(1, 4, 4, DIM))
        self.rows, self.columns = (nn.MultiheadAttention(DIM, HEADS, batch_first=True) for _ in range(2))
        self.head = nn.Linear(DIM, 5)

    def forward(self, pixel_values):
        x = self.patch(pixel_values).permute(0, 2, 3, 1) + self.pos
        b, h, w, d = x.shape
        r = x.reshape(b * h, w, d)
        x = x + self.rows(r, r, r, need_weights=False)[0].view(b, h, w, d)
        c = x.transpose(1, 2).reshape(b * w, h, d)
        x = x + self.columns(c, c, c, need_weights=False)[0].view(b, w, h, d).transpose(1, 2)
        return self.head(x.mean((1, 2)))


@fine(batch=lambda: {"x": torch.randn(2, 24, 5, generator=torch.Generator().manual_seed(3))})
class ChannelsApart(nn.Module):
    """PatchTST: each channel of a series is a sequence of patches of its own."""

    def __init__(self):
        super().__init__()
        self.inp, self.pos = nn.Linear(4, DIM), nn.Parameter(torch.randn(1, 6, DIM))
        self.layer, self.out = nn.TransformerEncoderLayer(DIM, HEADS, 48, batch_first=True), nn.Linear(6 * DIM, 4)

    def forward(self, x):
        b, _, c = x.shape
        parts = self.inp(x.transpose(1, 2).reshape(b * c, 6, 4)) + self.pos
        return self.out(self.layer(parts).flatten(1)).view(b, c, 4).transpose(1, 2)


@fine(batch=lambda: {"points": torch.randn(2, 14, 3, generator=torch.Generator().manual_seed(3))})
class SetOfPoints(nn.Module):
    """Induced points and pooling by attention (Set Transformer)."""

    def __init__(self):
        super().__init__()
        self.inp, self.induced, self.seed = (
            nn.Linear(3, DIM),
            nn.Parameter(torch.randn(1, 4, DIM)),
            nn.Parameter(torch.randn(1, 1, DIM)),
        )
        self.a, self.b, self.c = (nn.MultiheadAttention(DIM, HEADS, batch_first=True) for _ in range(3))
        self.out = nn.Linear(DIM, 3)

    def forward(self, points):
        x = self.inp(points)
        h = self.a(self.induced.expand(len(x), -1, -1), x, x)[0]
        x = x + self.b(x, h, h)[0]
        return self.out(self.c(self.seed.expand(len(x), -1, -1), x, x)[0][:, 0])


@fine
class Universal(Llama):
    """Universal Transformer: one layer applied several times, with an embedding for each time."""

    def __init__(self):
        super().__init__(1)
        self.times = nn.Parameter(torch.randn(3, DIM))

    def forward(self, input_ids, attention_mask=None):
        x = self.tok(input_ids)
        for time in self.times:
            x = self.layers[0](x + time, attention_mask)
        return self.output(self.norm(x))


@fine
class Labels(nn.Module):
    """Each label attends to the text by itself (LAAT), after a bidirectional LSTM."""

    def __init__(self):
        super().__init__()
        self.emb, self.lstm = nn.Embedding(VOCAB, DIM), nn.LSTM(DIM, DIM // 2, bidirectional=True, batch_first=True)
        self.w, self.u, self.v = nn.Linear(DIM, DIM), nn.Linear(DIM, 6), nn.Linear(DIM, 1)

    def forward(self, input_ids):
        x = self.lstm(self.emb(input_ids))[0]
        weights = self.u(self.w(x).tanh()).softmax(1)
        return self.v(weights.mT @ x)[..., 0]


@fine
class LengthFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, DIM), nn.Parameter(torch.randn(MOST, 1, DIM))
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, 48), 2)
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids):
        x = self.emb(input_ids.t()) + self.pos[: input_ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(len(x))
        return self.out(self.enc(x, mask)).transpose(0, 1)


@fine
class Pointer(nn.Module):
    """Returns the attention weights themselves."""

    def __init__(self):
        super().__init__()
        self.emb, self.enc = nn.Embedding(VOCAB, DIM), nn.TransformerEncoderLayer(DIM, HEADS, 48, batch_first=True)
        self.q, self.k = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, input_ids):
        x = self.enc(self.emb(input_ids))
        return (self.q(x) @ self.k(x).mT / math.sqrt(DIM)).log_softmax(-1)
