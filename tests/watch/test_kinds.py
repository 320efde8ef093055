"""Self- and cross-attention told apart by what is computed, where no name tells."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import attemper

WIDTH, HEADS = 32, 4


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def heads(self, *parts):
        return (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)


class NormedEach(Two):
    """Norms whose outputs are gone when the next is computed: their memory is used again."""

    def forward(self, x, y):
        return F.scaled_dot_product_attention(
            *self.heads(self.q(self.norm(x)), self.k(self.other(y)), self.v(self.other(y)))
        )


class NormedAfter(Two):
    def forward(self, x, y):
        q, k, v = self.heads(self.q(x), self.k(y), self.v(y))
        return F.scaled_dot_product_attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)


class Residual(Two):
    """Queries from a stream to which an attention's output was added."""

    def forward(self, x, y):
        x = x + F.scaled_dot_product_attention(*self.heads(x, x, x)).transpose(1, 2).flatten(2)
        y = x if y is None else y
        return (self.q(x) @ self.k(y).mT).softmax(-1) @ self.v(y)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("cls", [NormedEach, NormedAfter])
@pytest.mark.parametrize("length", [5, 64])
def test_by_the_sequences_behind_q_and_k(cls, length, graph):
    net, x, y = cls(), torch.randn(2, length, WIDTH), torch.randn(2, length, WIDTH)
    with torch.set_grad_enabled(graph):
        for other, kind in ((y, "cross"), (x, "self")):
            net(x, other)
            with attemper.watch(net) as watch:
                net(x, other)
            assert [entry.kind for entry in watch.record.entries] == [kind]


def test_a_residual_stream_stays_one_sequence():
    net, x = Residual(), torch.randn(2, 6, WIDTH)
    for other, kinds in ((None, ["self", "self"]), (torch.randn(2, 6, WIDTH), ["self", "cross"])):
        with torch.no_grad(), attemper.watch(net) as watch:
            net(x, other)
        assert [entry.kind for entry in watch.record.entries] == kinds


@pytest.mark.parametrize("weights", [False, True])
def test_multihead_attention_called_by_keywords(weights):
    net = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x, y = torch.randn(2, 6, WIDTH), torch.randn(2, 6, WIDTH)
    hidden = torch.zeros(2, 6, dtype=torch.bool)
    hidden[1, 4:] = True
    for key, kind, rows in ((y, "cross", 12), (x, "self", 10)):
        with torch.no_grad(), attemper.watch(net) as watch:
            net(query=x, key=key, value=key, key_padding_mask=hidden, need_weights=weights)
        assert [(entry.kind, entry.summary.rows[0].item()) for entry in watch.record.entries] == [(kind, rows)]


def test_a_cross_attention_whose_inner_module_is_called_self():
    sizes = {"d_model": 32, "d_latents": 32, "num_latents": 6, "num_blocks": 1, "num_self_attends_per_block": 1}
    heads = {"num_self_attention_heads": 4, "num_cross_attention_heads": 4}
    model = transformers.PerceiverModel(transformers.PerceiverConfig(**sizes, **heads)).eval()
    with torch.no_grad(), attemper.watch(model) as watch:
        model(inputs=torch.randn(2, 12, 32))
    assert [(entry.layer, entry.kind) for entry in watch.record.entries] == [
        ("encoder.cross_attention.attention.self", "cross"),
        ("encoder.self_attends.0.attention.self", "self"),
    ]
