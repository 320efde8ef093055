"""AdditiveAttention: Bahdanau's formula, written out."""

import copy

import torch

import attemper
from close import assert_float64
from judge import assert_within

EPS = torch.finfo(torch.float32).eps


def definition(module, query, key, value, mask):
    q, k = module.q_proj(query), module.k_proj(key)
    z = (module.weight * torch.tanh(q[:, :, None] + k[:, None])).sum(-1)
    p = z.masked_fill(~mask, float("-inf")).softmax(-1)
    shut, count = ~mask.expand(z.shape), mask.sum(-1)
    seen = z.masked_fill(shut, 0.0)
    lse, mean = z.masked_fill(shut, float("-inf")).logsumexp(-1), seen.sum(-1) / count
    return {
        "output": p @ value,
        "mean": mean,
        "variance": (z - mean[..., None]).masked_fill(shut, 0.0).square().sum(-1) / count,
        "peak": z.masked_fill(shut, float("-inf")).amax(-1),
        "lse": lse,
        "entropy": lse - (p * seen).sum(-1),
        "sum_p2": p.square().sum(-1),
    }


def test_equals_its_definition():
    torch.manual_seed(0)
    module = attemper.AdditiveAttention(10, hidden=7, key_dim=6)
    torch.nn.init.normal_(module.weight)
    query, key = torch.randn(3, 4, 10, requires_grad=True), torch.randn(3, 9, 6, requires_grad=True)
    value = torch.randn(3, 9, 5)
    mask = (torch.arange(9) < torch.tensor([9, 4, 1])[:, None])[:, None]
    output, vitals = module(query, key, value, mask=mask, signs="all")
    assert torch.equal(vitals.visible[:, 0], mask.sum(-1).expand(3, 4).int())
    plain = definition(module, query, key, value, mask)
    ours = {"output": output} | {name: getattr(vitals, name)[:, 0] for name in plain if name != "output"}
    exact_module = copy.deepcopy(module).double()
    exact_inputs = [t.detach().double().requires_grad_() for t in (query, key)]
    exact = definition(exact_module, *exact_inputs, value.double(), mask)
    parameters = [*module.parameters(), query, key]
    exact_parameters = [*exact_module.parameters(), *exact_inputs]
    for name in ours:
        assert_within(name, ours[name], exact[name].detach(), plain[name], EPS)
        cotangent = torch.randn_like(exact[name])
        wanted = torch.autograd.grad((exact[name] * cotangent).sum(), exact_parameters, retain_graph=True)
        grads, plain_grads = (
            torch.autograd.grad((found[name] * cotangent.float()).sum(), parameters, retain_graph=True)
            for found in (ours, plain)
        )
        # a parameter's gradient is a sum over batch, rows and keys that may cancel: one rounding for each term, in quadrature
        largest = max(g.abs().max().item() for g in wanted) * (query.shape[0] * query.shape[1] * key.shape[1]) ** 0.5
        for grad, exact_grad, plain_grad in zip(grads, wanted, plain_grads, strict=True):
            assert_within(f"d({name})", grad, exact_grad, plain_grad, EPS * largest)


def test_hands_out_a_tensor_unless_signs_are_asked_for():
    module = attemper.AdditiveAttention(8, signs="entropy").double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    output = module(x, x)
    assert isinstance(output, torch.Tensor)
    assert module.vitals.entropy.shape == (2, 1, 5)
    assert copy.deepcopy(module).vitals is None
    assert torch.equal(module(x, x, signs="all").output, output)
    assert len(module.vitals.by_head().to_dicts()) == 1  # one head, whatever the batch
    assert_float64(module(x[0], x[0]), output[0])
