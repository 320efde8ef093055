"""The scale rule of an existing PyTorch model, swapped in place on the same parameters, and what that does to its attention."""

import copy

import torch

import attemper

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(d_model=512, nhead=8, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).eval()
tokens = torch.randn(4, 128, 512)
with torch.no_grad():
    expected = model(tokens)

print("rule         output moved by  logit std  top weight  effective keys of 128")
for rule in ("sqrt_dk", "none", "dk", "sqrt_dmodel", "qk_norm"):
    swapped = copy.deepcopy(model)
    for place, block in enumerate(swapped.layers):
        block.self_attn = attemper.MultiHeadAttention.from_torch(block.self_attn, rule=rule, layer=place, signs="all")
    with torch.no_grad():
        moved = (swapped(tokens) - expected).abs().max()
    heads = swapped.layers[0].self_attn.vitals.by_head()  # layer 0: one number per head
    spread, top, keys = (sign.mean() for sign in (heads.variance.sqrt(), heads.top_weight, heads.effective_keys))
    print(f"{rule:11}  {moved:15.1e}  {spread:9.2f}  {top:10.2f}  {keys:21.1f}")
print("The first rule is what the model had: only rounding moved.")
