"""A small model learns to copy, watched: which heads sharpen, and how large the gradients of their queries are."""

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import attemper

TOKENS, LENGTH, WIDTH = 32, 12, 64


class Copy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(24, WIDTH)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 128, 0.0, batch_first=True), 2)
        self.out = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.out(self.layers(hidden, mask=causal, is_causal=True))


torch.manual_seed(0)
optimizer = torch.optim.Adam((model := Copy()).parameters(), lr=3e-3)
table = Table("step", "loss", "layer", "effective keys per head", "|dq| per head", box=box.SIMPLE_HEAD)
with attemper.watch(model, every=50, optimizer=optimizer, gradients=True) as watch:
    for step in range(201):
        tokens = torch.randint(TOKENS, (32, LENGTH)).repeat(1, 2)
        second = model(tokens)[:, LENGTH - 1 : -1]
        loss = nn.functional.cross_entropy(second.mT, tokens[:, LENGTH:])
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        for entry in watch.record.filter(steps=step).entries:  # empty on the steps between
            keys, slopes = ([row[sign] for row in entry.to_dicts()] for sign in ("effective_keys", "grad_q_rms"))
            cells = " ".join(f"{n:5.2f}" for n in keys), " ".join(f"{n:.0e}" for n in slopes)
            table.add_row(str(step), f"{loss.item():.3f}", entry.layer[7:15], *cells)
Console(highlight=False).print(table)
