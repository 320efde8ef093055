"""Where else a training keeps its weights: masters, ScheduleFree's z, adapters; frozen, quantised and tied weights."""

import copy

import pytest
import torch
import transformers
from torch import nn

import attemper
from attemper.errors import InputError
from close import in_float64
from treat.architectures import PER_HEAD, SMALL
from treat.clipping import first, made, middle, watched

NAME = "layers.0.self_attn.q_proj.weight"


@pytest.fixture
def llama():
    model, inputs = made(PER_HEAD["llama"])
    attemper.projections(model, inputs)
    record = watched(model, inputs)
    return model, inputs, record, middle(first(record)[1])


def factors(model, record, tau):
    """What the rows of W_q and W_k are multiplied by."""
    peaks = first(record)[1]
    return (torch.full_like(peaks, tau) / peaks.clamp(min=tau)).repeat_interleave(4)[:, None] ** 0.5


def test_masters_of_half_weights_are_scaled_and_rounded_once(llama):
    model, _, record, tau = llama
    exact = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    half = copy.deepcopy(model).bfloat16()
    attemper.treat.finder._found[half] = attemper.treat.last_projections(model)
    # one keeps masters in its state, the other in its groups
    in_state = torch.optim.SGD(half.parameters(), lr=0.1)
    for name, parameter in half.named_parameters():
        in_state.state[parameter] = {"anything": exact[name].clone(), "momentum_buffer": torch.randn_like(exact[name])}
    masters = {name: parameter.clone().requires_grad_() for name, parameter in exact.items()}
    in_groups = torch.optim.SGD(masters.values(), lr=0.1)
    for optimizer in (in_state, in_groups):
        other = copy.deepcopy(half)
        attemper.treat.finder._found[other] = attemper.treat.last_projections(model)
        mapping = dict(zip(half.parameters(), other.parameters(), strict=True))
        if optimizer is in_state:
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            optimizer.state.update({mapping[one]: dict(kept) for one, kept in in_state.state.items()})
        moments = {k: s["momentum_buffer"].clone() for k, s in optimizer.state.items() if "momentum_buffer" in s}
        assert attemper.qk_clip(other, record, tau, optimizer=optimizer)
        found = other.get_parameter(NAME)
        master = masters[NAME] if not optimizer.state else optimizer.state[found]["anything"]
        assert torch.equal(master, exact[NAME] * factors(model, record, tau).float())
        assert torch.equal(found, master.bfloat16())
        for parameter, moment in moments.items():
            assert torch.equal(optimizer.state[parameter]["momentum_buffer"], moment)


def test_masters_that_are_equal_are_told_apart_by_their_order():
    """Gains of 1: the master of one layer's is not that of another's."""
    options = {**SMALL, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = transformers.Qwen3Model(transformers.Qwen3Config(**options))
    inputs = {"input_ids": torch.randint(3, 60, (2, 9))}
    attemper.projections(model, inputs)
    record = watched(model, inputs)
    masters = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    model.bfloat16()
    peaks = [max(row["peak"] for row in record.to_dicts() if row["layer"] == layer) for layer in record.layers]
    small, large = sorted(peaks)
    clip = attemper.qk_clip(model, record, (small + large) / 2, optimizer=torch.optim.SGD(masters.values(), lr=0.1))
    changed = {
        name
        for name, master in masters.items()
        if not torch.equal(master, torch.ones_like(master)) and "q_norm" in name
    }
    assert changed == {one.parameters[0] for one in clip}
    assert len(changed) == 1
    some = dict(list(masters.items())[::-1])
    with pytest.raises(InputError, match="in another order than the model's parameters"):
        attemper.qk_clip(model, record, small / 2, optimizer=torch.optim.SGD(list(some.values())[1:], lr=0.1))


def test_schedule_free(llama):
    model, _, record, tau = llama
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    z = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        optimizer.state[parameter]["z"] = z[name].clone()
    attemper.qk_clip(model, record, tau, optimizer=optimizer)
    assert torch.equal(optimizer.state[model.get_parameter(NAME)]["z"], z[NAME] * factors(model, record, tau))
    other = "layers.0.mlp.up_proj.weight"
    assert torch.equal(optimizer.state[model.get_parameter(other)]["z"], z[other])


def test_a_trainers_wrapper_of_the_optimizer_is_unwrapped(llama):
    model, _, record, tau = llama

    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.get_parameter(NAME)
    inner.state[weight]["z"] = weight.detach().clone()
    attemper.qk_clip(model, record, tau, optimizer=Wrapper(Wrapper(inner)))
    assert torch.equal(inner.state[weight]["z"], weight)


def test_frozen_weights_are_left_alone(llama):
    model, _, record, tau = llama
    model.requires_grad_(False)
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    clip = attemper.qk_clip(model, record, tau)
    assert len(clip) == 0
    assert [skipped_head.reason for skipped_head in clip.skipped] == [
        f"{NAME} is frozen (requires_grad=False), so that its rows are not scaled"
    ]
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.state_dict().items())


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("name", ["llama", "llama, grouped keys", "deepseek_v3"])
def test_if_one_side_is_frozen_the_other_takes_the_whole_factor(name, side):
    """Keys cannot, where several heads share them."""
    model, inputs = made(PER_HEAD[name])
    found = attemper.projections(model, inputs)
    record = watched(model, inputs)
    place, peaks = first(record)
    tau = middle(peaks)
    fixed = {part.parameter for part in found[place].parts if part.side == side}
    for parameter in fixed:
        model.get_parameter(parameter).requires_grad_(False)
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    clip = attemper.qk_clip(model, record, tau)
    after = first(watched(model, inputs))[1]
    if side == "q" and name != "llama":
        assert torch.equal(after, peaks)
        assert "is frozen" in clip.skipped[0].reason
        return
    assert after.tolist() == [in_float64(x) for x in peaks.clamp(max=tau).tolist()]
    assert torch.equal(after[peaks <= tau], peaks[peaks <= tau])
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in fixed)
    (note,) = clip.notes
    assert note.endswith(
        "keys are left alone: q takes the whole factor" if side == "k" else "keys take the whole factor"
    )
    assert not {parameter for one in clip for parameter in one.parameters} & fixed


def test_quantised_weights_are_left_alone(llama):
    model, _, record, tau = llama
    for name in (NAME, NAME.replace("q_proj", "k_proj")):
        module = model.get_submodule(name.rpartition(".")[0])
        module.weight = nn.Parameter(module.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    clip = attemper.qk_clip(model, record, tau)
    assert "is stored as float8_e4m3fn, whose rows cannot be scaled in place" in str(clip)


class Adapted(nn.Module):
    """A projection with a low-rank adapter, whose second factor begins at 0."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_an_adapter_goes_with_its_projection():
    model, inputs = made(PER_HEAD["llama"])
    attention = model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj).double()
    found = attemper.projections(model, inputs)["layers.0.self_attn", "self"]
    assert {part.parameter.removeprefix("layers.0.self_attn.") for part in found.parts} == {
        "q_proj.base_layer.weight",
        "q_proj.lora_B.weight",
        "k_proj.weight",
    }
    nn.init.normal_(attention.q_proj.lora_B.weight)
    record = watched(model, inputs)
    peaks = first(record)[1]
    tau = middle(peaks)
    attemper.qk_clip(model, record, tau)
    after = first(watched(model, inputs))[1]
    assert after.tolist() == [in_float64(x) for x in peaks.clamp(max=tau).tolist()]
    attention.q_proj.base_layer.weight.requires_grad_(False)
    attention.k_proj.weight.requires_grad_(False)
    clip = attemper.qk_clip(model, record, tau)
    assert not clip.heads
    assert "base_layer.weight is frozen" in str(clip)


def test_layers_that_share_a_parameter_are_scaled_once():
    torch.manual_seed(0)
    options = {**SMALL, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = transformers.LlamaModel(transformers.LlamaConfig(**options)).double()
    model.layers[1].self_attn.q_proj = model.layers[0].self_attn.q_proj
    model.layers[1].self_attn.k_proj = model.layers[0].self_attn.k_proj
    inputs = {"input_ids": torch.randint(3, 60, (2, 9))}
    attemper.projections(model, inputs)
    record = watched(model, inputs)
    before = model.layers[0].self_attn.q_proj.weight.clone()
    tau = min(row["peak"] for row in record.to_dicts()) / 2
    assert len(attemper.qk_clip(model, record, tau)) == 8
    rows = record.to_dicts()
    peaks = [max(row["peak"] for row in rows if row["head"] == head) for head in range(4)]
    largest = torch.tensor(peaks, dtype=torch.float64)
    expected = before * (torch.full_like(largest, tau) / largest).repeat_interleave(4)[:, None] ** 0.5
    found = model.layers[0].self_attn.q_proj.weight
    assert found.flatten().tolist() == [in_float64(x) for x in expected.flatten().tolist()]


def test_keys_that_a_later_layer_reuses_are_left_alone():
    """As in Gemma 3n: the last layer attends to the keys of an earlier one."""

    class Second(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.q = nn.Linear(width, width)

        def forward(self, x, k, v):
            q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    class First(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.qkv, self.second = nn.Linear(width, 3 * width), Second(width)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.second(x + y, k, v)

    model, inputs = made(lambda: (First(16), {"x": torch.randn(2, 9, 16)}))
    found = attemper.projections(model, inputs)
    assert not found["", "self"].splits
    assert not found["second", "self"].splits
    assert "its keys serve second too" in str(found)
    record = watched(model, inputs)
    kept = model.qkv.weight[16:].clone()
    tau = middle(first(record)[1])
    attemper.qk_clip(model, record, tau)
    after = first(watched(model, inputs))[1]
    assert after.tolist() == [in_float64(x) for x in first(record)[1].clamp(max=tau).tolist()]
    assert torch.equal(kept, model.qkv.weight[16:])


def test_the_way_of_megatron_scales_the_group():
    model, inputs = made(PER_HEAD["llama, grouped keys"])
    attemper.projections(model, inputs)
    record = watched(model, inputs)
    peaks = first(record)[1]
    tau = float(peaks.max()) * 0.9
    attemper.qk_clip(model, record, tau, shared="group")
    gamma = (torch.full_like(peaks, tau) / peaks.clamp(min=tau)).view(2, 2).amin(-1).repeat_interleave(2)
    assert first(watched(model, inputs))[1].tolist() == [in_float64(x) for x in (gamma * peaks).tolist()]


def test_nothing_is_moved(llama):
    """In place, so that compiled graphs and optimizers see it; no gradient is written, and modes are put back."""
    model, inputs, record, tau = llama
    model.train()
    model.layers[0].self_attn.eval()
    weight = model.get_parameter(NAME)
    address, version = weight.data_ptr(), weight._version
    attemper.projections(model, inputs)
    assert attemper.qk_clip(model, record, tau)
    assert weight is model.get_parameter(NAME)
    assert weight.data_ptr() == address
    assert weight._version > version  # a backward that still needs the old weights stops with an error
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert not model.layers[0].self_attn.training
    assert model.layers[0].mlp.training


def test_an_edit_between_forward_and_backward_is_an_error(llama):
    model, inputs, record, tau = llama
    loss = model(**inputs)[0].sum()
    attemper.qk_clip(model, record, tau)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("name", "attribute"), [("ZeRO", "ds_id"), ("ZeRO", "_hp_mapping")])
def test_deepspeed_is_refused(llama, name, attribute):
    model, _, record, tau = llama
    setattr(model.get_parameter(NAME), attribute, 3)
    with pytest.raises(InputError, match=f"belongs to DeepSpeed {name}, which keeps the weights elsewhere"):
        attemper.qk_clip(model, record, tau)


def test_weights_that_are_elsewhere_are_refused(llama):
    """As ZeRO-3 leaves them between two passes: a parameter without elements."""
    model, _, record, tau = llama
    weight, optimizer = model.get_parameter(NAME), torch.optim.SGD(model.parameters(), lr=0.1)
    before, weight.data = weight.data, torch.empty(0, dtype=weight.dtype)
    others = {name: one.clone() for name, one in model.named_parameters()}
    for word, called in (
        (r"qk_clip\(\)", lambda: attemper.qk_clip(model, record, tau)),
        (r"scale_rates\(\)", lambda: attemper.scale_rates(optimizer, model)),
        (r"Projections\.named\(\)", lambda: attemper.Projections.named(model, heads=4, q=NAME)),
    ):
        with pytest.raises(InputError, match=rf"^{word}: {NAME} has no elements on this rank, .* Train with FSDP2"):
            called()
    assert all(torch.equal(others[name], one) for name, one in model.named_parameters())
    weight.data = before


def test_fsdp1_is_refused(llama):
    model, _, record, tau = llama
    model.layers[0].__class__ = type("FullyShardedDataParallel", (type(model.layers[0]),), {})
    with pytest.raises(InputError, match="with accelerate set fsdp_version: 2"):
        attemper.qk_clip(model, record, tau)
