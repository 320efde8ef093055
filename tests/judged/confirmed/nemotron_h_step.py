"""Nemotron-H clamps its time steps to time_step_min in the pass over a whole text, and not in a step with its cache."""

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
mamba = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 4, "n_groups": 1, "time_step_min": 0.1}
config = NemotronHConfig(
    **sizes, **mamba, vocab_size=99, layers_block_type=["mamba", "attention"], initializer_range=0.2
)
model, ids = NemotronHForCausalLM(config).eval(), torch.randint(3, 90, (1, 12))
with torch.no_grad():
    whole, past = model(ids, use_cache=False).logits, model(ids[:, :10], use_cache=True).past_key_values
    for place in (10, 11):
        step = model(ids[:, place : place + 1], past_key_values=past, use_cache=True).logits[:, 0]
        print(place, f"{(step - whole[:, place]).abs().max():.1e}")  # 1e-06 with time_step_min=0.0
