"""The forward for Hopper without a GPU: run by its own interpreter, and judged as every kernel is: `make triton`."""

import importlib.util
import itertools
import os
import random
from types import SimpleNamespace

import pytest
import torch

from attemper.kernels.contract import ALL_SIGNS, BIT, OUTPUT_LOW_BIT, empty_results
from attemper.operation.call import prepare
from attemper.vitals import rounded_off
from judge import _clear_winner, assert_values, assert_within, by_definition, gradients
from rounding import gradient_mass, reference_mass, sign_mass

READY = os.environ.get("TRITON_INTERPRET") != "1" and importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not READY, reason="needs triton beside torch: make triton")
CASES = 60
HOSTILE = {
    "inf": lambda q, k: k[:, 0, 5].fill_(float("inf")),
    "nan": lambda q, k: k[:, 0, 100, 3].fill_(float("nan")),
    "sink": lambda q, k: k[:, :, 3].mul_(300),
    "last": lambda q, k: k[:, :, -1].mul_(300),
    "far": lambda q, k: (q[..., 0].fill_(8), k[..., 0].add_(200)),
    "equal": lambda q, k: k.fill_(1.0),
    "zero": lambda q, k: q.zero_(),
}


@pytest.fixture(scope="module")
def hopper():
    from research.hopper import backward, forward, interpreter, launch, parts, sums, terms

    kernel = interpreter.interpreted(parts, sums, forward)["forward_kernel"]
    found = interpreter.interpreted(parts, terms, backward)
    back = found["rows_kernel"], found["keys_kernel"]
    return SimpleNamespace(kernel=kernel, back=back, interpreter=interpreter, launch=launch, terms=terms)


def run(hopper, tensors, options, bits=ALL_SIGNS, programs=3, exact=True, block=None):
    """The results of a call, in memory that was not empty."""
    query, key, value = (tensors.get(name) for name in ("query", "key", "value"))
    problem = prepare("hopper", query, key, value, **options).problem
    assert hopper.launch.refusal(problem) is None
    results = empty_results(problem, bits, as_query=True)
    for tensor in results:
        tensor.fill_(77)
    interpreter = hopper.interpreter

    def tiles(tensor, rows, dim):
        return interpreter.Tiles(tensor, [1, 1, rows, dim])

    count, args, constants = hopper.launch.forward_arguments(problem, results, bits, programs, tiles, exact, block)
    interpreter.launch(hopper.kernel, count, args, **constants)
    return results


def drawn(seed):
    """A random call: lengths that are no multiple of anything, heads, dims, dtypes, layouts, logits up to hundreds."""
    draw, make = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, keys, heads = draw.randint(1, 400), draw.randint(1, 400), draw.choice([1, 2, 4])
    groups = draw.choice([g for g in (1, 2, 4) if heads % g == 0])
    dim, value_dim = draw.choice([(64, 64), (128, 128), (96, 96), (40, 40), (64, 128), (128, 48)])
    batch, dtype = draw.choice([1, 2]), draw.choice([torch.bfloat16, torch.float16])

    def tensor(heads, rows, dim):
        if draw.random() < 0.5:
            return torch.randn(batch, rows, heads, dim, generator=make).to(dtype).transpose(1, 2)  # by token
        return torch.randn(batch, heads, rows, dim, generator=make).to(dtype)

    tensors = {
        "query": tensor(heads, rows, dim),
        "key": tensor(groups, keys, dim),
        "value": tensor(groups, keys, value_dim),
    }
    tensors["query"] *= draw.choice([1, 1, 3, 10, 30, 100])
    causal = draw.choice([False, True, "lower_right"])
    return tensors, {"causal": causal, "scale": draw.choice([None, 0.1])}, draw


def assert_right(tensors, options, results):
    _, exact, problem = by_definition(tensors, options, torch.float64)
    wide, plain = (by_definition(tensors, options, dtype)[1] for dtype in (torch.float32, tensors["query"].dtype))
    actual = {name: getattr(results, name) for name in results._fields}
    if "value" not in tensors:
        actual["output"], plain, exact = exact["output"].to(torch.bfloat16), exact, exact
    mass = sign_mass(problem, exact)
    assert_values(
        actual, exact, wide | {"output": plain["output"]}, mass | {"mean": mass["mean"] + reference_mass(exact)}
    )


@pytest.mark.parametrize("seed", range(CASES))
def test_random_calls(hopper, seed):
    tensors, options, draw = drawn(seed)
    block = draw.choice([None, hopper.launch.Block(128, 2), hopper.launch.Block(64, 3)])
    results = run(hopper, tensors, options, programs=draw.choice([1, 3, 132]), exact=draw.random() < 0.8, block=block)
    assert_right(tensors, options, results)


@pytest.mark.parametrize("seed", range(0, CASES, 6))
def test_signs_change_no_bit_of_the_output(hopper, seed):
    tensors, options, _ = drawn(seed)
    plain = run(hopper, tensors, options, bits=0).output
    for bits in (ALL_SIGNS, BIT["variance"], BIT["entropy"] | BIT["peak"], OUTPUT_LOW_BIT):
        assert torch.equal(run(hopper, tensors, options, bits=bits).output, plain)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_numbers(hopper, name, causal):
    """Rows that see them have what the definition says; a hidden key reaches none, NaN or not."""
    torch.manual_seed(0)
    tensors = {what: torch.randn(1, 2, 260, 64).bfloat16() for what in ("query", "key", "value")}
    HOSTILE[name](tensors["query"], tensors["key"])
    results = run(hopper, tensors, {"causal": causal})
    _, exact, _ = by_definition(tensors, {"causal": causal}, torch.float64)
    if name not in ("inf", "nan"):
        assert_right(tensors, {"causal": causal}, results)
    for sign in ("lse", "peak", "mean", "entropy", "sum_p2", "variance", "output"):
        actual, expected = getattr(results, sign), exact[sign].detach()
        clean = expected.isfinite() if sign != "output" else exact["lse"].isfinite()[..., None].expand_as(expected)
        assert torch.equal(actual.isnan() & ~clean, expected.isnan() & ~clean) or sign == "output", sign
        assert actual[clean].isfinite().all(), sign


def test_what_rounding_took_from_the_output(hopper):
    """As the contract defines it: with it, the output is that of float32 arithmetic."""
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        tensors = {what: torch.randn(1, 2, 200, 64).to(dtype) for what in ("query", "key", "value")}
        results = run(hopper, tensors, {"causal": True}, bits=OUTPUT_LOW_BIT)
        wide = by_definition(tensors, {"causal": True}, torch.float32)[1]["output"].detach()
        lost = rounded_off(wide, results.output)
        steps = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
        assert (
            results.output_low.float() - lost.float()
        ).abs().median() < 0.25 * steps  # weights were cut to half precision


def test_without_values(hopper):
    tensors, options, _ = drawn(3)
    without = {name: tensor for name, tensor in tensors.items() if name != "value"}
    results = run(hopper, without, options)
    exact = by_definition(tensors, options, torch.float64)[1]
    wide = by_definition(tensors, options, torch.float32)[1]
    mass = sign_mass(by_definition(tensors, options, torch.float64)[2], exact)
    actual = {name: getattr(results, name) for name in results._fields} | {"output": wide["output"].detach()}
    far = {"mean": mass["mean"] + reference_mass(exact)}
    assert_values(actual, exact, wide, mass | far)


ARRIVED = {"output": 1, "lse": 2, "entropy": 4, "sum_p2": 8, "mean": 16, "variance": 32, "peak": 64}


def row_terms(exact, arriving):
    """What `row_terms_kernel` writes, and the bits of what arrived; by the definition in float64."""
    exact = {name: value.detach() for name, value in exact.items() if isinstance(value, torch.Tensor)}
    zeros = torch.zeros_like(exact["lse"])
    g = {name: arriving.get(name, zeros).double() for name in ARRIVED if name != "output"}
    terms, some = torch.zeros(9, *zeros.shape, dtype=torch.float64), exact["visible"].clamp(min=1)
    there = exact["lse"].isfinite()
    slope = 2 * g["variance"] / some
    terms[0] = torch.where(there, exact["lse"], float("inf"))
    terms[2] = g["lse"] - g["entropy"] * exact["entropy"] - 2 * g["sum_p2"] * exact["sum_p2"]
    terms[2] -= (arriving["output"].double() * exact["output"]).sum(-1)
    terms[3], terms[4], terms[6], terms[7] = g["entropy"], 2 * g["sum_p2"], slope, g["peak"]
    terms[5] = g["mean"] / some - slope * exact["mean"]
    terms[8] = g["lse"] + g["mean"] + g["peak"]
    terms[1:] = terms[1:].where(there, 0.0)
    return terms.float(), sum(ARRIVED[name] for name in arriving)


def run_backward(hopper, tensors, options, exact, arriving, lift=None, block=None):
    """Gradients, in memory that was not empty, of what arrives at the output and at signs."""
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    problem = prepare("hopper", query, key, value, **options).problem
    terms, arrived = row_terms(exact, arriving)
    packed = hopper.terms.packed(terms, exact["argmax"], arrived, problem.scale)
    grads = tuple(torch.full_like(tensor, 77) for tensor in (query, key, value))
    tile = hopper.interpreter.Tiles
    launches = hopper.launch.backward_arguments(
        problem, arriving["output"], packed, grads, arrived, lift, lambda tensor, rows, dim: tile(tensor, [1, 1, rows, dim]),
        lambda tensor, rows: tile(tensor, [1, 1, rows]), block,
    )  # fmt: skip
    for kernel, (count, args, constants) in zip(hopper.back, launches, strict=True):
        hopper.interpreter.launch(kernel, count, args, **constants)
    return dict(zip(("query", "key", "value"), grads, strict=True))


def assert_gradients(hopper, tensors, options, sign=None, **how):
    dtype = tensors["query"].dtype
    exact_leaves, exact, problem = by_definition(tensors, options, torch.float64)
    plain_leaves, plain, _ = by_definition(tensors, options, torch.float32)
    cotangents = {"output": torch.zeros_like(exact["output"]), sign: torch.randn_like(exact["lse"])}
    if sign is None:
        cotangents = {"output": torch.randn_like(exact["output"]).to(dtype).double()}
    elif sign == "peak":
        cotangents[sign] *= _clear_winner(exact)
    arriving = {"output": cotangents["output"].to(dtype)} | {
        n: g.float() for n, g in cotangents.items() if n != "output"
    }
    found = run_backward(hopper, tensors, options, exact, arriving, **how)
    expected, once = gradients(exact_leaves, exact, cotangents), gradients(plain_leaves, plain, cotangents)
    loss = sign or "output"
    mass = gradient_mass(problem, exact, loss, cotangents[loss])
    for name, grad in found.items():
        eps = torch.finfo(torch.float32).eps
        assert_within(f"d({loss})/d({name})", grad, expected[name], once[name].to(dtype), eps * mass[name])
    return found


GRADIENTS = [(seed, None) for seed in range(CASES)] + [
    (7 * n, sign) for n in range(6) for sign in ARRIVED if sign != "output"
]


@pytest.mark.parametrize(("seed", "sign"), GRADIENTS)
def test_gradients_of_random_calls(hopper, seed, sign):
    tensors, options, draw = drawn(seed)
    block = draw.choice([None, hopper.launch.BackwardBlock(128, 2, 64, 2), hopper.launch.BackwardBlock(64, 3, 64, 3)])
    lift = torch.tensor([4.0, 8.0]) if tensors["query"].dtype == torch.float16 else None
    assert_gradients(hopper, tensors, options, sign, lift=lift, block=block)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_that_see_one_key_have_no_gradient(hopper, causal):
    """Exactly: their weight is 1 whatever their logit is."""
    tensors = {what: torch.randn(2, 2, 130 if causal else 1, 64).bfloat16() for what in ("key", "value")}
    tensors["query"] = 10 * torch.randn(2, 4, 130, 64).bfloat16()
    found = assert_gradients(hopper, tensors, {"causal": causal})
    assert not found["query"][:, :, : 1 if causal else None].any()
    assert found["query"].any() == causal
    assert found["key"].any() == causal


@pytest.mark.parametrize("sign", [None, "mean"])
def test_what_keys_share_does_not_multiply_roundings(hopper, sign):
    """dZ of a row is rounded key by key, and its sum is not."""
    torch.manual_seed(1)
    tensors = {what: torch.randn(2, 2, 500, 64) for what in ("query", "key", "value")}
    tensors["key"] += 20
    assert_gradients(hopper, {what: tensor.bfloat16() for what, tensor in tensors.items()}, {}, sign)


@pytest.mark.parametrize("fault", ["copies", "stores", "turns"])
def test_the_interpreter_sees_races(hopper, fault, monkeypatch):
    """A tile that is read before it is there, a store that is overwritten, turns that are not waited for."""
    interpreter = hopper.interpreter
    if fault == "copies":
        wait = interpreter.Barrier.wait
        monkeypatch.setattr(
            interpreter.Barrier, "wait", lambda self, phase: None if self.count == 1 else wait(self, phase)
        )
    elif fault == "stores":
        monkeypatch.setattr(interpreter._Tma, "store_wait", staticmethod(lambda pendings: None))
    else:
        monkeypatch.setitem(hopper.kernel.__globals__, "wait_for_turn", lambda token, group: token)
    tensors = {what: torch.randn(1, 4, 400, 64).bfloat16() for what in ("query", "key", "value")}
    with pytest.raises((AssertionError, interpreter.Stuck)):
        assert_right(tensors, {}, run(hopper, tensors, {}, programs=1))


def test_every_tile_is_scheduled_once():
    from research.hopper.schedule import Shape, tiles_by_program

    for heads, rows, keys, right, programs in itertools.product(
        (1, 6, 64), (1, 128, 3001), (64, 4096), (None, 0, 1095), (1, 132)
    ):
        shape = Shape(heads, 1, rows, keys, right, 256, 128, programs)
        work = tiles_by_program(shape)
        assert sorted(tile for own in work for tile in own) == list(range(heads * -(-rows // 128)))
        assert all(work)


def test_programs_end_at_the_same_time():
    """Of a causal call that fills a card, as the schedule counts: within one of its longest tiles."""
    from research.hopper.schedule import OUTSIDE, Shape, _blocks, tiles_by_program

    shape = Shape(64, 1, 4096, 4096, 0, 256, 128, 132)
    loads = [sum(_blocks(shape, tile % 32) + OUTSIDE for tile in own) for own in tiles_by_program(shape)]
    assert max(loads) - min(loads) <= 32 + OUTSIDE
    assert max(loads) <= 1.05 * sum(loads) / len(loads)
