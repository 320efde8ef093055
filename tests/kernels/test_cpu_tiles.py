"""The native kernel on AMX tiles: half precision at the edges of tiles, and what tiles cannot hold."""

import math

import pytest
import torch

import attemper
from attemper.kernels.reference import define
from attemper.operation.call import prepare
from judge import SIGNS, assert_within, by_definition, judge
from native import VARIANTS, variant
from rounding import sign_mass

pytestmark = pytest.mark.skipif(
    "amx" not in VARIANTS, reason="needs a processor with AMX, and a build for it; `attemper env` says which"
)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])


@pytest.fixture(autouse=True)
def _poisoned(poisoned, poisoned_workspace):
    """Workspaces are filled with NaN as well as results."""


def draw(rows, keys, dim, value_dim, dtype, heads=2):
    shapes = {"query": (1, heads, rows, dim), "key": (1, heads, keys, dim), "value": (1, heads, keys, value_dim)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def both(run):
    """What tiles give, and what vectors give."""
    found = {}
    for name in ("amx", "avx512"):
        with variant(name):
            found[name] = run()
    return found["amx"], found["avx512"]


def outcome(tensors, **options):
    """Output, signs and the gradients of the output, of a fresh call."""
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    output, vitals = attemper.attention(**leaves, kernel="cpu", **options)
    gradients = torch.autograd.grad(output.float().sum(), list(leaves.values()))
    return [output.detach(), *(getattr(vitals, name).detach() for name in SIGNS), *gradients]


@HALVES
@pytest.mark.parametrize(
    ("rows", "keys", "dim", "value_dim"),
    [
        (16, 1, 1, 1),
        (17, 400, 31, 33),
        (64, 32, 1, 32),
        (65, 33, 33, 16),
        (81, 385, 3, 64),
        (96, 400, 64, 1),
        (97, 513, 65, 96),
        (130, 769, 128, 40),
    ],
)
@pytest.mark.parametrize("options", [{}, {"causal": "lower_right", "window": 40}], ids=["full", "window"])
def test_the_edges_of_tiles(rows, keys, dim, value_dim, options, dtype):
    judge(draw(rows, keys, dim, value_dim, dtype), options, "cpu")


@HALVES
@pytest.mark.parametrize("groups", [1, 2])
def test_few_heads_on_several_threads(groups, dtype):
    """Packed heads that all workers read, and keys in parts, each with its own dQ."""
    tensors = draw(200, 800, 40, 24, dtype) | {
        name: t[:, :groups] for name, t in draw(200, 800, 40, 24, dtype).items() if name != "query"
    }
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        judge(tensors, {"causal": "lower_right"}, "cpu")
        for a, b in zip(outcome(tensors), outcome(tensors), strict=True):
            assert torch.equal(a, b)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 32), (torch.float16, 64)], ids=["bf16", "f16"])
def test_tiles_are_what_runs(dtype, rows):
    """Other bits than vectors give: without this, the tests above would pass on vectors alone."""
    tensors = draw(rows, 32, 48, 48, dtype)
    tiles, vectors = both(lambda: outcome(tensors))
    different = [not torch.equal(a, b) for a, b in zip(tiles, vectors, strict=True)]
    assert any(different[1:-3])
    assert any(different[-3:])


@HALVES
@pytest.mark.parametrize(("rows", "keys"), [(15, 300), (100, 31)])
def test_short_calls_are_done_by_vectors(rows, keys, dtype):
    tensors = draw(rows, keys, 48, 48, dtype)
    for a, b in zip(*both(lambda: outcome(tensors)), strict=True):
        assert torch.equal(a, b)


ODD = {"inf": math.inf, "nan": math.nan, "huge": 1e30, "all tiny": 1e-30}


@pytest.mark.parametrize("where", ["query", "key", "value", "arriving"])
@pytest.mark.parametrize("what", ODD)
def test_what_tiles_cannot_hold_is_done_by_vectors(where, what):
    """What vectors give, whether that is finite or not."""
    tensors = {**draw(70, 90, 32, 32, torch.bfloat16), "arriving": torch.randn(1, 2, 70, 32).bfloat16()}
    tensors[where] = (
        tensors[where] * ODD[what] if what == "all tiny" else tensors[where].index_fill(2, torch.tensor(7), ODD[what])
    )
    arriving = tensors.pop("arriving")

    def run():
        leaves = [tensors[name].clone().requires_grad_() for name in ("query", "key", "value")]
        output, vitals = attemper.attention(*leaves, kernel="cpu")
        alone = attemper.measure(*leaves[:2], kernel="cpu")
        for name in SIGNS:  # measure() never sees the values
            assert torch.equal(getattr(alone, name).nan_to_num(7), getattr(vitals, name).nan_to_num(7)), name
        return [output, *torch.autograd.grad(output, leaves, arriving)]

    tiles, vectors = both(run)
    for a, b in zip(tiles, vectors, strict=True):
        finite = b.isfinite()
        assert torch.equal(a[~finite].nan_to_num(7), b[~finite].nan_to_num(7))
        if finite.any():
            a, b = a[finite].double(), b[finite].double()
            assert (a - b).abs().max() <= 0.01 * b.abs().max()


def test_products_of_small_numbers_are_not_lost():
    """Tiles drop products below 2^-126, before the scale makes them large."""
    tensors = {name: (t.float() * 2e-18).bfloat16() for name, t in draw(70, 90, 32, 32, torch.bfloat16).items()}
    tiles, vectors = both(lambda: attemper.measure(tensors["query"], tensors["key"], scale=5e34, kernel="cpu"))
    exact, plain = (by_definition(tensors, {"scale": 5e34}, dtype) for dtype in (torch.float64, torch.float32))
    mass = sign_mass(exact[2], exact[1])
    for vitals in (tiles, vectors):
        for name in SIGNS:
            rounding = torch.finfo(torch.float32).eps * mass[name]
            assert_within(name, getattr(vitals, name), exact[1][name].detach(), plain[1][name], rounding)


@pytest.mark.parametrize("loss", ["output", "entropy", "sum_p2"])
def test_gradients_of_float16_are_as_exact_as_with_vectors(loss):
    """Where lse is so large that its rounding counts, or dz times keys that lie close together cancels."""
    tensors, options = draw(100, 400, 64, 64, torch.float16), {"scale": 1.0}
    tensors["query"] = tensors["query"] / 10
    if loss == "output":
        options["mask"] = torch.full((100, 400), 1e4)
    else:
        tensors["key"] = tensors["key"] + 30
    arriving = torch.randn(1, 2, 100, 64).half() if loss == "output" else torch.randn(1, 2, 100)
    wide = [t.double().requires_grad_() for t in tensors.values()]
    result = getattr(define(prepare("test", *wide, **options).problem), loss)
    exact = torch.autograd.grad(result, wide, arriving.double(), allow_unused=True)

    def run():
        leaves = [t.clone().requires_grad_() for t in tensors.values()]
        output, vitals = attemper.attention(*leaves, **options, kernel="cpu")
        result = output if loss == "output" else getattr(vitals, loss)
        found = torch.autograd.grad(result, leaves, arriving, allow_unused=True)
        pairs = [(a, b) for a, b in zip(found, exact, strict=True) if b is not None]
        return [(a.double() - b).square().mean().sqrt().item() for a, b in pairs]

    tiles, vectors = both(run)
    assert max(a / b for a, b in zip(tiles, vectors, strict=True)) < 1.2


@HALVES
@pytest.mark.parametrize("learned", ["scale", "mask"])
def test_gradients_in_float32_are_done_by_vectors(learned, dtype):
    """They are as exact as with vectors alone, although the other inputs are of half precision."""
    tensors = draw(70, 90, 32, 32, dtype)
    tensors[learned] = torch.rand(2) if learned == "scale" else torch.randn(70, 90)
    judge(tensors, {}, "cpu:amx", "cpu:avx512")
