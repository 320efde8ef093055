"""Tensors that were made in inference mode, beside others that learn: gradients as if they had been made outside."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import attemper
from serving import ON_CPU

SHAPES = {"query": (2, 4, 6, 8), "key": (2, 2, 9, 8), "value": (2, 2, 9, 5), "weight": (8,)}
EXTRA = {
    "query": {},
    "key": {},
    "value": {},
    "bool": {"mask": torch.rand(2, 1, 1, 9) > 0.3},
    "bool, two dimensions": {"mask": torch.ones(6, 9, dtype=torch.bool).tril(3)},
    "bool, expanded": {"mask": (torch.rand(2, 1, 1, 9) > 0.3).expand(2, 4, 6, 9)},
    "additive": {"mask": torch.randn(4, 6, 9, dtype=torch.float64)},
    "scale": {"scale": torch.tensor(0.3, dtype=torch.float64)},
    "scale per head": {"scale": torch.rand(4, dtype=torch.float64)},
}


def inferred(tensor):
    with torch.inference_mode():
        once = tensor[tuple(slice(None) if step else slice(1) for step in tensor.stride())]
        return once.clone().expand(tensor.shape)


def run(call, inputs, options, made=lambda tensor: tensor, made_inputs=()):
    """The gradients of a call in which some tensors are `made`; those are overwritten before the backward."""
    tensors = {name: inputs[name].clone() for name in inputs}
    given = {name: made(tensor) if name in made_inputs else tensor.requires_grad_() for name, tensor in tensors.items()}
    extra = {name: made(tensor.clone()) for name, tensor in options.items()}
    total = call(**given, **extra)
    with torch.inference_mode():
        for tensor in (*extra.values(), *(given[name] for name in made_inputs)):
            if tensor.is_inference():
                tensor.as_strided([tensor.untyped_storage().nbytes() // tensor.element_size()], [1]).zero_()
    total.backward()
    return {name: tensor.grad for name, tensor in tensors.items() if name not in made_inputs}


def attended(**inputs):
    output, vitals = attemper.attention(**inputs)
    return output.square().sum() + vitals.entropy.sum() + vitals.peak.sum()


CALLS = {
    **{name: (lambda kernel: lambda **inputs: attended(**inputs, kernel=kernel))(name) for name in ON_CPU},
    "measure": lambda value, **inputs: attemper.measure(**inputs).entropy.sum() + 0.0 * value.sum(),
    "cosine": lambda scale=10.0, **inputs: attemper.cosine_attention(**inputs, scale=scale).output.square().sum(),
    "additive": lambda **inputs: attemper.additive_attention(**inputs).output.square().sum(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", EXTRA)
def test_gradients(call, case):
    options = EXTRA[case]
    if call == "additive" and "scale" in options:
        case, options = "weight", {}
    names = ("query", "key", "value", "weight") if call == "additive" else ("query", "key", "value")
    inputs = {name: torch.randn(SHAPES[name], dtype=torch.float64) for name in names}
    places = () if options else (case,)
    found = run(CALLS[call], inputs, options, inferred, places)
    expected = run(CALLS[call], inputs, options, made_inputs=places)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


def test_a_mask_of_the_quick_way_and_of_torch_s():
    """In four dimensions and without a kernel's name a call takes the direct path, where a mask was saved as it came."""
    inputs = {name: torch.randn(2, 4, 6, 8, dtype=torch.float64) for name in ("query", "key", "value")}
    mask = {"attn_mask": torch.rand(2, 1, 6, 6) > 0.3}
    ours, torchs = (
        lambda function=function, **given: function(**given).square().sum()
        for function in (attemper.sdpa, scaled_dot_product_attention)
    )
    found, expected = run(ours, inputs, mask, inferred), run(ours, inputs, mask)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    run(torchs, inputs, mask, inferred)  # it runs, so ours must


def test_what_was_expanded_is_not_copied_in_full():
    query, key, value = (torch.randn(2, 4, 64, 8).requires_grad_() for _ in range(3))
    mask = inferred((torch.rand(2, 1, 1, 64) > 0.3).expand(2, 4, 64, 64))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        attemper.attention(query, key, value, mask=mask)
    (kept,) = (tensor for tensor in saved if tensor.dtype == torch.bool)
    assert kept.untyped_storage().nbytes() == 2 * 64


@pytest.mark.parametrize("name", ["MultiHeadAttention", "AdditiveAttention"])
def test_modules(name):
    torch.manual_seed(0)
    if name == "MultiHeadAttention":
        module = attemper.MultiHeadAttention(16, 2, rule="log_n", batch_first=True)
        x, options = torch.randn(2, 5, 16), {"key_padding_mask": torch.rand(2, 5) > 0.7}
    else:
        module = attemper.AdditiveAttention(16)
        x, options = torch.randn(2, 5, 16), {"mask": torch.rand(2, 1, 5) > 0.3}
    found = []
    for made in (inferred, lambda tensor: tensor):
        module.zero_grad()
        given = {name: made(mask) for name, mask in options.items()}
        output = (
            module(x, x, **given) if name == "AdditiveAttention" else module(x, x, x, need_weights=False, **given)[0]
        )
        output.square().sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("call", CALLS)
def test_enable_grad_inside_of_inference_mode_records_nothing(call):
    """As torch has it; a Function alone would save what it may not."""
    names = ("query", "key", "value", "weight") if call == "additive" else ("query", "key", "value")
    inputs = {name: nn.Parameter(torch.randn(SHAPES[name], dtype=torch.float64)) for name in names}
    expected = CALLS[call](**inputs)
    with torch.inference_mode(), torch.enable_grad():
        found = CALLS[call](**inputs)
    assert found.is_inference()
    assert not found.requires_grad
    assert torch.equal(found, expected.detach())
