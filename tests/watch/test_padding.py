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
