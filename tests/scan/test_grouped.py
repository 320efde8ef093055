"""Grouped heads written by a five-dimensional einsum: their number, their signs and their scale, in any order of dimensions."""

import pytest
import torch
from torch import nn

import attemper
from close import in_float64

BATCH, LENGTH, WIDTH, EACH = 5, 17, 48, 8
ORDERS = {  # how q and k lie, and how the logits do
    "bgrij": ("bgrid", "bgjd"),
    "bigrj": ("bigrd", "bjgd"),
    "bgirj": ("bgrid", "bgjd"),
    "brgij": ("brgid", "bgjd"),
    "bgrji": ("bgrid", "bgjd"),
    "grbij": ("bigrd", "bjgd"),
    "gbrij": ("bigrd", "bjgd"),
    "bijgr": ("bigrd", "bjgd"),
}


class Grouped(nn.Module):
    """Scores by one einsum, divided by √d_model: the mistake that the audit must name."""

    def __init__(self, order, groups, repeats, keys_first, named):
        super().__init__()
        self.order, self.groups, self.repeats, self.keys_first = order, groups, repeats, keys_first
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * EACH) for n in (groups * repeats, groups, groups))
        self.out = nn.Linear(groups * repeats * EACH, WIDTH)
        if named:
            self.num_heads = groups * repeats

    def parts(self, x):
        q = self.q(x).unflatten(-1, (self.groups, self.repeats, EACH))
        return q, *(part(x).unflatten(-1, (self.groups, EACH)) for part in (self.k, self.v))

    def forward(self, x):
        q, k, v = self.parts(x)
        query, key = ORDERS[self.order]
        q, k, v = torch.einsum(f"bigrd->{query}", q), *(torch.einsum(f"bjgd->{key}", part) for part in (k, v))
        both = (k, q, f"{key},{query}") if self.keys_first else (q, k, f"{query},{key}")
        logits = torch.einsum(f"{both[2]}->{self.order}", *both[:2]) / WIDTH**0.5
        weights = logits.softmax(self.order.index("j"))
        return self.out(torch.einsum(f"{self.order},{key}->bigrd", weights, v).flatten(2))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("groups", "repeats", "keys_first"), [(2, 3, False), (2, 3, True), (1, 6, False), (6, 1, False)]
)
@pytest.mark.parametrize("order", ORDERS)
def test_grouped_heads_are_counted_and_their_scale_is_named(order, groups, repeats, keys_first, named):
    torch.manual_seed(0)
    model = Grouped(order, groups, repeats, keys_first, named).eval()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    found = attemper.scan(model, x, pictures=False)
    (layer,) = found.layers
    assert (layer["heads"], layer["kv_heads"], layer["queries"], layer["keys"]) == (6, groups, LENGTH, LENGTH)
    assert layer["scale"]["applied"] == in_float64(WIDTH**-0.5)
    assert layer["scale"]["rule"] == "sqrt_dmodel"
    q, k, _ = model.parts(x)
    logits = torch.einsum(f"bigrd,bjgd->{'rg' if order == 'brgij' else 'gr'}bij", q, k).flatten(0, 1) / WIDTH**0.5
    expected = logits.detach().double()
    for head, row in enumerate(found.heads):
        assert row["peak"] == in_float64(expected[head].max().item())
        assert row["variance"] == in_float64(expected[head].var(-1, correction=0).mean().item())
    std = expected.var(-1, correction=0).mean().sqrt().item()
    assert layer["scale"]["logit_std"] == in_float64(std)
    assert 0.5 < layer["scale"]["predicted_std"] / std < 2
