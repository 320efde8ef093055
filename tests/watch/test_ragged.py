"""torch's own packed sequences, varlen_attn and jagged tensors: every document is measured by itself, or it is said why not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import varlen

import attemper
import packed
from close import in_float64

SIGNS = ("rows", "visible", "peak", "entropy", "sum_p2")
GRADIENTS = ("grad_q_rms", "grad_k_rms")
PASSES = ["full", "intercepted", "full, gradients", "intercepted, gradients"]


pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


@pytest.fixture(autouse=True)
def _in_float64(float64):
    """Both ways to each number are exact."""
    packed.SEEN.clear()
    packed.GRADIENTS.clear()


def how(causal, scale, window):
    left, right = window or (-1, -1)
    return [float(causal), float(left), float(-1 if causal else right), scale]


@varlen._varlen_attn.register_kernel("cpu")
def _(q, k, v, rows, keys, _, __, causal=False, scale=None, window=None, gqa=False, used=None, table=None, splits=None):
    """torch has this op for GPUs alone."""
    if table is not None:
        out = q.clone()
    elif used is None:
        out = packed.forward(q, k, v, rows, keys, [*how(causal, scale or q.shape[-1] ** -0.5, window), 0.0])
    else:
        packed.SEEN.append(packed.define(q, k, (rows, keys), causal, (-1, -1), q.shape[-1] ** -0.5, used=used))
        out = q.clone()
    return out, q.new_zeros(q.shape[:2]), q.new_zeros(2)


@varlen._varlen_attn_backward.register_kernel("cpu")
def _(up, q, k, v, out, lse, rows, keys, _, __, causal, state, scale=None, window=None):
    return packed.backward(up, q, k, v, rows, keys, [*how(causal, scale or q.shape[-1] ** -0.5, window), 0.0])


def offsets(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def assert_rows(rows, expected, names=SIGNS):
    for name in names:
        assert [row[name] for row in rows] == in_float64(expected[name]), name


class Varlen(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.q, self.k, self.v, self.options = nn.Linear(12, 16), nn.Linear(12, 8), nn.Linear(12, 8), options

    def forward(self, x, y, rows, keys):
        q, k, v = (part.unflatten(-1, (-1, 4)) for part in (self.q(x), self.k(y), self.v(y)))
        return varlen.varlen_attn(q, k, v, rows, keys, 9, 9, enable_gqa=True, **self.options)


CALLS = {
    "all keys": ({}, (3, 6, 2), (3, 6, 2)),
    "causal": ({"window_size": (-1, 0)}, (3, 6, 2), (3, 6, 2)),
    "causal, a window": ({"window_size": (2, 0)}, (3, 6, 2), (3, 6, 2)),
    "a window": ({"window_size": (2, 2)}, (3, 6, 2), (3, 6, 2)),
    "a scale": ({"scale": 0.9}, (3, 6, 2), (3, 6, 2)),
    "one token, and none": ({"window_size": (-1, 0)}, (1, 0, 5, 1, 0), (1, 0, 5, 1, 0)),
    "other keys": ({}, (3, 6, 2), (5, 1, 4)),
    "other keys, causal": ({"window_size": (-1, 0)}, (3, 6, 2), (5, 7, 4)),
}


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize(("options", "rows", "keys"), CALLS.values(), ids=CALLS)
def test_varlen_attn(options, rows, keys, passes):
    net, x, y = Varlen(**options), torch.randn(sum(rows), 12), torch.randn(sum(keys), 12)
    y = x if rows == keys else y
    gradients = "gradients" in passes
    plain = net(x, y, offsets(*rows), offsets(*keys))
    packed.SEEN.clear()
    with attemper.watch(net, full="full" in passes, gradients=gradients) as watch:
        for _ in range(2):
            with torch.set_grad_enabled(gradients):
                out = net(x, y, offsets(*rows), offsets(*keys))
            assert torch.equal(out, plain)
            if gradients:
                out.sin().sum().backward()
            watch.step()
    assert watch.record.notes == []
    for step in range(2):
        found = watch.record.filter(steps=[step]).to_dicts()
        assert_rows(found, packed.SEEN[step])
        if gradients:
            assert_rows(found, packed.GRADIENTS[step], GRADIENTS)


def test_keys_of_a_cache_that_is_not_full():
    net, x, y = Varlen(seqused_k=torch.tensor([4, 1])), torch.randn(5, 12), torch.randn(12, 12)
    with torch.no_grad(), attemper.watch(net) as watch:
        net(x, y, offsets(2, 3), offsets(6, 6))
    assert_rows(watch.record.to_dicts(), packed.SEEN[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window_size": (2, 1)}, "a window of 2 keys before each query and 1 after it"),
        ({"seqused_k": torch.ones(3), "block_table": torch.zeros(3, 1)}, "a paged cache"),
    ],
)
def test_what_cannot_be_measured_of_varlen_attn_is_said(options, said):
    net, x = Varlen(**options), torch.randn(11, 12)
    if "block_table" in options:
        net.k = net.v = nn.Sequential(nn.Linear(12, 8), nn.Unflatten(0, (1, 11)))
    named = f"Varlen: not measured: .* call on {said}"
    with pytest.warns(UserWarning, match=named), torch.no_grad(), attemper.watch(net) as watch:
        net(x, x, offsets(3, 6, 2), offsets(3, 6, 2))
    assert len(watch.record) == 0


class Ragged(nn.Module):
    """Attention on jagged tensors, beside attention on others."""

    def __init__(self, beside=False):
        super().__init__()
        self.q, self.k, self.v, self.beside = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), beside

    def forward(self, x, y, **options):
        if self.beside:
            z = x.values()[None, None]
            F.scaled_dot_product_attention(z, z, z)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q(x), self.k(y), self.v(y)))
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(-2)


def jagged(*lengths):
    return torch.nested.nested_tensor([torch.randn(length, 8) for length in lengths], layout=torch.jagged)


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize(
    ("rows", "keys", "options"),
    [((3, 6, 2), None, {}), ((1, 5, 1), None, {"scale": 0.9}), ((3, 6, 2), (5, 1, 4), {}), ((4,), None, {})],
)
def test_jagged_tensors(rows, keys, options, passes):
    net, x = Ragged(), jagged(*rows)
    y = x if keys is None else jagged(*keys)
    gradients, kept = "gradients" in passes, {}

    def keep(name, shape):
        def hook(_, __, out):
            kept[name] = out.values().unflatten(-1, shape)
            if out.requires_grad:
                out.register_hook(
                    lambda gradient: kept.update({f"grad_{name}": gradient.values().unflatten(-1, shape)})
                )

        return hook

    for name in "qk":
        getattr(net, name).register_forward_hook(keep(name, (2, 4)))
    plain = net(x, y, **options).values()
    with attemper.watch(net, full="full" in passes, gradients=gradients) as watch:
        for _ in range(2):
            with torch.set_grad_enabled(gradients):
                out = net(x, y, **options).values()
            assert torch.equal(out, plain)
            if gradients:
                out.sin().sum().backward()
            watch.step()
    assert watch.record.notes == []
    given = False, (-1, -1), options.get("scale", 0.5)
    expected = packed.define(kept["q"], kept["k"], (offsets(*rows), offsets(*(keys or rows))), *given)
    if gradients:
        for name in "qk":
            expected[f"grad_{name}_rms"] = kept[f"grad_{name}"].square().mean((0, 2)).sqrt().tolist()
    for step in range(2):
        found = watch.record.filter(steps=[step]).to_dicts()
        assert_rows(found, expected, SIGNS + (GRADIENTS if gradients else ()))


def test_jagged_tensors_where_an_intercepted_pass_saw_others(kinds):
    """A model that packs only some of its passes."""

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.ragged = Ragged()

        def forward(self, x, pack):
            x = torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged) if pack else x
            return self.ragged(x, x)

    net = Either()
    with torch.no_grad(), attemper.watch(net) as watch:
        for pack in (False, False, True, False):
            net(torch.randn(2, 5, 8), pack)
            watch.step()
    assert kinds[:2] == ["full", "intercepted"]
    assert [row["rows"] for row in watch.record.to_dicts() if row["head"] == 0] == [10, 10, 7, 10]
    assert watch.record.notes == []


def test_jagged_tensors_by_another_name_of_the_function():
    """Many modules import the function itself."""

    class Alias(Ragged):
        def forward(self, x, y):
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q(x), self.k(y), self.v(y)))
            return torch._C._nn.scaled_dot_product_attention(q, k, v)

    x, net = jagged(3, 6, 2), Alias()
    with torch.no_grad():
        with attemper.watch(net) as watch:
            net(x, x)
        q, k = (layer(x).values().unflatten(-1, (2, 4)) for layer in (net.q, net.k))
    assert_rows(watch.record.to_dicts(), packed.define(q, k, (offsets(3, 6, 2),) * 2, False, (-1, -1), 0.5))
    assert watch.record.notes == []


@pytest.mark.parametrize("route", ["varlen", "jagged"])
def test_a_clip_of_packed_sequences_has_its_effect(route):
    net = Varlen() if route == "varlen" else Ragged()
    x, ends = torch.randn(11, 12), offsets(3, 6, 2)
    inputs = (x, x, ends, ends) if route == "varlen" else (jagged(3, 6, 2),) * 2
    found, peaks = attemper.projections(net, inputs), []
    for _ in range(2):
        with attemper.watch(net) as watch:
            net(*inputs)
        peaks.append([row["peak"] for row in watch.record.to_dicts()])
        attemper.qk_clip(net, watch.record, tau=0.01, projections=found)
    assert min(peaks[0]) > 0.01
    assert peaks[1] == in_float64([0.01] * len(peaks[0]))
