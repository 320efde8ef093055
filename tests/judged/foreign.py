"""Models of other packages: those of tests/third_party, and more that are called as their authors' own examples do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from third_party.models import PACKAGES

from . import INNOCENTS, Case

DRAWN = dict.fromkeys(("slot_attention", "reformer_pytorch", "sinkhorn_transformer"), ("random_output",))
"""Packages whose models draw in evaluation mode by design: first slots, hashes, and an order of buckets."""


def seeded(build: Callable[[], tuple[torch.nn.Module, Any]], part: int) -> Callable[[], Any]:
    """The model or its inputs, of a function that makes both."""

    def made() -> Any:
        torch.manual_seed(7)
        return build()[part]

    return made


def add(package: str, name: str, build: Callable[[], tuple[torch.nn.Module, Any]]) -> None:
    title = f"{package}:{name}"
    assert title not in INNOCENTS, title
    INNOCENTS[title] = Case(title, package, seeded(build, 0), seeded(build, 1), declared=DRAWN.get(package, ()))


def foreign(build: Callable[[], tuple[torch.nn.Module, Any]]) -> Callable[[], tuple[torch.nn.Module, Any]]:
    package, _, name = build.__name__.partition("__")
    add(package, name, build)
    return build


for package, models in PACKAGES.items():
    for one in models:
        add(package, one.name, one.build)


def picture(size: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, size, size)


def words(length: int = 14, most: int = 60) -> torch.Tensor:
    return torch.randint(1, most, (2, length))


SMALL = {"image_size": 32, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48}


@foreign
def vit_pytorch__registers_and_sinusoids():
    from vit_pytorch.simple_vit_with_register_tokens import SimpleViT

    return SimpleViT(**SMALL, patch_size=8, dim_head=8), (picture(),)


@foreign
def vit_pytorch__deep():
    from vit_pytorch.deepvit import DeepViT

    return DeepViT(**SMALL, patch_size=8, dim_head=8), (picture(),)


@foreign
def vit_pytorch__qk_norm():
    from vit_pytorch.simple_vit_with_qk_norm import SimpleViT

    return SimpleViT(**SMALL, patch_size=8, dim_head=8), (picture(),)


@foreign
def vit_pytorch__parallel():
    from vit_pytorch.parallel_vit import ViT

    return ViT(**SMALL, patch_size=8, dim_head=8, num_parallel_branches=2), (picture(),)


@foreign
def vit_pytorch__small_dataset():
    from vit_pytorch.vit_for_small_dataset import ViT

    return ViT(**SMALL, patch_size=8, dim_head=8), (picture(),)


@foreign
def vit_pytorch__tokens_to_token():
    from vit_pytorch.t2t import T2TViT

    return T2TViT(image_size=32, num_classes=5, dim=32, depth=2, heads=4, mlp_dim=48, t2t_layers=((7, 4), (3, 2))), (
        picture(),
    )


@foreign
def vit_pytorch__cross():
    from vit_pytorch.cross_vit import CrossViT

    sides = {
        f"{side}_{what}": number
        for side, patch in (("sm", 8), ("lg", 16))
        for what, number in (
            ("dim", 24),
            ("patch_size", patch),
            ("enc_depth", 1),
            ("enc_heads", 3),
            ("enc_mlp_dim", 32),
            ("enc_dim_head", 8),
        )
    }
    return CrossViT(
        image_size=32, num_classes=5, depth=1, cross_attn_depth=1, cross_attn_heads=3, cross_attn_dim_head=8, **sides
    ), (picture(),)


@foreign
def vit_pytorch__three_dimensions():
    from vit_pytorch.vit_3d import ViT

    sizes = {"image_size": 16, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, "num_classes": 5}
    return ViT(**sizes, dim=32, depth=2, heads=4, mlp_dim=48, dim_head=8), (torch.randn(2, 3, 4, 16, 16),)


@foreign
def vit_pytorch__one_dimension():
    from vit_pytorch.vit_1d import ViT

    return ViT(seq_len=24, patch_size=4, num_classes=5, dim=32, depth=2, heads=4, mlp_dim=48, dim_head=8), (
        torch.randn(2, 3, 24),
    )


@foreign
def vit_pytorch__regions():
    from vit_pytorch.regionvit import RegionViT

    return RegionViT(
        dim=(8, 16, 24, 32), depth=(1, 1, 1, 1), window_size=2, num_classes=5, tokenize_local_3_conv=False
    ), (picture(64),)


@foreign
def vit_pytorch__max():
    from vit_pytorch.max_vit import MaxViT

    return MaxViT(num_classes=5, dim_conv_stem=16, dim=16, dim_head=8, depth=(1,), window_size=4), (picture(),)


@foreign
def vit_pytorch__scalable():
    from vit_pytorch.scalable_vit import ScalableViT

    sizes = {
        "num_classes": 5,
        "dim": 16,
        "heads": (2, 4),
        "depth": (1, 1),
        "ssa_dim_key": 8,
        "reduction_factor": (4, 2),
        "window_size": (4, 2),
    }
    return ScalableViT(**sizes), (picture(64),)


@foreign
def x_transformers__encoder_decoder():
    from x_transformers import XTransformer

    sides = {
        f"{side}_{what}": number
        for side in ("enc", "dec")
        for what, number in (("num_tokens", 60), ("depth", 1), ("heads", 4), ("max_seq_len", 16))
    }
    made = XTransformer(dim=32, **sides)
    return made, {"src": words(), "tgt": words(9), "mask": torch.ones(2, 14, dtype=torch.bool)}


def written(kind: str = "Decoder", **more: Any) -> tuple[torch.nn.Module, Any]:
    import x_transformers

    outer = {
        name: more.pop(name) for name in ("use_abs_pos_emb", "num_memory_tokens", "scaled_sinu_pos_emb") if name in more
    }
    layers = getattr(x_transformers, kind)(dim=32, depth=2, heads=4, attn_dim_head=8, **more)
    return x_transformers.TransformerWrapper(num_tokens=60, max_seq_len=64, attn_layers=layers, **outer), (words(),)


for title, options in {
    "encoder_relative": {"kind": "Encoder", "rel_pos_bias": True, "use_abs_pos_emb": False},
    "encoder_memory_tokens": {"kind": "Encoder", "num_memory_tokens": 4},
    "decoder_one_key_head": {"attn_one_kv_head": True},
    "decoder_two_key_heads": {"attn_kv_heads": 2, "rotary_pos_emb": True, "use_abs_pos_emb": False},
    "decoder_gated": {"attn_gate_values": True, "attn_on_attn": True},
    "decoder_off_by_one": {"attn_add_zero_kv": True},
    "decoder_sinusoids": {"scaled_sinu_pos_emb": True, "use_rmsnorm": True},
    "decoder_shifted_tokens": {"shift_tokens": 1, "alibi_pos_bias": True, "use_abs_pos_emb": False},
    "decoder_value_residual": {"add_value_residual": True},
    "decoder_softclamped": {"attn_softclamp_logits": True, "rotary_xpos": True, "use_abs_pos_emb": False},
    "decoder_sandwich": {"sandwich_norm": True, "ff_glu": True},
    "decoder_macaron": {"macaron": True, "dynamic_pos_bias": True, "use_abs_pos_emb": False},
    "prefix_decoder": {"kind": "PrefixDecoder"},
    "decoder_selective": {"attn_selective": True},
    "decoder_laser": {"attn_laser": True},
}.items():
    add("x_transformers", title, lambda options=options: written(**options))


@foreign
def torch__transformer():
    made = torch.nn.Transformer(32, 4, 1, 1, 48, 0.0, batch_first=True)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(7)
    return made, {"src": torch.randn(2, 9, 32), "tgt": torch.randn(2, 7, 32), "tgt_mask": mask}


@foreign
def torch__decoder_layer():
    made = torch.nn.TransformerDecoderLayer(32, 4, 48, 0.0, batch_first=True)
    return made, {"tgt": torch.randn(2, 7, 32), "memory": torch.randn(2, 9, 32)}
