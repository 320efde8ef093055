"""attemper as a citizen of torch: opcheck, compile, functional transforms, autocast, inference mode, second derivatives."""

import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, jacrev, vmap

import attemper
from attemper.errors import KernelUnavailable
from attemper.kernels.contract import OUTPUT_LOW_BIT, Results, Upstream
from attemper.operation.call import prepare
from attemper.operation.ops import ARGMAX_BIT, BIT
from attemper.operation.tally import CALLS, WIDTH
from attemper.vitals import SIGNS
from close import assert_float64
from serving import ON_CPU

FUSED = [name for name in ON_CPU if name != "reference"]
ALL = sum(BIT.values()) | ARGMAX_BIT


def tensors(*lead, dtype=torch.float64, rows=6, keys=9):
    return (
        torch.randn(*lead, 2, 4, rows, 8, dtype=dtype),
        torch.randn(*lead, 2, 2, keys, 8, dtype=dtype),
        torch.randn(*lead, 2, 2, keys, 5, dtype=dtype),
    )


def loss(query, key, value, kernel, **options):
    output, vitals = attemper.attention(query, key, value, kernel=kernel, **options)
    signs = [getattr(vitals, name).sum() for name in ("mean", "variance", "peak", "lse", "entropy", "sum_p2")]
    return output.square().sum() + sum(signs)


PROBLEMS = {
    "full": {},
    "causal_window_cap": {"causal": True, "window": 4, "softcap": 2.0},
    "bool": {"mask": torch.rand(2, 1, 1, 9) > 0.3},
    "additive_gain": {"mask": torch.randn(4, 6, 9, dtype=torch.float64), "scale": torch.rand(4, dtype=torch.float64)},
    "dropout": {"dropout": 0.3},
    "documents": {
        "documents": (torch.tensor([0, 2, 2, 6]), torch.tensor([[0, 4, 5, 9], [0, 0, 8, 9]])),
        "causal": True,
    },
    "sink": {"sink": torch.randn(4, dtype=torch.float64)},
}


@pytest.mark.parametrize("options", PROBLEMS.values(), ids=PROBLEMS)
def test_opcheck(options):
    """Schema, fake implementation and AOT dispatch of both ops; they carry no autograd of their own.

    AOT dispatch is the op's, and asked for once; what every kernel returns is compared with the fake.
    """
    problem = prepare("test", *tensors(), **options).problem
    opcheck, forward, backward = torch.library.opcheck, torch.ops.attemper.forward, torch.ops.attemper.backward
    floating = problem.mask is not None and problem.mask.is_floating_point()
    every = [True, True, True, floating, problem.gain is not None, False, problem.sink is not None]
    for kernel, more in zip(FUSED, [("test_aot_dispatch_dynamic",), *[()] * len(FUSED)], strict=False):
        checks = ("test_schema", "test_faketensor", *more)
        for sign_bits in (0, BIT["entropy"]):
            opcheck(forward.default, (*problem, sign_bits, kernel), test_utils=checks[:2])
        opcheck(forward.default, (*problem, ALL, kernel), test_utils=checks)
        results = Results(*forward(*problem, ALL, kernel))
        upstream = Upstream(*(torch.ones_like(getattr(results, name)) for name in Upstream._fields))
        opcheck(backward.default, (*problem, *results, *upstream, every, kernel), test_utils=checks)
        one = (*problem, *results, *upstream, [True, *[False] * 6], kernel)
        opcheck(backward.default, one, test_utils=checks[:2])


@pytest.mark.parametrize("options", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ops_of_packed_signs(options, dtype):
    """The forward's signs in one tensor, added to a tally as those of the other op are."""
    given = {
        name: one.to(dtype) if torch.is_tensor(one) and one.is_floating_point() else one
        for name, one in options.items()
    }
    problem = prepare("test", *tensors(dtype=dtype), **given).problem
    keep = torch.rand(2, 6) > 0.2
    about = (keep, 2, "replaced", "self", "", None, None, "float32", 2, 9, 8, 0.5, None, None, None, 0.0, False, False)
    for kernel, more in zip(FUSED, [("test_aot_dispatch_dynamic",), *[()] * len(FUSED)], strict=False):
        checks = ("test_schema", "test_faketensor", *more)
        arguments = (*problem, sum(BIT.values()) | OUTPUT_LOW_BIT, kernel)
        torch.library.opcheck(torch.ops.attemper.forward_packed.default, arguments, test_utils=checks)
        results = Results(*torch.ops.attemper.forward(*arguments))
        output, output_low, lse_low, lse, packed = torch.ops.attemper.forward_packed(*arguments)
        for found, name in ((output, "output"), (output_low, "output_low"), (lse_low, "lse_low"), (lse, "lse")):
            assert torch.equal(found, getattr(results, name)), name
        tally, expected = (torch.zeros(2, 3, 4, WIDTH, dtype=torch.float64) for _ in range(2))
        arguments = (tally, lse, lse_low, packed, *about)
        torch.library.opcheck(torch.ops.attemper.tally_packed.default, arguments, test_utils=checks)
        tally.zero_()
        torch.ops.attemper.tally_packed(*arguments)
        torch.ops.attemper.tally(expected, *(getattr(results, name) for name in SIGNS), lse_low, *about)
        assert expected[0, 2, :, CALLS].tolist() == [1.0] * 4
        assert torch.equal(tally, expected)


@pytest.mark.parametrize("kernel", FUSED)
def test_the_op_of_packed_signs_reads_a_lazily_negated_query(kernel):
    _, key, value = tensors(dtype=torch.float32)
    query = torch.randn(2, 4, 6, 8, dtype=torch.complex64).conj().imag
    assert query.is_neg()
    numbers = (*[None] * 6, 0.3, None, None, None, 0.0, False, sum(BIT.values()), kernel)
    output, _, _, lse, _ = torch.ops.attemper.forward_packed(query, key, value, *numbers)
    expected = Results(*torch.ops.attemper.forward(query.resolve_neg(), key, value, *numbers))
    assert torch.equal(output, expected.output)
    assert torch.equal(lse, expected.lse)


def test_packed_signs_have_no_gradients_and_the_output_has():
    """Also of the bare op: a tracer may look through the Function around it."""
    inputs = [tensor.requires_grad_() for tensor in tensors()]
    problem = prepare("test", *inputs).problem
    arguments = (sum(BIT.values()) | OUTPUT_LOW_BIT, "blockwise")
    output, *others = torch.ops.attemper.forward_packed(*problem, *arguments)
    assert not any(one.requires_grad for one in others)
    found = torch.autograd.grad(output.square().sum(), inputs)
    expected = torch.autograd.grad(attemper.attention(*inputs, kernel="blockwise").output.square().sum(), inputs)
    assert all(map(torch.equal, found, expected))


def test_opcheck_without_values():
    problem = prepare("measure", *tensors()[:2], None).problem
    torch.library.opcheck(
        torch.ops.attemper.forward.default,
        (*problem, ALL, "blockwise"),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


# the graphs of all fused kernels hold the same op; the definition has a graph of its own, which its second shape makes dynamic
@pytest.mark.parametrize(("kernel", "dynamic"), [(FUSED[0], False), (FUSED[0], True), ("reference", True)])
def test_compile_fullgraph_with_gradients(kernel, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (6, 7):
        leaves = [t.requires_grad_() for t in tensors(rows=rows)]
        expected = torch.autograd.grad(loss(*leaves, kernel, causal="lower_right", window=5), leaves)
        actual = torch.autograd.grad(compiled(*leaves, kernel, causal="lower_right", window=5), leaves)
        for a, b in zip(actual, expected, strict=True):
            assert_float64(a, b)


PARTIAL = {
    "sdpa": lambda q, k, v: attemper.sdpa(q, k, v, enable_gqa=True).square().sum(),
    "one sign": lambda q, k, v: attemper.attention(q, k, v, signs="entropy").vitals.entropy.sum(),
    "measure": lambda q, k, v: attemper.measure(q, k).variance.sum() + 0 * v.sum(),
    "output of all": lambda q, k, v: attemper.attention(q, k, v).output.square().sum(),
}


@pytest.mark.parametrize("function", PARTIAL.values(), ids=PARTIAL)
def test_compile_fullgraph_with_gradients_of_a_part(function):
    """A compiled graph sends zeros, not None, for signs that were never measured."""
    torch._dynamo.reset()
    leaves = [t.requires_grad_() for t in tensors()]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(function(*leaves), leaves)
    for a, b in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        assert_float64(a, b)


def test_compile_hands_vitals_out_to_frozen_queries():
    torch._dynamo.reset()
    query, key, value = tensors()
    value.requires_grad_()

    def run(value):
        output, vitals = attemper.attention(query, key, value)
        return output.sum() + vitals.peak.sum() + vitals.entropy.sum()

    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        (actual,) = torch.autograd.grad(function(value), value)
        assert_float64(actual, torch.autograd.grad(attemper.sdpa(query, key, value, enable_gqa=True).sum(), value)[0])


def test_compile_of_a_vmap():
    torch._dynamo.reset()
    inputs = tensors(3)

    def run(*inputs):
        output, vitals = vmap(lambda *a: attemper.attention(*a, causal=True))(*inputs)
        return output, vitals.entropy

    for a, b in zip(torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs), run(*inputs), strict=True):
        assert_float64(a, b)


def test_compile_of_a_functional_gradient_is_never_wrong():
    """Dynamo looks through our Function there, and torch 2.13 cannot differentiate a custom op: an error. 2.15 can."""
    torch._dynamo.reset()
    query, key, value = tensors()

    def run(q, kernel):
        return attemper.sdpa(q, key, value, enable_gqa=True).sum() if kernel is None else loss(q, key, value, kernel)

    try:
        found = torch.compile(grad(lambda q: run(q, "blockwise")), backend="aot_eager", fullgraph=True)(query)
    except Exception as error:
        if not re.search(r"attemper.forward|functorch", str(error)):
            raise
    else:
        assert_float64(found, grad(lambda q: run(q, "blockwise"))(query))
    compiled = torch.compile(grad(lambda q: run(q, "reference")), backend="aot_eager", fullgraph=True)
    assert_float64(compiled(query), grad(lambda q: run(q, "reference"))(query))


def test_the_peak_has_a_gradient_through_vmap():
    x = torch.randn(3, 2, 5, 8, dtype=torch.float64, requires_grad=True)

    def peaks(x, kernel="blockwise"):
        return vmap(lambda a: attemper.attention(a, a, a, kernel=kernel).vitals.peak)(x).sum()

    (expected,) = torch.autograd.grad(peaks(x, "reference"), x)
    assert_float64(torch.autograd.grad(peaks(x), x)[0], expected)
    assert_float64(grad(peaks)(x.detach()), expected)


def test_vmap_of_gradients_without_keys():
    keys = torch.randn(3, 2, 2, 0, 8)
    query = torch.randn(2, 4, 6, 8)
    found = vmap(grad(lambda q, k: attemper.attention(q, k, k).output.sum(), argnums=(0, 1)), in_dims=(None, 0))(
        query, keys
    )
    assert found[0].shape == (3, *query.shape)
    assert found[1].shape == keys.shape


def test_a_batched_backward_with_dropout_is_refused_with_a_sentence():
    query, key, value = tensors()
    with pytest.raises(KernelUnavailable, match=r"cannot repeat its dropout in a batched backward.*kernel='reference'"):
        jacrev(lambda q: attemper.attention(q, key, value, dropout=0.3).output.sum((0, 1, 2)))(query)


def test_compile_fullgraph_hands_vitals_out():
    torch._dynamo.reset()

    def run(query, key, value, scale, mask):
        return attemper.attention(query, key, value, scale=scale, mask=mask, dropout=0.1)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    inputs = (*tensors(), torch.rand(4, dtype=torch.float64), torch.rand(6, 9) > 0.2)
    actual, expected = compiled(*inputs).vitals, run(*inputs).vitals
    for name in expected.measured:
        assert_float64(getattr(actual, name), getattr(expected, name))
    assert_float64(actual.effective_keys, expected.effective_keys)
    # a new seed at every call, not one that was compiled in
    assert not torch.equal(compiled(*inputs).output, compiled(*inputs).output)


def test_compile_fullgraph_of_sdpa_without_gradients():
    torch._dynamo.reset()
    compiled = torch.compile(attemper.sdpa, fullgraph=True, backend="aot_eager")
    query, key, value = tensors()
    with torch.no_grad():
        assert_float64(compiled(query, key, value, enable_gqa=True), attemper.sdpa(query, key, value, enable_gqa=True))


def test_compile_fullgraph_of_self_attention_on_one_tensor():
    torch._dynamo.reset()

    def run(x):
        return loss(x, x, x, "blockwise", causal=True)

    x = torch.randn(2, 4, 6, 8, dtype=torch.float64, requires_grad=True)
    (actual,) = torch.autograd.grad(torch.compile(run, fullgraph=True, backend="aot_eager")(x), x)
    assert_float64(actual, torch.autograd.grad(run(x), x)[0])


@pytest.mark.parametrize("kernel", FUSED)
def test_functional_gradients(kernel):
    inputs = tensors()
    actual = grad(loss, argnums=(0, 1, 2))(*inputs, kernel, causal=True)
    expected = grad(loss, argnums=(0, 1, 2))(*inputs, "reference", causal=True)
    for a, b in zip(actual, expected, strict=True):
        assert_float64(a, b)


@pytest.mark.parametrize("kernel", FUSED)
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (1, 0, None), (None, 2, 2)], ids=str)
def test_vmap_of_values_and_gradients(kernel, in_dims):
    full = tensors(3)
    inputs = [t[0] if d is None else t.movedim(0, d) for t, d in zip(full, in_dims, strict=True)]

    def one(query, key, value, name=kernel):
        return attemper.attention(query, key, value, kernel=name, causal=True)

    batched = vmap(one, in_dims=in_dims)(*inputs)
    gradient = vmap(grad(lambda *a: loss(*a, kernel)), in_dims=in_dims)(*inputs)
    for i in range(3):
        single = [t if d is None else t.select(d, i) for t, d in zip(inputs, in_dims, strict=True)]
        expected = one(*single, name="reference")
        assert_float64(batched.output[i], expected.output)
        for name in expected.vitals.measured:
            assert_float64(getattr(batched.vitals, name)[i], getattr(expected.vitals, name))
        assert_float64(gradient[i], grad(lambda *a: loss(*a, "reference"))(*single))


@pytest.mark.parametrize("kernel", FUSED)
@pytest.mark.parametrize("shape", [(1, 1, 6, 9), (2, 1, 1, 9), (2, 4, 6, 9)], ids=str)
def test_jacobian_of_a_mask_and_a_scale(kernel, shape):
    """jacrev maps over the backward: a mask that the batch shares must give each sample its own gradient."""
    query, key, value = tensors()
    mask, scale = torch.randn(shape, dtype=torch.float64), torch.rand(4, dtype=torch.float64)

    def run(mask, scale, name):
        output, vitals = attemper.attention(query, key, value, mask=mask, scale=scale, kernel=name)
        return torch.stack([vitals.entropy.sum((0, 2)), vitals.peak.sum((0, 2)), output.sum((0, 2, 3))])

    actual = jacrev(run, argnums=(0, 1))(mask, scale, kernel)
    expected = jacrev(run, argnums=(0, 1))(mask, scale, "reference")
    for a, b in zip(actual, expected, strict=True):
        assert_float64(a, b)


def test_vmap_over_a_mask_and_a_scale():
    query, key, value = tensors()
    masks, scales = torch.rand(3, 6, 9) > 0.3, torch.rand(3, 4, dtype=torch.float64)
    batched = vmap(lambda m, s: attemper.attention(query, key, value, mask=m, scale=s))(masks, scales)
    for i in range(3):
        expected = attemper.attention(query, key, value, mask=masks[i], scale=scales[i])
        assert_float64(batched.output[i], expected.output)
        assert torch.equal(batched.vitals.visible[i], expected.vitals.visible)


def test_dropout_under_vmap_needs_different_randomness():
    inputs = [t.expand(3, *t.shape) for t in tensors()]  # three times the same sample
    run = vmap(lambda *a: attemper.attention(*a, dropout=0.5).output, randomness="different")
    output = run(*inputs)
    assert not torch.equal(output[0], output[1])
    with pytest.raises(KernelUnavailable, match="randomness='different'"):
        vmap(lambda *a: attemper.attention(*a, dropout=0.5).output, randomness="same")(*inputs)


@pytest.mark.parametrize("kernel", FUSED)
def test_second_derivatives_are_refused_with_a_sentence(kernel):
    query, key, value = tensors()
    query.requires_grad_()
    (first,) = torch.autograd.grad(loss(query, key, value, kernel), query, create_graph=True)
    with pytest.raises(KernelUnavailable, match=f"kernel='{kernel}' does not compute second derivatives. Use kernel="):
        first.sum().backward()
    with pytest.raises(KernelUnavailable, match="second derivatives"):
        jacrev(jacrev(lambda q: loss(q, key, value, kernel)))(query.detach())


@pytest.mark.parametrize("kernel", FUSED)
def test_forward_mode_is_refused_with_a_sentence(kernel):
    query, key, value = tensors()
    with pytest.raises(
        KernelUnavailable, match=f"kernel='{kernel}' does not compute forward-mode derivatives. Use ker"
    ):
        torch.func.jvp(lambda q: loss(q, key, value, kernel), (query,), (query,))
    torch.func.jvp(lambda q: loss(q, key, value, "reference"), (query,), (query,))


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast_lowers_inputs_as_torch_does(kernel, low):
    inputs = [t.float().requires_grad_() for t in tensors()]
    with torch.autocast("cpu", low):
        output, vitals = attemper.attention(*inputs, kernel=kernel)
        expected = torch.nn.functional.scaled_dot_product_attention(*inputs, enable_gqa=True)
        kept = attemper.attention(*(t.double() for t in inputs), kernel=kernel).output
    assert output.dtype == expected.dtype == low
    assert vitals.entropy.dtype == torch.float32
    assert kept.dtype == torch.float64
    lowered = [t.detach().to(low) for t in inputs]
    outside = attemper.attention(*lowered, kernel=kernel)
    assert torch.equal(output, outside.output)  # autocast reaches the inputs, not the arithmetic inside
    assert torch.equal(vitals.variance, outside.vitals.variance)
    (output.float().sum() + vitals.entropy.sum()).backward()
    assert all(t.grad.dtype == torch.float32 and t.grad.isfinite().all() for t in inputs)


@pytest.mark.parametrize("kernel", ON_CPU)
def test_inference_mode(kernel):
    inputs = tensors()
    expected = attemper.attention(*inputs, kernel=kernel)
    with torch.inference_mode():
        actual = attemper.attention(*inputs, kernel=kernel)
        assert actual.vitals.entropy.is_inference()
    assert torch.equal(actual.output, expected.output)
    assert torch.equal(actual.vitals.sum_p2, expected.vitals.sum_p2)  # where it is read first does not matter


def test_only_what_is_asked_for_gets_a_gradient():
    query, key, value = tensors()
    key.requires_grad_()
    output, vitals = attemper.attention(query, key, value)
    (output.sum() + vitals.sum_p2.sum()).backward()
    assert key.grad.isfinite().all()
    assert query.grad is None
    assert not vitals.visible.requires_grad


def test_activation_checkpointing_draws_the_same_dropout():
    from torch.utils.checkpoint import checkpoint

    leaves = [t.requires_grad_() for t in tensors()]

    def run(*inputs):
        return attemper.attention(*inputs, dropout=0.5).output.square().sum()

    for reentrant in (False, True):
        torch.manual_seed(3)
        expected = torch.autograd.grad(run(*leaves), leaves)
        torch.manual_seed(3)
        for leaf in leaves:
            leaf.grad = None
        checkpoint(run, *leaves, use_reentrant=reentrant).backward()
        for leaf, grad_ in zip(leaves, expected, strict=True):
            assert_float64(leaf.grad, grad_)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace")
@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("kernel", [*ON_CPU, "additive"])
def test_a_traced_call_passes_its_own_check_and_has_gradients(kernel, graded):
    """The check traces once more without gradients: both graphs must hold the same op."""
    inputs = [t.requires_grad_(graded) for t in tensors()]

    def run(query, key, value):
        if kernel == "additive":
            attended = attemper.additive_attention(query, key, value, query[0, 0, 0])
        else:
            attended = attemper.attention(query, key, value, kernel=kernel)
        return attended.output.sum() + attended.vitals.entropy.sum() + attended.vitals.peak.sum()

    traced = torch.jit.trace(run, tuple(inputs))
    assert torch.equal(traced(*inputs), run(*inputs))
    if graded:
        pairs = zip(
            torch.autograd.grad(traced(*inputs), inputs), torch.autograd.grad(run(*inputs), inputs), strict=True
        )
        assert all(torch.equal(a, b) for a, b in pairs)


def packed_loss(query, key, value, documents, sink, kernel):
    return loss(query, key, value, kernel, documents=documents, sink=sink, causal="lower_right", window=4)


def packed_inputs(*lead):
    query, key, value = tensors(*lead, rows=9)
    return query, key, value, torch.tensor([0, 4, 4, 9]), torch.randn(4, dtype=torch.float64)


@pytest.mark.parametrize("kernel", ["blockwise", "reference"])  # the graphs of all fused kernels hold the same op
def test_one_graph_serves_the_documents_of_every_batch(kernel):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(packed_loss, fullgraph=True, backend=counter)
    query, key, value, documents, sink = packed_inputs()
    leaves = [one.requires_grad_() for one in (query, key, value, sink)]
    for offsets in (documents, torch.tensor([0, 0, 7, 9]), torch.tensor([0, 9, 9, 9])):
        found, expected = (
            torch.autograd.grad(run(query, key, value, offsets, sink, kernel), leaves)
            for run in (compiled, packed_loss)
        )
        for one, other in zip(found, expected, strict=True):
            assert_float64(one, other)
    assert counter.frame_count == 1


def test_export_holds_documents_and_sinks_as_inputs():
    class Attends(torch.nn.Module):
        def forward(self, query, key, value, documents, sink):
            return attemper.attention(query, key, value, documents=documents, sink=sink, causal=True)

    inputs = packed_inputs()
    exported = torch.export.export(Attends(), inputs).module()
    for documents in (inputs[3], torch.tensor([0, 1, 8, 9])):
        given = (*inputs[:3], documents, inputs[4])
        found, expected = exported(*given), Attends()(*given)
        assert_float64(found.output, expected.output)
        assert_float64(found.vitals.entropy, expected.vitals.entropy)


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("each", [(True, True), (True, False), (False, True)], ids=str)
def test_vmap_over_documents_and_sinks(kernel, each):
    query, key, value, *_ = packed_inputs(3)
    documents = torch.tensor([[0, 4, 4, 9], [0, 0, 9, 9], [0, 1, 8, 9]])
    sinks = torch.randn(3, 4, dtype=torch.float64)
    given = [tensor if own else tensor[0] for tensor, own in zip((documents, sinks), each, strict=True)]
    dims = (0, 0, 0, *(0 if own else None for own in each))

    def gradients(*inputs):
        return grad(packed_loss, argnums=(0, 4))(*inputs, kernel)

    found = vmap(gradients, in_dims=dims)(query, key, value, *given)
    output = vmap(
        lambda q, k, v, d, s: attemper.attention(q, k, v, documents=d, sink=s, kernel=kernel).output, in_dims=dims
    )
    batched = output(query, key, value, *given)
    for i in range(3):
        own = [one[i] if by else one for one, by in zip(given, each, strict=True)]
        expected = attemper.attention(query[i], key[i], value[i], documents=own[0], sink=own[1], kernel="reference")
        assert_float64(batched[i], expected.output)
        wanted = grad(packed_loss, argnums=(0, 4))(query[i], key[i], value[i], *own, "reference")
        for one, other in zip(found, wanted, strict=True):
            assert_float64(one[i], other)
