"""The tests that a model of your own needs: copy the last lines beside it. Run: python -m pytest examples/test_my_model.py"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.testing import assert_causal, assert_heads_keep_positions, assert_scale


class Attention(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(100, 64), Attention(), Attention(), nn.Linear(64, 100))


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(0))


def test_no_output_depends_on_a_later_token(model, tokens):
    assert_causal(model, tokens)


def test_every_layer_divides_by_the_root_of_d_k(model, tokens):
    assert_scale(model, tokens, rule="sqrt_dk")


def test_heads_are_cut_and_joined_by_position(model, tokens):
    assert_heads_keep_positions(model, tokens)


def test_a_scan_finds_nothing(model, tokens):
    assert attemper.scan(model, tokens).findings == []
