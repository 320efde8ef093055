"""The backward of a training step on a GPU: tiles that the hardware copies, and rows that enter products as columns."""

import pytest
import torch

import attemper
from judge import judge

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

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
        pytest.skip("plain attention in float16 overflows")
    judge(draw(dim=dim, size=size, dtype=dtype), {"causal": "lower_right"}, "triton", losses=("output",))


@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_tiles_that_the_hardware_cannot_copy(what):
    tensors = draw(rows=300, keys=300)
    memory = torch.randn(2, 2, 300, 68, device="cuda", dtype=torch.bfloat16)  # rows of 136 bytes
    tensors[what] = memory[..., :64]
    judge(tensors, {"causal": True}, "triton", losses=("output",))


def test_an_infinite_logit_spoils_only_its_own_gradients():
    """The lse of its row is infinite, and has no parts."""
    tensors = {name: tensor.requires_grad_() for name, tensor in draw(rows=256, keys=256).items()}
    with torch.no_grad():
        tensors["query"][0, 0, 3, 0], tensors["key"][0, 0, 5, :] = float("inf"), 1.0
    output = attemper.attention(*tensors.values(), signs=(), kernel="triton").output
    output.sum().backward()
    assert tensors["query"].grad[1].isfinite().all()
    assert tensors["value"].grad[:, 1].isfinite().all()
