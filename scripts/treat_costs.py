"""What treatments cost: qk_clip() of 32 layers of 32 heads, and projections() of a 12-layer GPT-2, on this machine's CPU.

OMP_NUM_THREADS=1 python scripts/treat_costs.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import attemper

TIMES = 9


def seconds(run: Callable[[], object], times: int = TIMES) -> list[float]:
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return found


def clip() -> None:
    """32 layers of 32 heads: nothing above tau, one head, and every head."""
    model = nn.Sequential(*(Attention(256, 32) for _ in range(32)))
    x = torch.randn(1, 16, 256)
    attemper.projections(model, x)
    with torch.no_grad(), attemper.watch(model) as watch:
        model(x)
    peaks = sorted(row["peak"] for row in watch.record.to_dicts())
    for words, tau in (
        ("nothing above tau", 2 * peaks[-1]),
        ("one head above tau", (peaks[-1] + peaks[-2]) / 2),
        ("half of the heads above tau", peaks[len(peaks) // 2]),
    ):
        found = seconds(lambda tau=tau: attemper.qk_clip(model, watch.record, tau))  # type: ignore[misc]
        print(f"qk_clip of 32 × 32 heads, {words}: {1e3 * statistics.median(found):.2f} ms")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def projections() -> None:
    """A GPT-2 of 12 layers and width 768, by 8 tokens."""
    import transformers

    model = transformers.GPT2Model(transformers.GPT2Config())
    tokens = torch.randint(0, 50257, (1, 8))
    found = seconds(lambda: attemper.projections(model, tokens), 3)
    print(f"projections of a 12-layer GPT-2: {statistics.median(found):.2f} s (least {min(found):.2f})")


if __name__ == "__main__":
    torch.manual_seed(0)
    clip()
    projections()
