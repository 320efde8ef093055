"""add_qk_norm(), add_temperature() and scale_rates()."""

import copy

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import InputError
from close import assert_float64, in_float64
from treat.architectures import PER_HEAD
from treat.clipping import first, made, middle, watched

PROJECTED = ["llama", "llama, grouped keys", "mistral", "gpt2", "gpt_neox", "phi3", "bert"]


def sizes(model, inputs):
    """The root mean square of each head's logits, from the model's own matrices."""
    found = attemper.treat.norm._sizes(model, inputs)
    return torch.cat(list(found.values()))


@pytest.mark.parametrize("name", PROJECTED)
def test_qk_norm_keeps_the_size_of_each_heads_logits(name):
    model, inputs = made(PER_HEAD[name])
    before = sizes(model, inputs)
    known, place = set(model.state_dict()), first(watched(model, inputs))[0]
    weights = attemper.projections(model, inputs)[place].parts
    added = attemper.add_qk_norm(model, inputs, eps=0.0)
    after = sizes(model, inputs)
    assert after.tolist() == [in_float64(x) for x in before.tolist()]
    new = set(model.state_dict()) - known
    assert len(added) == len(new) == 2
    assert all(name.endswith(("q_norm.gain", "k_norm.gain")) for name in new)
    assert {id(one) for one in added} <= {id(parameter) for parameter in model.parameters()}
    # larger weights before a norm change nothing, which is its purpose
    with torch.no_grad():
        for part in weights:
            model.get_parameter(part.parameter).mul_(100)
    assert sizes(model, inputs).tolist() == [in_float64(x) for x in before.tolist()]


def test_qk_norm_is_clipped_by_its_gain_and_survives_a_copy():
    model, inputs = made(PER_HEAD["llama"])
    attemper.add_qk_norm(model, inputs)
    model = copy.deepcopy(model)
    found = attemper.projections(model, inputs)["layers.0.self_attn", "self"]
    assert {part.parameter.rpartition(".")[0].rpartition(".")[2] for part in found.parts} == {"q_norm", "k_norm"}
    record = watched(model, inputs)
    peaks = first(record)[1]
    tau = middle(peaks)
    attemper.qk_clip(model, record, tau)
    assert first(watched(model, inputs))[1].tolist() == [in_float64(x) for x in peaks.clamp(max=tau).tolist()]
    model(**inputs)[0].square().sum().backward()
    assert all(p.grad.abs().max() > 0 for n, p in model.named_parameters() if n.endswith("norm.gain"))


def test_the_clip_knows_of_a_norm_that_was_added_between_two_watches():
    """Projections and passes that were learned before no longer hold."""
    model, inputs = made(PER_HEAD["llama, grouped keys"])
    attemper.projections(model, inputs)
    place, _ = first(watched(model, inputs))
    attemper.add_qk_norm(model, inputs)
    record = watched(model, inputs)
    assert first(record)[0] == place
    peaks = first(record)[1]
    tau = middle(peaks)
    attemper.qk_clip(model, record, tau)
    assert first(watched(model, inputs))[1].tolist() == [in_float64(x) for x in peaks.clamp(max=tau).tolist()]
    with pytest.raises(InputError, match="the model already has QK-norm"):
        attemper.add_qk_norm(model, inputs)


def test_a_temperature_changes_no_bit_and_is_what_the_clip_scales():
    model, inputs = made(PER_HEAD["llama, grouped keys"])
    output = model(**inputs)[0]
    (gain,) = attemper.add_temperature(model, inputs)
    assert gain.shape == (4, 1)
    assert torch.equal(model(**inputs)[0], output)
    weight = model.layers[0].self_attn.q_proj.weight.clone()
    record = watched(model, inputs)
    peaks = first(record)[1]
    tau = middle(peaks)
    attemper.qk_clip(model, record, tau)
    assert torch.equal(weight, model.layers[0].self_attn.q_proj.weight)
    assert gain.flatten().tolist() == (torch.full_like(peaks, tau) / peaks.clamp(min=tau)).tolist()
    assert first(watched(model, inputs))[1].tolist() == [in_float64(x) for x in peaks.clamp(max=tau).tolist()]
    model(**inputs)[0].square().sum().backward()
    assert gain.grad.abs().max() > 0


@pytest.mark.parametrize("add", [attemper.add_qk_norm, attemper.add_temperature])
def test_where_nothing_can_be_added(add):
    model, inputs = made(PER_HEAD["nn.MultiheadAttention"])
    with pytest.raises(InputError, match=r"use attemper\.MultiHeadAttention\.from_torch"):
        add(model, inputs)
    assert not any(hooked._forward_hooks for hooked in model.modules())


def test_qk_norm_once_and_not_for_shared_keys():
    model, inputs = made(PER_HEAD["deepseek_v3"])
    with pytest.raises(InputError, match="no output to normalise"):
        attemper.add_qk_norm(model, inputs)
    model, inputs = made(PER_HEAD["llama"])
    attemper.add_qk_norm(model, inputs)
    with pytest.raises(InputError, match=r"^add_qk_norm\(\): "):
        attemper.add_qk_norm(model, inputs)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("name", ["llama", "gpt2", "llama, grouped keys"])
def test_rates_are_those_of_a_group_with_another_rate(name, kind):
    """The rows of a head step by lr · ‖W_k at the start‖ / ‖W_k now‖."""
    model, inputs = made(PER_HEAD[name])
    found = attemper.projections(model, inputs)
    layer = next(iter(found.values()))
    optimizer = kind(model.parameters(), lr=1e-3)
    rates = attemper.scale_rates(optimizer, model)
    with torch.no_grad():
        for part in layer.parts:
            if part.side == "k":  # keys grow, head by head
                weight = model.get_parameter(part.parameter)
                shape = [-1 if dim == part.dim else 1 for dim in range(weight.dim())]
                weight.mul_(torch.where(part.owner >= 0, part.owner + 2.0, 1.0).view(shape).double())
    model(**inputs)[0].square().sum().backward()
    plain = copy.deepcopy(model)
    for copied, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        copied.grad = parameter.grad
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    kind(plain.parameters(), lr=1e-3).step()
    optimizer.step()
    groups = layer.heads // layer.key_heads
    for name, parameter in model.named_parameters():
        factor = torch.ones_like(parameter)
        for part in layer.parts:
            if part.parameter == name and part.side == "q":
                rows = torch.where(part.owner >= 0, 1 / (part.owner.clamp(min=0) // groups + 2.0).double(), 1.0)
                factor = factor * rows.view([-1 if dim == part.dim else 1 for dim in range(parameter.dim())])
        assert_float64(
            parameter.detach(), before[name] + factor * (plain.get_parameter(name).detach() - before[name]), name
        )
    rates.remove()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_rates_keep_the_bits_of_everything_else():
    model, inputs = made(PER_HEAD["gpt2"])
    attemper.projections(model, inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**inputs)[0].square().sum().backward()
    plain = copy.deepcopy(model)
    for copied, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        copied.grad = parameter.grad
    torch.optim.AdamW(plain.parameters(), lr=1e-3).step()
    with attemper.scale_rates(optimizer, model):
        optimizer.step()  # nothing has grown yet: a step with the rate that was set
    for copied, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(copied, parameter)


def test_a_head_that_grows_learns_more_slowly():
    """At a fixed rate logits grow faster and faster as both sides grow; at scaled rates they do not."""

    def grown(scaled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Identity(), attemper.MultiHeadAttention(16, 2, batch_first=True, bias=False))
        block, x = model[1], torch.randn(2, 9, 16)
        attemper.projections(block, (x, x, x))
        optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
        if scaled:
            attemper.scale_rates(optimizer, block)
        for _ in range(40):
            vitals = block(x, x, x, signs=("peak",)).vitals
            (-vitals.peak.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(vitals.peak.detach().max())

    assert grown(scaled=True) < grown(scaled=False) / 10
