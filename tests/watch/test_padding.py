"""Padded queries: left out where a mask shows them, and never by another sequence's mask."""

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import attemper
from close import in_float64

WIDTH, HEADS, LENGTH, REAL = 32, 4, 10, 6
ROWS = LENGTH + REAL


def hidden():
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[1, REAL:] = True
    return mask


def row_of(net, *inputs, **named):
    with torch.no_grad(), attemper.watch(net) as watch:
        net(*inputs, **named)
    return watch.record.to_dicts()[-1]


def test_a_cross_attention_has_its_own_queries_padding():
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.second = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x, y):
            memory = self.first(x, x, x, key_padding_mask=hidden(), need_weights=False)[0]
            return self.second(y, memory, memory, key_padding_mask=hidden(), need_weights=False)[0]

    row = row_of(Cross().eval(), torch.randn(2, LENGTH, WIDTH), torch.randn(2, LENGTH, WIDTH))
    assert (row["layer"], row["kind"], row["rows"], row["visible"]) == ("second", "cross", 2 * LENGTH, 8)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("value", [-1e4, -65504.0, -math.inf])
def test_an_added_mask_hides_whatever_the_score(value, sign):
    class Hand(nn.Module):
        num_heads = 1

        def __init__(self):
            super().__init__()
            self.q = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            scores = self.q(x)[:, None] @ x[:, None].mT
            mask = torch.where(hidden(), value, 0.0)[:, None, None, :]
            scores = scores + mask if sign > 0 else scores - -mask
            return (scores * 0.5).softmax(-1) @ x[:, None]

    row = row_of(Hand(), torch.randn(2, LENGTH, WIDTH))
    assert row["rows"] == ROWS
    assert row["visible"] == in_float64((LENGTH * LENGTH + REAL * REAL) / ROWS)
    assert abs(row["mean"]) < 10
    assert row["variance"] < 100


def test_a_sink_beside_the_keys_hides_no_padding():
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 64, "vocab_size": 99, "max_position_embeddings": 64, "head_dim": 8}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    model = transformers.GptOssModel(transformers.GptOssConfig(**sizes, num_local_experts=4, rope_parameters=rope))
    tokens = torch.randint(3, 90, (2, LENGTH))
    row = row_of(model.eval(), input_ids=tokens, attention_mask=(~hidden()).long())
    assert row["rows"] == ROWS


def test_padded_queries_that_see_themselves():
    sizes = {"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 64, "vocab_size": 99}
    model = transformers.XLNetModel(transformers.XLNetConfig(**sizes)).eval()
    tokens = torch.randint(3, 90, (2, LENGTH))
    assert row_of(model, input_ids=tokens, attention_mask=(~hidden()).float())["rows"] == ROWS


@pytest.mark.parametrize("diagonal", [0, -1])
def test_a_causal_mask_shows_no_padding(diagonal):
    """Strictly causal, nobody sees the last key; its query is real all the same."""

    class Causal(nn.Module):
        def forward(self, x):
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(diagonal)
            mask[0, 0] = True
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    assert row_of(Causal(), torch.randn(2, HEADS, LENGTH, 8))["rows"] == 2 * LENGTH


class Chooses(nn.Module):
    """Attention whose queries choose their keys."""

    num_heads = HEADS

    def __init__(self, choose, route):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.choose, self.route = choose, route

    def forward(self, x):
        q, k = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k))
        scores = q @ k.mT
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        keep = self.choose(scores.masked_fill(~causal, -math.inf), q) & causal
        self.hidden_keys = (~keep.any(-2)).any()
        if self.route == "an argument":
            return F.scaled_dot_product_attention(q, k, k, attn_mask=keep)
        if self.route == "an added argument":
            return F.scaled_dot_product_attention(q, k, k, attn_mask=torch.zeros(keep.shape).masked_fill(~keep, -1e9))
        return scores.masked_fill(~keep, -torch.finfo(scores.dtype).max).softmax(-1) @ k


def best(scores, count):
    return scores >= scores.topk(count, -1).values[..., -1:]


CHOICES = {
    "the best two": lambda scores, q: best(scores, 2),
    "the best one": lambda scores, q: best(scores, 1),
    "the best two for all heads": lambda scores, q: best(scores.sum(1, keepdim=True), 2).expand_as(scores),
    "buckets": lambda scores, q: ((q[..., :1] > 0) == (q.flip(-1)[..., :1] > 0).mT) | (torch.arange(LENGTH) == 0),
    "the best two of one head": lambda scores, q: best(scores[:, :1], 2),
}


@pytest.mark.parametrize("route", ["by hand", "an argument", "an added argument"])
@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_a_key_that_no_query_chose_is_no_padding(choose, route):
    net = Chooses(choose, route).eval()
    for _ in range(3):
        row = row_of(net, torch.randn(2, LENGTH, WIDTH))
        assert row["rows"] == 2 * LENGTH
    assert net.hidden_keys


PADS = {
    "right": lambda: hidden(),
    "left": lambda: hidden().flip(-1),
    "in the middle": lambda: hidden().roll(-2, -1),
    "both sides": lambda: hidden().roll(2, -1),
}
I, J = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
SEEN = {
    "all": I == I,
    "causal": J <= I,
    "backward": J >= I,
    "a window": (I - J).abs() < 3,
    "documents": I // 5 == J // 5,
    "a prefix": (J <= I) | (J < 3),
    "a window and a global token": ((I - J).abs() < 3) | (J == 0),
    "every other token": (I - J) % 2 == 0,
}


@pytest.mark.parametrize("route", ["by hand", "an argument"])
@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
@pytest.mark.parametrize("pads", PADS.values(), ids=PADS)
def test_padding_behind_every_mask_is_left_out(pads, seen, route):
    class Padded(nn.Module):
        num_heads = HEADS

        def forward(self, x):
            q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            keep = seen & ~pads()[:, None, None]
            if route == "an argument":
                return F.scaled_dot_product_attention(q, q, q, attn_mask=keep)
            return (q @ q.mT).masked_fill(~keep, -1e9).softmax(-1) @ q

    assert row_of(Padded(), torch.randn(2, LENGTH, WIDTH))["rows"] == ROWS


@pytest.mark.parametrize("lengths", [(5, 1), (4, 2), (3, 1, 2), (2, 3, 1), (1, 5)])
@pytest.mark.parametrize("causal", [True, False])
def test_the_last_rows_of_documents_are_no_padding(lengths, causal):
    """Only its own query sees the last key of each, if they are causal."""

    class Packed(nn.Module):
        def forward(self, x):
            mask = torch.block_diag(*(torch.ones(length, length) for length in lengths)).bool()
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask.tril() if causal else mask)

    assert row_of(Packed(), torch.randn(2, HEADS, 6, 8))["rows"] == 12
