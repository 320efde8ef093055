"""A softmax over the queries, a fault or slot attention, is measured, noted and named by a scan, wherever its module is."""

import pytest
import torch
from torch import nn

import attemper
from close import in_float64
from watched import state

WIDTH, HEADS, LENGTH, SLOTS = 32, 4, 12, 5
NOTE = "its softmax runs over the queries, not over the keys: its signs do too."


class Heads(nn.Module):
    num_heads = HEADS

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        self.z = q @ k.mT * 8**-0.5
        return (self.z.softmax(-2) @ v).transpose(1, 2).flatten(-2)


class Slots(nn.Module):
    """Slots compete for the inputs; what each has won is then averaged."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.cell, self.start = nn.GRUCell(WIDTH, WIDTH), nn.Parameter(torch.randn(1, SLOTS, WIDTH))

    def forward(self, x):
        k, v, slots = self.k(x), self.v(x), self.start.expand(len(x), -1, -1)
        for _ in range(2):
            self.z = torch.einsum("bid,bjd->bij", self.q(slots), k) * WIDTH**-0.5
            shares = self.z.softmax(1) + 1e-8
            update = torch.einsum("bjd,bij->bid", v, shares / shares.sum(-1, keepdim=True))
            slots = self.cell(update.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return slots


MODELS = {
    "alone": lambda: Heads(),
    "inside": lambda: nn.Sequential(Heads(), nn.Linear(WIDTH, WIDTH)),
    "slots": lambda: Slots(),
    "slots inside": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Slots()),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_it_is_measured_and_noted(make, training):
    net, x = make(), torch.randn(2, LENGTH, WIDTH)
    before = state()
    with torch.set_grad_enabled(training):
        expected = net(x)
        with attemper.watch(net, gradients=training) as watch:
            output = net(x)
            if training:
                output.sum().backward()
    assert torch.equal(output, expected)
    assert state() == before
    assert [note.endswith(NOTE) for note in watch.record.notes] == [True]
    assert watch.unmeasured == 0


@pytest.mark.usefixtures("float64")
def test_its_signs_are_those_of_the_softmax_that_ran():
    net, x = Heads(), torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad(), attemper.watch(net) as watch:
        net(x)
    p = net.z.softmax(-2)
    entropy = -(p * p.log()).sum(-2).mean((0, 2))
    rows = watch.record.to_dicts()
    assert [row["entropy"] for row in rows] == in_float64(entropy.tolist())
    assert [row["peak"] for row in rows] == in_float64(net.z.amax((0, 2, 3)).tolist())


def test_a_scan_names_it():
    found = attemper.scan(MODELS["inside"]().eval(), torch.randn(2, LENGTH, WIDTH))
    assert "softmax over the queries in 0" in found.verdict["line"]
