"""A call that compiled code takes at once gives what the general way gives, to the bit: results, gradients and errors."""

import random

import pytest
import torch
from torch import Tensor

import attemper
from attemper.operation import run
from serving import SEED


def drawn(pick):
    """Tensors and options of a call, mostly valid; sizes are small and often equal, so that a wrong broadcast fits."""
    batch, groups, shared = pick((1, 2, 3)), pick((1, 2, 3)), pick((1, 1, 2))
    heads, rows, dim, dims = groups * shared, pick((1, 2, 3, 4)), pick((2, 4)), pick((4, 4, 3, 3, 2))
    keys = pick((rows, 2, 5))

    def vectors(heads, length):
        whole = (batch if pick(range(8)) else 1, heads, length, dim)
        return torch.randn(whole[4 - dims :])

    options = {
        "causal": pick((False, True, "lower_right")),
        "window": pick((None, None, 2)),
        "softcap": pick((None, 3.0)),
    }
    if pick(range(2)):
        shape = [size if pick(range(3)) else 1 for size in (batch, heads, rows, keys)][pick(range(5)) :]
        options["mask"] = torch.rand(shape) > 0.3 if pick(range(2)) else torch.randn(shape)
    if pick(range(2)):
        sizes = (heads, rows, 1)
        shapes = (
            (),
            (heads,),
            (heads, 1, 1),
            (heads, rows, 1),
            (1, rows, 1),
            (rows, 1),
            (batch, heads, 1, 1),
            (pick(sizes), pick(sizes), pick(sizes)),
        )
        options["scale"] = torch.rand(pick(shapes)) + 0.1
    return [vectors(heads, rows), vectors(groups, keys), vectors(groups, keys)], options


def answer(tensors, options, tracked):
    given = [tensor.clone().requires_grad_(tracked) for tensor in tensors]
    more = {name: one.clone() if isinstance(one, Tensor) else one for name, one in options.items()}
    learned = [
        one.requires_grad_(tracked) for one in more.values() if isinstance(one, Tensor) and one.is_floating_point()
    ]
    try:
        output, vitals = attemper.attention(*given, **more, kernel="cpu")
    except attemper.errors.AttemperError as error:
        return str(error)
    found = [output, *vitals.to_dict().values()]
    if tracked:
        loss = sum(one.masked_fill(~one.isfinite(), 0).square().sum() for one in found if one.requires_grad)
        found += torch.autograd.grad(loss, [*given, *learned], allow_unused=True)
    return [None if one is None else one.detach() for one in found]


def same(one, other):
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    pairs = list(zip(one, other, strict=True))
    return all(
        a is b is None or (a.shape == b.shape and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))) for a, b in pairs
    )


@pytest.mark.parametrize("tracked", [False, True])
def test_both_ways_give_the_same(tracked, monkeypatch):
    pick, at_once = random.Random(SEED).choice, run._attend_at_once
    for number in range(1000):
        torch.manual_seed(number)
        tensors, options = drawn(pick)
        fast = answer(tensors, options, tracked)
        monkeypatch.setattr(run, "_attend_at_once", lambda *call: None)
        slow = answer(tensors, options, tracked)
        monkeypatch.setattr(run, "_attend_at_once", at_once)
        shapes = {name: tuple(one.shape) if isinstance(one, Tensor) else one for name, one in options.items()}
        assert same(fast, slow), (number, [tuple(tensor.shape) for tensor in tensors], shapes)


def test_a_scale_of_three_dimensions_is_per_head():
    query, key, value = (torch.randn(3, 3, 5, 8, dtype=torch.float64) for _ in range(3))
    scale = torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64).reshape(3, 1, 1)
    expected = torch.softmax(scale * (query @ key.mT), -1) @ value
    error = (attemper.attention(query, key, value, scale=scale).output - expected).abs().max()
    assert error < 16 * torch.finfo(torch.float64).eps * expected.abs().max()
