"""Scaled dot-product attention from scratch, three lines of arithmetic, beside attemper.attention()."""

import math

import torch

import attemper

torch.manual_seed(0)
n, d_k = 3, 64
Q, K, V = torch.randn(3, n, d_k)

scores = Q @ K.T / math.sqrt(d_k)  # [3, 3]: every query against every key
weights = torch.exp(scores) / torch.exp(scores).sum(-1, keepdim=True)
context = weights @ V  # [3, 64]: each row a mixture of the values

output, vitals = attemper.attention(Q, K, V)
print(f"largest difference in the output   {(output - context).abs().max():.1e}")

# the vital signs are numbers of the same matrix, which attention() never stores
entropy = -(weights * weights.log()).sum(-1)
print(f"largest difference in the entropy  {(vitals.entropy - entropy).abs().max():.1e}")
print(f"variance of the scores, unscaled   {(Q @ K.T).var(correction=0):.1f}   (theory: d_k = {d_k})")
print(f"variance of the scores, scaled     {scores.var(correction=0):.2f}   (theory: 1)")
for row, word in enumerate(("Love", "Apple", "phones")):
    print(f"{word:7} top weight {vitals.top_weight[row]:.2f}, as if it saw {vitals.effective_keys[row]:.1f} of 3 keys")
