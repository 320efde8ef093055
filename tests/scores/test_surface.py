"""The scores as people meet them: sentences for bad input, torch's transforms, memory."""

import re
import subprocess
import sys

import pytest
import torch
from torch.func import grad, jacrev, jvp, vmap

import attemper
from attemper.errors import InputError, KernelUnavailable
from attemper.kernels.contract import Results, Upstream
from attemper.operation.call import prepare
from attemper_lab.bench import memory
from close import assert_float64

Q = torch.randn(2, 12, 5, 8)
W = torch.randn(8)


def additive(**changes):
    return attemper.additive_attention(**{"query": Q, "key": Q, "value": Q, "weight": W, **changes})


def cosine(**changes):
    return attemper.cosine_attention(**{"query": Q, "key": Q, "value": Q, "scale": 2.0, **changes})


FLAT = (
    "A cosine is at most 1, which is nearly flat after softmax: use scale=10.0, "
    "or torch.nn.Parameter(torch.tensor(10.0)) to learn it."
)
SHAPES = "`weight` must have shape (8,), shared by all heads, or (12, 8), one per head"
SCALE = "`scale` must be a finite number or a tensor; got"
NO_VALUE = "`value` must be a torch.Tensor; got None. For signs alone pass value=key."
ADDITIVE = [
    ({"weight": torch.randn(9)}, f"{SHAPES}; got (9,). Begin with torch.randn(8) / 8**0.5."),
    ({"weight": torch.randn(5, 8)}, f"{SHAPES}; got (5, 8). Begin with torch.randn(8) / 8**0.5."),
    (
        {"weight": [1.0]},
        "`weight` must be a torch.Tensor; got list. Use torch.nn.Parameter(torch.randn(8) / 8**0.5) to learn it.",
    ),
    ({"weight": W.long()}, "`weight` must be floating point; got torch.int64. Use weight.float()."),
    ({"weight": W.to("meta")}, "`weight` must be on query's device cpu; got meta. Use weight.to('cpu')."),
    (
        {"key": Q[..., :7]},
        "`key` must have head dim 8 like `query`; got 7 (shape (2, 12, 5, 7)). Project both to the same width.",
    ),
    (
        {"key": Q[:, :5], "value": Q[:, :5]},
        "query heads (=12) must be a multiple of key heads (=5). Use 4 or 6 key/value heads.",
    ),
    ({"query": [1.0]}, "`query` must be a torch.Tensor; got list. Use torch.as_tensor(query)."),
    ({"value": None}, NO_VALUE),
]
COSINE = [
    ({"scale": None}, f"{SCALE} None. {FLAT}"),
    ({"scale": "big"}, f"{SCALE} 'big'. {FLAT}"),
    ({"scale": float("inf")}, f"{SCALE} inf. {FLAT}"),
    (
        {"scale": torch.ones(5)},
        "a `scale` tensor must have shape (), (12,) for one number per head, or broadcast to (2, 12, 5, 1); got (5,). "
        "Begin with torch.ones(12) for one per head.",
    ),
    ({"value": None}, NO_VALUE),
]
SENTENCES = [(additive, *pair) for pair in ADDITIVE] + [(cosine, *pair) for pair in COSINE]


@pytest.mark.parametrize(("function", "changes", "sentence"), SENTENCES)
def test_the_exact_sentence(function, changes, sentence):
    with pytest.raises(InputError, match=f"^{function.__name__}_attention\\(\\): {re.escape(sentence)}$"):
        function(**changes)


@pytest.mark.parametrize("function", [additive, cosine])
def test_an_unknown_sign_gets_its_nearest_spelling(function):
    with pytest.raises(InputError, match=r"unknown sign 'entropi' in `signs`\. Did you mean 'entropy'\?"):
        function(signs="entropi")


def test_a_scale_left_out_says_what_to_type():
    with pytest.raises(InputError, match=r"use scale=10\.0"):
        attemper.cosine_attention(Q, Q, Q)


def loss(query, key, value, number, function=attemper.additive_attention, **options):
    if function is attemper.cosine_attention:
        output, vitals = function(query, key, value, scale=number, **options)
    else:
        output, vitals = function(query, key, value, number, **options)
    signs = [getattr(vitals, name).sum() for name in ("mean", "variance", "peak", "lse", "entropy", "sum_p2")]
    return output.square().sum() + sum(signs)


def leaves(number):
    return [t.double().requires_grad_() for t in (*torch.randn(3, 2, 2, 9, 8), number)]


FUNCTIONS = pytest.mark.parametrize(
    ("function", "number"),
    [(attemper.additive_attention, torch.randn(8)), (attemper.cosine_attention, torch.tensor(3.0))],
    ids=["additive", "cosine"],
)


@FUNCTIONS
def test_compiled_in_one_graph_and_functional_gradients_agree_with_eager(function, number):
    inputs, options = leaves(number), {"causal": True, "mask": torch.randn(9, 9).double()}
    expected = torch.autograd.grad(loss(*inputs, function, **options), inputs)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    functional = grad(loss, argnums=(0, 1, 2, 3))(*inputs, function, **options)
    for found in (torch.autograd.grad(compiled(*inputs, function, **options), inputs), functional):
        for ours, theirs in zip(found, expected, strict=True):
            assert_float64(ours, theirs)


def test_compiled_self_attention_with_one_sign():
    def entropy(x, w):
        return attemper.additive_attention(x, x, x, w, signs="entropy").vitals.entropy.sum()

    x, w = torch.randn(2, 9, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    compiled = torch.compile(entropy, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(*(torch.autograd.grad(f(x, w), (x, w)) for f in (compiled, entropy)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("needs_grad", [[True] * 4 + [False, True], [False, False, True, False, False, False]])
def test_opcheck(needs_grad):
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 5)
    problem = prepare("test", q, k, v, mask=torch.randn(1, 4, 1, 9), causal="lower_right", scale=1.0).problem
    inputs = (*problem._replace(weight=torch.randn(2, 4, 8)), 255, "blockwise")
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.attemper.forward.default, inputs, test_utils=checks)
    results = Results(*torch.ops.attemper.forward(*inputs))
    upstream = Upstream(*(torch.ones_like(getattr(results, name)) for name in Upstream._fields))
    args = (*inputs[:-2], *results, *upstream, needs_grad, "blockwise")
    torch.library.opcheck(torch.ops.attemper.backward.default, args, test_utils=checks)


def test_what_additive_does_not_do_is_an_error():
    q, k, v, w = leaves(torch.randn(8))
    (first,) = torch.autograd.grad(loss(q, k, v, w), q, create_graph=True)
    with pytest.raises(KernelUnavailable, match=r"second derivatives are not computed.*kernel='reference'"):
        first.sum().backward()
    with pytest.raises(KernelUnavailable, match=r"forward-mode derivatives are not computed"):
        jvp(lambda w: attemper.additive_attention(q, k, v, w).output, (w,), (w,))


def test_additive_under_vmap_and_in_batched_derivatives():
    """Each input may be the one that is mapped, the weight too; gradients per sample are those of a loop."""
    q, k, v = (t.detach() for t in leaves(torch.randn(8))[:3])
    weights = torch.randn(2, 2, 8).double()
    per_sample = vmap(grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, weights)
    for i in range(2):
        alone = grad(loss, argnums=(0, 1, 2, 3))(q[i], k[i], v[i], weights[i])
        for ours, theirs in zip(per_sample, alone, strict=True):
            assert_float64(ours[i], theirs)
    shared = vmap(lambda q: loss(q, k[0], v[0], weights[0]))(q)
    assert_float64(shared[1], loss(q[1], k[0], v[0], weights[0]))

    def some(w):
        return attemper.additive_attention(q, k, v, w).output[0, :, 0]

    (found,) = jacrev(some, argnums=(0,))(weights[0])
    w = weights[0].clone().requires_grad_()
    (row,) = torch.autograd.grad(some(w)[1, 3], w)
    assert_float64(found[1, 3], row)


def test_a_watch_says_that_additive_scores_are_not_measured():
    """They go through the op of attention(), but are no product that a watch could measure again."""
    module = torch.nn.Sequential(attemper.AdditiveAttention(8))
    module.forward = lambda x: module[0](x, x)
    with pytest.warns(UserWarning, match=r"0: not measured: .* on additive scores"), attemper.watch(module) as watch:
        module(torch.randn(2, 5, 8))
    assert watch.record.to_dicts() == []


def test_the_way_out_that_the_sentence_names_has_second_derivatives():
    q, k, v, w = leaves(torch.randn(8))
    mask = torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)) @ w
    other = attemper.attention(q, k, v, mask=mask, scale=0.0, kernel="reference")
    assert_float64(other.output, attemper.additive_attention(q, k, v, w).output)
    (first,) = torch.autograd.grad(other.output.square().sum(), w, create_graph=True)
    assert torch.autograd.grad(first.sum(), w)[0].isfinite().all()


def test_cosine_has_what_attention_has():
    q, k, v, s = leaves(torch.tensor(3.0))
    folded = vmap(lambda q: attemper.cosine_attention(q, k[0], v[0], scale=s).output)(q)
    assert_float64(folded[1], attemper.cosine_attention(q[1], k[0], v[0], scale=s).output)
    (first,) = torch.autograd.grad(
        loss(q, k, v, s, attemper.cosine_attention, kernel="reference"), q, create_graph=True
    )
    first.sum().backward()
    assert q.grad.isfinite().all()


@FUNCTIONS
def test_autocast_lowers_the_inputs_as_attention_does(function, number):
    q, k, v = (t.detach().float().requires_grad_() for t in leaves(number)[:3])
    number = number.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        under = function(q, k, v, number) if number.dim() else function(q, k, v, scale=number)
    low = [t.bfloat16() for t in (q, k, v)]
    outside = function(*low, number) if number.dim() else function(*low, scale=number)
    assert torch.equal(under.output, outside.output)
    assert torch.equal(under.vitals.lse, outside.vitals.lse)
    under.output.sum().backward()
    assert q.grad.dtype == number.grad.dtype == torch.float32


PROBE = """
import sys, torch, attemper
from attemper_lab import memory

def call(length, dim):
    q, k, v, w = (torch.randn(s, requires_grad=True) for s in ((length, dim), (length, dim), (length, dim), (dim,)))
    def run():
        output, vitals = attemper.additive_attention(q, k, v, w)
        return output, *torch.autograd.grad(output.sum() + vitals.entropy.sum(), (q, k, v, w))
    return run

dim, *lengths = map(int, sys.argv[1:])
call(128, dim)()
for length in lengths:
    risen, _ = memory._on_cpu(call(length, dim))
    print(risen, memory._high_water())
"""


def peaks(dim: int, *lengths: int) -> list[list[int]]:
    """Bytes that forward and backward of each length add to a process, and all that it then held."""
    order = [sys.executable, "-c", PROBE, *map(str, (dim, *lengths))]
    done = subprocess.run(order, capture_output=True, text=True, check=True)
    return [[int(number) for number in line.split()] for line in done.stdout.splitlines()]


linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@linux
def test_forward_and_backward_hold_neither_the_matrix_nor_its_tanh():
    (small, _), (large, _) = peaks(16, 1024, 2048)
    assert large < 32 * memory.MIB  # the matrix with its gradient: 32 MiB; every tanh: 256 MiB
    assert large < 2.2 * small


@linux
@pytest.mark.exhaustive
def test_length_8192_runs_forward_and_backward_in_less_than_a_gibibyte():
    """8192² × 64 tanh in float32 are 16 GiB, and a backward that keeps them needs more."""
    [(added, most)] = peaks(64, 8192)
    print(f"added {added / memory.MIB:.0f} MiB, process {most / memory.MIB:.0f} MiB")
    assert added < 64 * memory.MIB
    assert most < 1024 * memory.MIB
