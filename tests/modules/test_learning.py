"""Every rule trains: a two-layer model learns to repeat what it has just read."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import attemper

VOCABULARY, LENGTH, WIDTH = 12, 6, 48


class Block(nn.Module):
    def __init__(self, rule: str, layer: int):
        super().__init__()
        self.norm_attention, self.norm_mix = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = attemper.MultiHeadAttention(WIDTH, 4, rule=rule, layer=layer, batch_first=True, signs="peak")
        self.mix = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm_attention(x), is_causal=True, need_weights=False)[0]
        return x + self.mix(self.norm_mix(x))


class Copier(nn.Module):
    """Token and place in, next token out."""

    def __init__(self, rule: str):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(rule, layer) for layer in range(2)))
        self.read = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.read(self.blocks(self.token(tokens) + self.place(torch.arange(tokens.shape[1]))))


@pytest.mark.parametrize("rule", attemper.RULES)
def test_learns_to_copy(rule):
    torch.manual_seed(0)
    model = Copier(rule)
    gains = [block.attention.gain for block in model.blocks]
    at_first = [None if gain is None else gain.detach().clone() for gain in gains]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    accuracy = 0.0
    for _ in range(600):
        words = torch.randint(VOCABULARY, (32, LENGTH))
        tokens = torch.cat([words, words], 1)
        logits = model(tokens[:, :-1])[:, LENGTH - 1 :]  # from the last word read on, the next is known
        loss = cross_entropy(logits.flatten(0, 1), words.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = (logits.argmax(-1) == words).float().mean().item()
        if accuracy == 1.0:
            break
    assert accuracy > 0.98, f"loss {loss:.3f}, accuracy {accuracy:.2f}"
    for gain, start in zip(gains, at_first, strict=True):
        assert gain is None or not torch.equal(gain, start), "the gain did not learn"
    if rule == "softcap":
        assert all(block.attention.vitals.peak.max() <= 50 for block in model.blocks)
