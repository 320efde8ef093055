"""Models of text, proteins and speech."""

from __future__ import annotations

import torch
from torch import nn

from . import model, tokens


def written(**more):
    """A language model of x-transformers."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=24, depth=2, heads=3, attn_dim_head=8, **more)
    return TransformerWrapper(num_tokens=99, max_seq_len=16, attn_layers=layers), (tokens(),)


@model("x_transformers", layers=2, heads=3)
def decoder():
    return written()


@model("x_transformers", layers=2, heads=3)
def decoder_flash_rotary():
    return written(attn_flash=True, rotary_pos_emb=True)


@model("x_transformers", layers=2, heads=3)
def decoder_alibi():
    return written(alibi_pos_bias=True)


@model("x_transformers", layers=2, heads=3)
def decoder_qk_norm():
    return written(attn_qk_norm=True, attn_qk_norm_dim_scale=True)


@model("x_transformers", layers=2, heads=3)
def decoder_top_k():
    return written(attn_sparse_topk=3)


@model("x_transformers", layers=2, heads=3)
def decoder_talking_heads():
    return written(attn_pre_talking_heads=True)


@model("x_transformers", layers=2, heads=3)
def decoder_memory():
    return written(attn_num_mem_kv=4)


@model("litgpt", layers=2, heads=4)
def grouped():
    from litgpt import GPT, Config

    sizes = {"n_layer": 2, "n_head": 4, "n_query_groups": 2, "n_embd": 32, "block_size": 16, "vocab_size": 99}
    return GPT(Config(**sizes, padded_vocab_size=99, rotary_percentage=1.0, bias=False)), (tokens(),)


@model("litgpt", layers=2, heads=4)
def qk_norm():
    from litgpt import GPT, Config

    sizes = {"n_layer": 2, "n_head": 4, "n_query_groups": 4, "n_embd": 32, "block_size": 16, "vocab_size": 99}
    return GPT(Config(**sizes, padded_vocab_size=99, norm_qk=True, norm_class_name="RMSNorm")), (tokens(),)


@model("litgpt", layers=2, heads=4, cap=20.0)
def capped():
    from litgpt import GPT, Config

    sizes = {"n_layer": 2, "n_head": 4, "n_query_groups": 4, "n_embd": 32, "block_size": 16, "vocab_size": 99}
    return GPT(Config(**sizes, padded_vocab_size=99, attention_logit_softcapping=20.0)), (tokens(),)


@model("whisper", layers=6, heads=3)
def speech():
    from whisper.model import ModelDimensions, Whisper

    made = Whisper(ModelDimensions(8, 12, 24, 3, 2, 99, 16, 24, 3, 2))
    nn.init.normal_(made.decoder.positional_embedding)  # it is left to a checkpoint
    return made, (torch.randn(2, 8, 24), tokens())


@model("esm", layers=2, heads=3)
def esm2():
    from esm import ESM2

    return ESM2(num_layers=2, embed_dim=24, attention_heads=3), (torch.randint(4, 24, (2, 11)),)


@model("esm", layers=4, heads=3)
def msa():
    from argparse import Namespace

    from esm import Alphabet
    from esm.model.msa_transformer import MSATransformer

    given = {"layers": 2, "embed_dim": 24, "ffn_embed_dim": 32, "attention_heads": 3, "max_positions": 64}
    given |= {"num_layers": 2, "logit_bias": True, "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
    given |= {
        "max_tokens_per_msa": 2**14,
        "max_tokens": 2**14,
        "embed_positions_msa": False,
        "embed_positions_msa_dim": 24,
    }
    made = MSATransformer(Namespace(**given), Alphabet.from_architecture("msa_transformer"))
    return made, (torch.randint(4, 24, (2, 4, 7)),)


@model("local_attention", layers=2, heads=3)
def local():
    from local_attention import LocalTransformer

    sizes = {"num_tokens": 99, "max_seq_len": 24, "dim": 24, "depth": 2, "local_attn_window_size": 6, "heads": 3}
    return LocalTransformer(**sizes, dim_head=8, num_residual_streams=1), (tokens(24),)


@model("linear_attention_transformer", layers=1, heads=3)
def linear_with_local():
    from linear_attention_transformer import LinearAttentionTransformerLM

    sizes = {"num_tokens": 99, "dim": 24, "heads": 3, "depth": 1, "max_seq_len": 24, "n_local_attn_heads": 3}
    return LinearAttentionTransformerLM(**sizes, local_attn_window_size=6, causal=True), (tokens(24),)


@model("curated_transformers", layers=2, heads=3)
def bert():
    from curated_transformers.layers import AttentionMask
    from curated_transformers.models import BERTConfig, BERTEncoder

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"embedding_width": 24, "hidden_width": 24, "intermediate_width": 32, "n_hidden_layers": 2}
            self.encoder = BERTEncoder(BERTConfig(**sizes, n_attention_heads=3, n_pieces=99, n_positions=16))

        def forward(self, pieces):
            return self.encoder(
                pieces, AttentionMask(torch.ones_like(pieces, dtype=torch.bool))
            ).last_hidden_layer_state

    return Called(), (tokens(),)


@model("bert_pytorch", layers=2, heads=3)
def bert_by_hand():
    from bert_pytorch import BERT

    return BERT(99, 24, 2, 3), (tokens(), torch.ones(2, 11, dtype=torch.long))


@model("conformer", layers=2, heads=3)
def conformer():
    from conformer import Conformer

    return Conformer(24, depth=2, dim_head=8, heads=3, conv_kernel_size=5), (torch.randn(2, 11, 24),)


@model("coca_pytorch", layers=5, heads=3, shifted=True)
def coca():
    from coca_pytorch import CoCa

    class Eyes(nn.Module):
        def forward(self, pixels):
            return pixels.flatten(2).mT

    sizes = {
        "dim": 24,
        "num_tokens": 99,
        "unimodal_depth": 2,
        "multimodal_depth": 1,
        "image_dim": 12,
        "num_img_queries": 5,
    }
    return CoCa(**sizes, img_encoder=Eyes(), heads=3, dim_head=8), (tokens(), torch.randn(2, 12, 3, 3))


@model("flamingo_pytorch", layers=2, heads=3, shifted=True)
def resampler():
    from flamingo_pytorch import PerceiverResampler

    return PerceiverResampler(dim=24, depth=2, dim_head=8, heads=3, num_latents=5, num_media_embeds=2), (
        torch.randn(2, 1, 7, 24),
    )


@model("rtdl_revisiting_models", layers=2, heads=3)
def ft_transformer():
    from rtdl_revisiting_models import FTTransformer

    more = {
        **FTTransformer.get_default_kwargs(2),
        "d_block": 24,
        "attention_n_heads": 3,
        "d_out": 2,
        "_is_default": False,
    }
    return FTTransformer(n_cont_features=7, cat_cardinalities=[], **more), (torch.randn(2, 7), None)
