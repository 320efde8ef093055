"""attemper's own operation inside a watched model: measured from its arguments, whatever they are."""

import pytest
import torch
from torch import nn

import attemper
from attemper.watch.routes.attemper import band
from close import assert_float64, in_float64

BATCH, HEADS, LENGTH, KEYS, EACH = 2, 4, 9, 12, 8
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "lower right": {"causal": "lower_right"},
    "a window": {"window": 3},
    "a causal window": {"causal": True, "window": 3},
    "a window at the end": {"causal": "lower_right", "window": 4},
    "capped": {"softcap": 2.0},
    "a number": {"scale": 0.4},
    "a number per head": {"scale": torch.linspace(0.1, 0.7, HEADS)},
    "a number per row": {"scale": torch.linspace(0.1, 0.7, LENGTH).view(1, 1, -1, 1)},
    "a mask": {"mask": torch.arange(KEYS) < 10},
}


class Attends(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def forward(self, q, k):
        return attemper.attention(q, k, k, signs=(), **self.options).output


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_its_vitals_are_those_of_measure(options, kernel):
    q, k = torch.randn(BATCH, HEADS, LENGTH, EACH) * 2, torch.randn(BATCH, 2, KEYS, EACH) * 2
    model = Attends({**options, "kernel": kernel})
    expected = model(q, k)
    with attemper.watch(model) as watch:
        assert torch.equal(model(q, k), expected)
    assert watch.record.notes == []
    vitals = attemper.measure(q, k, **options, kernel="reference").by_head()
    for head, row in enumerate(watch.record.to_dicts()):
        for sign in ("visible", "mean", "variance", "entropy", "sum_p2", "peak"):
            assert row[sign] == in_float64(getattr(vitals, sign)[head].item()), sign


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rule", attemper.RULES)
def test_every_rule_of_the_module(rule):
    module = attemper.MultiHeadAttention(HEADS * EACH, HEADS, rule=rule, layer=1, batch_first=True)
    x = torch.randn(BATCH, LENGTH, HEADS * EACH)
    with attemper.watch(module) as watch:
        vitals = module(x, is_causal=True, signs="all").vitals.by_head()
    (entry,) = watch.record.entries
    assert_float64(entry.summary.entropy, vitals.entropy)
    assert watch.record.info["", "self"].route == "attemper"


@pytest.mark.parametrize(
    ("left", "right", "causal", "window"),
    [
        (None, None, False, None),
        (None, 0, True, None),
        (None, 3, "lower_right", None),
        (2, 2, False, 3),
        (2, 0, True, 3),
        (0, 3, "lower_right", 4),
    ],
)
def test_a_band_is_read_back(left, right, causal, window):
    assert band(left, right) == (causal, window)
