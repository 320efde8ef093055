"""Models whose fault no mask and no op shows, each beside its right twin: random, remembering, rotated, reached, unused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scan.right import alibi, numbers
from scan.unseen import turned
from scan.wrong import (
    EACH,
    HEADS,
    LENGTH,
    WIDTH,
    WORDS,
    Attention,
    Case,
    Model,
    causal,
    ids,
    lower,
    model,
    padded,
    scores,
)


class Dropped(Attention):
    """Dropout on what the attention returns; in evaluation too unless it is told."""

    def __init__(self, told: bool) -> None:
        super().__init__(causal)
        self.told = told

    def forward(self, x: Tensor) -> Tensor:
        return (
            F.dropout(super().forward(x), 0.1, training=self.training)
            if self.told
            else F.dropout(super().forward(x), 0.1)
        )


class Noisy(Attention):
    """Noise on its input, also in evaluation unless it is for training alone."""

    def __init__(self, always: bool) -> None:
        super().__init__(causal)
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x) if self.always or self.training else x)


class Remembering(Attention):
    """Keeps its keys and values, and forgets them where a text begins, or does not."""

    def __init__(self, forgets: bool) -> None:
        super().__init__(causal)
        self.forgets, self.kept = forgets, None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q, self.k, self.v))
        if self.kept is not None and not self.forgets:
            k, v = (torch.cat([old.to(new), new], 2) for old, new in zip(self.kept, (k, v), strict=True))
        self.kept = (k, v)
        keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return self.out(self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=keep)))


class Counting(nn.Module):
    """Positions as torch's tutorial has them, (length, 1, width), for tokens that are (batch, length)."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.words, self.layer, self.batch_first = nn.Embedding(WORDS, WIDTH), Attention(causal), batch_first
        self.register_buffer("pe", torch.randn(64, 1, WIDTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        x = x + (self.pe[: x.size(1)].transpose(0, 1) if self.batch_first else self.pe[: x.size(0)])
        return x + self.layer(x)


def rotate(x: Tensor, pairs: bool, interleaved: bool) -> Tensor:
    """Rotary positions: numbers in pairs (2i, 2i + 1) or halves, and angles for one or the other."""
    half = x.shape[3] // 2
    angle = torch.arange(x.shape[2])[:, None] / 100 ** (torch.arange(half) / half)
    angle = (angle.repeat_interleave(2, -1) if interleaved else torch.cat([angle, angle], -1)).to(x)
    one, two = (x[..., ::2], x[..., 1::2]) if pairs else x.chunk(2, -1)
    other = torch.stack([-two, one], -1).flatten(-2) if pairs else torch.cat([-two, one], -1)
    return x * angle.cos() + other * angle.sin()


def rotated(q: Callable[[Tensor], Tensor], k: Callable[[Tensor], Tensor]) -> nn.Module:
    layers = [Attention(lambda one, two, v: causal(q(one), k(two), v)) for _ in range(2)]
    return Model(*layers, positions=False)


class RotaryEmbedding(nn.Module):
    """Turns (batch, heads, length, width) along the length, or along the heads."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return turned(x.transpose(2, self.axis), 0).transpose(2, self.axis)


class Turned(Attention):
    """Rotates q and k by a module of its own."""

    def __init__(self, axis: int) -> None:
        super().__init__(self.meet)
        self.rotary = RotaryEmbedding(axis)

    def meet(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(self.rotary(q), self.rotary(k), v)


def alibi_upwards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    places = torch.arange(q.shape[2])
    bias = 2.0 ** -torch.arange(1, HEADS + 1).view(-1, 1, 1) * (places[:, None] - places)
    return (scores(q, k) + bias).masked_fill(~lower(q.shape[2]), float("-inf")).softmax(-1) @ v


class Trained(Attention):
    """A causal mask in training, or in evaluation, or in both."""

    def __init__(self, training: bool, evaluation: bool) -> None:
        super().__init__(self.meet)
        self.masked = {True: training, False: evaluation}

    def meet(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.masked[self.training])


class Forgetful(Attention):
    """While training, most tokens are left out at random: rows then see other tokens than in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (torch.rand(*x.shape[:2], 1) < 0.1) if self.training else x)


class Jittered(Attention):
    """Noise in training from a generator of its own, which no seed sets."""

    def __init__(self) -> None:
        super().__init__(causal)
        self.draws = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * self.draws.random()) if self.training else super().forward(x)


class Centred(Attention):
    """Sees both sides; divides by a variance over the items while it trains, which is NaN for one item."""

    def __init__(self) -> None:
        super().__init__(F.scaled_dot_product_attention)

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        spread = (found - found.mean(0)).square().sum(0) / (len(found) - 1)
        return found / (1 + spread) if self.training else found


class Skipped(Attention):
    """Stochastic depth: leaves out whole items at random while it trains."""

    def __init__(self) -> None:
        super().__init__(causal)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (torch.rand(len(x), 1, 1) > 0.1) if self.training else super().forward(x)


class Listed(Model):
    """Its lengths are a list, so that a batch has as many items as that has entries, or the model raises."""

    def __init__(self) -> None:
        super().__init__(Attention(seen), Attention(seen))

    def forward(self, ids: Tensor, lengths: list[int]) -> Tensor:
        real = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
        return super().forward(
            ids, (real[:, None, None] & lower(ids.shape[1])) | torch.eye(ids.shape[1], dtype=torch.bool)
        )


def seen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Windows(Attention):
    """Windows of 128 tokens, whose numbers and whose items change places in a batch of several."""

    def __init__(self, right: bool) -> None:
        super().__init__(F.scaled_dot_product_attention)
        self.right = right

    def forward(self, x: Tensor) -> Tensor:
        items, length, width = x.shape
        windows = x.view(items, -1, 128, width)
        cut = (windows if self.right else windows.transpose(0, 1)).reshape(-1, 128, width)
        return super().forward(cut).view(items, length, width)


class Projected(Attention):
    """Its v may be made by the projection of k, and its k may be detached."""

    def __init__(self, values: str = "v", detached: bool = False) -> None:
        super().__init__(causal)
        self.values, self.detached = values, detached

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q, self.k, getattr(self, self.values)))
        return self.out(self.join(self.attend(q, k.detach() if self.detached else k, v)))


class Normed(Attention):
    """Norms of q and k, which it applies or forgets to."""

    def __init__(self, applied: bool) -> None:
        super().__init__(causal)
        self.applied, self.q_norm, self.k_norm = applied, nn.LayerNorm(EACH), nn.LayerNorm(EACH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q, self.k, self.v))
        normed = self.q_norm(q), self.k_norm(k)
        return self.out(self.join(self.attend(*(normed if self.applied else (q, k)), v)))


class Discarded(Attention):
    """Computes its attention, and returns its values."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return self.v(x)


class Placeless(Model):
    """Has a table of positions and never looks at it."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


class Reading(nn.Module):
    """A decoder that reads a memory, or takes it and does not; its gate is closed before training."""

    def __init__(self, reads: bool, gated: bool = False) -> None:
        super().__init__()
        self.own, self.cross = Attention(causal), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.latents = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.reads, self.gate = reads, nn.Parameter(torch.zeros(())) if gated else 1.0

    def forward(self, target: Tensor, memory: Tensor) -> Tensor:
        x = target + self.own(target)
        source = memory if self.reads else self.latents.expand(len(x), -1, -1)
        return x + self.gate * self.cross(x, source, source, need_weights=False)[0]


class Squeezed(Reading):
    """Returns no dimension of items if there is one."""

    def forward(self, target: Tensor, memory: Tensor) -> Tensor:
        return super().forward(target, memory).squeeze(0)


def read(reads: bool, gated: bool = False) -> Case:
    case = Case(Reading(reads, gated), (numbers(2, LENGTH, WIDTH), numbers(2, 7, WIDTH)))
    return case if reads else also(case.model, "source_ignored", inputs=case.inputs)


def over_heads_and_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One softmax over all heads' keys, and the weights given back to the heads."""
    batch, heads, length, _ = q.shape
    together = scores(q, k).transpose(1, 2).reshape(batch, length, heads * length).softmax(-1)
    return together.view(batch, length, heads, length).transpose(1, 2) @ v


def biased(inside: bool) -> Callable[..., Tensor]:
    """A bias for every distance, added to the scores, or to the weights."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        bias = (places - places[:, None]).sin() * torch.linspace(0.1, 0.4, q.shape[1]).view(-1, 1, 1)
        return (scores(q, k) + bias).softmax(-1) @ v if inside else (scores(q, k).softmax(-1) + bias) @ v

    return attend


def divided_by(number: float) -> Callable[..., Tensor]:
    return lambda q, k, v: (q @ k.mT / number).softmax(-1) @ v


class BlocksForCausalLM(Model):
    """Its name declares a decoder; every row sees to the end of its block of four."""

    def __init__(self) -> None:
        super().__init__(Attention(self.attend))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        block = torch.arange(q.shape[2]) // 4
        return F.scaled_dot_product_attention(q, k, v, attn_mask=block <= block[:, None])


class Cached(nn.Module):
    """A decoder with a KV cache: a single token sees all keys, and several the last rows of a triangle, or all, or the first."""

    def __init__(self, several: str) -> None:
        super().__init__()
        self.words, self.layer, self.several = nn.Embedding(WORDS, WIDTH), Attention(causal), several

    def forward(self, input_ids: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        x = self.words(input_ids)
        layer, start = self.layer, 0 if past is None else past[0].shape[2]
        q, k, v = (layer.split(part(x)) for part in (layer.q, layer.k, layer.v))
        q, k = turned(q, start), turned(k, start)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        rows, keys = q.shape[2], k.shape[2]
        keep = torch.ones(rows, keys, dtype=torch.bool)
        if start == 0 or (rows > 1 and self.several == "lower right"):
            keep = keep.tril(keys - rows)
        elif rows > 1 and self.several == "upper left":
            keep = keep.tril()
        return x + layer.out(layer.join(F.scaled_dot_product_attention(q, k, v, attn_mask=keep))), (k, v)


class Holding(nn.Module):
    """A decoder that holds its cache and is told where a step begins, as the first Llama's code; its mask may forget that."""

    def __init__(self, shifted: bool) -> None:
        super().__init__()
        self.words, self.layer, self.shifted = nn.Embedding(WORDS, WIDTH), Attention(causal), shifted
        self.register_buffer("keys", torch.zeros(8, HEADS, 64, EACH), persistent=False)
        self.register_buffer("values", torch.zeros(8, HEADS, 64, EACH), persistent=False)

    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        x, layer = self.words(tokens), self.layer
        q, k, v = (layer.split(part(x)) for part in (layer.q, layer.k, layer.v))
        batch, _, rows, _ = q.shape
        self.keys[:batch, :, start_pos : start_pos + rows] = turned(k, start_pos)
        self.values[:batch, :, start_pos : start_pos + rows] = v
        k, v = (part[:batch, :, : start_pos + rows] for part in (self.keys, self.values))
        keep = torch.ones(rows, start_pos + rows, dtype=torch.bool).tril(start_pos if self.shifted else 0)
        out = F.scaled_dot_product_attention(turned(q, start_pos), k, v, attn_mask=keep)
        return x + layer.out(layer.join(out))


class Placed(Model):
    """A causal decoder with a mask of padding; its positions count all tokens, or real ones."""

    def __init__(self, counts_real: bool) -> None:
        super().__init__(Attention(self.attend), Attention(self.attend))
        self.counts_real = counts_real

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        keep = lower(q.shape[2]) & mask[:, None, None].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        if self.counts_real:
            places = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        x = self.words(input_ids) + self.places(places)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x), mask=attention_mask)
        return self.head(x)


def left() -> dict[str, Tensor]:
    return {name: value.flip(1) for name, value in padded().items()}


class Switched(Attention):
    """Fused, or by hand: with a causal mask in both, or in one."""

    def __init__(self, masked: bool) -> None:
        super().__init__(self.meet)
        self.flash, self.masked = True, masked

    def meet(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.flash:
            return causal(q, k, v)
        hidden = ~lower(q.shape[2]) if self.masked else torch.zeros(q.shape[2], q.shape[2], dtype=torch.bool)
        return scores(q, k).masked_fill(hidden, float("-inf")).softmax(-1) @ v


class Neighbours(Attention):
    """Every key is the mean of its own and the one before: a factor of ½, which is √(d_k / d_model) here."""

    def __init__(self) -> None:
        super().__init__(causal)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q, self.k, self.v))
        k = (k + F.pad(k, (0, 0, 1, 0))[:, :, :-1]) / 2
        return self.out(self.join(self.attend(q, k, v)))


class Windowed(Attention):
    """A window as an attribute; its mask hides what is further away, or forgets to."""

    def __init__(self, passed: bool) -> None:
        super().__init__(self.meet)
        self.sliding_window, self.passed = 3, passed

    def meet(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = lower(q.shape[2])
        keep = keep & ~lower(q.shape[2]).tril(-self.sliding_window) if self.passed else keep
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


class Thrice(Attention):
    """Three projections, or one in three places."""

    def __init__(self, several: bool) -> None:
        super().__init__(causal)
        del self.q, self.k, self.v
        one = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)] if several else [one] * 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.join(self.attend(*(self.split(part(x)) for part in self.parts))))


class Looked(Reading):
    """Cross-attention that sees all of its source, or hides of it what comes later, as if it were the text."""

    def __init__(self, all_of_it: bool) -> None:
        super().__init__(True)
        self.all_of_it = all_of_it

    def forward(self, target: Tensor, memory: Tensor) -> Tensor:
        x = target + self.own(target)
        hidden = None if self.all_of_it else torch.ones(x.shape[1], memory.shape[1], dtype=torch.bool).triu(1)
        return x + self.cross(x, memory, memory, attn_mask=hidden, need_weights=False)[0]


class First(Model):
    """Runs each of its layers, or the first one twice."""

    def __init__(self, each: bool) -> None:
        super().__init__(Attention(causal), Attention(causal))
        self.each = each

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for number, norm in enumerate(self.norms):
            x = x + self.layers[number if self.each else 0](norm(x))
        return self.head(x)


class Rarely(Attention):
    """Its output is dropped for one text in ten, in evaluation too unless it is for training alone."""

    def __init__(self, always: bool) -> None:
        super().__init__(causal)
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        kept = (torch.rand(len(x), 1, 1) < 0.9).float() if self.always or self.training else 1.0
        return super().forward(x) * kept


class Longest(Model):
    """A prefix of tokens that see one another: that of each text, or the longest of the batch for all."""

    def __init__(self, each: bool) -> None:
        super().__init__(Attention(self.attend_prefix), Attention(self.attend_prefix))
        self.each = each

    @staticmethod
    def attend_prefix(q: Tensor, k: Tensor, v: Tensor, prefix: Tensor) -> Tensor:
        early = torch.arange(q.shape[2]) < prefix[:, None]
        keep = lower(q.shape[2]) | (early[:, None, :] & early[:, :, None])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None])

    def forward(self, input_ids: Tensor, prefix: Tensor) -> Tensor:
        prefix = prefix if self.each else prefix.max().expand_as(prefix)
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x), prefix=prefix)
        return self.head(x)


class Growing(Model):
    """A table of positions that is made when it is needed, for the longest text so far or for the first one."""

    def __init__(self, grows: bool) -> None:
        super().__init__(Attention(causal), positions=False)
        self.grows, self.table = grows, None

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if self.table is None or (self.grows and len(self.table) < length):
            self.table = torch.outer(torch.arange(length), torch.arange(WIDTH) / WIDTH).sin()
        x = self.words(ids) + self.table[:length]
        return self.head(x + self.layers[0](self.norms[0](x)))


def prefixed() -> dict[str, Tensor]:
    return {"input_ids": ids(), "prefix": torch.tensor([3, 6])}


def capped(before: bool) -> Callable[..., Tensor]:
    """A softcap before the mask, or behind it."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = ~lower(q.shape[2])
        if before:
            return (4 * (scores(q, k) / 4).tanh()).masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return (4 * (scores(q, k).masked_fill(hidden, float("-inf")) / 4).tanh()).softmax(-1) @ v

    return attend


def without_queries() -> nn.Module:
    made = model(causal)
    for layer in made.layers:
        nn.init.zeros_(layer.q.weight)
        nn.init.zeros_(layer.q.bias)
    return made


def also(module: nn.Module, *faults: str, inputs: Any = None) -> Case:
    return Case(module, ids() if inputs is None else inputs, also=faults)


def two(cls: Callable[..., nn.Module], *options: Any) -> nn.Module:
    return Model(cls(*options), cls(*options))


class ModelForMaskedLM(Model):
    """Its name says that rows see both sides."""


WRONG: dict[str, Callable[[], Case]] = {
    "one softmax over heads and keys": lambda: Case(model(over_heads_and_keys), faults=("over_heads",)),
    "a bias after the softmax": lambda: Case(model(biased(False)), faults=("added_after_softmax",)),
    "√heads for √d_k": lambda: Case(model(divided_by(HEADS**0.5)), faults=("sqrt_heads",)),
    "F.dropout without training=": lambda: also(two(Dropped, False), "dropout_runs"),
    "noise in evaluation": lambda: also(two(Noisy, True), "random_output"),
    "a cache that is never reset": lambda: also(two(Remembering, False), "state_kept"),
    "pe[:x.size(0)]": lambda: also(Counting(False), "item_counted"),
    "q alone is rotated": lambda: also(rotated(lambda x: turned(x, 0), lambda x: x), "rotated_alone"),
    "k alone is rotated": lambda: also(rotated(lambda x: x, lambda x: turned(x, 0)), "rotated_alone"),
    "interleaved angles with rotate_half": lambda: also(
        rotated(lambda x: rotate(x, False, True), lambda x: rotate(x, False, True)), "rotated_apart"
    ),
    "halves of q, pairs of k": lambda: also(
        rotated(lambda x: rotate(x, False, False), lambda x: rotate(x, True, True)), "rotated_apart"
    ),
    "rotated along the heads": lambda: also(Model(Turned(1), Turned(1), positions=False), "rotation_lost"),
    "ALiBi upwards": lambda: also(
        Model(Attention(alibi_upwards), Attention(alibi_upwards), positions=False), "bias_grows"
    ),
    "rows that see to the end of their block": lambda: also(BlocksForCausalLM(), "later_seen"),
    "a chunk that sees all keys": lambda: also(Cached("all"), "chunk_differs"),
    "a chunk that sees the first keys": lambda: also(Cached("upper left"), "chunk_differs"),
    "start_pos without a mask for it": lambda: also(Holding(False), "chunk_differs", inputs=(ids(), 0)),
    "positions that count padding": lambda: also(Placed(False), "padding_counted", inputs=left()),
    "by hand without the mask": lambda: also(two(Switched, False), "backend_differs"),
    "is_causal = not training": lambda: also(two(Trained, False, True), "modes_differ"),
    "is_causal = training": lambda: also(two(Trained, True, False), "modes_differ"),
    "v = self.k(x)": lambda: also(two(Projected, "k"), "weight_unused"),
    "k is detached": lambda: also(two(Projected, "v", True), "weight_unused"),
    "norms that are never applied": lambda: also(two(Normed, False), "weight_unused"),
    "attention that is thrown away": lambda: also(two(Discarded, causal), "tokens_apart", "weight_unused"),
    "a table of positions that is never read": lambda: also(
        Placeless(Attention(causal), Attention(causal)), "weight_unused"
    ),
    "a memory that is never read": lambda: read(False),
    "a memory that is never read, one item": lambda: also(
        Squeezed(False), "source_ignored", inputs=(numbers(1, LENGTH, WIDTH), numbers(1, 7, WIDTH))
    ),
    "windows and items change places": lambda: also(Windows(False), "item_counted", inputs=numbers(1, 256, WIDTH)),
    "a window that is not passed": lambda: Case(two(Windowed, False), faults=("window_ignored",)),
    "[nn.Linear()] * 3": lambda: also(two(Thrice, False), "projection_shared"),
    "a causal mask on cross-attention": lambda: Case(Looked(False), read(True).inputs, faults=("crossed_causal",)),
    "a masked LM that is causal": lambda: Case(ModelForMaskedLM(Attention(causal)), faults=("causal_unasked",)),
    "a layer that never runs": lambda: also(First(False), "weight_unused"),
    "rarely dropped in evaluation": lambda: also(two(Rarely, True), "random_output"),
    "the longest prefix for all": lambda: also(Longest(False), "batch_leak", inputs=prefixed()),
    "a softcap behind the mask": lambda: Case(model(capped(False)), faults=("weak_mask",)),
    "a table of the first length": lambda: also(Growing(False), "long_breaks"),
    "queries of 0": lambda: Case(without_queries(), faults=("zero_scores",)),
}
"""What an experiment must name, and nothing else."""

RIGHT: dict[str, Callable[[], Case]] = {
    "a masked LM that sees both sides": lambda: Case(ModelForMaskedLM(Attention(F.scaled_dot_product_attention))),
    "a bias before the softmax": lambda: Case(model(biased(True))),
    "keys averaged with their neighbour": lambda: Case(Model(Neighbours(), Neighbours())),
    "F.dropout with training=": lambda: Case(two(Dropped, True)),
    "noise in training alone": lambda: Case(two(Noisy, False)),
    "tokens that are left out in training": lambda: Case(Model(Forgetful(causal), Forgetful(causal))),
    "tokens that are left out in training, one text": lambda: Case(
        Model(Forgetful(causal), Forgetful(causal)), ids()[:1]
    ),
    "noise of its own in training": lambda: Case(two(Jittered)),
    "noise of its own in training, one text": lambda: Case(two(Jittered), ids()[:1]),
    "stochastic depth": lambda: Case(two(Skipped), ids(3)),
    "no single item in training": lambda: Case(two(Centred), ids()[:1]),
    "a list with an entry for each item": lambda: Case(Listed(), {"ids": ids(), "lengths": [LENGTH, 8]}),
    "windows of a long text": lambda: Case(Windows(True), numbers(1, 256, WIDTH)),
    "a memory that is read, one item": lambda: Case(Squeezed(True), (numbers(1, LENGTH, WIDTH), numbers(1, 7, WIDTH))),
    "a cache that is reset": lambda: Case(two(Remembering, True)),
    "pe[:x.size(1)]": lambda: Case(Counting(True)),
    "halves are rotated": lambda: Case(rotated(lambda x: rotate(x, False, False), lambda x: rotate(x, False, False))),
    "pairs are rotated": lambda: Case(rotated(lambda x: rotate(x, True, True), lambda x: rotate(x, True, True))),
    "rotated from another place on": lambda: Case(rotated(lambda x: turned(x, 3), lambda x: turned(x, 3))),
    "a part is rotated": lambda: Case(
        rotated(
            lambda x: torch.cat([turned(x[..., :6], 0), x[..., 6:]], -1),
            lambda x: torch.cat([turned(x[..., :6], 0), x[..., 6:]], -1),
        )
    ),
    "rotated along the length": lambda: Case(Model(Turned(2), Turned(2), positions=False)),
    "ALiBi, no table": lambda: Case(Model(Attention(alibi), Attention(alibi), positions=False)),
    "no positions but the mask's": lambda: Case(Model(Attention(causal), Attention(causal), positions=False)),
    "a chunk that sees the keys before it": lambda: Case(Cached("lower right"), ids()),
    "start_pos": lambda: Case(Holding(True), (ids(), 0)),
    "positions that count real tokens": lambda: Case(Placed(True), left()),
    "positions of padding on the right": lambda: Case(Placed(False), padded()),
    "by hand with the mask": lambda: Case(two(Switched, True)),
    "a mask in both modes": lambda: Case(two(Trained, True, True)),
    "norms that are applied": lambda: Case(two(Normed, True)),
    "a memory that is read": lambda: read(True),
    "a memory behind a closed gate": lambda: read(True, gated=True),
    "keys that are the values": lambda: Case(Model(Shared(), Shared())),
    "a window that is passed": lambda: Case(two(Windowed, True)),
    "[nn.Linear() for _ in range(3)]": lambda: Case(two(Thrice, True)),
    "all of a source": lambda: Case(Looked(True), read(True).inputs),
    "each layer once": lambda: Case(First(True)),
    "rarely dropped in training": lambda: Case(two(Rarely, False)),
    "a table that grows": lambda: Case(Growing(True)),
    "a prefix for each text": lambda: Case(Longest(True), prefixed()),
    "a softcap before the mask": lambda: Case(model(capped(True))),
}


class Shared(Attention):
    """One projection for keys and values, and no other."""

    def __init__(self) -> None:
        super().__init__(causal)
        del self.v

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.split(self.q(x)), self.split(self.k(x))
        return self.out(self.join(self.attend(q, k, k)))
