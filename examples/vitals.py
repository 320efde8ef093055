"""The same tokens with the scale 1/√d_k and with none: what one number does to the vital signs of attention."""

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import attemper

torch.manual_seed(0)
query, key, value = torch.randn(3, 4, 12, 64)  # each (H, L, E): 4 heads, 12 tokens, d_k = 64
scaled = attemper.attention(query, key, value).vitals.by_head()  # 1/√d_k is the default
plain = attemper.attention(query, key, value, scale=1.0).vitals.by_head()

signs = {  # name: (one number per head, what it says)
    "logit mean": (lambda head: head.mean, "average logit of a row"),
    "peak logit": (lambda head: head.peak, "largest logit of all"),
    "entropy": (lambda head: head.entropy, "of a row's weights; flat is ln 12 = 2.48"),
    "logit std": (lambda head: head.variance.sqrt(), "spread of the logits of a row"),
    "effective keys": (lambda head: head.effective_keys, "exp(entropy): keys that share the weight"),
    "top weight": (lambda head: head.top_weight, "largest weight of a row"),
    "jacobian trace": (lambda head: head.jacobian_trace, "of the softmax; 0 when one key has it all"),
}
table = Table("scale", "1/√64", "none", "", box=box.SIMPLE_HEAD)
for name, (read, says) in signs.items():
    over_heads = torch.max if name == "peak logit" else torch.mean
    table.add_row(name, *(f"{over_heads(read(summary)):5.2f}" for summary in (scaled, plain)), says)
lines = Table("head", *list(signs)[3:], box=box.SIMPLE_HEAD)
for head in range(4):
    pairs = [(read(scaled)[head], read(plain)[head]) for read, _ in list(signs.values())[3:]]
    lines.add_row(str(head), *(f"{a:.2f} → {b:.2f}" for a, b in pairs))
Console().print(table, lines)

wider = (plain.variance.mean() / scaled.variance.mean()).sqrt()
few, many = plain.effective_keys.mean(), scaled.effective_keys.mean()
print(f"Without the scale the logits spread {wider:.1f} times as wide (√64 = 8),")
print(f"and {few:.1f} of the 12 keys share the weight of a row instead of {many:.1f}.")
