"""The backward of a training step on a GPU: tiles that the hardware copies, and rows that enter products as columns."""

import pytest
import torch

import attemper
from judge import judge

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch finds as cuda")

CALLS = {
    "full": ({}, {}),
    "causal": ({"rows": 400, "keys": 400}, {"causal": True}),
    "causal, last rows": ({"rows": 200, "keys": 333}, {"causal": "lower_right"}),
    "causal, more rows": ({"rows": 333, "keys": 200}, {"causal": "lower_right"}),
    "window": ({"rows": 300, "keys": 300}, {"causal": True, "window": 70}),
    "grouped": ({"heads": 6}, {"causal": True}),
    "negative scale": ({}, {"scale": -0.2}),
    "small scale": ({}, {"scale": 1e-5}),
    "head dim 40": ({"dim": 40}, {"causal": True}),
    "head dim 128": ({"dim": 128}, {"causal": True}),
    "head dims 96 and 32": ({"dim": 96, "value_dim": 32}, {}),
    "head dims 32 and 96": ({"dim": 32, "value_dim": 96}, {"causal": True}),
    "head dim 256": ({"dim": 256}, {"causal": True}),
}


def draw(rows=320, keys=256, heads=2, dim=64, value_dim=None, size=1.0, dtype=torch.bfloat16):
    def vectors(heads, length, dim):
        tensor = torch.randn(2, length, heads, dim, device="cuda").to(dtype)  # as models have them: by token
        return tensor.transpose(1, 2)

    query, key, value = vectors(heads, rows, dim), vectors(2, keys, dim), vectors(2, keys, value_dim or dim)
    return {"query": query * size, "key": key * size, "value": value}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_the_output(name):
    sizes, options = CALLS[name]
    judge(draw(**sizes), options, "triton", losses=("output",))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [10.0, 30.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_large_logits(dim, size, dtype):
    if dtype == torch.float16 and size * size * dim > 6e4:
        pytest.skip("does not apply: plain attention in float16 overflows")
    judge(draw(dim=dim, size=size, dtype=dtype), {"causal": "lower_right"}, "triton", losses=("output",))


@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_tiles_that_the_hardware_cannot_copy(what):
    tensors = draw(rows=300, keys=300)
    memory = torch.randn(2, 2, 300, 68, device="cuda", dtype=torch.bfloat16)  # rows of 136 bytes
    tensors[what] = memory[..., :64]
    judge(tensors, {"causal": True}, "triton", losses=("output",))


def test_an_infinite_logit_spoils_only_what_it_must():
    """The lse of its row is infinite, and has no parts. A key whose logit there is -inf has no weight: its gradient is finite."""
    tensors = {name: tensor.requires_grad_() for name, tensor in draw(rows=256, keys=256).items()}
    query, key, value = tensors.values()
    with torch.no_grad():
        query[0, 0, 3, 0] = float("inf")
    attemper.attention(query, key, value, signs=(), kernel="triton").output.sum().backward()
    assert query.grad[1].isfinite().all()
    assert value.grad[:, 1].isfinite().all()
    assert value.grad[0, 0][key[0, 0, :, 0] < 0].isfinite().all()


def gradients(tensors, arriving, which=("query", "key", "value")):
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    output = attemper.attention(*leaves.values(), causal=True, signs=(), kernel="triton").output
    return torch.autograd.grad(output, [leaves[name] for name in which], arriving)


@pytest.mark.parametrize("what", ["query", "key", "value", "gradient"])
def test_addresses_that_are_not_aligned(what):
    """Between two calls on aligned ones of the same shapes: their plans and descriptors must not be used."""
    tensors, found = draw(rows=300, keys=300), []
    tensors["gradient"] = torch.randn_like(tensors["query"])
    memory = torch.empty(tensors[what].numel() + 16, device="cuda", dtype=torch.bfloat16)
    for start in (0, 4, 0):
        moved = memory[start : start + tensors[what].numel()].view(2, 300, 2, 64).transpose(1, 2).copy_(tensors[what])
        *vectors, arriving = (tensors | {what: moved}).values()
        found.append(gradients(dict(zip(("query", "key", "value"), vectors, strict=True)), arriving))
    for later in found[1:]:
        assert all(map(torch.equal, found[0], later))


@pytest.mark.parametrize("dim", [64, 128])
def test_repetitions_have_the_same_bits(dim):
    tensors = draw(rows=700, keys=700, dim=dim)
    arriving = torch.randn_like(tensors["query"])
    first = gradients(tensors, arriving)
    for _ in range(30):
        assert all(map(torch.equal, first, gradients(tensors, arriving)))


def test_what_arrives_may_lie_in_any_way():
    tensors = draw(rows=300, keys=300)
    row = torch.randn(64, device="cuda", dtype=torch.bfloat16)
    whole = row.expand(2, 2, 300, 64)
    expected = gradients(tensors, whole.contiguous())
    ways = {"expanded": whole, "turned": whole.mT.contiguous().mT, "sliced": torch.cat([whole, whole], -1)[..., 64:]}
    for name, arriving in ways.items():
        assert all(map(torch.equal, expected, gradients(tensors, arriving))), name


@pytest.mark.parametrize("which", [("query",), ("key",), ("value",), ("key", "value")])
def test_some_gradients_are_those_of_all(which):
    tensors = draw(rows=300, keys=300)
    arriving = torch.randn_like(tensors["query"])
    of_all = dict(zip(tensors, gradients(tensors, arriving), strict=True))
    assert all(map(torch.equal, gradients(tensors, arriving, which), [of_all[name] for name in which]))


def test_a_capture():
    tensors = draw(rows=300, keys=300)
    arriving = torch.randn_like(tensors["query"])
    expected = gradients(tensors, arriving)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(tensors, arriving)
    for gradient in found:
        gradient.zero_()
    graph.replay()
    assert all(map(torch.equal, expected, found))
