"""Models of transformers and diffusers."""

from __future__ import annotations

from typing import Any

import torch

from . import image, model, tokens

SMALL = {
    "vocab_size": 99,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def built(config: str, name: str, given: dict[str, Any] | None = None, how: str | None = None, **more: Any) -> Any:
    """A model of transformers from its config, and what it is called with: tokens, if nothing else is given."""
    import transformers

    settings = getattr(transformers, config)(**{**SMALL, **more})
    if how is not None:
        settings._attn_implementation = how
    return getattr(transformers, name)(settings), given or {"input_ids": tokens(), "use_cache": False}


@model("transformers", layers=2, heads=3)
def gpt2():
    return built("GPT2Config", "GPT2LMHeadModel", n_embd=24, n_layer=2, n_head=3, n_positions=64)


@model("transformers", layers=2, heads=3)
def gpt2_eager():
    return built("GPT2Config", "GPT2LMHeadModel", how="eager", n_embd=24, n_layer=2, n_head=3, n_positions=64)


@model("transformers", layers=2, heads=6)
def llama_grouped():
    return built("LlamaConfig", "LlamaForCausalLM", num_attention_heads=6, num_key_value_heads=3)


@model("transformers", layers=2, heads=6)
def qwen3():
    return built("Qwen3Config", "Qwen3ForCausalLM", num_attention_heads=6, num_key_value_heads=3, head_dim=8)


@model("transformers", layers=2, heads=6, cap=20.0)
def gemma2_capped():
    more = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "attn_logit_softcapping": 20.0}
    return built("Gemma2Config", "Gemma2ForCausalLM", how="eager", sliding_window=6, **more)


@model("transformers", layers=3, heads=6)
def gemma3_windows():
    more = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "num_hidden_layers": 3}
    return built("Gemma3TextConfig", "Gemma3ForCausalLM", sliding_window=5, **more)


@model("transformers", layers=2, heads=3)
def bert():
    return built("BertConfig", "BertModel", {"input_ids": tokens()})


@model("transformers", layers=2, heads=3)
def bert_decoder():
    return built("BertConfig", "BertLMHeadModel", is_decoder=True)


@model("transformers", layers=6, heads=3)
def t5():
    given = {"input_ids": tokens(), "decoder_input_ids": tokens(7), "use_cache": False}
    return built(
        "T5Config", "T5ForConditionalGeneration", given, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3
    )


@model("transformers", layers=6, heads=3)
def bart():
    sides = {
        f"{side}_{what}": 3 if "heads" in what else 2
        for side in ("encoder", "decoder")
        for what in ("layers", "attention_heads")
    }
    given = {"input_ids": tokens(), "decoder_input_ids": tokens(7), "use_cache": False}
    return built("BartConfig", "BartModel", given, d_model=24, encoder_ffn_dim=32, decoder_ffn_dim=32, **sides)


@model("transformers", layers=2, heads=3)
def bloom_alibi():
    return built("BloomConfig", "BloomForCausalLM", n_layer=2, n_head=3)


@model("transformers", layers=2, heads=4)
def falcon_rotary():
    more = {"num_attention_heads": 4, "hidden_size": 32, "new_decoder_architecture": False, "multi_query": False}
    return built("FalconConfig", "FalconForCausalLM", **more)


@model("transformers", layers=2, heads=3)
def deepseek_latent():
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    experts = {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
    }
    more = {"topk_group": 1, "first_k_dense_replace": 2, "num_key_value_heads": 3, **latent, **experts}
    return built("DeepseekV3Config", "DeepseekV3ForCausalLM", **more)


@model("transformers", layers=2, heads=6, other="(mlp|router|gate)")
def mixtral():
    more = {"num_attention_heads": 6, "num_key_value_heads": 3, "num_local_experts": 3, "num_experts_per_tok": 2}
    return built("MixtralConfig", "MixtralForCausalLM", sliding_window=None, **more)


@model("transformers", layers=1, heads=3, reused=True)
def albert_shared():
    return built("AlbertConfig", "AlbertModel", {"input_ids": tokens()}, embedding_size=16, num_hidden_layers=2)


@model("transformers", layers=2, heads=3)
def deberta():
    more = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}
    return built("DebertaV2Config", "DebertaV2Model", {"input_ids": tokens()}, **more)


@model("transformers", layers=2, heads=3)
def vit():
    return built("ViTConfig", "ViTModel", {"pixel_values": image()}, image_size=24, patch_size=6)


@model("transformers", layers=2, heads={"layers.0": 2, "layers.1": 4})
def swin():
    import transformers

    more = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
    return transformers.SwinModel(transformers.SwinConfig(**more)), {"pixel_values": torch.randn(3, 3, 32, 32)}


@model("transformers", layers=2, heads=3)
def wav2vec2():
    more = {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    more |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
    return built("Wav2Vec2Config", "Wav2Vec2Model", {"input_values": torch.randn(2, 200)}, **more)


@model("transformers", layers=2, heads=3)
def longformer():
    return built("LongformerConfig", "LongformerModel", {"input_ids": tokens(16)}, attention_window=4)


@model("transformers", layers=2, heads=3)
def pegasus_x_encoder():
    import transformers

    more = {
        "d_model": 24,
        "encoder_layers": 2,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 32,
        "block_size": 4,
    }
    settings = transformers.PegasusXConfig(
        vocab_size=99, num_global_tokens=2, stagger_local_blocks=False, pad_token_id=0, **more
    )
    return transformers.PegasusXModel(settings).encoder, {"input_ids": tokens(16)}


@model("diffusers", layers=2, heads=3)
def dit():
    import diffusers

    sizes = {"num_attention_heads": 3, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8}
    made = diffusers.DiTTransformer2DModel(**sizes, patch_size=2, norm_num_groups=2, num_embeds_ada_norm=10)
    return made, {"hidden_states": image(8, 4), "timestep": torch.tensor([3, 5]), "class_labels": torch.tensor([1, 2])}


@model("diffusers", layers=8, heads=3)
def unet_conditioned():
    import diffusers

    sizes = {"sample_size": 8, "block_out_channels": (12, 24), "layers_per_block": 1, "cross_attention_dim": 16}
    blocks = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D")}
    blocks["up_block_types"] = ("CrossAttnUpBlock2D", "UpBlock2D")
    made = diffusers.UNet2DConditionModel(**sizes, **blocks, norm_num_groups=4, attention_head_dim=3)
    return made, {"sample": image(8, 4), "timestep": torch.tensor(3), "encoder_hidden_states": torch.randn(2, 7, 16)}


@model("diffusers", layers=3, heads=3)
def flux():
    import diffusers

    sizes = {
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 3,
    }
    made = diffusers.FluxTransformer2DModel(
        **sizes, patch_size=1, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8)
    )
    given = {"hidden_states": torch.randn(2, 9, 4), "encoder_hidden_states": torch.randn(2, 5, 32)}
    given |= {"pooled_projections": torch.randn(2, 32), "timestep": torch.tensor([1.0, 2.0])}
    return made, given | {"img_ids": torch.randn(9, 3), "txt_ids": torch.randn(5, 3)}


@model("diffusers", layers=2, heads=3)
def sd3():
    import diffusers

    sizes = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8}
    made = diffusers.SD3Transformer2DModel(
        **sizes,
        num_attention_heads=3,
        caption_projection_dim=24,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    given = {"hidden_states": image(8, 4), "encoder_hidden_states": torch.randn(2, 5, 32)}
    return made, given | {"pooled_projections": torch.randn(2, 64), "timestep": torch.tensor([1.0, 2.0])}


@model("diffusers", layers=1, heads=1)
def autoencoder():
    import diffusers

    made = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2)
    return made.encoder, (image(8),)


@model("diffusers", layers=2, heads=3)
def prior():
    import diffusers

    sizes = {"num_attention_heads": 3, "attention_head_dim": 8, "num_layers": 2, "embedding_dim": 12}
    made = diffusers.PriorTransformer(**sizes, num_embeddings=5, additional_embeddings=4)
    given = {"hidden_states": torch.randn(2, 12), "timestep": torch.tensor(3), "proj_embedding": torch.randn(2, 12)}
    return made, given | {"encoder_hidden_states": torch.randn(2, 5, 12)}
