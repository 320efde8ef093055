"""language: the small language model of Python source that several experiments train, and what it is measured against.

Characters of the standard library's own modules, in the order of their names, hashed into every row. Pre-norm blocks.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attemper.errors import InputError

from ..engine.experiment import Cell, Row, generator
from .layers import AttentionLayer
from .loop import fitted
from .runs import PARTS

VOCABULARY = 128
TEXT = 1_000_000  # characters: nine tenths to train on, a fiftieth to choose learning rates by, the rest held out
TRAINING, VALIDATION = TEXT * 9 // 10, TEXT * 92 // 100
WATCHED, UNSEEN = 64, 512  # windows: of each text while training, and held out at the end
INITS = ("small", "unit")
NO_ATTENTION = "no_attention"


@functools.cache
def corpus() -> tuple[Tensor, str]:
    """The text as numbers below 128, and the hash that says which text it was."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= TEXT:
            break
    content = b"".join(parts)[:TEXT]
    if len(content) < TEXT:
        raise InputError("run charlm: this Python has no source files of its standard library. Use one that has.")
    numbers = torch.frombuffer(bytearray(content), dtype=torch.uint8).long().clamp(max=VOCABULARY - 1)
    return numbers, hashlib.sha256(content).hexdigest()[:16]


class TransformerBlock(nn.Module):
    """Attention and two linear layers, each on a normed copy of its input; without attention, the linear layers alone."""

    def __init__(
        self, width: int, heads: int, attention: AttentionLayer | None, std: float, stream: torch.Generator
    ) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention

        def draw(rows: int, columns: int, spread: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=stream, device=stream.device) * spread)

        self.qkv = draw(width, 3 * width, std)
        self.out = draw(width, width, width**-0.5)
        self.up, self.down = draw(width, 4 * width, width**-0.5), draw(4 * width, width, 0.5 * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        if self.attention is not None:
            split = (F.layer_norm(x, (width,)) @ self.qkv).view(batch, length, 3, self.heads, -1)
            query, key, value = split.permute(2, 0, 3, 1, 4)  # each (B, H, L, d)
            attended = self.attention(query, key, value, causal=True)
            x = x + attended.transpose(1, 2).reshape(batch, length, width) @ self.out
        return x + F.gelu(F.layer_norm(x, (width,)) @ self.up) @ self.down


class LanguageModel(nn.Module):
    """Embeddings, blocks, read-out."""

    def __init__(self, cell: Cell, score: str, stream: torch.Generator, kappa: float = 1.0) -> None:
        super().__init__()
        width, heads, length = int(cell["d_model"]), int(cell["heads"]), int(cell["length"])
        std = width**-0.5 if cell["init"] == "unit" else 0.02

        def draw(rows: int, columns: int, spread: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=stream, device=stream.device) * spread)

        self.token, self.position = draw(VOCABULARY, width, 1.0), draw(length, width, 0.3)
        scores = [
            None if score == NO_ATTENTION else AttentionLayer(score, heads, width // heads, layer, kappa)
            for layer in range(int(cell["layers"]))
        ]
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, attention, std, stream) for attention in scores).to(
            stream.device
        )
        self.read = draw(width, VOCABULARY, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.token) + self.position
        for block in self.blocks:
            x = block(x)
        return F.layer_norm(x, x.shape[-1:]) @ self.read


def train(cell: Cell, score: str, kappa: float = 1.0) -> list[Row]:
    """One run. Losses on the way are of the same windows at every step: ``seen`` of the training text, ``validation``,
    ``held_out``. The last row has the held-out loss of many more windows, by part: what rules are compared by."""
    _, name = corpus()
    length, batch, seed, device = int(cell["length"]), int(cell["batch"]), cell["seed"], str(cell["device"])
    size = min(int(cell["text"]), TRAINING)
    model = LanguageModel(cell, score, generator(device, "charlm", cell["d_model"], cell["layers"], seed), kappa)
    data = generator("cpu", "charlm data", length, batch, seed)
    texts = {"seen": (0, size), "validation": (TRAINING, VALIDATION), "held_out": (VALIDATION, TEXT)}
    some = {of: windows(*ends, WATCHED, length, generator("cpu", "charlm", of, length)) for of, ends in texts.items()}
    some = {of: tokens.to(device) for of, tokens in some.items()}

    def loss_on(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def loss_of(step: int) -> Tensor:
        return loss_on(windows(0, size, batch, length, data).to(device))

    @torch.no_grad()
    def evaluate(last: bool) -> dict[str, float]:
        losses = {of: float(loss_on(tokens)) for of, tokens in some.items()}
        if last:
            pieces = unseen(length).to(device).chunk(PARTS)
            losses |= {f"held_out_{index}": float(loss_on(piece)) for index, piece in enumerate(pieces, start=1)}
        return losses

    first = model.blocks[0]
    assert isinstance(first, TransformerBlock)
    rows = fitted(model, float(cell["lr"]), int(cell["steps"]), loss_of, evaluate, {"qkv": first.qkv})
    return [{**row, "bigram": bigram(length), "text_sha256": name} for row in rows]


@functools.cache
def bigram(length: int) -> float:
    """The held-out loss of a bigram model with one added to every count, which a model without attention can reach."""
    text, _ = corpus()
    counts = torch.ones(VOCABULARY, VOCABULARY, dtype=torch.float64, device="cpu")
    pairs = text[: TRAINING - 1] * VOCABULARY + text[1:TRAINING]
    counts += torch.bincount(pairs, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY)
    held = unseen(length)
    return float(-(counts / counts.sum(1, keepdim=True)).log()[held[:, :-1], held[:, 1:]].mean())


def unseen(length: int) -> Tensor:
    """The windows that runs are compared on at the end."""
    return windows(VALIDATION, TEXT, UNSEEN, length, generator("cpu", "charlm test", length))


def windows(start: int, stop: int, count: int, length: int, stream: torch.Generator) -> Tensor:
    """Random windows of one character more than ``length``, from a stretch of the text: (count, length + 1)."""
    text = corpus()[0][start:stop]
    starts = torch.randint(len(text) - length, (count, 1), generator=stream, device="cpu")
    return text[starts + torch.arange(length + 1, device="cpu")]
