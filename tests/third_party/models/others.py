"""Models of latents, volumes, series and graphs."""

from __future__ import annotations

import torch
from torch import nn

from . import image, model, tokens


@model("perceiver_pytorch", layers=4, heads=3)
def perceiver():
    from perceiver_pytorch import Perceiver

    sizes = {"num_freq_bands": 2, "depth": 2, "max_freq": 4.0, "input_channels": 3, "num_latents": 5, "latent_dim": 24}
    heads = {"cross_heads": 3, "latent_heads": 3, "cross_dim_head": 8, "latent_dim_head": 8}
    return Perceiver(**sizes, **heads, num_classes=5), (torch.randn(2, 6, 6, 3),)


@model("perceiver_pytorch", layers=4, heads=3)
def perceiver_io():
    from perceiver_pytorch import PerceiverIO

    sizes = {"dim": 12, "queries_dim": 10, "depth": 2, "num_latents": 5, "latent_dim": 24, "cross_heads": 3}
    made = PerceiverIO(**sizes, latent_heads=3, cross_dim_head=8, latent_dim_head=8)
    return made, {"data": torch.randn(2, 9, 12), "queries": torch.randn(2, 4, 10)}


@model("denoising_diffusion_pytorch", layers=5, heads=3)
def unet():
    from denoising_diffusion_pytorch import Unet

    return Unet(12, dim_mults=(1, 2), attn_heads=3, attn_dim_head=8, full_attn=True), (image(8), torch.tensor([3, 5]))


@model("denoising_diffusion_pytorch", layers=5, heads=3)
def unet_flash():
    from denoising_diffusion_pytorch import Unet

    made = Unet(12, dim_mults=(1, 2), attn_heads=3, attn_dim_head=8, full_attn=True, flash_attn=True)
    return made, (image(8), torch.tensor([3, 5]))


@model("denoising_diffusion_pytorch", layers=6, heads=3)
def karras_unet():
    from denoising_diffusion_pytorch.karras_unet import KarrasUnet

    sizes = {"image_size": 8, "dim": 24, "dim_max": 24, "channels": 3, "num_downsamples": 1, "num_blocks_per_stage": 1}
    return KarrasUnet(**sizes, attn_dim_head=8, attn_res=(4,)), (image(8), torch.tensor([0.3, 0.5]))


@model("monai", layers=2, heads=3)
def volume_vit():
    from monai.networks.nets import ViT

    sizes = {"in_channels": 1, "img_size": (8, 8, 8), "patch_size": (4, 4, 4), "hidden_size": 24, "mlp_dim": 32}
    return ViT(**sizes, num_layers=2, num_heads=3, classification=True), (torch.randn(2, 1, 8, 8, 8),)


@model("monai", layers=4, heads=3)
def decoder_cross():
    from monai.networks.nets import DecoderOnlyTransformer

    sizes = {"num_tokens": 99, "max_seq_len": 16, "attn_layers_dim": 24, "attn_layers_depth": 2, "attn_layers_heads": 3}
    return DecoderOnlyTransformer(**sizes, with_cross_attention=True), {"x": tokens(), "context": torch.randn(2, 5, 24)}


@model("monai", layers=4, heads=3)
def swin_windows():
    from monai.networks.nets.swin_unetr import SwinTransformer

    sizes = {"in_chans": 1, "embed_dim": 12, "window_size": (2, 2), "patch_size": (2, 2), "depths": (1, 1, 1, 1)}
    return SwinTransformer(**sizes, num_heads=(3, 3, 3, 3), spatial_dims=2), (torch.randn(2, 1, 32, 32),)


@model("monai", layers=4, heads=3)
def diffusion_unet():
    from monai.networks.nets import DiffusionModelUNet

    sizes = {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (12, 24), "num_res_blocks": 1}
    made = DiffusionModelUNet(**sizes, attention_levels=(False, True), norm_num_groups=4, num_head_channels=8)
    return made, (torch.randn(2, 1, 8, 8), torch.tensor([3, 5]))


@model("torch_geometric", layers=2, heads=3)
def gps():
    import torch_geometric.nn as graphs

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(graphs.GPSConv(24, graphs.GCNConv(24, 24), heads=3) for _ in range(2))

        def forward(self, x, edges):
            for layer in self.layers:
                x = layer(x, edges)
            return x

    return Graph(), (torch.randn(9, 24), torch.randint(0, 9, (2, 20)))


@model("torch_geometric", layers=1, heads=3)
def transformer_conv():
    from torch_geometric.nn import TransformerConv

    return TransformerConv(24, 8, heads=3), (torch.randn(9, 24), torch.randint(0, 9, (2, 20)))


@model("torch_geometric", layers=2, heads=3)
def set_transformer():
    from torch_geometric.nn.aggr import SetTransformerAggregation

    made = SetTransformerAggregation(24, num_encoder_blocks=1, num_decoder_blocks=0, heads=3)
    return made, (torch.randn(10, 24), torch.tensor([0] * 5 + [1] * 5))


@model("slot_attention", layers=1, heads=1)
def slots():
    from slot_attention import SlotAttention

    return SlotAttention(num_slots=5, dim=24, iters=2), (torch.randn(2, 9, 24),)


@model("slot_attention", layers=1, heads=3)
def slots_of_heads():
    from slot_attention import MultiHeadSlotAttention

    return MultiHeadSlotAttention(num_slots=5, dim=24, heads=3, dim_head=8, iters=2), (torch.randn(2, 9, 24),)


@model("invariant_point_attention", layers=1, heads=3)
def invariant_points():
    from invariant_point_attention import InvariantPointAttention

    made = InvariantPointAttention(dim=24, heads=3, scalar_key_dim=8, scalar_value_dim=8, require_pairwise_repr=False)
    turns = torch.eye(3).expand(2, 7, 3, 3)
    return made, {"single_repr": torch.randn(2, 7, 24), "rotations": turns, "translations": torch.randn(2, 7, 3)}


@model("axial_attention", layers=2, heads=3)
def axial():
    from axial_attention import AxialAttention

    return AxialAttention(dim=24, dim_index=1, heads=3, num_dimensions=2), (torch.randn(2, 24, 5, 4),)


@model("nystrom_attention", layers=1, heads=3)
def nystrom():
    from nystrom_attention import NystromAttention

    made = NystromAttention(dim=24, dim_head=8, heads=3, num_landmarks=4, residual=False)
    return made, (torch.randn(2, 12, 24),)


@model("x_clip", layers=4, heads=3)
def contrastive():
    from x_clip import CLIP

    sizes = {
        "dim_text": 24,
        "dim_image": 24,
        "dim_latent": 16,
        "num_text_tokens": 99,
        "text_enc_depth": 2,
        "text_seq_len": 11,
    }
    more = {"text_heads": 3, "text_dim_head": 8, "visual_enc_depth": 2, "visual_heads": 3, "visual_dim_head": 8}
    made = CLIP(**sizes, **more, visual_image_size=24, visual_patch_size=6, visual_patch_dropout=0.0)
    return made, {"text": tokens(), "image": image(), "return_loss": False}


@model("ring_attention_pytorch", layers=2, heads=3)
def ring():
    from ring_attention_pytorch import RingTransformer

    sizes = {"num_tokens": 99, "dim": 24, "depth": 2, "causal": True, "dim_head": 8, "heads": 3, "bucket_size": 4}
    return RingTransformer(**sizes, ring_attn=False, striped_ring_attn=False, force_regular_attn=True), (tokens(12),)


@model("sinkhorn_transformer", layers=2, heads=4)
def sinkhorn():
    from sinkhorn_transformer import SinkhornTransformer

    return SinkhornTransformer(dim=32, heads=4, depth=2, bucket_size=5, max_seq_len=15), (torch.randn(2, 15, 32),)


@model("reformer_pytorch", layers=2, heads=3)
def hashed():
    from reformer_pytorch import Reformer

    return Reformer(dim=24, depth=2, heads=3, bucket_size=4, n_hashes=2, full_attn_thres=8), (
        torch.randn(2, 16, 24, requires_grad=True),
    )


@model("egnn_pytorch", layers=2, heads=3)
def graph_global():
    from egnn_pytorch.egnn_pytorch import GlobalLinearAttention

    made = GlobalLinearAttention(dim=24, heads=3, dim_head=8)
    return made, (torch.randn(2, 7, 24), torch.randn(2, 5, 24))


@model("chronos", layers=3, heads=3)
def patched_forecast():
    import transformers
    from chronos.chronos_bolt import ChronosBoltModelForForecasting

    bolt = {"context_length": 24, "prediction_length": 4, "input_patch_size": 4, "input_patch_stride": 4}
    sizes = {"d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 3}
    settings = transformers.T5Config(**sizes, vocab_size=8, pad_token_id=0, decoder_start_token_id=0)
    settings.chronos_config = {**bolt, "quantiles": [0.1, 0.5, 0.9], "use_reg_token": False}
    return ChronosBoltModelForForecasting(settings), {"context": torch.randn(2, 24)}


@model("lightly", layers=2, heads=3)
def masked_decoder():
    from lightly.models.modules import MAEDecoderTIMM

    sizes = {"num_patches": 16, "patch_size": 6, "embed_dim": 24, "decoder_embed_dim": 24, "decoder_depth": 2}
    return MAEDecoderTIMM(**sizes, decoder_num_heads=3), (torch.randn(2, 17, 24),)
