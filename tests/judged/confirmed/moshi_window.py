"""Moshi's cache keeps the keys of its window, and the pass over a whole text has no window: from there on, steps differ."""

import torch
from transformers import MoshiConfig, MoshiForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
config = MoshiConfig(**sizes, vocab_size=99, ffn_dim=48, sliding_window=6, initializer_range=0.2)
model, ids = MoshiForCausalLM(config).eval(), torch.randint(3, 90, (1, 12))
with torch.no_grad():
    whole, past = model(ids, use_cache=False).logits, None
    for place in range(12):
        step = model(ids[:, place : place + 1], past_key_values=past, use_cache=True)
        past = step.past_key_values
        print(
            place, f"{(step.logits[:, 0] - whole[:, place]).abs().max():.1e}"
        )  # 1e-06 up to place 5, 2 to 4 from 6 on
