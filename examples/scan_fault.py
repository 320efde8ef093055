"""A model with a common mistake, √d_model instead of √d_k, scanned."""

import math

import torch
from torch import nn

import attemper


class Attention(nn.Module):
    def __init__(self, d_model: int, heads: int, right: bool) -> None:
        super().__init__()
        self.heads, self.right = heads, right
        self.q, self.k, self.v = (nn.Linear(d_model, d_model) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (self.heads, x.shape[-1] // self.heads)
        q, k, v = (part(x).unflatten(-1, split).transpose(1, 2) for part in (self.q, self.k, self.v))
        width = q.shape[-1] if self.right else x.shape[-1]  # the mistake
        weights = torch.softmax(q @ k.mT / math.sqrt(width), dim=-1)
        return x + (weights @ v).transpose(1, 2).flatten(2)


torch.manual_seed(0)
for right in (True, False):
    model = nn.Sequential(*(Attention(256, 8, right) for _ in range(2)))
    for name, parameter in model.named_parameters():
        if name.endswith(("q.weight", "k.weight")):
            nn.init.normal_(parameter, std=1 / 16)  # so that heads choose
    found = attemper.scan(model, torch.randn(1, 64, 256))
    print(found)
    print("-" * 60)
