"""Layers that are called more than once, and layers beside others: which call counts, and which layer is out of line."""

import jsonschema
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
from attemper.scan.document import schema
from close import in_float32, in_float64
from scan.faults import LENGTH, ROOT, WIDTH, Layer, by_hand, numbers
from scan.test_audit import audited


class Cached(Layer):
    """A scaled k, fresh or from a cache, and SDPA's own scale on top."""

    def __init__(self):
        super().__init__(F.scaled_dot_product_attention)
        self.cache = None

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        k = k * ROOT if self.cache is None else self.cache
        return self.meet(q, k, v)


@pytest.mark.parametrize("order", [("cached", "fresh"), ("fresh", "cached")])
def test_a_call_whose_keys_are_fresh_counts_whenever_it_comes(order):
    torch.manual_seed(0)
    layer, stored = Cached(), torch.randn(2, 4, LENGTH, WIDTH // 4)

    def run():
        for kind in order:
            layer.cache = stored if kind == "cached" else None
            layer(numbers())

    (found,) = audited(layer, run)
    assert (found.fault, found.applied) == ("twice", in_float32(ROOT**2, terms=8))
    assert "followed" not in found.message
    assert "calls apply" not in found.message  # what the cache holds cannot be known to be another number


class Tied(nn.Module):
    """One layer, called three times."""

    def __init__(self, scales, gain=1.0):
        super().__init__()
        self.layer, self.scales = Layer(by_hand(ROOT), gain), scales

    def forward(self, x):
        for scale in self.scales:
            self.layer.meet = by_hand(scale)
            x = self.layer(x)
        return x


@pytest.mark.parametrize(
    ("scales", "fault"),
    [
        ((ROOT, WIDTH**-0.5, ROOT), "sqrt_dmodel"),
        ((WIDTH**-0.5, ROOT, ROOT), "sqrt_dmodel"),
        ((ROOT, 1.0, WIDTH**-0.5), "uncontrolled"),  # the worst of two faults
        ((WIDTH**-0.5, ROOT, 1.0), "uncontrolled"),
    ],
)
def test_a_tied_layer_is_judged_by_the_worst_of_its_calls(scales, fault):
    torch.manual_seed(0)
    net = Tied(scales, gain=2.0)
    (found,) = audited(net, lambda: net(numbers()))
    assert found.fault == fault
    shown = [f"{scale:.4g}" for scale in dict.fromkeys(scales)]
    assert found.message.endswith(f" Its calls apply {', '.join(shown[:-1])} and {shown[-1]}.")


def test_a_tied_layer_that_applies_one_scale_is_said_as_any_other():
    torch.manual_seed(0)
    net = Tied((ROOT,) * 3)
    (found,) = audited(net, lambda: net(numbers()))
    assert (found.fault, found.message) == (None, f"q·k is multiplied by {ROOT:.4g}: q·k / √d_k.")


@pytest.mark.usefixtures("float64")
def test_the_spread_of_a_fault_is_that_of_its_own_calls():
    torch.manual_seed(0)
    net = Tied((ROOT, ROOT, ROOT, 1.0), gain=1.3)
    (found,) = audited(net, lambda: net(numbers()))
    alone = Tied((1.0,))
    alone.load_state_dict(net.state_dict())
    with torch.no_grad():
        x = Tied((ROOT,) * 3)
        x.load_state_dict(net.state_dict())
        (expected,) = audited(alone, lambda: alone(x(numbers())))
    assert expected.fault == found.fault == "uncontrolled"
    assert found.logit_std == in_float64(expected.logit_std)


def layers(*scales, cls=Layer, **options):
    torch.manual_seed(0)
    return nn.Sequential(*(cls(by_hand(scale), **options) for scale in scales))


@pytest.mark.parametrize("odd", [0, 2, 3])
def test_a_layer_out_of_line_is_remarked(odd):
    scales = [ROOT] * 4
    scales[odd] = 0.2
    net = layers(*scales)
    found = audited(net, lambda: net(numbers()))
    assert [layer.fault for layer in found] == ["odd" if index == odd else None for index in range(4)]
    assert found[odd].message.endswith(f"This layer multiplies q·k by 0.2, the 3 others like it by {ROOT:.4g}.")
    assert found[odd].verdict == "ok"
    document = attemper.scan(net, numbers()).to_dict()
    (said,) = [one for one in document["findings"] if one["name"] == "scale"]
    assert (said["level"], said["fault"], said["layer"]) == ("note", "odd", str(odd))
    jsonschema.validate(document, schema())


class Named(Layer):
    """Its scale is an attribute, so it is meant."""

    def __init__(self, meet):
        super().__init__(meet)
        self.scale = 0.2


class Learned(Layer):
    """One learned number per layer."""

    def __init__(self, meet):
        super().__init__(lambda q, k, v: (q @ k.mT * self.temperature).softmax(-1) @ v)
        self.temperature = nn.Parameter(torch.tensor(0.2 if meet is None else ROOT))


NOT_DECLARED = {None, "unknown"}  # 0.2 is the scale of no rule
IN_LINE = {
    "two of each": (lambda: layers(ROOT, 0.2, ROOT, 0.2), NOT_DECLARED),
    "two layers": (lambda: layers(ROOT, 0.2), NOT_DECLARED),
    "one that is named": (lambda: nn.Sequential(*layers(ROOT, ROOT, ROOT), Named(by_hand(0.2))), {None}),
    "learned": (lambda: nn.Sequential(*(Learned(meet) for meet in (1, 1, 1, None))), {None}),
    "another place": (lambda: nn.ModuleDict({"a": layers(ROOT, ROOT, ROOT), "b": layers(0.2)}), NOT_DECLARED),
}


@pytest.mark.parametrize("name", IN_LINE)
def test_layers_that_may_differ_are_not_out_of_line(name):
    build, faults = IN_LINE[name]
    net = build()

    def run():
        x = numbers()
        for part in net.values() if isinstance(net, nn.ModuleDict) else [net]:
            x = part(x)

    assert {layer.fault for layer in audited(net, run)} == faults


def masked_by(bias):
    """Unscaled, and the mask scaled in place of the scores."""
    mask = torch.full((LENGTH, LENGTH), bias).triu(1)
    return lambda q, k, v: (q @ k.mT + mask * ROOT).softmax(-1) @ v


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("gain", [0.3, 2.0])
def test_a_mask_that_was_scaled_is_no_logit(gain):
    """−1e4/√d_k is above what counts as hidden; the spread is that of the scores all the same."""
    found = []
    for bias in (-1e4, -torch.inf):
        torch.manual_seed(0)
        net = nn.Sequential(Layer(masked_by(bias), gain))
        found += audited(net, lambda net=net: net(numbers()))
    scaled, whole = found
    assert scaled.logit_std == in_float64(whole.logit_std)
    assert (scaled.fault, scaled.keys) == (whole.fault, whole.keys)
    assert whole.fault == ("uncontrolled" if gain == 2.0 else "unscaled")


def test_logits_that_lie_far_apart_by_themselves_count():
    """One key above all others by 500, in all heads: no mask hides the others, though one is added."""
    torch.manual_seed(0)
    net = nn.Sequential(Layer(lambda q, k, v: (q @ k.mT * 100 + torch.zeros(LENGTH)).softmax(-1) @ v, gain=3.0))
    (found,) = audited(net, lambda: net(numbers()))
    assert found.logit_std > 400
    assert found.fault == "uncontrolled"
