"""Models that choose their scale on purpose, in ways that look like faults; with the scale each applies, by its own paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import attemper
from scan.faults import EACH, HEADS, LENGTH, ROOT, SIZES, WIDTH, Layer, by_hand, llama, numbers, tokens


@dataclass
class Case:
    """A model, how it is called, the scale that each layer applies, and the rule that this is."""

    model: nn.Module
    applied: float | Callable[[int], float]
    rule: str | Callable[[int], str | None] | None = "sqrt_dk"
    inputs: dict[str, Any] = field(default_factory=dict)
    remark: str | None = None  # the note that it gets

    def run(self) -> object:
        return self.model(**self.inputs) if self.inputs else self.model(numbers())


def layers(meet: Callable[..., Tensor], applied: float, rule: str | None = "sqrt_dk", gain: float = 1.0) -> Case:
    return Case(nn.Sequential(*(Layer(meet, gain) for _ in range(2))), applied, rule)


def text(cls: str, applied: Any, rule: Any = "sqrt_dk", drop: tuple[str, ...] = (), **options: Any) -> Case:
    sizes = {name: value for name, value in SIZES.items() if name not in drop}
    config = getattr(transformers, f"{cls}Config")(**sizes, **options)
    model = getattr(transformers, f"{cls}TextModel", None) or getattr(transformers, f"{cls}Model")
    return Case(model(config), applied, rule, tokens())


class OwnNorm(nn.Module):
    """QK-norm written by hand, in the middle of a forward; scale 1, as Gemma 3n has it."""

    num_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)
        self.gain = nn.Parameter(torch.ones(EACH))
        nn.init.normal_(self.packed.weight, std=1.0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed(x).unflatten(-1, (3, HEADS, EACH)).permute(2, 0, 3, 1, 4)
        q, k = (part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6) * self.gain for part in (q, k))
        return F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(2)


class Declaring(Layer):
    """Without a scale on purpose: it says so."""

    scale = 1.0


class OneHead(nn.Module):
    """d_model is d_k: the root of the one is the root of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).mT / math.sqrt(WIDTH)).softmax(-1) @ self.v(x)


class InPlace(Layer):
    """q is a part of one packed tensor, and is scaled where it lies."""

    def __init__(self) -> None:
        super().__init__(by_hand(1.0))
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed(x).chunk(3, -1)
        q *= ROOT
        q, k, v = (part.unflatten(-1, (HEADS, EACH)).transpose(1, 2) for part in (q, k, v))
        return self.meet(q, k, v).transpose(1, 2).flatten(2)


class TorchMHA(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        memory = x.flip(1)[:, :9]
        return self.attention(x, memory, memory, need_weights=self.weights)[0]


class Ours(nn.Module):
    """attemper's own module, under any rule."""

    def __init__(self, rule: str, weights: bool) -> None:
        super().__init__()
        self.attention = attemper.MultiHeadAttention(WIDTH, HEADS, rule=rule, layer=2, batch_first=True)
        self.weights = weights
        with torch.no_grad():
            self.attention.in_proj_weight.mul_(4)
            if self.attention.gain is not None:
                self.attention.gain.copy_(torch.linspace(0.5, 1.5, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, need_weights=self.weights)[0]


def ours(rule: str, weights: bool) -> Case:
    found = attemper.rule(rule)
    gain = 1.0 if found.gain is not None else None  # the mean of what Ours puts there
    number = found.scale(head_dim=EACH, heads=HEADS, layer=2, keys=LENGTH, gain=gain)
    return Case(Ours(rule, weights), float(number), rule)


def gpt2(**options: Any) -> Case:
    flag = options.get("scale_attn_by_inverse_layer_idx", False)
    return text(
        "GPT2",
        lambda layer: ROOT / (layer + 1 if flag else 1),
        lambda layer: "layer" if flag and layer else "sqrt_dk",
        **options,
    )


def heads_by_layer() -> Case:
    """Four heads: 1/((layer + 1) √d_k) at layer 1 is 1/√d_model as well."""
    return gpt2(scale_attn_by_inverse_layer_idx=True)


def colder_by_layer() -> Case:
    """The same without a config: only the layers together show it."""
    model = nn.Sequential(*(Layer(by_hand(ROOT / (layer + 1))) for layer in range(3)))
    return Case(model, lambda layer: ROOT / (layer + 1), lambda layer: "layer" if layer else "sqrt_dk")


class NGPT(OwnNorm):
    """Unit vectors of q and k, multiplied by √d_k: nGPT."""

    def __init__(self) -> None:
        super().__init__()
        del self.gain

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed(x).unflatten(-1, (3, HEADS, EACH)).permute(2, 0, 3, 1, 4)
        q, k = (F.normalize(part, dim=-1) for part in (q, k))
        return F.scaled_dot_product_attention(q, k, v, scale=EACH**0.5).transpose(1, 2).flatten(2)


def yarn() -> Case:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    stretch = 0.1 * math.log(4.0) + 1
    return Case(llama(rope_parameters=rope), ROOT * stretch**2, "sqrt_dk", tokens())


def swin() -> Case:
    sizes = {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 24,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    model = transformers.Swinv2Model(transformers.Swinv2Config(**sizes))
    return Case(model, 10.0, "qk_norm", {"pixel_values": torch.randn(1, 3, 32, 32)})


def mup(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=1 / EACH)


def per_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Numbers per head, which are no rule."""
    return (q @ k.mT * torch.linspace(0.1, 0.3, HEADS).view(-1, 1, 1)).softmax(-1) @ v


class Talking(Layer):
    """Weights that are mixed behind the softmax: rows no longer add up to 1, and not to one number."""

    def __init__(self) -> None:
        super().__init__(self.mixed)
        self.mix = nn.Parameter(torch.rand(HEADS, HEADS, generator=torch.Generator().manual_seed(1)))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT * ROOT).softmax(-1)
        return torch.einsum("bhqk,hg->bgqk", weights, self.mix) @ v


def sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A column that takes weight and gives no value."""
    scores = q @ k.mT * ROOT
    return torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1] @ v


INNOCENT: dict[str, Callable[[], Case]] = {
    "GPT-2": gpt2,
    "GPT-2, eager": lambda: gpt2(attn_implementation="eager"),
    "GPT-2's flag, honoured": heads_by_layer,
    "GPT-2's flag, eager and upcast": lambda: gpt2(
        scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True, attn_implementation="eager"
    ),
    "GPT-2 without scale, by its flag": lambda: text(
        "GPT2", 1.0, "none", scale_attn_weights=False, initializer_range=0.5
    ),
    "colder by layer, by hand": colder_by_layer,
    "Llama": lambda: Case(llama(), ROOT, "sqrt_dk", tokens()),
    "Llama, eager": lambda: Case(llama(attn_implementation="eager"), ROOT, "sqrt_dk", tokens()),
    "Llama with YaRN": yarn,
    "Granite's multiplier": lambda: text("Granite", 0.015625, None, attention_multiplier=0.015625),
    "Gemma 2's scalar": lambda: text("Gemma2", 168**-0.5, None, head_dim=EACH, query_pre_attn_scalar=168),
    "Gemma 2's cap": lambda: text("Gemma2", ROOT, "softcap", head_dim=EACH, query_pre_attn_scalar=EACH),
    "Gemma 3: QK-norm": lambda: text(
        "Gemma3Text", 16**-0.5, "qk_norm", head_dim=EACH, num_key_value_heads=2, query_pre_attn_scalar=16
    ),
    "QK-norm by hand, scale 1": lambda: Case(nn.Sequential(OwnNorm()), 1.0, "qk_norm"),
    "nGPT: √d_k behind unit vectors": lambda: Case(nn.Sequential(NGPT()), EACH**0.5, "qk_norm"),
    "Qwen 3: QK-norm": lambda: text("Qwen3", ROOT, "qk_norm", head_dim=EACH, num_key_value_heads=2),
    "OLMo 2: QK-norm of the whole": lambda: text("Olmo2", ROOT, "qk_norm"),
    "GPT-NeoX: partly rotated": lambda: text("GPTNeoX", ROOT),
    "Phi: partly rotated": lambda: text("Phi", ROOT),
    "Falcon: one key head": lambda: text("Falcon", ROOT, drop=("intermediate_size", "max_position_embeddings")),
    "Falcon-H1: multiplied keys": lambda: text(
        "FalconH1",
        0.3 * ROOT,
        None,
        num_key_value_heads=2,
        key_multiplier=0.3,
        mamba_d_ssm=WIDTH,
        mamba_n_heads=4,
        mamba_d_head=12,
        mamba_d_state=8,
    ),
    "ESM: scaled before it is rotated": lambda: text(
        "Esm", ROOT, position_embedding_type="rotary", token_dropout=False
    ),
    "Swin v2: cosines": swin,
    "µP": lambda: layers(mup, 1 / EACH, "dk"),
    "µP by hand": lambda: layers(by_hand(1 / EACH), 1 / EACH, "dk"),
    "no scale, small logits, declared": lambda: Case(nn.Sequential(Declaring(by_hand(1.0), 0.2)), 1.0, "none"),
    "a number of its own": lambda: replace(layers(by_hand(0.2), 0.2, None), remark="unknown"),
    "numbers per head": lambda: layers(per_head, 0.2, None),
    "talking heads": lambda: Case(nn.Sequential(Talking()), ROOT),
    "sinks": lambda: layers(sinks, ROOT),
    "half of the weights": lambda: layers(by_hand(ROOT, after=0.5), ROOT),
    "one head": lambda: Case(nn.Sequential(OneHead()), WIDTH**-0.5),
    "packed, scaled in place": lambda: Case(nn.Sequential(InPlace()), ROOT),
    "nn.MultiheadAttention": lambda: Case(nn.Sequential(TorchMHA(False)), ROOT),
    "nn.MultiheadAttention with weights": lambda: Case(nn.Sequential(TorchMHA(True)), ROOT),
    **{f"attemper, rule {rule}": lambda rule=rule: ours(rule, False) for rule in attemper.RULES},
    **{f"attemper with weights, rule {rule}": lambda rule=rule: ours(rule, True) for rule in attemper.RULES},
}
