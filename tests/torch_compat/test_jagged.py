"""sdpa() on torch's jagged tensors, as torch's own has them, with their gradients."""

import pytest
import torch
from torch.nested import nested_tensor, nested_tensor_from_jagged
from torch.nn.functional import scaled_dot_product_attention

import attemper
from attemper.errors import InputError
from close import assert_float64

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    # dynamo reads .grad behind a filter of its own, which the filters of another thread may replace
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def jagged(lengths, heads=4, dim=8):
    parts = [torch.randn(length, heads, dim, dtype=torch.float64) for length in lengths]
    return nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def run(function, *tensors, **options):
    output = function(*(tensor.transpose(1, 2) for tensor in tensors), **options)
    grads = torch.autograd.grad(output.values().square().sum(), tensors)
    return output, [grad.values() for grad in grads]


CALLS = {
    "self": ([3, 5, 1, 7], [3, 5, 1, 7], {}),
    "scale": ([3, 5, 1, 7], [3, 5, 1, 7], {"scale": 0.3}),
    "cross": ([3, 5, 1, 7], [4, 1, 9, 2], {}),
}


@pytest.mark.parametrize(("queries", "keys", "options"), CALLS.values(), ids=CALLS)
def test_as_torch_has_it(queries, keys, options):
    query, key = jagged(queries), jagged(keys)
    value = nested_tensor_from_jagged(torch.randn_like(key.values()), key.offsets()).detach().requires_grad_()
    if queries == keys:
        key, value = (
            nested_tensor_from_jagged(torch.randn_like(query.values()), query.offsets()).detach().requires_grad_()
            for _ in range(2)
        )
    expected, wanted = run(scaled_dot_product_attention, query, key, value, **options)
    found, grads = run(attemper.sdpa, query, key, value, **options)
    assert found.shape == expected.shape == query.transpose(1, 2).shape  # their symbols too
    assert_float64(found.values(), expected.values())
    for one, other in zip(grads, wanted, strict=True):
        assert_float64(one, other)


@pytest.mark.parametrize("compiled", [False, True])
def test_values_of_other_sequences_than_the_keys_are_refused(compiled):
    """Of the same total length: the values of one sequence would be the next one's."""
    torch._dynamo.reset()
    query, value = jagged([3, 5, 2]), jagged([1, 4, 5])
    run = torch.compile(attemper.sdpa, backend="aot_eager") if compiled else attemper.sdpa
    with pytest.raises((InputError, RuntimeError), match="a jagged `value` must have the sequences of `key`"):
        run(*(t.detach().transpose(1, 2) for t in (query, query, value)))
    with pytest.raises(InputError, match="a jagged `key` must have 3 sequences like `query`; got 2"):
        attemper.sdpa(*(t.transpose(1, 2) for t in (query, jagged([5, 5]), query)))
    same = nested_tensor_from_jagged(query.values(), query.offsets().clone())
    found = attemper.sdpa(*(t.transpose(1, 2) for t in (query, query, same)))
    assert_float64(found.values(), attemper.sdpa(*(t.transpose(1, 2) for t in (query,) * 3)).values())


def test_grouped_heads_and_causal_keys_of_other_lengths():
    """Which torch does not compute here: sequence by sequence."""
    query, key, value = jagged([3, 5, 0, 7]), jagged([4, 1, 2, 9], heads=2), None
    value = nested_tensor_from_jagged(torch.randn_like(key.values()), key.offsets())
    found = attemper.sdpa(*(t.transpose(1, 2) for t in (query, key, value)), is_causal=True, enable_gqa=True)
    parts = zip(found.unbind(), query.unbind(), key.unbind(), value.unbind(), strict=True)
    for one, *own in parts:
        own = [t.transpose(0, 1) for t in own]
        assert_float64(one, scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True))


def test_another_dimension_may_be_ragged():
    tensor = nested_tensor([torch.randn(n, 4, 6, 8, dtype=torch.float64) for n in (3, 5)], layout=torch.jagged)
    found, expected = (function(tensor, tensor, tensor) for function in (attemper.sdpa, scaled_dot_product_attention))
    assert found.shape == expected.shape
    assert_float64(found.values(), expected.values())


def test_compiled_without_a_break():
    torch._dynamo.reset()
    tensors = [jagged([3, 5, 1])] * 3

    def step(*tensors):
        return attemper.sdpa(*(tensor.transpose(1, 2) for tensor in tensors), is_causal=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_float64(compiled(*tensors).values(), step(*tensors).values())


def test_what_torch_refuses_is_refused_with_a_sentence():
    query = jagged([3, 5]).transpose(1, 2)
    dense = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    holes = nested_tensor_from_jagged(torch.randn(10, 4, 8), torch.tensor([0, 4, 10]), lengths=torch.tensor([2, 5]))
    for tensors, options, match in (
        ((query, query, query), {"attn_mask": torch.ones(5, 5)}, "`attn_mask` must be None for jagged tensors"),
        ((query, dense, query), {}, "`key` must be a jagged tensor where another input is one; got torch.strided"),
        ((dense, query, query), {}, "`query` must be a jagged tensor"),
        ((holes.transpose(1, 2),) * 3, {}, "must have no holes"),
        ((nested_tensor([torch.randn(3, 8)], layout=torch.jagged),) * 3, {}, r"must be \(B, H, j, E\)"),
    ):
        with pytest.raises(InputError, match=match):
            attemper.sdpa(*tensors, **options)
