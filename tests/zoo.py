"""Small random models of every kind that watch() follows, with padded inputs; and their logits, by independent means."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

WIDTH, HEADS, LENGTH, REAL, TARGETS = 32, 4, 14, 10, 9
COMMON = {
    "num_hidden_layers": 2,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,  # weights large enough that no head is flat
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass
class Subject:
    """A model, how it is called, and which queries of its encoder or decoder are real."""

    model: nn.Module
    inputs: dict[str, Tensor]
    keep: Tensor | None = None  # (B, LENGTH)
    targets: Tensor | None = None  # (B, TARGETS)
    full: Callable[[Subject], list[Tensor]] = field(default=lambda subject: eager_logits(subject))
    replaceable: bool = True

    def run(self) -> Tensor:
        out = self.model(**self.inputs)
        return out if isinstance(out, Tensor) else out[0]


def in_float64(subject: Subject) -> Subject:
    """The same model and inputs, to judge by."""
    inputs = {name: t.double() if t.is_floating_point() else t for name, t in subject.inputs.items()}
    return replace(subject, model=copy.deepcopy(subject.model).double(), inputs=inputs)


def real_tokens(left: bool = False) -> Tensor:
    keep = torch.ones(2, LENGTH, dtype=torch.bool)
    if left:
        keep[1, : LENGTH - REAL] = False
    else:
        keep[1, REAL:] = False
    return keep


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(3, 99, (2, length))


def text(model: nn.Module, left: bool = False, **options) -> Subject:
    keep = real_tokens(left)
    return Subject(model, {"input_ids": tokens(), "attention_mask": keep.long()}, keep, **options)


def config(cls: type, drop: tuple[str, ...] = (), **options):
    return cls(**{name: value for name, value in COMMON.items() if name not in drop}, **options)


def bert() -> Subject:
    return text(transformers.BertModel(config(transformers.BertConfig)))


def gpt2() -> Subject:
    return text(transformers.GPT2Model(config(transformers.GPT2Config)), left=True)


def llama() -> Subject:
    return text(transformers.LlamaModel(config(transformers.LlamaConfig, num_key_value_heads=2)))


def mistral() -> Subject:
    options = {"num_key_value_heads": 2, "sliding_window": 5}
    return text(transformers.MistralModel(config(transformers.MistralConfig, **options)), left=True)


def t5() -> Subject:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": HEADS, "vocab_size": 99}
    model = transformers.T5Model(transformers.T5Config(**sizes, initializer_factor=4.0))
    return sequence_to_sequence(model, {"input_ids": tokens(), "attention_mask": real_tokens().long()}, real_tokens())


def sequence_to_sequence(
    model: nn.Module, source: dict[str, Tensor], keep: Tensor | None, masked: bool = True
) -> Subject:
    targets = torch.ones(2, TARGETS, dtype=torch.bool)
    inputs = {**source, "decoder_input_ids": tokens(TARGETS)}
    if masked:
        targets[0, 6:] = False
        inputs["decoder_attention_mask"] = targets.long()
    return Subject(model, inputs, keep, targets)


def gemma2() -> Subject:
    options = {"num_key_value_heads": 2, "head_dim": 8, "attn_logit_softcapping": 2.0, "sliding_window": 5}
    return text(transformers.Gemma2Model(config(transformers.Gemma2Config, **options)))


def gemma3() -> Subject:
    options = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 1}
    return text(transformers.Gemma3TextModel(config(transformers.Gemma3TextConfig, **options)))


def gpt_neo() -> Subject:
    drop = ("num_hidden_layers", "num_attention_heads")
    options = {"num_layers": 2, "num_heads": HEADS, "attention_types": [[["global", "local"], 1]], "window_size": 5}
    model = transformers.GPTNeoModel(config(transformers.GPTNeoConfig, drop, **options))
    return text(model, replaceable=False)


def opt() -> Subject:
    options = {"ffn_dim": 64, "word_embed_proj_dim": WIDTH, "init_std": 0.4}
    drop = ("intermediate_size", "initializer_range")
    return text(transformers.OPTModel(config(transformers.OPTConfig, drop, **options)))


def bloom() -> Subject:
    sizes = {"hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": 99, "initializer_range": 0.4}
    return text(transformers.BloomModel(transformers.BloomConfig(**sizes)), replaceable=False)


def deberta() -> Subject:
    options = {"pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16, "position_buckets": 8}
    model = transformers.DebertaV2Model(config(transformers.DebertaV2Config, relative_attention=True, **options))
    return text(model, replaceable=False)


def vit() -> Subject:
    drop = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    model = transformers.ViTModel(config(transformers.ViTConfig, drop, image_size=16, patch_size=4))
    return Subject(model, {"pixel_values": torch.randn(2, 3, 16, 16)})


def whisper() -> Subject:
    sizes = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 99, "init_std": 0.4}
    sizes |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "num_mel_bins": 8}
    sizes |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 12, "max_target_positions": 20}
    names = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = transformers.WhisperModel(transformers.WhisperConfig(**sizes, **names))
    return sequence_to_sequence(model, {"input_features": torch.randn(2, 8, 24)}, None)


class Whole(nn.Module):
    """nn.Transformer with its masks in place, so that it is called like the others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(WIDTH, HEADS, 2, 2, 64, dropout=0.0, batch_first=True)
        for parameter in self.inner.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)

    def forward(self, source: Tensor, target: Tensor, hidden: Tensor, hidden_target: Tensor) -> Tensor:
        length = target.shape[1]
        causal = torch.full((length, length), -math.inf).triu(1)
        return self.inner(
            source,
            target,
            tgt_mask=causal,
            src_key_padding_mask=hidden,
            tgt_key_padding_mask=hidden_target,
            memory_key_padding_mask=hidden,
        )


def torch_transformer() -> Subject:
    targets = torch.ones(2, TARGETS, dtype=torch.bool)
    targets[0, 6:] = False
    keep = real_tokens()
    inputs = {"source": torch.randn(2, LENGTH, WIDTH), "target": torch.randn(2, TARGETS, WIDTH)}
    # additive for both, as torch asks for one kind of mask
    inputs |= {"hidden": torch.zeros(2, LENGTH).masked_fill(~keep, -math.inf)}
    inputs |= {"hidden_target": torch.zeros(2, TARGETS).masked_fill(~targets, -math.inf)}
    return Subject(Whole(), inputs, keep, targets, full=mha_logits, replaceable=False)


class Encoder(nn.Module):
    """nn.TransformerEncoder, which packs padded sequences and runs fused layers in eval."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
        for parameter in self.inner.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)

    def forward(self, source: Tensor, hidden: Tensor) -> Tensor:
        return self.inner(source, src_key_padding_mask=hidden)


def torch_encoder(norm_first: bool = False) -> Subject:
    keep = real_tokens()
    inputs = {"source": torch.randn(2, LENGTH, WIDTH), "hidden": ~keep}
    return Subject(Encoder(norm_first), inputs, keep, full=mha_logits, replaceable=False)


def torch_encoder_norm_first() -> Subject:
    return torch_encoder(norm_first=True)


class ByHand(nn.Module):
    """Two layers of attention as tutorials write it, a router beside it, and a vocabulary at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HandWritten() for _ in range(2))
        self.router = nn.Linear(WIDTH, 3)
        self.words = nn.Linear(WIDTH, 99, bias=False)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, keep)
            x = x * self.router(x).softmax(-1).amax(-1, keepdim=True)
        return self.words(x).softmax(-1) @ self.words.weight


class HandWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)
        self.softmax = nn.Softmax(dim=-1)
        nn.init.normal_(self.packed.weight, std=0.4)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.packed(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        scores /= math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~keep[:, None, None, :], torch.finfo(scores.dtype).min)
        scores = scores + torch.full((length, length), -math.inf).triu(1)
        weights = self.softmax(scores)
        self.logits = scores.detach()
        return torch.einsum("bhqk,bhkd->bhqd", weights, v).transpose(1, 2).flatten(2)


def by_hand() -> Subject:
    keep = real_tokens()
    inputs = {"x": torch.randn(2, LENGTH, WIDTH), "keep": keep}

    def logits(subject: Subject) -> list[Tensor]:
        subject.run()
        return [layer.logits for layer in subject.model.layers]

    return Subject(ByHand(), inputs, keep, full=logits, replaceable=False)


ZOO = {
    maker.__name__: maker
    for maker in (bert, gpt2, llama, mistral, t5, gemma2, gemma3, gpt_neo, opt, bloom, deberta, vit, whisper)
} | {maker.__name__: maker for maker in (torch_transformer, torch_encoder, torch_encoder_norm_first, by_hand)}


def make(name: str, seed: int = 0) -> Subject:
    torch.manual_seed(seed)
    subject = ZOO[name]()
    subject.model.eval()
    return subject


@contextmanager
def softmax_inputs():
    """What F.softmax is given: the logits of every eager attention, in order, beside the weights it returns."""
    found: list[tuple[Tensor, Tensor]] = []
    softmax = F.softmax

    def listening(logits: Tensor, *args, **options) -> Tensor:
        weights = softmax(logits, *args, **options)
        if logits.dim() == 4:
            found.append((logits.detach(), weights.detach()))
        return weights

    F.softmax = listening
    try:
        yield found
    finally:
        F.softmax = softmax


def eager_logits(subject: Subject) -> list[Tensor]:
    """The full matrices of a Hugging Face model, from its own eager attention."""
    if not hasattr(subject.model, "set_attn_implementation"):
        pytest.skip("needs transformers 4.54, whose models can be switched to eager; tests/versions has older ones")
    before = subject.model.config._attn_implementation
    if subject.replaceable:
        subject.model.set_attn_implementation("eager")
    with softmax_inputs() as found:
        out = subject.model(**subject.inputs, output_attentions=True)
    if subject.replaceable:
        subject.model.set_attn_implementation(before)
    names = ("encoder_attentions", "decoder_attentions", "cross_attentions", "attentions")
    shown = [weights for name in names for weights in (getattr(out, name, None) or ())]
    assert len(shown) == len(found)
    for _, weights in found:  # what was overheard is what the model itself shows
        assert any(weights.shape == other.shape and torch.equal(weights, other) for other in shown)
    return [logits for logits, _ in found]


def mha_logits(subject: Subject) -> list[Tensor]:
    """The full matrices of every nn.MultiheadAttention, computed by hand from what it was called with."""
    found: list[Tensor] = []

    def look(module: nn.MultiheadAttention, args: tuple, kwargs: dict) -> None:
        query, key = args[0], args[1]
        width = query.shape[-1]
        parts = (module.in_proj_weight.double(), module.in_proj_bias.double())
        q = F.linear(query.double(), parts[0][:width], parts[1][:width])
        k = F.linear(key.double(), parts[0][width : 2 * width], parts[1][width : 2 * width])
        q, k = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k))
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        for mask in (kwargs.get("attn_mask"), kwargs.get("key_padding_mask")):
            if mask is not None:
                shape = mask[:, None, None, :] if mask is kwargs.get("key_padding_mask") else mask
                logits = logits.masked_fill(shape, -math.inf) if mask.dtype == torch.bool else logits + shape
        found.append(logits.detach())

    modules = [part for part in subject.model.modules() if isinstance(part, nn.MultiheadAttention)]
    handles = [part.register_forward_pre_hook(look, with_kwargs=True) for part in modules]
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        subject.run()
    torch.backends.mha.set_fastpath_enabled(True)
    for handle in handles:
        handle.remove()
    return found
