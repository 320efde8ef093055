"""Products and softmaxes that are no attention between tokens; and shifts of whole rows, which a softmax ignores."""

import pytest
import torch
from torch import nn

import attemper

BATCH, SIDE, HEADS, EACH, VALUES = 2, 4, 4, 8, 16
LENGTH, WIDTH = SIDE * SIDE, HEADS * VALUES


class Lambda(nn.Module):
    """Keys softmaxed over positions, summed with the values to one matrix that every query is multiplied by."""

    def __init__(self, kernel):
        super().__init__()
        self.qkv = nn.Conv2d(WIDTH, HEADS * EACH + EACH + VALUES, 1)
        self.norm, self.act = nn.BatchNorm2d(HEADS * EACH), nn.ReLU()
        self.last = nn.Conv2d(WIDTH, WIDTH, kernel, padding=kernel // 2)

    def forward(self, x):
        q, k, v = self.qkv(x).split([HEADS * EACH, EACH, VALUES], 1)
        q = self.norm(q).reshape(-1, HEADS, EACH, LENGTH).mT
        context = k.flatten(2).softmax(-1) @ v.flatten(2).mT
        positions = (
            q.unsqueeze(-2) @ v.flatten(2).mT.reshape(-1, 1, LENGTH, 1, VALUES).expand(-1, -1, -1, EACH, -1)
        ).squeeze(-2)
        out = q @ context.unsqueeze(1) + positions
        return self.act(self.last(out.mT.reshape(x.shape)))


class Attention(nn.Module):
    def forward(self, x):
        tokens = x.flatten(2).mT
        return (tokens @ tokens.mT).softmax(-1) @ tokens


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "in a norm's module"])
def test_features_that_a_product_made_are_no_scores_for_the_next_layer(kernel, wrapped):
    blocks = [Lambda(kernel), Lambda(kernel), Lambda(kernel)]
    if wrapped:
        for block in blocks:
            block.last = type("ConvNormAct", (nn.Sequential,), {})(block.last, nn.BatchNorm2d(WIDTH), nn.ReLU())
    net, x = nn.Sequential(*blocks, Attention()).eval(), torch.randn(BATCH, WIDTH, SIDE, SIDE)
    with torch.no_grad():
        expected = net(x)
        with attemper.watch(net) as watch:
            assert torch.equal(net(x), expected)
    assert watch.record.layers == ["3"]
