"""A fourth draw: what the scan was asked after the third had taught it, and right models of unusual design.

Of its 66 faults the scan named 53 at first, and called 7 healthy; of its 52 right models it accused 2. Here is a choice of them.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import FAULTS, INNOCENTS, Case

D, H, E, V = 32, 4, 8, 60


def ids(items: int = 2, length: int = 12, low: int = 3) -> Tensor:
    return torch.randint(low, V, (items, length), generator=torch.Generator().manual_seed(11))


def text(**more: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids(), **more}


def padded(left: bool = False, items: int = 2) -> dict[str, Tensor]:
    mask = torch.ones(items, 12, dtype=torch.long)
    mask[1, slice(0, 4) if left else slice(8, None)] = 0
    return {"input_ids": ids(items) * mask, "attention_mask": mask}


def numbers(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def words(name: str) -> str:
    return name.replace("_", " ")


def fault(
    name: str,
    classes: tuple[str, ...],
    build: Callable[[bool], nn.Module],
    batch: Callable[[], Any] = text,
    check: tuple[str, ...] = (),
) -> None:
    FAULTS[name] = Case(
        name, "fourth", lambda: build(True), batch, classes, lambda: build(False), check, f"class: {words(name)}"
    )


def right(
    name: str, build: Callable[[], nn.Module], batch: Callable[[], Any] = text, declared: tuple[str, ...] = ()
) -> None:
    INNOCENTS[name] = Case(name, "own", build, batch, declared=declared)


def causal(n: int, m: int | None = None) -> Tensor:
    m = n if m is None else m
    return torch.ones(n, m, dtype=torch.bool).tril(m - n)


class Att(nn.Module):
    """Attention by hand; ``meet(q, k, v, **)`` is what differs."""

    def __init__(self, meet=None, kv: int = H, **more):
        super().__init__()
        self.wq, self.wk, self.wv = (
            nn.Linear(D, D, bias=False),
            nn.Linear(D, kv * E, bias=False),
            nn.Linear(D, kv * E, bias=False),
        )
        self.wo = nn.Linear(D, D, bias=False)
        self.meet, self.kv = meet, kv
        for key, value in more.items():
            setattr(self, key, value)

    def heads(self, x):
        b, n, _ = x.shape
        return tuple(w(x).view(b, n, -1, E).transpose(1, 2) for w in (self.wq, self.wk, self.wv))

    def forward(self, x, **more):
        q, k, v = self.heads(x)
        return self.wo(self.meet(q, k, v, **more).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attn):
        super().__init__()
        self.n1, self.n2, self.attn = nn.LayerNorm(D), nn.LayerNorm(D), attn
        self.mlp = nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))

    def forward(self, x, **more):
        x = x + self.attn(self.n1(x), **more)
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    """A language model of two blocks; ``places``: learned positions."""

    def __init__(self, *attns, places=True, head=V):
        super().__init__()
        self.tok = nn.Embedding(V, D)
        self.pos = nn.Embedding(64, D) if places else None
        self.blocks = nn.ModuleList(Block(a) for a in attns)
        self.norm, self.lm_head = nn.LayerNorm(D), nn.Linear(D, head, bias=False)

    def embed(self, input_ids):
        x = self.tok(input_ids)
        return x if self.pos is None else x + self.pos(torch.arange(input_ids.shape[1], device=input_ids.device))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


class TinyForCausalLM(LM):
    pass


class TinyForMaskedLM(LM):
    pass


class Masked(LM):
    """Takes attention_mask, and gives its blocks a boolean mask of keys to see."""

    causal = True

    def allowed(self, attention_mask):
        keep = attention_mask[:, None, None, :].bool()
        if self.causal:
            keep = keep & causal(attention_mask.shape[1])
        return keep

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        keep = self.allowed(attention_mask)
        for block in self.blocks:
            x = block(x, keep=keep)
        return self.lm_head(self.norm(x))


def sdpa(q, k, v, keep=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, is_causal=False)


def hand(q, k, v, keep=None):
    z = q @ k.mT * E**-0.5
    if keep is not None:
        z = z.masked_fill(~keep, torch.finfo(z.dtype).min)
    return z.softmax(-1) @ v


def auto(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def two(cls, meet, **more):
    return lambda: cls(Att(meet), Att(meet), **more)


# ---------------------------------------------------------------- faults: masks


def _stale_mask(wrong):
    class Model(Masked):
        causal = False
        kept = None

        def allowed(self, attention_mask):
            if not wrong:
                return super().allowed(attention_mask)
            if (
                self.kept is None
                or self.kept.shape[-1] != attention_mask.shape[1]
                or len(self.kept) != len(attention_mask)
            ):
                self.kept = super().allowed(attention_mask)
            return self.kept

    return Model(Att(sdpa), Att(sdpa))


fault("padding_mask_of_an_earlier_batch", ("kept", "padding"), _stale_mask, padded)


class EncDec(nn.Module):
    """Two stacks in one; ``how`` says what goes wrong."""

    def __init__(self, how=""):
        super().__init__()
        self.how = how
        self.src, self.tgt, self.pos = nn.Embedding(V, D), nn.Embedding(V, D), nn.Embedding(64, D)
        self.enc = nn.TransformerEncoderLayer(D, H, 64, batch_first=True)
        self.own, self.cross = (
            nn.MultiheadAttention(D, H, batch_first=True),
            nn.MultiheadAttention(D, H, batch_first=True),
        )
        self.out = nn.Linear(D, V)
        self.stale = None

    def forward(self, src, tgt, src_mask):
        s = self.src(src) + self.pos(torch.arange(src.shape[1]))
        m = self.enc(s, src_key_padding_mask=src_mask == 0)
        if self.how == "raw":
            m = s
        if self.how == "stale":
            if self.stale is None or self.stale.shape != m.shape:
                self.stale = m.detach()
            m = self.stale
        t = self.tgt(tgt) + self.pos(torch.arange(tgt.shape[1]))
        t = t + self.own(t, t, t, attn_mask=~causal(t.shape[1]), need_weights=False)[0]
        hidden = src_mask == 0
        if self.how == "unmasked":
            hidden = None
        if self.how == "target":
            hidden = tgt == 0
        if self.how == "first":
            hidden = hidden[:1].expand(len(hidden), -1)
        t = t + self.cross(t, m, m, key_padding_mask=hidden, need_weights=False)[0]
        return self.out(t)


def pair():
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 7:] = 0
    return {"src": ids(2, 10), "tgt": ids(2, 10).flip(1), "src_mask": mask}


fault("cross_with_the_targets_padding", ("padding",), lambda wrong: EncDec("target" if wrong else ""), pair)
fault("cross_with_the_first_items_padding", ("padding", "batch"), lambda wrong: EncDec("first" if wrong else ""), pair)
fault("memory_is_not_encoded", ("effect",), lambda wrong: EncDec("raw" if wrong else ""), pair)
fault("memory_of_the_first_call", ("kept", "source", "effect"), lambda wrong: EncDec("stale" if wrong else ""), pair)


def _documents(wrong):
    class Model(LM):
        def forward(self, input_ids, position_ids):
            x = self.tok(input_ids) + self.pos(position_ids)
            doc = (position_ids == 0).cumsum(-1)
            same = doc[:, :, None] >= doc[:, None, :] if wrong else doc[:, :, None] == doc[:, None, :]
            keep = same[:, None] & causal(input_ids.shape[1])
            for block in self.blocks:
                x = block(x, keep=keep)
            return self.lm_head(self.norm(x))

    return Model(Att(hand), Att(hand))


def pack():
    return {"input_ids": ids(1, 12), "position_ids": torch.cat([torch.arange(5), torch.arange(7)])[None]}


fault("documents_see_earlier_ones", ("documents",), _documents, pack)


def _bert_causal(wrong):
    return TinyForMaskedLM(Att(auto if wrong else sdpa), Att(auto if wrong else sdpa))


fault("a_masked_lm_that_is_causal", ("future", "mask"), _bert_causal)


def _offbyone(wrong):
    def meet(q, k, v):
        n = q.shape[2]
        hidden = torch.ones(n, n).triu(0 if wrong else 1).bool()
        z = (q @ k.mT * E**-0.5).masked_fill(hidden, -1e9)
        return z.softmax(-1) @ v

    return TinyForCausalLM(Att(meet), Att(meet))


fault("a_row_does_not_see_itself", ("mask", "future"), _offbyone)


# ---------------------------------------------------------------- faults: positions


def angles(n, start=0, base=100.0):
    freq = base ** (-torch.arange(0, E, 2) / E)
    a = (torch.arange(n) + start)[:, None] * freq
    return torch.cat([a, a], -1)


def turn(x, a):
    one, other = x.chunk(2, -1)
    return x * a.cos() + torch.cat([-other, one], -1) * a.sin()


def rope(rotate_q, rotate_k):
    def meet(q, k, v):
        a = angles(q.shape[2])
        return auto(rotate_q(q, a), rotate_k(k, a), v)

    return meet


def roped(wrong_q, wrong_k=None):
    wrong_k = wrong_k or wrong_q

    def build(wrong):
        meet = rope(wrong_q, wrong_k) if wrong else rope(turn, turn)
        return TinyForCausalLM(Att(meet), Att(meet), places=False)

    return build


fault("cos_and_sin_swapped_for_k", ("positions",), roped(turn, lambda x, a: turn(x, math.pi / 2 - a)))


def _half(x, a, first):
    one, rest = x.chunk(2, -1)
    if not first:
        one, rest = rest, one
    b = a[:, : E // 4]
    one = turn(one, torch.cat([b, b], -1))
    return torch.cat([one, rest] if first else [rest, one], -1)


fault("other_halves_turned", ("positions",), roped(lambda x, a: _half(x, a, True), lambda x, a: _half(x, a, False)))


def _alibi(wrong):
    def meet(q, k, v):
        n = q.shape[2]
        i = torch.arange(n)
        slopes = 2.0 ** -torch.arange(1, H + 1)[:, None, None]
        bias = (i[:, None] - i).abs() * slopes
        return sdpa(q, k, v, bias if wrong else -bias)

    return LM(Att(meet), Att(meet), places=False)


fault("alibi_rewards_distance_both_ways", ("positions",), _alibi)


def _skew(wrong):
    class Rel(Att):
        def __init__(self):
            super().__init__()
            self.er = nn.Parameter(torch.randn(64, E))

        def forward(self, x):
            q, k, v = self.heads(x)
            n = q.shape[2]
            rel = q @ self.er[-n:].T  # column n - 1 is distance 0
            rel = F.pad(rel, (1, 0))
            rel = rel[..., :n] if wrong else rel.reshape(*rel.shape[:2], n + 1, n)[:, :, 1:]  # cut in place of reshaped
            z = ((q @ k.mT + rel) * E**-0.5).masked_fill(~causal(n), -torch.inf)
            return self.wo((z.softmax(-1) @ v).transpose(1, 2).flatten(2))

    return TinyForCausalLM(Rel(), Rel(), places=False)


fault("relative_logits_not_skewed", ("positions",), _skew)


# ---------------------------------------------------------------- faults: caches


class Stepper(nn.Module):
    """A decoder with a cache that it takes and returns; ``how`` says what goes wrong."""

    def __init__(self, how="", kind="rope"):
        super().__init__()
        self.how, self.kind = how, kind
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(64, D)
        self.layers, self.out = nn.ModuleList(Att() for _ in range(2)), nn.Linear(D, V)
        if kind == "bias":
            self.bias = nn.Embedding(64, H)

    def forward(self, input_ids, past_key_values=None, use_cache=True):
        n = input_ids.shape[1]
        start = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        x, kept = self.tok(input_ids), []
        if self.kind == "table":
            x = x + self.pos(torch.arange(start, start + n))
        for number, layer in enumerate(self.layers):
            q, k, v = layer.heads(x)
            if self.kind == "rope":
                q = turn(q, angles(n, start))
                k = turn(k, angles(n, 0 if self.how == "zero" else start))
            if past_key_values is not None:
                if self.how == "layer":
                    k, v = torch.cat([past_key_values[0][0], k], 2), torch.cat([past_key_values[0][1], v], 2)
                else:
                    k, v = torch.cat([past_key_values[number][0], k], 2), torch.cat([past_key_values[number][1], v], 2)
            kept.append((k, v))
            if self.how == "twice" and past_key_values is not None:
                k = turn(k, angles(k.shape[2]))
            m = k.shape[2]
            keep = causal(n, m)
            z = q @ k.mT * E**-0.5
            if self.kind == "alibi":
                i = torch.arange(n) + (0 if self.how == "zero" else start)
                z = z - (i[:, None] - torch.arange(m)).abs() * 2.0 ** -torch.arange(1, H + 1)[:, None, None]
            if self.kind == "bias":
                i = torch.arange(n) + (0 if self.how == "zero" else start)
                z = z + self.bias((i[:, None] - torch.arange(m)).clamp(min=0)).permute(2, 0, 1)
            if self.kind == "window":
                i = torch.arange(n) + start
                keep = keep & (i[:, None] - torch.arange(m) < 6)
                if self.how == "crop":
                    kept[-1] = (k[:, :, -4:], v[:, :, -4:])
            z = z.masked_fill(~keep, -torch.inf)
            x = x + layer.wo((z.softmax(-1) @ v).transpose(1, 2).flatten(2))
        out = self.out(x)
        return (out, tuple(kept)) if use_cache else (out,)


fault("cached_keys_turned_again", ("cache",), lambda wrong: Stepper("twice" if wrong else ""))
fault("bias_of_a_step_at_zero", ("cache",), lambda wrong: Stepper("zero" if wrong else "", "bias"))
fault("the_first_layers_cache_for_all", ("cache",), lambda wrong: Stepper("layer" if wrong else "", "table"))


# ---------------------------------------------------------------- faults: norms, convolutions, shifts


def normed(wrong_norm, right_norm):
    def build(wrong):
        class Mixed(Att):
            def forward(self, x):
                return super().forward((wrong_norm if wrong else right_norm)(x))

        return TinyForCausalLM(Mixed(auto), Mixed(auto))

    return build


fault(
    "rolled_around_the_end",
    ("future",),
    normed(lambda x: x + x.roll(1, 1), lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1]),
)


def _linear(wrong_sum, wrong_norm):
    def build(wrong):
        def meet(q, k, v):
            q, k = F.elu(q) + 1, F.elu(k) + 1
            state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
            total = k.cumsum(2)
            if wrong and wrong_sum:
                state = state[:, :, -1:].expand_as(state)
            if wrong and wrong_norm:
                total = total[:, :, -1:].expand_as(total)
            return torch.einsum("bhld,bhlde->bhle", q, state) / (q * total).sum(-1, keepdim=True)

        return TinyForCausalLM(Att(meet), Att(meet))

    return build


fault("linear_attention_normalised_over_all", ("future",), _linear(False, True))


class Decision(nn.Module):
    """Returns, states and actions by turns, with a causal stack."""

    def __init__(self, wrong=False):
        super().__init__()
        self.wrong = wrong
        self.r, self.s, self.a = nn.Linear(1, D), nn.Linear(5, D), nn.Linear(3, D)
        self.time, self.blocks, self.out = (
            nn.Embedding(64, D),
            nn.ModuleList(Block(Att(auto)) for _ in range(2)),
            nn.Linear(D, 3),
        )

    def forward(self, returns, states, actions):
        b, n, _ = states.shape
        t = self.time(torch.arange(n))
        x = torch.stack([self.r(returns) + t, self.s(states) + t, self.a(actions) + t], 1)
        x = (x if self.wrong else x.transpose(1, 2)).reshape(b, 3 * n, D)
        for block in self.blocks:
            x = block(x)
        x = x.reshape(b, n, 3, D)
        return self.out(x[:, :, 1])


def episode():
    return {"returns": numbers(2, 8, 1), "states": numbers(2, 8, 5, seed=3), "actions": numbers(2, 8, 3, seed=4)}


fault("turns_stacked_in_the_wrong_order", ("future", "mask"), Decision, episode)


# ---------------------------------------------------------------- faults: heads, weights, softmax, scale


def _gqa(how):
    def build(wrong):
        class Grouped(Att):
            num_key_value_groups = 2

            def __init__(self):
                super().__init__(kv=2)

            def forward(self, x):
                q, k, v = self.heads(x)
                if wrong and how == "one":
                    k, v = k[:, :1].expand(-1, H, -1, -1), v[:, :1].expand(-1, H, -1, -1)
                elif wrong and how == "k_one":
                    k, v = k[:, :1].expand(-1, H, -1, -1), v.repeat_interleave(2, 1)
                else:
                    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
                return self.wo(auto(q, k, v).transpose(1, 2).flatten(2))

        return TinyForCausalLM(Grouped(), Grouped())

    return build


fault("one_key_head_for_all", ("effect", "heads"), _gqa("one"))
fault("the_first_key_head_alone", ("effect", "heads"), _gqa("k_one"))


def _qkv(wrong):
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

        def forward(self, x):
            b, n, _ = x.shape
            part = self.c_attn(x).view(b, n, 3, H, E).permute(2, 0, 3, 1, 4)
            q, k, v = part[0], part[0 if wrong else 1], part[2]
            return self.c_proj(auto(q, k, v).transpose(1, 2).reshape(b, n, D))

    return TinyForCausalLM(Fused(), Fused())


fault("a_third_of_qkv_is_not_read", ("effect", "shared"), _qkv)


def scaled(wrong_meet, right_meet=hand):
    return lambda wrong: LM(*(Att(wrong_meet if wrong else right_meet) for _ in range(2)))


fault("values_of_another_item", ("batch",), scaled(lambda q, k, v: sdpa(q, k, v.flip(0)), sdpa))
fault("log_softmax_for_softmax", ("rows", "axis"), scaled(lambda q, k, v: (q @ k.mT * E**-0.5).log_softmax(-1) @ v))


# ---------------------------------------------------------------- faults: randomness, modes, backends, pooling, wiring


def _droppath(wrong):
    class Path(Block):
        def forward(self, x):
            keep = (torch.rand(len(x), 1, 1) < 0.8) / 0.8 if wrong or self.training else 1.0
            return x + keep * (super().forward(x) - x)

    model = LM()
    model.blocks = nn.ModuleList(Path(Att(sdpa)) for _ in range(2))
    return model


fault("layers_dropped_in_evaluation", ("random",), _droppath)


def _flash(wrong):
    class Two(Att):
        def __init__(self):
            super().__init__()
            self.use_flash_attn = False

        def forward(self, x):
            q, k, v = self.heads(x)
            if self.use_flash_attn:
                out = auto(q, k, v)
            else:
                z = q @ k.mT / (E if wrong else E**0.5)
                out = z.masked_fill(~causal(z.shape[-1]), -torch.inf).softmax(-1) @ v
            return self.wo(out.transpose(1, 2).flatten(2))

    return TinyForCausalLM(Two(), Two())


fault("by_hand_with_another_scale", ("backend",), _flash)


def _modes(wrong):
    class Mode(Att):
        def forward(self, x):
            q, k, v = self.heads(x)
            n = q.shape[2]
            i = torch.arange(n)
            keep = causal(n) & (i[:, None] - i < (4 if self.training or not wrong else n))
            return self.wo(sdpa(q, k, v, keep).transpose(1, 2).flatten(2))

    return TinyForCausalLM(Mode(), Mode())


fault("a_window_in_training_alone", ("mode", "window"), _modes)


class Pooler(Masked):
    causal = False

    def __init__(self, how):
        super().__init__(Att(sdpa), Att(sdpa))
        self.how = how

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, keep=self.allowed(attention_mask))
        if self.how == "last":
            return self.lm_head(x[:, -1])
        if self.how == "max":
            return self.lm_head(x.amax(1))
        if self.how == "count":
            return self.lm_head((x * attention_mask[..., None]).sum(1) / x.shape[1])
        return self.lm_head((x * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True))


for _how in ("last", "max", "count"):
    fault(f"pooled_with_padding_{_how}", ("padding",), lambda wrong, how=_how: Pooler(how if wrong else ""), padded)


def _types(wrong):
    class Model(LM):
        def __init__(self, *a):
            super().__init__(*a)
            self.kind = nn.Embedding(2, D)

        def forward(self, input_ids, token_type_ids):
            x = self.embed(input_ids) + (0 if wrong else self.kind(token_type_ids))
            for block in self.blocks:
                x = block(x)
            return self.lm_head(x)

    return Model(Att(sdpa), Att(sdpa))


fault(
    "token_types_are_not_read",
    ("effect",),
    _types,
    lambda: {"input_ids": ids(), "token_type_ids": (torch.arange(12) > 5).long().repeat(2, 1)},
)


def _same_block(wrong):
    class Model(LM):
        def forward(self, input_ids):
            x = self.embed(input_ids)
            for block in self.blocks:
                y = block(self.embed(input_ids) if wrong else x)
                x = y
            return self.lm_head(self.norm(x))

    return Model(Att(sdpa), Att(sdpa), Att(sdpa))


fault("each_layer_reads_the_embedding", ("effect",), _same_block)


def _frames(wrong):
    class Video(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.att, self.out = (
                nn.Linear(6, D),
                nn.MultiheadAttention(D, H, batch_first=True),
                nn.Linear(D, 6),
            )

        def forward(self, frames):
            b, t, s, _ = frames.shape
            x = self.inp(frames)
            y = x.reshape(b * s, t, D) if wrong else x.transpose(1, 2).reshape(b * s, t, D)
            y = self.att(y, y, y, attn_mask=~causal(t), need_weights=False)[0]
            y = y.reshape(b, t, s, D) if wrong else y.view(b, s, t, D).transpose(1, 2)
            return self.out(x + y)

    return Video()


fault("frames_folded_by_a_reshape", ("future", "heads"), _frames, lambda: {"frames": numbers(2, 6, 4, 6)})


# ================================================================ innocents

right("alibi_both_ways", lambda: _alibi(False))
right(
    "rope_first_half",
    lambda: TinyForCausalLM(
        *(Att(rope(lambda x, a: _half(x, a, True), lambda x, a: _half(x, a, True))) for _ in range(2)), places=False
    ),
)


class Differential(Att):
    def __init__(self):
        super().__init__()
        self.lam = nn.Parameter(torch.tensor(0.3))
        self.norm = nn.RMSNorm(E)

    def forward(self, x):
        q, k, v = self.heads(x)
        (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
        hidden = ~causal(x.shape[1])
        w = [(a @ b.mT * (E / 2) ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1) for a, b in ((q1, k1), (q2, k2))]
        return self.wo(self.norm((w[0] - self.lam * w[1]) @ v).transpose(1, 2).flatten(2))


right("differential_attention", lambda: TinyForCausalLM(Differential(), Differential()))


class Latent(nn.Module):
    """Keys and values from a latent; a part of q and k is turned (DeepSeek)."""

    def __init__(self):
        super().__init__()
        self.down, self.up_k, self.up_v = nn.Linear(D, 12), nn.Linear(12, H * E), nn.Linear(12, H * E)
        self.q, self.kr, self.o = nn.Linear(D, H * (E + 4)), nn.Linear(D, 4), nn.Linear(H * E, D)

    def forward(self, x):
        b, n, _ = x.shape
        c = self.down(x)
        q = self.q(x).view(b, n, H, E + 4).transpose(1, 2)
        k, v = (u(c).view(b, n, H, E).transpose(1, 2) for u in (self.up_k, self.up_v))
        a = torch.arange(n)[:, None] * torch.tensor([1.0, 0.1])
        a = torch.cat([a, a], -1)
        q = torch.cat([q[..., :E], turn(q[..., E:], a)], -1)
        k = torch.cat([k, turn(self.kr(x)[:, None], a).expand(-1, H, -1, -1)], -1)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


right("latent_attention", lambda: TinyForCausalLM(Latent(), Latent(), places=False))


def _retention(q, k, v):
    n = q.shape[2]
    i = torch.arange(n)
    gamma = 1 - 2.0 ** -(2 + torch.arange(H))[:, None, None]
    decay = (gamma ** (i[:, None] - i).clamp(min=0)).tril()
    return (q @ k.mT * E**-0.5 * decay) @ v


right("retention", two(TinyForCausalLM, _retention))
right("linear_attention", lambda: _linear(False, False)(False))


class Recall(LM):
    """Transformer-XL: takes and returns the states of the segment before."""

    def forward(self, input_ids, mems=None):
        x, kept = self.tok(input_ids), []
        for number, block in enumerate(self.blocks):
            old = mems[number] if mems is not None else x[:, :0]
            kept.append(x.detach())
            whole = block.n1(torch.cat([old, x], 1))
            q, k, v = block.attn.heads(whole)
            n, m = x.shape[1], whole.shape[1]
            d = (torch.arange(n)[:, None] + m - n - torch.arange(m)).clamp(min=0)
            bias = -d * 2.0 ** -torch.arange(1, H + 1)[:, None, None]
            out = sdpa(q[:, :, -n:], k, v, bias.masked_fill(~causal(n, m), -torch.inf))
            x = x + block.attn.wo(out.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.n2(x))
        return self.lm_head(x), kept


right("recurrent_segments", lambda: Recall(Att(), Att(), places=False))


class Inducing(nn.Module):
    def __init__(self):
        super().__init__()
        self.points = nn.Parameter(torch.randn(1, 5, D))
        self.a, self.b = nn.MultiheadAttention(D, H, batch_first=True), nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x):
        h = self.a(self.points.expand(len(x), -1, -1), x, x)[0]
        return x + self.b(x, h, h)[0]


right("inducing_points", lambda: nn.Sequential(nn.Linear(6, D), Inducing(), Inducing()), lambda: numbers(2, 11, 6))
right("masked_mean", lambda: Pooler(""), padded)


right("encoder_decoder_with_padding", lambda: EncDec(), pair)
right("turns_in_order", lambda: Decision(), episode)


class Image(nn.Module):
    def __init__(self, registers=3, turned=False):
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, D, 4, 4), nn.Parameter(torch.randn(1, 1 + registers, D))
        self.pos = nn.Parameter(torch.randn(1, 16, D) * 0.1)
        self.blocks, self.head = (
            nn.ModuleList(Block(Att(self.turned if turned else sdpa)) for _ in range(2)),
            nn.Linear(D, 10),
        )

    def turned(self, q, k, v):
        n = q.shape[2] - self.cls.shape[1]
        side = math.isqrt(n)
        y, x = torch.arange(n) // side, torch.arange(n) % side
        f = torch.tensor([1.0, 0.3])
        a = torch.cat([y[:, None] * f, x[:, None] * f], -1)
        a = F.pad(torch.cat([a, a], -1), (0, 0, self.cls.shape[1], 0))
        return sdpa(turn(q, a), turn(k, a), v)

    def forward(self, pixel_values):
        x = self.patch(pixel_values).flatten(2).mT + self.pos
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


right("image_turned_on_two_axes", lambda: Image(0, True), lambda: {"pixel_values": numbers(2, 3, 16, 16)})


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]


class Structured(LM):
    def forward(self, input_ids):
        x, hidden = self.embed(input_ids), []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return Output(self.lm_head(x), hidden)


right("returns_a_dataclass", lambda: Structured(Att(auto), Att(auto)))
Pair = collections.namedtuple("Pair", "loss logits")


class Named(LM):
    def forward(self, input_ids, labels=None):
        logits = super().forward(input_ids)
        return Pair(
            None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits
        )


right(
    "returns_a_namedtuple_with_a_loss",
    lambda: Named(Att(auto), Att(auto)),
    lambda: {"input_ids": ids(), "labels": ids()},
)


class SharedQK(Att):
    def __init__(self):
        super().__init__()
        self.wk = self.wq

    def forward(self, x):
        q, k, v = self.heads(x)
        k = F.normalize(k, dim=-1)
        z = q @ k.mT * E**-0.5
        n = x.shape[1]
        z = z.masked_fill(torch.eye(n, dtype=torch.bool), -1e5).masked_fill(~causal(n), -1e9)
        return self.wo((z.softmax(-1) @ v).transpose(1, 2).flatten(2))


right("shared_q_and_k", lambda: TinyForCausalLM(SharedQK(), SharedQK()), declared=("projection_shared",))


class ByEinsum(Att):
    def __init__(self):
        super().__init__(kv=2)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.heads(x)
        q = q.reshape(b, 2, 2, n, E)
        z = torch.einsum("bgrqd,bgkd->bgrqk", q, k) / math.sqrt(E)
        w = z.masked_fill(~causal(n), -torch.inf).softmax(-1)
        return self.wo(torch.einsum("bgrqk,bgkd->bqgrd", w, v).reshape(b, n, D))


right("groups_by_einsum", lambda: TinyForCausalLM(ByEinsum(), ByEinsum()))
for _kind in ("rope", "bias", "alibi", "table", "window"):
    right(f"cache_with_{_kind}", lambda kind=_kind: Stepper("", kind))


class Static(LM):
    """A cache of a fixed size in buffers, filled from start_pos."""

    def __init__(self):
        super().__init__(Att(), Att())
        for number in range(2):
            self.register_buffer(f"cache{number}", torch.zeros(2, 4, H, 64, E), persistent=False)

    def forward(self, tokens, start_pos=0):
        b, n = tokens.shape
        x = self.tok(tokens) + self.pos(torch.arange(start_pos, start_pos + n))
        for number, block in enumerate(self.blocks):
            cache = getattr(self, f"cache{number}")
            q, k, v = block.attn.heads(block.n1(x))
            cache[0, :b, :, start_pos : start_pos + n], cache[1, :b, :, start_pos : start_pos + n] = (
                k.detach(),
                v.detach(),
            )
            k, v = cache[0, :b, :, : start_pos + n], cache[1, :b, :, : start_pos + n]
            x = x + block.attn.wo(sdpa(q, k, v, causal(n, start_pos + n)).transpose(1, 2).flatten(2))
            x = x + block.mlp(block.n2(x))
        return self.lm_head(x)


right("static_cache", Static, lambda: {"tokens": ids()})


class Lookahead(Att):
    lookahead = 2

    def forward(self, x):
        n, (q, k, v) = x.shape[1], self.heads(x)
        return self.wo(sdpa(q, k, v, torch.ones(n, n, dtype=torch.bool).tril(2)).transpose(1, 2).flatten(2))


right("looks_two_ahead", lambda: LM(Lookahead(), Lookahead()))


class Recommender(LM):
    """SASRec: ids padded with 0 on the left, positions by place."""

    def __init__(self):
        super().__init__(Att(self.meet), Att(self.meet))
        self.tok = nn.Embedding(V, D, padding_idx=0)

    def meet(self, q, k, v):
        z = (q @ k.mT * E**-0.5).masked_fill(~causal(q.shape[2]), -1e9)
        return z.masked_fill(self.pad[:, None, None], -1e9).softmax(-1) @ v

    def forward(self, input_ids):
        self.pad = input_ids == 0
        x = self.embed(input_ids) * (~self.pad)[..., None]
        for block in self.blocks:
            x = block(x) * (~self.pad)[..., None]
        return self.norm(x)


def history():
    some = ids()
    some[1, :5] = 0
    return {"input_ids": some}


right("recommender_padded_on_the_left", Recommender, history, declared=("padding_counted",))


class Series(nn.Module):
    """Patches of a series that is normalised over time, channels apart."""

    def __init__(self):
        super().__init__()
        self.inp, self.pos, self.enc, self.out = (
            nn.Linear(4, D),
            nn.Parameter(torch.randn(6, D)),
            nn.TransformerEncoderLayer(D, H, 64, batch_first=True),
            nn.Linear(6 * D, 5),
        )

    def forward(self, series):
        b, _, c = series.shape
        mean, std = series.mean(1, keepdim=True), series.std(1, keepdim=True) + 1e-5
        x = ((series - mean) / std).transpose(1, 2).reshape(b * c, 6, 4)
        y = self.out(self.enc(self.inp(x) + self.pos).flatten(1)).view(b, c, 5).transpose(1, 2)
        return y * std + mean


right("series_in_patches", Series, lambda: {"series": numbers(2, 24, 3)})


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.near, self.blocks = (
            nn.Linear(6, D),
            nn.Embedding(5, H),
            nn.ModuleList(Block(Att(sdpa)) for _ in range(2)),
        )

    def forward(self, nodes, distances):
        x, bias = self.inp(nodes), self.near(distances).permute(0, 3, 1, 2)
        for block in self.blocks:
            x = block(x, keep=bias)
        return x


right(
    "graph_with_distances",
    Graph,
    lambda: {
        "nodes": numbers(2, 9, 6),
        "distances": torch.randint(0, 5, (2, 9, 9), generator=torch.Generator().manual_seed(1)),
    },
)


right("skewed_relative_logits", lambda: _skew(False))


class AxialMix(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.row, self.col = (
            nn.Linear(6, D),
            nn.MultiheadAttention(D, H, batch_first=True),
            nn.MultiheadAttention(D, H, batch_first=True),
        )
        self.p, self.q = nn.Parameter(torch.randn(1, 8, 1, D)), nn.Parameter(torch.randn(1, 1, 8, D))

    def forward(self, grid):
        b, h, w, _ = grid.shape
        x = self.inp(grid) + self.p[:, :h] + self.q[:, :, :w]
        r = x.flatten(0, 1)
        x = x + self.row(r, r, r)[0].view(b, h, w, D)
        c = x.transpose(1, 2).flatten(0, 1)
        return x + self.col(c, c, c)[0].view(b, w, h, D).transpose(1, 2)


right("rows_then_columns", AxialMix, lambda: {"grid": numbers(2, 5, 6, 6)})
right("documents_apart", lambda: _documents(False), pack)
right("frames_in_order", lambda: _frames(False), lambda: {"frames": numbers(2, 6, 4, 6)})
