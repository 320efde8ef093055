"""AdditiveAttention: Bahdanau's formula, written out."""

import copy

import pytest
import torch

import attemper
from judge import assert_within

EPS = torch.finfo(torch.float32).eps


def definition(module, query, key, value, mask):
    q, k = module.q_proj(query), module.k_proj(key)
    z = (module.weight * torch.tanh(q[:, :, None] + k[:, None])).sum(-1)
    p = z.masked_fill(~mask, float("-inf")).softmax(-1)
    return {"output": p @ value, "lse": z.masked_fill(~mask, float("-inf")).logsumexp(-1), "p2": p.square().sum(-1)}


def test_equals_its_definition():
    torch.manual_seed(0)
    module = attemper.AdditiveAttention(10, hidden=7, key_dim=6)
    torch.nn.init.normal_(module.weight)
    query, key, value = torch.randn(3, 4, 10), torch.randn(3, 9, 6), torch.randn(3, 9, 5)
    mask = (torch.arange(9) < torch.tensor([9, 4, 1])[:, None])[:, None]
    output, vitals = module(query, key, value, mask=mask, signs="all")
    ours = {"output": output, "lse": vitals.lse[:, 0], "p2": vitals.p2[:, 0]}
    plain = definition(module, query, key, value, mask)
    exact_module = copy.deepcopy(module).double()
    exact = definition(exact_module, query.double(), key.double(), value.double(), mask)
    parameters, exact_parameters = list(module.parameters()), list(exact_module.parameters())
    for name in ours:
        assert_within(name, ours[name], exact[name].detach(), plain[name], EPS)
        cotangent = torch.randn_like(exact[name])
        wanted = torch.autograd.grad((exact[name] * cotangent).sum(), exact_parameters, retain_graph=True)
        grads, plain_grads = (
            torch.autograd.grad((found[name] * cotangent.float()).sum(), parameters, retain_graph=True)
            for found in (ours, plain)
        )
        largest = max(g.abs().max().item() for g in wanted)
        for grad, exact_grad, plain_grad in zip(grads, wanted, plain_grads, strict=True):
            assert_within(f"d({name})", grad, exact_grad, plain_grad, EPS * largest)


def test_hands_out_a_tensor_unless_signs_are_asked_for():
    module = attemper.AdditiveAttention(8, signs="entropy")
    x = torch.randn(2, 5, 8)
    output = module(x, x)
    assert isinstance(output, torch.Tensor)
    assert module.vitals.entropy.shape == (2, 1, 5)
    assert copy.deepcopy(module).vitals is None
    assert torch.equal(module(x, x, signs="all").output, output)
    assert len(module.vitals.by_head().to_dicts()) == 1  # one head, whatever the batch
    torch.testing.assert_close(module(x[0], x[0]), output[0])


@pytest.mark.parametrize(("options", "name"), [({"hidden": 0}, "hidden"), ({"key_dim": 1.5}, "key_dim")])
def test_impossible_widths_are_named(options, name):
    with pytest.raises(attemper.errors.InputError, match=f"`{name}` must be a whole number, at least 1"):
        attemper.AdditiveAttention(8, **options)
