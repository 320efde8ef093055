"""Models of images: timm, vit-pytorch, open_clip, segment-anything, kornia."""

from __future__ import annotations

import torch

from . import image, model, tokens


@model("timm", layers=2, heads=3)
def vision_transformer():
    import timm

    return timm.models.VisionTransformer(24, 6, embed_dim=24, depth=2, num_heads=3, num_classes=5), (image(),)


@model("timm", layers=2, heads=3)
def vision_transformer_qk_norm():
    import timm

    return timm.models.VisionTransformer(24, 6, embed_dim=24, depth=2, num_heads=3, qk_norm=True, init_values=0.1), (
        image(),
    )


@model("timm", layers=2, heads=3)
def beit():
    import timm

    return timm.models.Beit(24, 6, embed_dim=24, depth=2, num_heads=3, use_rel_pos_bias=True), (image(),)


@model("timm", layers=3, heads=3)
def cait_talking_heads():
    import timm

    return timm.models.Cait(24, 6, embed_dim=24, depth=2, num_heads=3, depth_token_only=1, num_classes=5), (image(),)


@model("timm", layers=2, heads=3)
def eva():
    import timm

    return timm.models.Eva(24, 6, embed_dim=24, depth=2, num_heads=3, use_rot_pos_emb=True, num_classes=5), (image(),)


@model("timm", layers=2, heads={"layers.0": 3, "layers.1": 6})
def swin():
    import timm

    sizes = {"embed_dim": 12, "depths": (1, 1), "num_heads": (3, 6), "window_size": 4, "num_classes": 5}
    return timm.models.SwinTransformer(32, 4, **sizes), (image(32),)


@model("timm", layers=4, heads=3)
def xcit_cross_covariance():
    import timm

    return timm.models.Xcit(24, 8, embed_dim=24, depth=2, num_heads=3, cls_attn_layers=2, num_classes=5), (image(),)


@model("timm", layers=2, heads=3)
def deit_distilled():
    import timm

    made = timm.models.deit.VisionTransformerDistilled(img_size=24, patch_size=6, embed_dim=24, depth=2, num_heads=3)
    return made, (image(),)


@model("timm", layers=1, heads=4)
def attention_pool():
    from timm.layers import AttentionPool2d

    return AttentionPool2d(24, 4, 24, num_heads=4), (torch.randn(2, 24, 4, 4),)


@model("vit_pytorch", layers=2, heads=3)
def vit():
    from vit_pytorch import ViT

    return ViT(image_size=24, patch_size=6, num_classes=5, dim=24, depth=2, heads=3, mlp_dim=32, dim_head=8), (image(),)


@model("vit_pytorch", layers=2, heads=3)
def simple_vit_qk_norm():
    from vit_pytorch.simple_vit_with_qk_norm import SimpleViT

    sizes = {"image_size": 24, "patch_size": 6, "num_classes": 5, "dim": 24, "depth": 2, "heads": 3, "mlp_dim": 32}
    return SimpleViT(**sizes, dim_head=8), (image(),)


@model("vit_pytorch", layers=3, heads=3)
def cait():
    from vit_pytorch.cait import CaiT

    sizes = {"image_size": 24, "patch_size": 6, "num_classes": 5, "dim": 24, "depth": 2, "cls_depth": 1, "heads": 3}
    return CaiT(**sizes, mlp_dim=32, dim_head=8), (image(),)


@model("vit_pytorch", layers=2, heads=3)
def deepvit_reattention():
    from vit_pytorch.deepvit import DeepViT

    sizes = {"image_size": 24, "patch_size": 6, "num_classes": 5, "dim": 24, "depth": 2, "heads": 3, "mlp_dim": 32}
    return DeepViT(**sizes, dim_head=8), (image(),)


@model("vit_pytorch", layers=2, heads=3)
def cct():
    from vit_pytorch.cct import CCT

    sizes = {"img_size": 24, "embedding_dim": 24, "n_conv_layers": 1, "num_layers": 2, "num_heads": 3, "mlp_ratio": 1}
    return CCT(**sizes, num_classes=5), (image(),)


@model("vit_pytorch", layers=2, heads=3)
def parallel_vit_3d():
    from vit_pytorch.simple_vit_3d import SimpleViT

    sizes = {"image_size": 12, "image_patch_size": 4, "frames": 4, "frame_patch_size": 2, "num_classes": 5}
    return SimpleViT(**sizes, dim=24, depth=2, heads=3, mlp_dim=32, dim_head=8), (torch.randn(2, 3, 4, 12, 12),)


@model("vit_pytorch", layers=2, heads=3)
def learned_temperature():
    from vit_pytorch.vit_for_small_dataset import ViT

    sizes = {"image_size": 24, "patch_size": 6, "num_classes": 5, "dim": 24, "depth": 2, "heads": 3, "mlp_dim": 32}
    return ViT(**sizes, dim_head=8), (image(),)


@model("open_clip", layers=4, heads=3)
def clip():
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    seen = CLIPVisionCfg(layers=2, width=24, head_width=8, patch_size=6, image_size=24)
    read = CLIPTextCfg(context_length=11, vocab_size=99, width=24, heads=3, layers=2)
    return CLIP(embed_dim=16, vision_cfg=seen, text_cfg=read), (image(), tokens())


@model("open_clip", layers=3, heads=3)
def attentional_pool():
    from open_clip.transformer import VisionTransformer

    sizes = {"image_size": 24, "patch_size": 6, "width": 24, "layers": 2, "heads": 3, "mlp_ratio": 1, "output_dim": 24}
    return VisionTransformer(**sizes, attentional_pool=True, attn_pooler_queries=5, attn_pooler_heads=3), (image(),)


@model("segment_anything", layers=2, heads=3)
def image_encoder():
    from segment_anything.modeling import ImageEncoderViT

    sizes = {"img_size": 24, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "out_chans": 8}
    return ImageEncoderViT(**sizes, use_rel_pos=True, window_size=3, global_attn_indexes=(1,)), (image(),)


@model("segment_anything", layers=7, heads=4)
def mask_decoder():
    from segment_anything.modeling import TwoWayTransformer

    made = TwoWayTransformer(depth=2, embedding_dim=24, num_heads=4, mlp_dim=32)
    return made, (image(5, 24), image(5, 24), torch.randn(2, 6, 24))


@model("kornia", layers=2, heads=3)
def kornia_vit():
    from kornia.models.vit import VisionTransformer

    return VisionTransformer(image_size=24, patch_size=6, embed_dim=24, depth=2, num_heads=3), (image(),)


@model("kornia", layers=2, heads=3)
def lightglue_block():
    from kornia.feature.lightglue import TransformerLayer

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = TransformerLayer(24, 3, flash=False)

        def forward(self, one, other):
            turn = torch.zeros(2, 2, 1, one.shape[1], 8), torch.zeros(2, 2, 1, other.shape[1], 8)
            return self.layer(one, other, *turn)

    return Both(), (torch.randn(2, 7, 24), torch.randn(2, 5, 24))
