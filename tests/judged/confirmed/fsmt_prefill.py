"""FSMT makes no causal mask when it fills a cache: the first of several decoder tokens see those after them."""

import torch
from transformers import FSMTConfig, FSMTForConditionalGeneration

torch.manual_seed(0)
sides = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64, "init_std": 0.2}
config = FSMTConfig(**sides, **sizes, langs=["en", "de"], src_vocab_size=99, tgt_vocab_size=99)
model = FSMTForConditionalGeneration(config).eval()
ids, target = torch.randint(3, 90, (1, 12)), torch.randint(3, 90, (1, 6))
with torch.no_grad():
    for use_cache in (False, True):
        one = model(ids, decoder_input_ids=target, use_cache=use_cache).logits
        two = model(ids, decoder_input_ids=target[:, :3], use_cache=use_cache).logits
        print(use_cache, f"{(one[:, :3] - two).abs().max():.1e}")  # 1e-06 without a cache, 0.1 and more with one
