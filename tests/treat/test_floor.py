"""entropy_floor() against its definition and finite differences; floor() against the same loss added by hand."""

import copy
import math
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import attemper
from close import assert_float64, in_float64
from treat.architectures import PER_HEAD, SMALL
from treat.clipping import made


def by_hand(q, k, floor, causal=True):
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool)
    logits = logits.masked_fill(~(seen.tril() if causal else seen), -math.inf)
    weights = logits.softmax(-1)
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
    visible = torch.arange(1, q.shape[-2] + 1) if causal else torch.full((q.shape[-2],), k.shape[-2])
    rows = visible >= 8
    short = (floor - entropy[..., rows] / visible[rows].double().log()).clamp(min=0)
    return short.square().mean()


@pytest.fixture
def qk(float64):
    return [(3 * torch.randn(2, 3, 12, 8)).requires_grad_() for _ in range(2)]


def test_the_definition_and_its_gradient(qk):
    vitals = attemper.attention(*qk, qk[0], causal=True).vitals
    found, expected = attemper.entropy_floor(vitals, 0.6), by_hand(*qk, 0.6)
    assert found.item() == in_float64(expected.item())
    for one, other in zip(torch.autograd.grad(found, qk), torch.autograd.grad(expected, qk), strict=True):
        assert one.abs().max() > 1e-4
        assert_float64(one, other)


def test_finite_differences(qk):
    q, k = (part[:1, :1].detach().requires_grad_() for part in qk)

    def loss(q, k):
        vitals = attemper.attention(q, k, q.detach(), causal=True, kernel="reference").vitals
        return attemper.entropy_floor(vitals, 0.6)

    assert torch.autograd.gradcheck(loss, (q, k))


def test_several_calls_count_row_by_row(qk):
    q, k = qk
    both = [attemper.attention(q[:, :, :n], k[:, :, :n], q[:, :, :n], causal=True).vitals for n in (12, 9)]
    single = [by_hand(q[:, :, :n], k[:, :, :n], 0.6) * (n - 7) for n in (12, 9)]
    assert attemper.entropy_floor(both, 0.6).item() == in_float64(sum(single).item() / 7)


def test_nothing_below_the_floor_has_no_graph(qk):
    q, k = (part * 1e-3 for part in qk)
    loss = attemper.entropy_floor(attemper.attention(q, k, q).vitals, 0.5)
    assert loss.item() == 0
    assert not loss.requires_grad


def test_rows_that_see_few_keys_do_not_count():
    q = torch.randn(1, 1, 7, 8)
    assert attemper.entropy_floor(attemper.attention(q, 100 * q, q).vitals, 0.9).item() == 0


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))

    def forward(self, x, collect=None):
        for layer in self.qkv:
            q, k, v = layer(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
            if collect is None:
                y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                y, vitals = attemper.attention(q, k, v, causal=True)
                collect.append(vitals)
            x = x + y.transpose(1, 2).flatten(2)
        return x


def test_a_plain_model_gets_the_gradient_of_the_added_loss(float64):
    model, x = Plain(), 5 * torch.randn(2, 12, 16)
    other, collected = copy.deepcopy(model), []
    output = model(x)
    with attemper.floor(model, floor=0.6, weight=0.3) as floored:
        found = model(x)
        found.square().mean().backward()
    assert floored.calls == 2
    assert_float64(found, output)
    loss = other(x, collected).square().mean()
    (loss + 0.3 * sum(attemper.entropy_floor(one, 0.6) for one in collected)).backward()
    alone = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    for one, right, plain in zip(model.parameters(), other.parameters(), alone, strict=True):
        assert_float64(one.grad, right.grad)
        assert not torch.equal(one.grad, plain)


def test_the_scale_of_accumulation_and_a_loss_scale(float64):
    model, x = Plain(), 5 * torch.randn(2, 12, 16)
    with attemper.floor(model, floor=0.6):
        model(x).sum().backward()
    once = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with attemper.floor(model, floor=0.6, scale=1024 / 4):
        for _ in range(4):
            (model(x).sum() / 4 * 1024).backward()
    for parameter, expected in zip(model.parameters(), once, strict=True):
        assert_float64(parameter.grad / 1024, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_hugging_face_model_shows_its_scale_by_its_loss(implementation):
    """The trainer divides the model's loss and multiplies it: the added gradient follows."""
    torch.manual_seed(0)
    options = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).double()
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(400)
    x = torch.randint(3, 60, (2, 12))
    plain = torch.autograd.grad(model(input_ids=x, labels=x).loss, list(model.parameters()))
    with attemper.floor(model, floor=0.7, weight=2.0) as floored:
        model(input_ids=x, labels=x).loss.backward()
        assert floored.calls == 2
        once = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        (model(input_ids=x, labels=x).loss * 8 / 2).backward()
    assert model.config._attn_implementation == implementation
    for parameter, expected in zip(model.parameters(), once, strict=True):
        assert_float64(parameter.grad / 4, expected)
    queries = [n for n, (name, _) in enumerate(model.named_parameters()) if "q_proj" in name]
    assert all((once[n] - plain[n]).abs().max() > 1e-6 for n in queries)


def test_it_lets_go():
    model = Plain()
    with pytest.raises(RuntimeError), attemper.floor(model):
        model(torch.randn(9))  # no batch and no length
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with attemper.floor(model), torch.no_grad():
        model(torch.randn(1, 9, 16))  # evaluation
    q = torch.randn(1, 1, 4, 4)
    assert type(nn.functional.scaled_dot_product_attention(q, q, q)) is torch.Tensor


def test_attention_that_it_cannot_reach_is_told():
    model, inputs = made(PER_HEAD["nn.MultiheadAttention, weights"])  # by hand, since it returns its weights
    with pytest.warns(UserWarning, match="no attention call of MultiheadAttention went through"), attemper.floor(model):
        model(**inputs)[0].sum().backward()


def llama():
    torch.manual_seed(0)
    sizes = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double()
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            model.model.layers[0].self_attn.get_submodule(name).weight.mul_(60)
    return model


@pytest.mark.filterwarnings("ignore")  # of Dynamo, about tensors of its own
def test_a_compiled_model_gets_the_gradient_of_each_step():
    """A graph must not keep what the loss was multiplied by when it was traced."""
    tokens, found = torch.randint(3, 60, (2, 20)), {}
    for compiled in (False, True):
        torch.compiler.reset()
        model = llama()
        called = torch.compile(model, backend="eager") if compiled else model
        with attemper.floor(model, 0.6, 5.0) as floored:
            for scale in (1.0, 8.0, 0.25):
                model.zero_grad()
                (called(input_ids=tokens, labels=tokens).loss * scale).backward()
                found[compiled, scale] = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
        assert floored.calls == 3
    torch.compiler.reset()
    for scale in (1.0, 8.0, 0.25):
        assert_float64(found[True, scale], found[False, scale])
        assert_float64(found[True, scale], scale * found[False, 1.0])


def test_two_hugging_face_models_at_once_are_an_error():
    first, second = llama(), llama()
    with attemper.floor(first):
        with pytest.raises(attemper.errors.InputError, match=r"another floor is open .* Close that floor first"):
            attemper.floor(second).__enter__()
        assert second.config._attn_implementation != first.config._attn_implementation
    with attemper.floor(second) as floored:  # one after the other is fine
        second(input_ids=torch.randint(3, 60, (1, 12)), labels=torch.randint(3, 60, (1, 12))).loss.backward()
    assert floored.calls == 1


def test_the_defaults_are_those_that_the_page_measures():
    floored = attemper.floor(Plain())
    page = (Path(__file__).parents[2] / "docs" / "treat.md").read_text(encoding="utf-8")
    assert f"| {floored.floor:g}, {floored.weight:g} (the defaults) | 2.09" in page
