"""Small models of torch alone, one for each way that torch offers to attend, and the records that watching them makes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper

WIDTH, HEADS, LENGTH = 64, 4, 111
EACH = WIDTH // HEADS
ROOT = EACH**-0.5


class Layer(nn.Module):
    """Causal self-attention whose middle is given: q, k, v as (B, H, L, E) in, the heads' outputs out."""

    num_heads = HEADS

    def __init__(self, meet) -> None:
        super().__init__()
        self.packed, self.out, self.meet = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), meet

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(self.meet(q, k, v).transpose(1, 2).flatten(2))


class Multihead(nn.Module):
    """nn.MultiheadAttention on one sequence."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.inner, self.need_weights = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), need_weights

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x, x, need_weights=self.need_weights)[0]


def by_hand(q: Tensor, k: Tensor, v: Tensor, scale: float = ROOT) -> Tensor:
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 96, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS = {
    "by hand": lambda: nn.Sequential(Layer(by_hand), Layer(by_hand)),
    "SDPA": lambda: nn.Sequential(Layer(fused), Layer(fused)),
    "MultiheadAttention": lambda: nn.Sequential(Multihead(False), Multihead(False)),
    "MultiheadAttention with weights": lambda: nn.Sequential(Multihead(True), Multihead(True)),
    "TransformerEncoder": encoder,
}


def made(name: str, dtype: torch.dtype, device: str, rounded: torch.dtype) -> tuple[nn.Module, Tensor]:
    """A model and its input, in one dtype, of numbers that another dtype holds exactly."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)  # heads that are not flat
    x = torch.randn(3, LENGTH, WIDTH)
    return model.to(rounded).to(device, dtype), x.to(rounded).to(device, dtype)


def run(model: nn.Module, x: Tensor, train: bool) -> list[Tensor]:
    """The output, and with `train` the gradients of all parameters too."""
    model.train(train)
    if not train:
        with torch.no_grad():
            return [model(x)]
    model.zero_grad()
    out = model(x)
    out.float().square().mean().backward()
    return [out.detach(), *(parameter.grad for parameter in model.parameters())]


def watched(model: nn.Module, x: Tensor, train: bool, **options) -> tuple[list[Tensor], attemper.Record]:
    with attemper.watch(model, gradients=train, **options) as watch:
        found = run(model, x, train)
    return found, watch.record
