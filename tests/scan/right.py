"""Models whose attention is right, though it may look wrong: published families, tiny, and designs that are meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from scan.wrong import (
    EACH,
    HEADS,
    LENGTH,
    SIZES,
    WIDTH,
    WORDS,
    Attention,
    Cached,
    Case,
    Model,
    TorchMHA,
    causal,
    ids,
    llama,
    lower,
    model,
    padded,
    scores,
)


def family(name: str, kind: str = "Model", inputs: Any = None, drop: tuple[str, ...] = (), **options: Any) -> Case:
    """A model of transformers, built from its config."""
    sizes = {key: value for key, value in SIZES.items() if key not in drop}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **options})
    return Case(getattr(transformers, f"{name}{kind}")(config), inputs or {"input_ids": ids()})


def decoder(name: str, **options: Any) -> Case:
    return family(name, "ForCausalLM", **options)


def both(name: str, **options: Any) -> Case:
    """An encoder and a decoder."""
    targets = torch.randint(3, WORDS, (2, 7), generator=torch.Generator().manual_seed(6))
    return family(name, inputs={"input_ids": ids(), "decoder_input_ids": targets}, **options)


BART = {
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
IMAGE = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def pixels(size: int = 16, batch: int = 2) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))}


FAMILIES: dict[str, Callable[[], Case]] = {
    "BERT": lambda: family("Bert"),
    "BERT, padded": lambda: family("Bert", inputs=padded()),
    "BERT as a decoder": lambda: family("Bert", "LMHeadModel", is_decoder=True),
    "RoBERTa": lambda: family("Roberta", max_position_embeddings=80, pad_token_id=1),
    "ALBERT": lambda: family("Albert", embedding_size=16),
    "DistilBERT": lambda: family("DistilBert", dim=WIDTH, n_heads=HEADS, hidden_dim=64, n_layers=2),
    "ELECTRA": lambda: family("Electra", embedding_size=16),
    "DeBERTa v2": lambda: family("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
    "ModernBERT: windows": lambda: family("ModernBert", local_attention=6, global_attn_every_n_layers=2),
    "XLNet": lambda: family(
        "XLNet", drop=("max_position_embeddings",), d_model=WIDTH, n_head=HEADS, n_layer=2, d_inner=64
    ),
    "ESM": lambda: family("Esm", position_embedding_type="rotary", token_dropout=False),
    "GPT-2": lambda: family("GPT2", "LMHeadModel"),
    "GPT-2, padded on the left": lambda: family(
        "GPT2", "LMHeadModel", inputs={name: value.flip(1) for name, value in padded().items()}
    ),
    "GPT-Neo: local layers": lambda: decoder(
        "GPTNeo",
        drop=("num_hidden_layers", "num_attention_heads"),
        num_layers=2,
        num_heads=HEADS,
        attention_types=[[["global", "local"], 1]],
        window_size=5,
    ),
    "GPT-J": lambda: decoder("GPTJ", n_embd=WIDTH, n_layer=2, n_head=HEADS, rotary_dim=8, n_positions=64),
    "GPT-NeoX": lambda: decoder("GPTNeoX"),
    "OPT": lambda: decoder("OPT", ffn_dim=64, word_embed_proj_dim=WIDTH, drop=("intermediate_size",)),
    "BLOOM: ALiBi": lambda: decoder("Bloom", n_layer=2, n_head=HEADS),
    "MPT: ALiBi": lambda: decoder("Mpt", d_model=WIDTH, n_heads=HEADS, n_layers=2, max_seq_len=64, expansion_ratio=2),
    "Falcon": lambda: decoder("Falcon", drop=("intermediate_size",)),
    "Llama": lambda: Case(llama(), {"input_ids": ids(1)}),
    "Llama, eager, padded": lambda: Case(llama(attn_implementation="eager"), padded()),
    "Mistral: a window": lambda: decoder("Mistral", num_key_value_heads=2, sliding_window=5),
    "Mixtral: experts": lambda: decoder("Mixtral", num_key_value_heads=2, **MIXTURE),
    "Qwen 2": lambda: decoder("Qwen2", num_key_value_heads=2),
    "Qwen 3": lambda: decoder("Qwen3", num_key_value_heads=2, head_dim=EACH),
    "Qwen 3, experts": lambda: decoder("Qwen3Moe", num_key_value_heads=2, head_dim=EACH, **MIXTURE),
    "Phi": lambda: decoder("Phi"),
    "Phi 3": lambda: decoder("Phi3", num_key_value_heads=2),
    "Gemma": lambda: decoder("Gemma", num_key_value_heads=2, head_dim=EACH),
    "Gemma 2": lambda: decoder("Gemma2", num_key_value_heads=2, head_dim=EACH, sliding_window=5),
    "Gemma 3: windows": lambda: family(
        "Gemma3Text", "Model", num_key_value_heads=2, head_dim=EACH, sliding_window=5, query_pre_attn_scalar=EACH
    ),
    "gpt-oss: sinks": lambda: decoder(
        "GptOss", num_key_value_heads=2, head_dim=EACH, sliding_window=5, num_local_experts=4, num_experts_per_tok=2
    ),
    "DeepSeek v3: latent attention": lambda: decoder(
        "DeepseekV3",
        num_key_value_heads=HEADS,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
    ),
    "OLMo 2": lambda: decoder("Olmo2"),
    "Granite": lambda: decoder("Granite", num_key_value_heads=2),
    "Cohere": lambda: decoder("Cohere", num_key_value_heads=2),
    "StableLM": lambda: decoder("StableLm", num_key_value_heads=2, partial_rotary_factor=0.5),
    "Starcoder 2": lambda: decoder("Starcoder2", num_key_value_heads=2),
    "Falcon-H1: a Mamba hybrid": lambda: decoder(
        "FalconH1", num_key_value_heads=2, mamba_d_ssm=WIDTH, mamba_n_heads=4, mamba_d_head=12, mamba_d_state=8
    ),
    "Bamba: a Mamba hybrid": lambda: decoder(
        "Bamba",
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=12,
        mamba_d_state=8,
        mamba_expand=2,
    ),
    "Nyströmformer: a convolution of values": lambda: family(
        "Nystromformer", num_landmarks=13, segment_means_seq_len=13, conv_kernel_size=3
    ),
    "ConvBERT: a convolution of tokens": lambda: family("ConvBert", embedding_size=16),
    "Funnel: pooled": lambda: family(
        "Funnel",
        drop=("num_hidden_layers", "hidden_size", "num_attention_heads"),
        block_sizes=[1, 1],
        d_model=WIDTH,
        n_head=HEADS,
        d_head=EACH,
        d_inner=64,
    ),
    "RoFormer as a decoder": lambda: decoder("RoFormer", is_decoder=True, embedding_size=16),
    "Jamba: a Mamba hybrid": lambda: decoder(
        "Jamba",
        num_key_value_heads=2,
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        use_mamba_kernels=False,
    ),
    "CTRL": lambda: family("CTRL", "LMHeadModel", n_embd=WIDTH, n_layer=2, n_head=HEADS, dff=64),
    "PEGASUS-X: blocks and global tokens": lambda: both("PegasusX", **BART, block_size=4, num_global_tokens=2),
    "T5": lambda: both(
        "T5", d_model=WIDTH, d_kv=EACH, d_ff=64, num_layers=2, num_heads=HEADS, decoder_start_token_id=0
    ),
    "BART": lambda: both("Bart", **BART),
    "Marian": lambda: both("Marian", **BART),
    "Pegasus": lambda: both("Pegasus", **BART),
    "Whisper": lambda: family(
        "Whisper",
        inputs={
            "input_features": torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(2)),
            "decoder_input_ids": ids()[:, :9],
        },
        **BART,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=20,
    ),
    "ViT": lambda: family("ViT", inputs=pixels(), drop=IMAGE, image_size=16, patch_size=4),
    "DeiT": lambda: family(
        "DeiT",
        inputs=pixels(),
        drop=IMAGE,
        image_size=16,
        patch_size=4,
    ),
    "BEiT": lambda: family("Beit", inputs=pixels(), drop=IMAGE, image_size=16, patch_size=4),
    "DINOv2": lambda: family("Dinov2", inputs=pixels(), drop=IMAGE, image_size=16, patch_size=4),
    "Swin: shifted windows": lambda: family(
        "Swin",
        inputs=pixels(32),
        drop=(*IMAGE, "hidden_size", "num_hidden_layers", "num_attention_heads"),
        image_size=32,
        patch_size=4,
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "CLIP's text encoder: causal": lambda: family("CLIPText", inputs={"input_ids": ids()}),
    "wav2vec 2": lambda: family(
        "Wav2Vec2",
        inputs={"input_values": torch.randn(2, 800, generator=torch.Generator().manual_seed(2))},
        conv_dim=(16, 16),
        conv_kernel=(10, 5),
        conv_stride=(5, 4),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    ),
}


class PrefixLM(Attention):
    """The first five tokens see one another."""

    def __init__(self) -> None:
        super().__init__(self.prefixed)

    def prefixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = lower(q.shape[2])
        mask[:, :5] = True
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def slots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slot attention: a softmax over the queries, and then a mean over the keys."""
    weights = scores(q, k).softmax(-2)
    return weights / weights.sum(-1, keepdim=True) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length = q.shape[2]
    places = torch.arange(length)
    slopes = 2.0 ** -torch.arange(1, HEADS + 1).view(-1, 1, 1)
    bias = slopes * (places - places[:, None])
    return (scores(q, k) + bias).masked_fill(~lower(length), float("-inf")).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two tokens on either side."""
    places = torch.arange(q.shape[2])
    near = (places - places[:, None]).abs() <= 2
    return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


def finite_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """−100 hides, by measurement: Swin's."""
    mask = torch.zeros(q.shape[2], q.shape[2]).masked_fill(~lower(q.shape[2]), -100.0)
    return (scores(q, k) + mask).softmax(-1) @ v


def zeroed_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Hidden before the softmax, and set to 0 once more after it, as a row of padding would be uniform."""
    keep = (mask[:, None, None, :] * mask[:, None, :, None]).bool()
    weights = scores(q, k).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1)
    return weights.masked_fill(~keep, 0.0) @ v


class Directions(nn.Module):
    """Two attentions: one reads from the left, one from the right (DiSAN)."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards, self.backwards = Attention(causal), Attention(self.reverse)

    @staticmethod
    def reverse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=lower(q.shape[2]).mT)

    def forward(self, x: Tensor) -> Tensor:
        return self.forwards(x) + self.backwards(x)


class Backward(Attention):
    """Reads from the right, and says so."""

    direction = "backward"

    def __init__(self) -> None:
        super().__init__(Directions.reverse)
        self.reverse = True


class LocalHeads(Attention):
    """Each head has a window of its own, and says so."""

    def __init__(self) -> None:
        super().__init__(self.local)
        self.windows = (1, 2, 4, 8)

    def local(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        near = (places - places[:, None]).abs() <= torch.tensor(self.windows).view(-1, 1, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


class Gated(Attention):
    """Weights that a gate makes smaller."""

    def __init__(self) -> None:
        super().__init__(self.gated)
        self.gate = nn.Parameter(torch.randn(HEADS, 1, LENGTH * 2))

    def gated(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q, k).softmax(-1) * self.gate[..., : k.shape[2]].sigmoid() @ v


class RealFormer(nn.Module):
    """The scores of a layer are added to those of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model(self.attend)
        self.last: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.last = scores(q, k) if self.last is None else scores(q, k) + self.last
        return self.last.softmax(-1) @ v

    def forward(self, input_ids: Tensor) -> Tensor:
        self.last = None
        return self.inner(input_ids)


class SequenceFirst(nn.Module):
    """(length, batch, width), as torch's layers take it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0), 2, enable_nested_tensor=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Crossing(nn.Module):
    """A decoder that reads a memory of another length."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, target: Tensor, memory: Tensor) -> Tensor:
        hidden = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        return self.decoder(target, memory, tgt_mask=hidden)


class Sets(nn.Module):
    """A set of vectors: no order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = TorchMHA()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Convolved(Attention):
    """Its input is smoothed by a causal convolution, as in Mamba hybrids and Primer."""

    def __init__(self) -> None:
        super().__init__(causal)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.conv(F.pad(x.mT, (2, 0))).mT)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


DESIGNS: dict[str, Callable[[], Case]] = {
    "a prefix LM": lambda: Case(Model(PrefixLM(), PrefixLM())),
    "bidirectional": lambda: Case(model(F.scaled_dot_product_attention)),
    "causal": lambda: Case(model(causal)),
    "slot attention": lambda: Case(model(slots)),
    "ALiBi by hand": lambda: Case(model(alibi)),
    "a window by hand": lambda: Case(model(window)),
    "−100 hides": lambda: Case(model(finite_mask)),
    "rows of padding set to 0": lambda: Case(model(zeroed_rows), padded()),
    "nn.MultiheadAttention, padded": lambda: Case(Model(TorchMHA(True), TorchMHA(True)), padded()),
    "both directions": lambda: Case(Model(Directions(), Directions())),
    "from the right, declared": lambda: Case(Model(Backward(), Backward())),
    "a window for each head": lambda: Case(Model(LocalHeads(), LocalHeads())),
    "gated weights": lambda: Case(Model(Gated(), Gated())),
    "scores of the layer before": lambda: Case(RealFormer()),
    "(length, batch, width)": lambda: Case(SequenceFirst(), numbers(LENGTH, 2, WIDTH)),
    "a decoder with a memory": lambda: Case(Crossing(), (numbers(2, LENGTH, WIDTH), numbers(2, 7, WIDTH))),
    "a set": lambda: Case(Sets(), numbers(2, LENGTH, WIDTH)),
    "a causal convolution": lambda: Case(Model(Convolved(), Convolved())),
    "a KV cache": lambda: Case(Cached(lambda seen: seen), ids(1)),
}
RIGHT = {**FAMILIES, **DESIGNS}
OFTEN = (
    *("BERT, padded", "RoBERTa", "ModernBERT: windows", "XLNet", "GPT-2", "BLOOM: ALiBi", "Llama"),
    *(
        "Mixtral: experts",
        "Gemma 3: windows",
        "gpt-oss: sinks",
        "DeepSeek v3: latent attention",
        "T5",
        "Whisper",
        "ViT",
    ),
    *("Swin: shifted windows", "Falcon-H1: a Mamba hybrid", *DESIGNS),
)
"""What make test runs; the rest is exhaustive."""
