"""Additive and dot-product scores on the same tokens, sign by sign: one is bounded by its weights, the other by nothing."""

import torch

import attemper

torch.manual_seed(0)
length, d_k = 12, 64
query, key, value = torch.randn(3, length, d_k)
weight = torch.randn(d_k) / d_k**0.5  # Σ w² is near 1


def row(name: str, additive: torch.Tensor, dot: torch.Tensor) -> None:
    print(f"{name:16}{additive.item():10.2f}{dot.item():12.2f}")


# the definition, term by term, for the first query and key: Σ_e w_e · tanh(q_e + k_e), and no scale
by_hand = sum(weight[e] * torch.tanh(query[0, e] + key[0, e]) for e in range(d_k))
first = attemper.additive_attention(query[:1], key[:1], value[:1], weight).vitals
print(f"by hand {by_hand:.4f}, measured {first.mean.item():.4f}\n")  # one key: the mean logit is that logit

print(f"{'':16}{'additive':>10}{'dot':>12}")
additive = attemper.additive_attention(query, key, value, weight).vitals
dot = attemper.attention(query, key, value).vitals
row("logit std", additive.variance.mean().sqrt(), dot.variance.mean().sqrt())  # tanh narrows; 1/√64 makes it 1
row("entropy", additive.entropy.mean(), dot.entropy.mean())  # twelve equal keys would be ln 12 = 2.48
row("effective keys", additive.effective_keys.mean(), dot.effective_keys.mean())  # exp(entropy) of each row

# tokens 100 times as long: every tanh is ±1 by then, while a product of two grows 100² = 10,000 times
query, key = 100 * query, 100 * key
far = attemper.additive_attention(query, key, value, weight).vitals.peak.max()
row("peak × 100", far, attemper.attention(query, key, value).vitals.peak.max())
bound = weight.abs().sum()  # what the logit would be if every tanh had its weight's sign
print(f"\nAn additive logit stays within ‖w‖₁ = {bound:.2f}, which is not within 1: {bool(1 < far <= bound)}")
