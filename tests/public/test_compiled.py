"""Every public function in a graph: compiled without breaks, with other shapes, exported, traced; numbers and gradients stay."""

import functools
import warnings

import pytest
import torch

import attemper
from close import assert_float64, assert_reordered
from public.entries import ENTRIES, inputs, loss

COMPILED = ("attention",)  # what `make test` compiles; the others are compiled in the exhaustive grid
EVERY = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
SOME = pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=name, marks=() if name in COMPILED else pytest.mark.exhaustive)
        for name, entry in ENTRIES.items()
    ],
)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(function, given):
    held = [one.clone().requires_grad_() for one in given]
    total = function(*held)
    return [total.detach(), *torch.autograd.grad(total, held, allow_unused=True)]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert_float64(None if one is None else one.detach(), None if other is None else other.detach())


@SOME
def test_one_graph_forward_and_backward(entry):
    """fullgraph, so no break; and a second shape compiles at most once more."""
    compiled = torch.compile(functools.partial(loss, entry), fullgraph=True, backend="aot_eager")
    limit = 3 if entry is ENTRIES["merged"] else 2  # shards compile once more today; beyond it fullgraph is an error
    with torch._dynamo.config.patch(recompile_limit=limit):
        for rows in (6, 7, 11):  # none is another dimension of the tensors, which Dynamo would tell apart
            given = inputs(rows=rows)
            assert_same(gradients(compiled, given), gradients(functools.partial(loss, entry), given))
    with torch.no_grad():
        assert_same(torch.compile(entry, fullgraph=True, backend="aot_eager")(*given), entry(*given))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo asks of every tensor
@pytest.mark.parametrize("tracked", [True, False])
def test_vitals_that_no_one_has_read_enter_a_graph(tracked):
    attend = torch.compiler.disable(lambda q: attemper.attention(q, q, q))

    def run(q):
        output, vitals = attend(q)
        return output.sum() + vitals.entropy.mean() + vitals.sum_p2.sum()

    q = torch.randn(1, 2, 6, 8, dtype=torch.float64, requires_grad=tracked)
    found, expected = torch.compile(run, backend="aot_eager")(q), run(q)
    assert_float64(found.detach(), expected.detach())
    if tracked:
        assert_float64(*(torch.autograd.grad(one, q)[0] for one in (found, expected)))


@pytest.mark.exhaustive
@EVERY
def test_dynamic_shapes_compile_once(entry):
    compiled = torch.compile(functools.partial(loss, entry), fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, keys in ((6, 9), (7, 11), (12, 15)):
            given = inputs(rows=rows, keys=keys)
            assert_same(gradients(compiled, given), gradients(functools.partial(loss, entry), given))


@pytest.mark.exhaustive
@EVERY
@pytest.mark.filterwarnings("ignore")  # Inductor's own
def test_inductor(entry):
    """Its loops add up in an order of their own around ours."""
    given = inputs(dtype=torch.float32)
    compiled = torch.compile(entry, fullgraph=True)
    for one, other in zip(compiled(*given), entry(*given), strict=True):
        if one.is_floating_point():
            assert_reordered(one, other, one.numel())
        else:
            assert torch.equal(one, other)


@SOME
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_exported(entry):
    class Whole(torch.nn.Module):
        def forward(self, q, k, v):
            return entry(q, k, v)

    given = inputs()
    program = torch.export.export(Whole(), tuple(given))
    again = inputs()
    assert_same(program.module()(*again), entry(*again))


@SOME
def test_traced(entry):
    given, again = inputs(), inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constants, as any trace has
        traced = torch.jit.trace(entry, tuple(given), check_trace=False)
    assert_same(traced(*again), entry(*again))
    direct, found = (gradients(lambda *held, f=f: f(*held)[0].sin().sum(), again) for f in (entry, traced))
    assert_same(found, direct)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_traced_in_half_precision(kernel):
    given = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16, requires_grad=True)

    def run(one):
        return attemper.attention(one, one, one, kernel=kernel).output

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(run, (given,), check_trace=False)
    assert torch.equal(traced(given), run(given))


@pytest.mark.parametrize(
    "kernel", ["cpu", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("blockwise", "reference"))]
)
def test_vitals_go_in_and_out_of_a_graph(kernel):
    q, k, v = inputs()

    def halves(q, k, v):
        return [attemper.attention(q, k[..., s, :], v[..., s, :], kernel=kernel) for s in (slice(0, 4), slice(4, 9))]

    parts = torch.compile(halves, fullgraph=True, backend="aot_eager")(q, k, v)
    assert all(isinstance(part, attemper.Attended) for part in parts)
    found = torch.compile(lambda parts: attemper.merge(parts), fullgraph=True, backend="aot_eager")(parts)
    expected = attemper.attention(q, k, v, kernel=kernel)
    assert_float64(found.output, expected.output)
    for name in expected.vitals.measured:
        assert_float64(getattr(found.vitals, name), getattr(expected.vitals, name), name)


def test_modules_compile_in_one_graph():
    module = attemper.MultiHeadAttention(16, 4, rule="learned", batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 5, 16, dtype=torch.float64)

    def step(x):
        output, vitals = module(x, is_causal=True, signs=("entropy",))
        return output.sin().sum() + vitals.entropy.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    leaves = [x.requires_grad_(), *module.parameters()]
    assert_same(torch.autograd.grad(compiled(x), leaves), torch.autograd.grad(step(x), leaves))
