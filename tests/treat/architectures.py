"""One layer of many architectures, built from tiny configurations, with what is needed to call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import attemper

WIDTH = 16
SMALL: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
GPT: dict[str, Any] = {
    "n_embd": WIDTH,
    "n_head": 4,
    "n_layer": 1,
    "vocab_size": 64,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FALCON: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
Built = tuple[nn.Module, dict[str, Tensor]]


def tokens(length: int = 9) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 60, (2, length))}


def text(model: type, config: type, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        return model(config(**options)), tokens()

    return build


def small(model: type, config: type, heads: int = 4, keys: int | None = None, **options: Any) -> Callable[[], Built]:
    grouped = {} if keys is None else {"num_key_value_heads": keys}
    return text(model, config, **{**SMALL, "num_attention_heads": heads, **grouped, **options})


def t5() -> Built:
    sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    return hf.T5Model(hf.T5Config(**sizes)), {**tokens(), "decoder_input_ids": tokens(7)["input_ids"]}


def bart() -> Built:
    sizes = {
        "d_model": WIDTH,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "vocab_size": 64,
        "max_position_embeddings": 32,
    }
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    words = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 2}
    return hf.BartModel(hf.BartConfig(**sizes, **heads, **words)), {
        **tokens(),
        "decoder_input_ids": tokens(7)["input_ids"],
    }


def vit() -> Built:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}
    model = hf.ViTModel(hf.ViTConfig(**sizes, image_size=8, patch_size=4), add_pooling_layer=False)
    return model, {"pixel_values": torch.randn(2, 3, 8, 8)}


def multihead(need_weights: bool) -> Callable[[], Built]:
    def build() -> Built:
        module = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        x, y = torch.randn(2, 9, WIDTH), torch.randn(2, 7, WIDTH)
        return module, {"query": x, "key": y, "value": y, "need_weights": need_weights}

    return build


def ours(**options: Any) -> Callable[[], Built]:
    def build() -> Built:
        x = torch.randn(2, 9, WIDTH)
        module = attemper.MultiHeadAttention(WIDTH, 4, batch_first=True, **options)
        return module, {"query": x, "key": x, "value": x, "need_weights": False}

    return build


class Odd(nn.Module):
    """A layout that no list names: (d, E, H) for q, one parameter per head for k, everything in the block itself."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.wq = nn.Parameter(torch.randn(WIDTH, 4, 4) / 4)
        self.wk = nn.ParameterList([nn.Parameter(torch.randn(4, WIDTH) / 4) for _ in range(4)])
        self.offset = nn.Parameter(torch.randn(4, 1, 4) / 4)
        self.wv = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q = torch.einsum("bld,deh->bhle", y, self.wq) + self.offset
        k = torch.stack([y @ weight.T for weight in self.wk], 1)
        v = self.wv(y).unflatten(-1, (4, 4)).transpose(1, 2)
        weights = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        return x + (weights @ v).transpose(1, 2).flatten(2)


class OneHead(nn.Module):
    """One head behind a norm that q and k share, with a low rank q: only the last factor is to be scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        k, v = self.kv(y).chunk(2, -1)
        q = self.up(self.down(y))
        return nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]


def alone(module: Callable[[], nn.Module]) -> Callable[[], Built]:
    return lambda: (module(), {"x": torch.randn(2, 9, WIDTH)})


# every head is clipped on its own, exactly
PER_HEAD: dict[str, Callable[[], Built]] = {
    "llama": small(hf.LlamaModel, hf.LlamaConfig, keys=4),
    "llama, grouped keys": small(hf.LlamaModel, hf.LlamaConfig, keys=2),
    "llama, one key head": small(hf.LlamaModel, hf.LlamaConfig, keys=1),
    "llama, biased": small(hf.LlamaModel, hf.LlamaConfig, keys=2, attention_bias=True),
    "mistral": small(hf.MistralModel, hf.MistralConfig, keys=2, sliding_window=5),
    "mixtral": small(hf.MixtralModel, hf.MixtralConfig, keys=2, num_local_experts=2, num_experts_per_tok=1),
    "qwen2": small(hf.Qwen2Model, hf.Qwen2Config, keys=2),
    "gpt2": text(hf.GPT2Model, hf.GPT2Config, **GPT),
    "gpt_bigcode": text(hf.GPTBigCodeModel, hf.GPTBigCodeConfig, **GPT),
    "gpt_neo": text(
        hf.GPTNeoModel,
        hf.GPTNeoConfig,
        hidden_size=WIDTH,
        num_layers=1,
        num_heads=4,
        attention_types=[[["global"], 1]],
        vocab_size=64,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt_neox": small(hf.GPTNeoXModel, hf.GPTNeoXConfig, rotary_pct=0.5),
    "gptj": text(hf.GPTJModel, hf.GPTJConfig, **GPT, rotary_dim=2),
    "codegen": text(hf.CodeGenModel, hf.CodeGenConfig, **GPT, rotary_dim=2),
    "falcon, one key head": text(hf.FalconModel, hf.FalconConfig, **FALCON, multi_query=True),
    "falcon, all heads": text(hf.FalconModel, hf.FalconConfig, **FALCON, multi_query=False, bias=True),
    "falcon, new": text(
        hf.FalconModel, hf.FalconConfig, **FALCON, new_decoder_architecture=True, num_kv_heads=2, parallel_attn=True
    ),
    "phi": small(hf.PhiModel, hf.PhiConfig, keys=4),
    "phi3": small(hf.Phi3Model, hf.Phi3Config, keys=2),
    "stablelm": small(hf.StableLmModel, hf.StableLmConfig, keys=2),
    "starcoder2": small(hf.Starcoder2Model, hf.Starcoder2Config, keys=2),
    "opt": text(
        hf.OPTModel,
        hf.OPTConfig,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        ffn_dim=16,
        vocab_size=64,
        max_position_embeddings=32,
        word_embed_proj_dim=WIDTH,
    ),
    "bert": small(hf.BertModel, hf.BertConfig),
    "roberta": small(hf.RobertaModel, hf.RobertaConfig),
    "albert": small(hf.AlbertModel, hf.AlbertConfig, embedding_size=8),
    "bart": bart,
    "vit": vit,
    "deepseek_v3": small(hf.DeepseekV3Model, hf.DeepseekV3Config, q_lora_rank=8, **LATENT),
    "deepseek_v3, q whole": small(hf.DeepseekV3Model, hf.DeepseekV3Config, q_lora_rank=None, **LATENT),
    "olmo": small(hf.OlmoModel, hf.OlmoConfig, keys=2),
    "olmo2": small(hf.Olmo2Model, hf.Olmo2Config, keys=4),
    "cohere": small(hf.CohereModel, hf.CohereConfig, keys=2),
    "cohere, norm": small(hf.CohereModel, hf.CohereConfig, keys=2, use_qk_norm=True),
    "gemma": small(hf.GemmaModel, hf.GemmaConfig, keys=1, head_dim=8),
    "nn.MultiheadAttention": multihead(need_weights=False),
    "nn.MultiheadAttention, weights": multihead(need_weights=True),
    "attemper": ours(),
    "attemper, grouped": ours(kv_heads=2),
    "attemper, learned": ours(rule="learned"),
    "attemper, norm": ours(rule="qk_norm"),
    "odd": alone(Odd),
    "one head": alone(OneHead),
}

# one gain serves all heads: the layer is clipped by its smallest factor
BY_LAYER: dict[str, Callable[[], Built]] = {
    "qwen3": small(hf.Qwen3Model, hf.Qwen3Config, keys=2, head_dim=8),
    "gemma3": small(hf.Gemma3TextModel, hf.Gemma3TextConfig, keys=2, head_dim=8, query_pre_attn_scalar=1),
    "gemma3n": small(
        hf.Gemma3nTextModel,
        hf.Gemma3nTextConfig,
        keys=2,
        head_dim=8,
        num_kv_shared_layers=0,
        layer_types=["full_attention"],
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=4,
        laurel_rank=2,
        intermediate_size=[16],
        activation_sparsity_pattern=[0.0],
        altup_num_inputs=2,
    ),
    "persimmon": small(hf.PersimmonModel, hf.PersimmonConfig, qk_layernorm=True),
}

# the clip is not exact: numbers are added to the scores
BIASED: dict[str, Callable[[], Built]] = {
    "t5": t5,
    "bloom": text(hf.BloomModel, hf.BloomConfig, hidden_size=WIDTH, n_layer=1, n_head=4, vocab_size=64),
    "mpt": text(hf.MptModel, hf.MptConfig, d_model=WIDTH, n_layers=1, n_heads=4, vocab_size=64, max_seq_len=32),
    "falcon, alibi": text(hf.FalconModel, hf.FalconConfig, **FALCON, alibi=True, multi_query=False),
}

# the record's peak is not q·k: a softcap is undone, a sink is left alone
OTHER: dict[str, Callable[[], Built]] = {
    "gemma2": small(
        hf.Gemma2Model, hf.Gemma2Config, keys=2, head_dim=8, attn_logit_softcapping=50.0, query_pre_attn_scalar=1
    ),
    "gpt_oss": small(
        hf.GptOssModel,
        hf.GptOssConfig,
        keys=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["full_attention"],
    ),
}
