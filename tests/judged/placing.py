"""Faults of positions, of caches of keys and values, and of what a model keeps between calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import (
    GPT,
    HEADS,
    WIDTH,
    Bidirectional,
    Encoder,
    Linear,
    Placed,
    Rotary,
    SelfAttention,
    angles,
    fault,
    rotate,
    rows,
    slopes,
    tokens,
)

HEAD = WIDTH // HEADS

# positions


@fault("positions", source="class: rope on q alone")
class RotaryOfQueriesAlone(Rotary):
    def place(self, q, k):
        return rotate(q, angles(q.shape[-2], HEAD)), k


@fault("positions", source="facebookresearch/xformers#841, mlfoundations/open_lm#4, Om-Alve/smolGPT#22")
class RotaryOverHeads(Rotary):
    """The angles grow with the head, and all tokens of a head are turned alike."""

    def place(self, q, k):
        turned = angles(HEADS, HEAD)
        return (rotate(one.transpose(1, 2), turned).transpose(1, 2) for one in (q, k))


@fault(
    "positions", source="facebookresearch/vjepa2#15, raiyanyahya/how-to-train-your-gpt#6, huggingface/diffusers#13546"
)
class AnglesOfAnotherPairing(Rotary):
    """Angles for the pairs (0, 1), (2, 3), …, and a rotation of the pairs (0, d/2), (1, d/2 + 1), …"""

    def place(self, q, k):
        turned = angles(q.shape[-2], HEAD).repeat_interleave(2, -1)
        cos, sin = turned.cos(), turned.sin()
        return (x * cos + torch.cat([-x[..., HEAD // 2 :], x[..., : HEAD // 2]], -1) * sin for x in (q, k))


@fault("positions", source="class: a sign lost in rotate_half")
class ReflectedNotRotated(Rotary):
    def place(self, q, k):
        turned = angles(q.shape[-2], HEAD)
        turned = torch.cat([turned, turned], -1)
        return (
            x * turned.cos() + torch.cat([x[..., HEAD // 2 :], x[..., : HEAD // 2]], -1) * turned.sin() for x in (q, k)
        )


@fault("positions", source="class: the keys are turned the other way")
class KeysTurnedBackwards(Rotary):
    """Logits depend on i + j."""

    def place(self, q, k):
        turned = angles(q.shape[-2], HEAD)
        return rotate(q, turned), rotate(k, -turned)


@fault(
    "positions",
    "dtype",
    source="huggingface/transformers#29285",
    right=lambda: Placed(Rotary).bfloat16(),
    batch=tokens(1, 48),
)
class AnglesInBfloat16(Placed):
    """Positions above 256 cannot be told apart in bfloat16; these begin at 300, as in the middle of a long text."""

    def __init__(self):
        super().__init__(RoundedAngles)
        self.bfloat16()


class RoundedAngles(Rotary):
    def place(self, q, k):
        frequencies = (10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)).to(q.dtype)
        turned = torch.outer((300 + torch.arange(q.shape[-2])).to(q.dtype), frequencies)
        return rotate(q, turned), rotate(k, turned)


@fault("positions", source="meta-pytorch/attention-gym#86")
class LinearBiasOfTheOtherSign(Linear):
    def score(self, q, k):
        return 2 * SelfAttention.score(self, q, k) - super().score(q, k)


@fault("positions", source="paiml/aprender#2143")
class SlopesFromOne(Linear):
    """Slopes 2^(−8h/n) from h = 0: the first head has slope 1, and each the slope of the head before."""

    def score(self, q, k):
        places = torch.arange(q.shape[-2])
        return (
            SelfAttention.score(self, q, k)
            - 4 * slopes(HEADS)[:, None, None] * (places[:, None] - places[None, :]).abs()
        )


class BothSides(Linear):
    causal = False


@fault("positions", "future", source="class: ALiBi without |·| in an encoder", model=Placed)
class LinearBiasWithoutAbsolute(BothSides):
    """Keys on the right gain by their distance."""

    def score(self, q, k):
        places = torch.arange(q.shape[-2])
        return SelfAttention.score(self, q, k) - slopes(HEADS)[:, None, None] * (places[:, None] - places[None, :])


@fault("positions", "effect", source="lucidrains/x-transformers#10", right=lambda: Bucketed(), model=Placed)
class BucketsOfTheWrongSign(SelfAttention):
    """A bias for each distance, read at j − i instead of i − j: all keys that a causal row sees are in bucket 0."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(16, HEADS)

    def distance(self, length: int) -> Tensor:
        places = torch.arange(length)
        return places[None, :] - places[:, None]

    def score(self, q, k):
        return super().score(q, k) + self.bias(self.distance(q.shape[-2]).clamp(0, 15)).permute(2, 0, 1)


class Bucketed(BucketsOfTheWrongSign):
    def distance(self, length):
        return -super().distance(length)


@fault("positions", source="vllm-project/vllm#30413", check=("permutation",))
class NoPositions(Encoder):
    """A table of positions that nothing reads."""

    def embed(self, input_ids, attention_mask):
        return self.wte(input_ids)


@fault(
    "positions",
    "batch",
    source="tanjimin/C.Origami#42, nebuly-ai/optimate#264",
    right=lambda: Sines(1),
    batch=rows(3, 12),
    check=("batch",),
)
class PositionsOfTheItem(nn.Module):
    """x is (batch, length, width), and pe[:x.size(0)] of (places, 1, width) adds place 0 to item 0, place 1 to item 1, …"""

    def __init__(self, dim: int = 0):
        super().__init__()
        self.dim = dim
        waves = angles(64, WIDTH)
        self.register_buffer("pe", torch.stack([waves.sin(), waves.cos()], -1).flatten(1)[:, None])
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x + (self.pe[: x.size(0)] if self.dim == 0 else self.pe[: x.size(1)].transpose(0, 1)))


Sines = PositionsOfTheItem


@fault("positions", source="class: one position for all tokens, of a table indexed by the length")
class OnePositionForAll(Encoder):
    def embed(self, input_ids, attention_mask):
        return self.wte(input_ids) + self.wpe(torch.tensor(input_ids.shape[1] - 1))


# caches


class Cached(nn.Module):
    """A rotary language model that returns its keys and values, and takes them back as `past_key_values`."""

    max_position_embeddings = 64

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(80, WIDTH)
        self.attn, self.norm, self.lm_head = SelfAttention(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 80)

    def start(self, past: Tensor | None) -> int:
        return 0 if past is None else past.shape[2]

    def kept(self, past: Tensor | None, k: Tensor, placed: Tensor) -> Tensor:
        """The keys as they are stored: already placed."""
        return placed if past is None else torch.cat([past, placed], 2)

    def read(self, stored: Tensor) -> Tensor:
        return stored

    def options(self, queries: int, keys: int) -> dict:
        return {"attn_mask": torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)}

    def forward(self, input_ids, past_key_values=None, use_cache=True):
        past = (None, None) if past_key_values is None else past_key_values
        x = self.wte(input_ids)
        q, k, v = self.attn.project(self.norm(x), self.norm(x))
        turned = angles(q.shape[2], HEAD, self.start(past[0]))
        stored = self.kept(past[0], k, rotate(k, turned))
        v = v if past[1] is None else torch.cat([past[1], v], 2)
        options = self.options(q.shape[2], stored.shape[2])
        out = F.scaled_dot_product_attention(rotate(q, turned), self.read(stored), v, **options)
        logits = self.lm_head(x + self.attn.out_proj(self.attn.join(out)))
        return (logits, (stored, v)) if use_cache else logits


CACHE = ("cache",)


@fault("cache", source="pytorch/executorch#2010", check=CACHE)
class StepsBeginAtZero(Cached):
    def start(self, past):
        return 0


@fault("cache", source="skyzh/tiny-llm#46", check=CACHE)
class StepsOneTooFar(Cached):
    def start(self, past):
        return 0 if past is None else past.shape[2] + 1


@fault("cache", source="pytorch/pytorch#103082", check=CACHE)
class CausalOfOneQuery(Cached):
    """is_causal aligns the first query with the first key, so a step sees one key."""

    def options(self, queries, keys):
        return {"is_causal": True}


@fault("cache", "future", source="class: no mask for a chunk of several tokens after the first", check=CACHE)
class ChunksWithoutMask(Cached):
    """Right for the whole text and for one token at a time; tokens of a longer chunk see those after them."""

    def options(self, queries, keys):
        return {"is_causal": True} if queries == keys else {}


@fault("cache", source="class: cached keys are turned again at each step", check=CACHE)
class TurnedAgain(Cached):
    def kept(self, past, k, placed):
        return k if past is None else torch.cat([past, k], 2)

    def forward(self, input_ids, past_key_values=None, use_cache=True):
        past = past_key_values
        if past is not None:  # the table is at hand, so turn all that is there
            past = (rotate(past[0], angles(past[0].shape[2], HEAD)), past[1])
        return super().forward(input_ids, past, use_cache)

    def read(self, stored):
        return rotate(stored, angles(stored.shape[2], HEAD))


@fault(
    "cache",
    "positions",
    source="huggingface/transformers#37574, rajveer43/VeloxQuant-MLX#389",
    check=CACHE,
    right=lambda: Trimmed(),
)
class PositionOfAFullWindow(Cached):
    """A cache of the last six keys, whose length is taken for the position: from there on, every step has position 6."""

    window = 6

    def options(self, queries, keys):
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        return {"attn_mask": seen & ~torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries - self.window)}

    def forward(self, input_ids, past_key_values=None, use_cache=True):
        logits, (k, v) = super().forward(input_ids, past_key_values, True)
        return (logits, (k[:, :, 1 - self.window :], v[:, :, 1 - self.window :])) if use_cache else logits


class Trimmed(PositionOfAFullWindow):
    """It keeps all keys; the mask has the window."""

    def forward(self, input_ids, past_key_values=None, use_cache=True):
        return Cached.forward(self, input_ids, past_key_values, use_cache)


class Slots(Cached):
    """Keys and values in tensors of a fixed size, with how many are filled."""

    size = 32

    def options(self, queries, keys):
        filled = keys
        return {"attn_mask": torch.ones(queries, self.size, dtype=torch.bool).tril(filled - queries)}

    def forward(self, input_ids, past_key_values=None, use_cache=True):
        x = self.wte(input_ids)
        q, k, v = self.attn.project(self.norm(x), self.norm(x))
        if past_key_values is None:
            keys, values, filled = (
                k.new_zeros(len(x), HEADS, self.size, HEAD),
                v.new_zeros(len(x), HEADS, self.size, HEAD),
                0,
            )
        else:
            keys, values, filled = past_key_values[0].clone(), past_key_values[1].clone(), int(past_key_values[2])
        turned, end = angles(q.shape[2], HEAD, filled), filled + q.shape[2]
        keys[:, :, filled:end], values[:, :, filled:end] = rotate(k, turned), v
        out = F.scaled_dot_product_attention(rotate(q, turned), keys, values, **self.options(q.shape[2], end))
        logits = self.lm_head(x + self.attn.out_proj(self.attn.join(out)))
        return (logits, (keys, values, torch.tensor(end))) if use_cache else logits


@fault("cache", "mask", "future", source="class: a static cache whose empty slots are attended to", check=CACHE)
class EmptySlotsAreSeen(Slots):
    """A step has no mask, and keys of zeros take their share; the whole text has one."""

    def options(self, queries, keys):
        return {} if queries == 1 else super().options(queries, keys)


# what is kept between calls


@fault("kept", source="class: memories of a Transformer-XL that are never reset", right=lambda: Forgetful())
class MemoriesStay(GPT):
    """The words of the last call are put before those of this one."""

    def __init__(self):
        super().__init__()
        self.memory = None

    def remember(self, x: Tensor) -> None:
        self.memory = x.detach()

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids, attention_mask)
        before = self.memory if self.memory is not None and self.memory.shape == x.shape else x[:, :0]
        self.remember(x)
        x = torch.cat([before, x], 1)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x[:, before.shape[1] :]))


class Forgetful(MemoriesStay):
    def remember(self, x):
        pass


@fault("kept", "cache", source="ml-explore/mlx-examples#1000")
class CacheOfTheLastCall(Placed):
    """Keys and values are appended to those of the call before, if the items are as many."""

    def __init__(self):
        super().__init__(Appending)


class Appending(Rotary):
    def __init__(self):
        super().__init__()
        self.cache = None

    def forward(self, x, attention_mask=None):
        q, k, v = self.project(x, x)
        q, k = self.place(q, k)
        if self.cache is not None and len(self.cache[0]) == len(k):
            k, v = (torch.cat(pair, 2) for pair in zip(self.cache, (k, v), strict=True))
        self.cache = (k.detach(), v.detach())
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return self.out_proj(self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=seen)))


@fault("kept", source="class: running statistics that are updated in evaluation too", right=lambda: GPT())
class StatisticsInEvaluation(GPT):
    def __init__(self):
        super().__init__(Centred)


class Centred(SelfAttention):
    """Keys less their running mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def project(self, x, source):
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)).to(self.mean.dtype), 0.1)
        return super().project(x, x - self.mean)


class Pair(nn.Module):
    """A decoder layer over a source."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(80, WIDTH)
        self.self_attn, self.cross_attn, self.out = SelfAttention(), Bidirectional(), nn.Linear(WIDTH, 80)

    def source(self, encoder_hidden_states: Tensor) -> Tensor:
        return encoder_hidden_states

    def forward(self, decoder_input_ids, encoder_hidden_states):
        x = self.words(decoder_input_ids)
        x = x + self.self_attn(x)
        return self.out(x + self.cross_attn(x, source=self.source(encoder_hidden_states)))


def captioned():
    return {
        "decoder_input_ids": tokens(2, 9)()["input_ids"],
        "encoder_hidden_states": rows(2, 6, "source")()["source"],
    }


@fault("kept", "source", "cache", source="class: keys of the first source are kept for all", batch=captioned)
class FirstSourceForAll(Pair):
    def __init__(self):
        super().__init__()
        self.kept = None

    def source(self, encoder_hidden_states):
        if (
            self.kept is None
            or self.kept.shape != encoder_hidden_states.shape
            or self.kept.dtype != encoder_hidden_states.dtype
        ):
            self.kept = encoder_hidden_states.detach()
        return self.kept


@fault("random", source="class: noise on the scores that is not turned off")
class NoiseOnScores(SelfAttention):
    def score(self, q, k):
        return super().score(q, k) + torch.rand(q.shape[-2], k.shape[-2]).log().neg().log().neg() * 0.3
