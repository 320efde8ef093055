"""A small GPT in a loop of its own, on the text of Python's library: attention beside the loss, and exploding heads clipped."""

import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.integrations import monitor

WIDTH, LAYERS, LENGTH, BATCH = 64, 3, 64, 16
FILES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:150]
TEXT = torch.tensor(bytearray(b"".join(file.read_bytes() for file in FILES)[:1_500_000]), dtype=torch.long)


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.between = heads, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (made(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for made in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(heads) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of predicting each next byte."""
        hidden = self.norm(self.blocks(self.bytes(text[:, :-1]) + self.places.weight))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())


def batches(seed: int, steps: int) -> list[Tensor]:
    starts = torch.randint(len(TEXT) - LENGTH - 1, (steps, BATCH), generator=torch.Generator().manual_seed(seed))
    return list(TEXT.unfold(0, LENGTH + 1, 1)[starts])


if __name__ == "__main__":
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with monitor(model, every=20, path="run.jsonl", clip=100) as watching:  # attemper report run.jsonl shows it
        for step, text in enumerate(batches(0, 21 if "--quick" in sys.argv else 501)):
            loss = model(text)
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            watching.step(loss=loss)
            for row in watching.record.filter(steps=step).to_dicts()[:1]:  # none on the steps between
                print(f"step {step:3}  loss {loss:.2f}  first head: largest logit {row['peak']:.1f}")
