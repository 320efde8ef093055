"""Small models whose attention is wrong, each written as people write it, and the fault that a scan must name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

WIDTH, HEADS, EACH, LENGTH, WORDS = 48, 4, 12, 13, 60
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass
class Case:
    """A model, what it is called with, and its faults: the names that a scan must give, and no others."""

    model: nn.Module
    inputs: Any = field(default_factory=lambda: ids())
    faults: tuple[str, ...] = ()
    also: tuple[str, ...] = ()  # what an experiment names too


def ids(batch: int = 2) -> Tensor:
    return torch.randint(3, WORDS, (batch, LENGTH), generator=torch.Generator().manual_seed(5))


def padded() -> dict[str, Tensor]:
    keep = torch.ones(2, LENGTH, dtype=torch.long)
    keep[1, 9:] = 0
    return {"input_ids": ids(), "attention_mask": keep}


def lower(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


class Attention(nn.Module):
    """Self-attention whose middle is given: q, k, v as (B, H, L, E) in, the heads' outputs out."""

    def __init__(self, attend: Callable[..., Tensor], heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attend, self.num_heads = attend, heads

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q, self.k, self.v))
        return self.out(self.join(self.attend(q, k, v, **options)))


class Model(nn.Module):
    """Tokens and positions, two layers of attention, logits."""

    def __init__(self, *layers: nn.Module, positions: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(64, WIDTH) if positions else None
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in layers)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.words(input_ids)
        if self.places is not None:
            x = x + self.places(torch.arange(x.shape[1]))
        options = {} if attention_mask is None else {"mask": attention_mask}
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x), **options)
        return self.head(x)


def model(attend: Callable[..., Tensor], cls: type[nn.Module] = Attention) -> nn.Module:
    return Model(cls(attend), cls(attend))


def case(attend: Callable[..., Tensor], *faults: str, also: tuple[str, ...] = ()) -> Case:
    return Case(model(attend), faults=faults, also=also)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q, k), dim=-2) @ v


def over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax() without dim picks 1 for a tensor of four dimensions."""
    return F.softmax(scores(q, k), dim=1) @ v


def over_folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """And 0 for one of three: batch and heads."""
    a = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) / math.sqrt(q.shape[-1])
    return torch.bmm(torch.softmax(a, dim=0), v.flatten(0, 1)).view_as(v)


def over_queries_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).div(EACH**0.5).softmax(2)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def softmax_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(scores(q, k), dim=-1)
    return F.softmax(weights, dim=-1) @ v


def twice_with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = nn.Dropout(0.1).eval()(nn.Softmax(-1)(scores(q, k)))
    return nn.Softmax(-1)(weights) @ v


def mask_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(scores(q, k), dim=-1).masked_fill(~lower(q.shape[2]), 0.0) @ v


def mask_after_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.softmax(scores(q, k), dim=-1) * lower(q.shape[2]).float()) @ v


def mask_after_tril(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1).tril() @ v


def weak(value: float) -> Callable[..., Tensor]:
    return lambda q, k, v: scores(q, k).masked_fill(~lower(q.shape[2]), value).softmax(-1) @ v


def times_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k) * lower(q.shape[2])).softmax(-1) @ v


def weak_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.where(lower(q.shape[2]), scores(q, k), torch.tensor(-3.0)).softmax(-1) @ v


def added_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of 0 and 1, which SDPA adds."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=lower(q.shape[2]).to(q.dtype))


def subtracted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """1 - mask, and −1 where −1e9 was meant."""
    return (scores(q, k) + (1.0 - lower(q.shape[2]).float()) * -1.0).softmax(-1) @ v


def inverted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch.nn.MultiheadAttention's meaning of a boolean mask, given to SDPA."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(q.shape[2], q.shape[2]).triu(1).bool())


def inverted_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).masked_fill(lower(q.shape[2]), -1e9).softmax(-1) @ v


def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~lower(q.shape[2]).mT, float("-inf")).softmax(-1) @ v


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], q.shape[2]).tril(diagonal=1) == 0
    return scores(q, k).masked_fill(mask, float("-inf")).softmax(-1) @ v


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(scores(q, k).softmax(-1), 0.1) @ v


def dropped_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1)
    return weights / weights.sum(dim=-2, keepdim=True) @ v


class Reshaped(Attention):
    """Heads cut by view alone."""

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], self.num_heads, x.shape[1], -1)


class Rejoined(Attention):
    """Heads joined by reshape alone."""

    def join(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[2], -1)


class Rotated(Reshaped):
    """Heads cut by view, then rotated by their positions: only v shows it by its numbers."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__(self.rotating(attend))

    @staticmethod
    def rotating(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def turned(x: Tensor) -> Tensor:
            angle = torch.arange(x.shape[2])[:, None] / 100 ** (torch.arange(x.shape[3] // 2) / (x.shape[3] // 2))
            angle = torch.cat([angle, angle], -1).to(x.dtype)
            one, two = x.chunk(2, -1)
            return x * angle.cos() + torch.cat([-two, one], -1) * angle.sin()

        return lambda q, k, v: attend(turned(q), turned(k), v)


class Half(nn.Module):
    """Attends with a mask in every layer but one."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.inner, self.masked = Attention(self.attend), masked

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = lower(q.shape[2]) if self.masked else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def folded_wrongly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask per item, repeated for heads in another order than the scores."""
    batch, heads, length, _ = q.shape
    keep = torch.stack([lower(length), torch.ones(length, length, dtype=torch.bool)])[:batch]
    mask = keep.repeat(heads, 1, 1)
    a = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) / math.sqrt(q.shape[-1])
    weights = a.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.bmm(weights, v.flatten(0, 1)).view_as(q)


def padding_as_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return scores(q, k).masked_fill(mask[:, None, :, None] == 0, -1e9).softmax(-1) @ v


def padding_forgotten(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class TorchMHA(nn.Module):
    """nn.MultiheadAttention, whose key_padding_mask hides what is True; given what is to be kept."""

    def __init__(self, negate: bool = False, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options})
        self.negate = negate

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = None if mask is None else mask.bool() ^ self.negate
        return self.inner(x, x, x, key_padding_mask=hidden, need_weights=False)[0]


class CausalMHA(TorchMHA):
    """A mask of what may be seen, where nn.MultiheadAttention takes what is hidden."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, attn_mask=lower(x.shape[1]), need_weights=False)[0]


class Grouped(nn.Module):
    """Six heads on two groups, as einsum writes them, divided by √d_model; no attribute names the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, width) for width in (WIDTH, 16, 16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 2, 3, 8)
        k, v = (part(x).view(batch, length, 2, 8) for part in (self.k, self.v))
        weights = (torch.einsum("bqgrd,bkgd->bgrqk", q, k) / math.sqrt(WIDTH)).softmax(-1)
        return self.out(torch.einsum("bgrqk,bkgd->bqgrd", weights, v).reshape(batch, length, WIDTH))


class Smoothed(Attention):
    """Its keys see the tokens on both sides: a convolution that is not causal."""

    def __init__(self) -> None:
        super().__init__(causal)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.conv(x.mT).mT)


class NormOverLength(Attention):
    """A causal attention behind a norm over all tokens."""

    def __init__(self) -> None:
        super().__init__(causal)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True))


class Cached(nn.Module):
    """A decoder with a KV cache; `start` is the position that a step's tokens begin at."""

    def __init__(self, start: Callable[[int], int], is_causal: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.start, self.is_causal_call = start, is_causal

    def forward(self, input_ids: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        seen = 0 if past is None else past[0].shape[2]
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]) + self.start(seen))
        q, k, v = (part(x).view(*x.shape[:2], HEADS, EACH).transpose(1, 2) for part in (self.q, self.k, self.v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        if self.is_causal_call:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(out.transpose(1, 2).flatten(2)), (k, v)


class Block(nn.Module):
    """A fixed mask that is shorter than the positions that the model declares."""

    block_size = 64

    def __init__(self) -> None:
        super().__init__()
        self.inner = model(self.attend)
        self.register_buffer("mask", lower(20))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q, k).masked_fill(~self.mask[: q.shape[2], : q.shape[2]], float("-inf")).softmax(-1) @ v

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids)


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **options)
    return transformers.LlamaForCausalLM(config)


def register(name: str, mask: Callable[..., Any] | None, attend: Callable[..., Any] | None = None) -> None:
    plain = sdpa_attention_forward
    transformers.AttentionInterface.register(name, attend or plain)
    if mask is not None:
        transformers.AttentionMaskInterface.register(name, mask)


def attend_to_all(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """An attention function that is registered without a mask function: it gets None."""
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2), None


def without_mask() -> Case:
    register("unmasked", None, attend_to_all)
    return Case(llama(attn_implementation="unmasked"), ids(), ("missing_mask",), ("future_leak", "padding_leak"))


def inverted_mask(**options: Any) -> Tensor | None:
    made = transformers.masking_utils.sdpa_mask(**{**options, "allow_is_causal_skip": False})
    return None if made is None else ~made


def llama_inverted() -> Case:
    register("inverted", inverted_mask)
    return Case(llama(attn_implementation="inverted"), ids(), ("inverted_mask",), ("future_leak", "padding_leak"))


def mask_without_padding(**options: Any) -> Tensor | None:
    return transformers.masking_utils.sdpa_mask(**{**options, "attention_mask": None, "allow_is_causal_skip": False})


def llama_without_padding() -> Case:
    register("unpadded", mask_without_padding)
    inputs = padded()
    inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    return Case(llama(attn_implementation="unpadded"), inputs, ("padding_visible",))


class ForgetfulCache(transformers.DynamicCache):
    """Keeps the newest keys only in part."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if key_states.shape[2] == 1:
            keys = torch.cat([keys[:, :, :-2], keys[:, :, -1:], keys[:, :, -1:]], 2)
        return keys, values


class LlamaWithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        kept = past_key_values if past_key_values is not None else ForgetfulCache() if use_cache else None
        return self.inner(input_ids, past_key_values=kept, use_cache=use_cache)


class BatchSecond(nn.Module):
    """(batch, length, width) given to a layer that takes (length, batch, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layer(self.words(input_ids))


WRONG: dict[str, Callable[[], Case]] = {
    "softmax over the queries": lambda: case(over_queries, "over_queries"),
    "softmax over the queries, einsum": lambda: case(over_queries_einsum, "over_queries"),
    "softmax over the heads": lambda: case(over_heads, "over_heads"),
    "softmax over batch and heads": lambda: case(over_folded, "over_heads", also=("batch_leak",)),
    "softmax twice": lambda: case(softmax_twice, "softmax_twice"),
    "softmax twice, dropout between": lambda: case(twice_with_dropout, "softmax_twice"),
    "masked after softmax, filled": lambda: case(mask_after, "masked_after_softmax"),
    "masked after softmax, multiplied": lambda: case(mask_after_product, "masked_after_softmax"),
    "masked after softmax, tril": lambda: case(mask_after_tril, "masked_after_softmax"),
    "weak mask, −5": lambda: case(weak(-5.0), "weak_mask"),
    "weak mask, 1e-9 for −1e9": lambda: case(weak(1e-9), "weak_mask"),
    "weak mask, times 0": lambda: case(times_mask, "weak_mask"),
    "weak mask, where": lambda: case(weak_where, "weak_mask"),
    "weak mask, 0 and 1 added by SDPA": lambda: case(added_ones, "weak_mask"),
    "weak mask, −1 added": lambda: case(subtracted, "weak_mask"),
    "inverted mask, SDPA": lambda: case(inverted, "inverted_mask"),
    "inverted mask, by hand": lambda: case(inverted_by_hand, "inverted_mask"),
    "inverted mask, nn.MultiheadAttention": lambda: Case(Model(CausalMHA(), CausalMHA()), faults=("inverted_mask",)),
    "inverted mask, Llama": llama_inverted,
    "transposed mask": lambda: case(transposed, "transposed_mask"),
    "shifted mask": lambda: case(shifted, "shifted_mask"),
    "no mask function registered, Llama": without_mask,
    "padding inverted, nn.MultiheadAttention": lambda: Case(
        Model(TorchMHA(), TorchMHA()), padded(), ("padding_inverted",)
    ),
    "padding hides queries": lambda: Case(model(padding_as_queries), padded(), ("padding_visible",), ("padding_leak",)),
    "padding forgotten": lambda: Case(model(padding_forgotten), padded(), ("padding_visible",), ("padding_leak",)),
    "padding forgotten in a Llama's mask": llama_without_padding,
    "one layer without a mask": lambda: Case(
        Model(Half(True), Half(False), Half(True)), faults=("masks_differ",), also=("future_leak",)
    ),
    "masks folded into heads wrongly": lambda: Case(
        model(folded_wrongly), faults=("heads_differ",), also=("future_leak", "batch_leak")
    ),
    "heads cut by view": lambda: Case(
        model(causal, Reshaped), faults=("heads_mixed",), also=("future_leak", "position_leak")
    ),
    "heads cut by view, by hand": lambda: Case(
        model(weak(-1e9), Reshaped), faults=("heads_mixed",), also=("future_leak", "position_leak")
    ),
    "heads cut by view, rotated": lambda: Case(
        model(causal, Rotated), faults=("heads_mixed",), also=("future_leak", "position_leak")
    ),
    "heads joined by reshape": lambda: Case(model(causal, Rejoined), faults=("heads_joined",), also=("future_leak",)),
    "dropout in evaluation": lambda: case(dropped, "dropout_in_eval"),
    "dropout in evaluation, SDPA": lambda: case(dropped_sdpa, "dropout_in_eval"),
    "weights divided by columns": lambda: case(divided, "uneven_rows"),
    "grouped heads by einsum, √d_model": lambda: Case(Model(Grouped(), Grouped()), faults=("sqrt_dmodel",)),
    "a convolution that sees the future": lambda: Case(Model(Smoothed(), Smoothed()), also=("future_leak",)),
    "a norm over the length": lambda: Case(Model(NormOverLength(), NormOverLength()), also=("future_leak",)),
    "positions of a step start at 0": lambda: Case(Cached(lambda seen: 0), ids(1), also=("cache_differs",)),
    "is_causal with a cache": lambda: Case(Cached(lambda seen: seen, True), ids(1), also=("cache_differs",)),
    "a cache that forgets, Llama": lambda: Case(LlamaWithCache(), ids(1), also=("cache_differs",)),
    "a mask of fixed size": lambda: Case(Block(), also=("long_breaks",)),
    "batch_first forgotten": lambda: Case(BatchSecond(), {"input_ids": ids()}, also=("batch_leak",)),
    "no positions": lambda: Case(
        Model(Attention(F.scaled_dot_product_attention), positions=False), also=("order_ignored",)
    ),
}
"""What is read from the ops is in ``faults``; what only an experiment shows is in ``also``."""
