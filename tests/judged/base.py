"""The right models that faults are put into: a language model, an encoder and a translator, as people write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import FAULTS, Case

WIDTH, HEADS, WORDS, LONGEST = 32, 4, 80, 64


class SelfAttention(nn.Module):
    """Attention over several heads, a method for each step: a fault replaces one of them."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2)

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.q_proj(x)), self.split(self.k_proj(source)), self.split(self.v_proj(source))

    def place(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])

    def visible(self, scores: Tensor) -> Tensor:
        """Which keys a query may see, but for padding."""
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        return seen.tril() if self.causal else seen

    def hide(self, scores: Tensor, padding: Tensor | None) -> Tensor:
        scores = scores.masked_fill(~self.visible(scores), torch.finfo(scores.dtype).min)
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None, :] == 0, torch.finfo(scores.dtype).min)
        return scores

    def weigh(self, scores: Tensor, padding: Tensor | None) -> Tensor:
        return self.hide(scores, padding).softmax(-1)

    def join(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, source: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x, x if source is None else source)
        q, k = self.place(q, k)
        return self.out_proj(self.join(self.weigh(self.score(q, k), attention_mask) @ v))


class Bidirectional(SelfAttention):
    causal = False


def angles(length: int, size: int, start: int = 0, device: Any = None) -> Tensor:
    """Angles of rotary positions, (length, size // 2)."""
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    return torch.outer(torch.arange(start, start + length, device=device), frequencies)


def rotate(x: Tensor, turned: Tensor) -> Tensor:
    """Turn the pairs (i, i + size/2) of x, (…, length, size), by angles (length, size // 2)."""
    turned = torch.cat([turned, turned], -1)
    first, second = x.chunk(2, -1)
    return x * turned.cos().to(x.dtype) + torch.cat([-second, first], -1) * turned.sin().to(x.dtype)


class Rotary(SelfAttention):
    def place(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        turned = angles(q.shape[-2], q.shape[-1], device=q.device)
        return rotate(q, turned), rotate(k, turned)


def slopes(heads: int) -> Tensor:
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


class Linear(SelfAttention):
    """ALiBi: scores fall with the distance, by a slope for each head."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(q.shape[-2])
        return super().score(q, k) - slopes(HEADS)[:, None, None] * (places[:, None] - places[None, :]).abs()


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = attention
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), attention_mask)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small language model; layers that place tokens themselves go without a table of positions."""

    positions = True
    max_position_embeddings = LONGEST

    def __init__(self, attention: Callable[[], nn.Module] = SelfAttention) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH) if self.positions else None
        self.blocks = nn.ModuleList(Block(attention()) for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def embed(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        x = self.wte(input_ids)
        if self.wpe is None:
            return x
        places = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        if attention_mask is not None:  # padding on the left takes no position
            places = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        return x + self.wpe(places)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids, attention_mask)
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.lm_head(self.norm(x))


class Placed(GPT):
    """For rotary layers and ALiBi."""

    positions = False


class Encoder(GPT):
    """A bidirectional encoder; returns a row for each token."""

    def __init__(self, attention: Callable[[], nn.Module] = Bidirectional) -> None:
        super().__init__(attention)


def tokens(items: int = 2, length: int = 12) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"input_ids": torch.randint(3, WORDS, (items, length), generator=torch.Generator().manual_seed(11))}


def padded(left: bool = False, length: int = 12, hidden: int = 4) -> Callable[[], dict[str, Tensor]]:
    """Two texts, the second shorter than the first."""

    def made() -> dict[str, Tensor]:
        batch = tokens(2, length)()
        mask = torch.ones_like(batch["input_ids"])
        mask[1, slice(0, hidden) if left else slice(length - hidden, None)] = 0
        return {"input_ids": batch["input_ids"].masked_fill(mask == 0, 0), "attention_mask": mask}

    return made


def rows(items: int = 2, length: int = 12, name: str = "x") -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randn(items, length, WIDTH, generator=torch.Generator().manual_seed(11))}


def fault(
    *classes: str,
    source: str,
    right: Callable[[], nn.Module] | None = None,
    model: Callable[..., nn.Module] | None = None,
    batch: Callable[[], Any] | None = None,
    check: tuple[str, ...] = (),
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Adds a fault: an attention that goes into `model`, or a whole model. Its twin is its parent, if nothing else is given.

    Its name is no hint: the scan sees its parent's.
    """

    def add(made: type[nn.Module]) -> type[nn.Module]:
        name, parent, within = made.__name__, made.__mro__[1], model
        twin = right or parent
        if within is None and issubclass(made, SelfAttention):
            within = Encoder if not made.causal else Placed if issubclass(made, (Rotary, Linear)) else GPT
        made.__name__ = made.__qualname__ = "Model" if parent is nn.Module else parent.__name__
        group = made.__module__.rpartition(".")[2]
        assert name not in FAULTS, name
        build, other = ((lambda: within(made)), (lambda: within(twin))) if within else (made, twin)
        FAULTS[name] = Case(name, group, build, batch or tokens(), classes, other, check, source)
        return made

    return add
