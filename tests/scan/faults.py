"""Small models that apply the scale wrongly, each by a fault that the audit must name, and how each is called."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

WIDTH, HEADS, LENGTH, LAYERS = 48, 4, 17, 2
EACH = WIDTH // HEADS
ROOT = EACH**-0.5


class Layer(nn.Module):
    """Self-attention whose middle is given: q, k, v as (B, H, L, E) in, the heads' outputs out."""

    num_heads = HEADS

    def __init__(self, meet: Callable[..., Tensor], gain: float = 1.0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for part in (self.q, self.k):
            nn.init.normal_(part.weight, std=gain * WIDTH**-0.5)
        self.meet = meet

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, EACH)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return x + self.out(self.meet(q, k, v).transpose(1, 2).flatten(2))


@dataclass
class Case:
    """A model, how it is called, and what the audit must find: the scale applied and the fault's name."""

    model: nn.Module
    applied: float | None
    fault: str | None
    inputs: dict[str, Any] = field(default_factory=dict)
    innocent: int = 0  # how many of the first layers have no fault

    def run(self) -> object:
        return self.model(**self.inputs) if self.inputs else self.model(numbers())


def stack(meet: Callable[..., Tensor], applied: float, fault: str | None, gain: float = 1.0) -> Case:
    return Case(nn.Sequential(*(Layer(meet, gain) for _ in range(LAYERS))), applied, fault)


def by_hand(scale: float, after: float = 1.0) -> Callable[..., Tensor]:
    return lambda q, k, v: (q @ k.mT * scale).softmax(-1) * after @ v


def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As tutorials write it, with the wrong square root."""
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(WIDTH)
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).tril() == 0, -1e9)
    return torch.softmax(scores, -1) @ v


def roots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The root of the scale on each of q and k, and then SDPA's own."""
    return F.scaled_dot_product_attention(q * ROOT**0.5, k * ROOT**0.5, v)


def math_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA's own math, which dropout asks for, on a q that is scaled already."""
    return F.scaled_dot_product_attention(q * ROOT, k, v, dropout_p=1e-9)


class RotatedTwice(nn.Module):
    """A Llama whose q is scaled once more, behind its rotary embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()
        for layer in self.inner.layers:
            layer.self_attn.q_proj = Scaled(layer.self_attn.q_proj, layer.self_attn.head_dim**-0.5)

    def forward(self, input_ids: Tensor) -> object:
        return self.inner(input_ids=input_ids)


class Scaled(nn.Module):
    """A projection, and a number that multiplies what it made."""

    def __init__(self, inner: nn.Module, number: float) -> None:
        super().__init__()
        self.inner, self.number = inner, number

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.number


SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(**options: Any) -> nn.Module:
    return transformers.LlamaModel(transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **options))


def numbers() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 99, (2, LENGTH), generator=torch.Generator().manual_seed(3))}


def ignoring(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """A fused path that knows nothing of `scaling`, as transformers' was for GPT-2 until its pull request 44397."""
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out.transpose(1, 2), None


def gpt2_flag() -> Case:
    """The real GPT-2 with its real flag, on that path."""
    transformers.AttentionInterface.register("ignoring", ignoring)
    transformers.AttentionMaskInterface.register("ignoring", transformers.masking_utils.sdpa_mask)
    options = {"scale_attn_by_inverse_layer_idx": True, "attn_implementation": "ignoring"}
    model = transformers.GPT2Model(transformers.GPT2Config(**SIZES, **options))
    # the first layer divides by 1: there the flag asks for nothing
    return Case(model, ROOT, "ignored", tokens(), innocent=1)


def granite_ignored() -> Case:
    transformers.AttentionInterface.register("ignoring", ignoring)
    transformers.AttentionMaskInterface.register("ignoring", transformers.masking_utils.sdpa_mask)
    config = transformers.GraniteConfig(
        **SIZES, num_key_value_heads=2, attention_multiplier=0.015625, attn_implementation="ignoring"
    )
    return Case(transformers.GraniteModel(config), ROOT, "ignored", tokens())


class Settings:
    scale_attn_weights = True
    scale_attn_by_inverse_layer_idx = True


class Flagged(Layer):
    """A replica by hand: its config has the flag, its code does not look at it."""

    config = Settings()

    def __init__(self, layer_idx: int) -> None:
        super().__init__(by_hand(ROOT))
        self.layer_idx = layer_idx


def flag_by_hand() -> Case:
    return Case(nn.Sequential(Flagged(1), Flagged(2)), ROOT, "ignored")


class FusedAttention(Layer):
    """Its scale is a setting, which the fused path forgets to pass on."""

    def __init__(self, scale: float) -> None:
        super().__init__(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
        self.scale = scale


def cvt() -> Case:
    """CvT as published: its attention divides by the root of the stage's width."""
    config = transformers.CvtConfig(embed_dim=[16, 32, 48], num_heads=[1, 2, 4], depth=[1, 2, 3])
    model = transformers.CvtModel(config)
    # the first stage has one head, so that d_model is d_k
    return Case(model, None, "sqrt_dmodel", {"pixel_values": torch.randn(1, 3, 64, 64)}, innocent=1)


FAULTY: dict[str, Callable[[], Case]] = {
    "√d_model by hand": lambda: stack(by_hand(WIDTH**-0.5), WIDTH**-0.5, "sqrt_dmodel"),
    "√d_model as tutorials write it": lambda: stack(divided, WIDTH**-0.5, "sqrt_dmodel"),
    "√d_model to SDPA": lambda: stack(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=WIDTH**-0.5), WIDTH**-0.5, "sqrt_dmodel"
    ),
    "√d_model in CvT": cvt,
    "√d_model on q": lambda: stack(
        lambda q, k, v: F.scaled_dot_product_attention(q / WIDTH**0.5, k, v, scale=1.0), WIDTH**-0.5, "sqrt_dmodel"
    ),
    "twice: q, then SDPA": lambda: stack(
        lambda q, k, v: F.scaled_dot_product_attention(q * ROOT, k, v, is_causal=True), ROOT**2, "twice"
    ),
    "twice: roots on q and k, then SDPA": lambda: stack(roots, ROOT**2, "twice"),
    "twice: q, then SDPA's own math": lambda: stack(math_twice, ROOT**2, "twice"),
    "twice by hand": lambda: stack(lambda q, k, v: ((q * ROOT) @ k.mT / EACH**0.5).softmax(-1) @ v, ROOT**2, "twice"),
    "twice in a Llama": lambda: Case(RotatedTwice(), ROOT**2, "twice", tokens()),
    "after softmax, by hand": lambda: stack(by_hand(1.0, after=ROOT), 1.0, "after_softmax"),
    "after softmax, on the output": lambda: stack(
        lambda q, k, v: (q @ k.mT).softmax(-1) @ v * ROOT, 1.0, "after_softmax"
    ),
    "after SDPA": lambda: stack(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1.0) / EACH**0.5, 1.0, "after_softmax"
    ),
    "after softmax, on v": lambda: stack(lambda q, k, v: (q @ k.mT).softmax(-1) @ (v * ROOT), 1.0, "after_softmax"),
    "after softmax, on v, with SDPA": lambda: stack(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v / EACH**0.5, scale=1.0), 1.0, "after_softmax"
    ),
    "ignored: GPT-2's flag": gpt2_flag,
    "ignored: Granite's multiplier": granite_ignored,
    "ignored: a flag, by hand": flag_by_hand,
    "ignored: an attribute": lambda: Case(nn.Sequential(FusedAttention(0.05), FusedAttention(0.05)), ROOT, "ignored"),
    "multiplied by hand": lambda: stack(by_hand(EACH**0.5), EACH**0.5, "multiplied"),
    "multiplied by hand, small logits": lambda: stack(by_hand(EACH**0.5), EACH**0.5, "multiplied", gain=0.1),
    "multiplied by d_k, with SDPA": lambda: stack(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=EACH), EACH, "multiplied"
    ),
    "negative by hand": lambda: stack(by_hand(-ROOT), -ROOT, "negative"),
    "negative with SDPA": lambda: stack(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=-ROOT), -ROOT, "negative"
    ),
    "uncontrolled by hand": lambda: stack(by_hand(1.0), 1.0, "uncontrolled", gain=2.0),
    "unscaled by hand, modest logits": lambda: stack(by_hand(1.0), 1.0, "unscaled", gain=0.2),
    "uncontrolled with SDPA": lambda: stack(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1.0), 1.0, "uncontrolled", gain=2.0
    ),
}
