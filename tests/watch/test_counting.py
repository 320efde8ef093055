"""Every row is counted once: under autocast, checkpoints, accumulation, threads and torch.func."""

import threading
from functools import partial

import pytest
import torch
from torch import nn

import attemper
import zoo
from close import in_float32, in_float64
from watched import Block, Checkpointed, same, stack

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    subject = zoo.make("by_hand")
    block, x = Block(), torch.randn(2, 5, 16)
    model = nn.ModuleDict({"block": block, "hand": subject.model})
    with torch.autocast("cpu", dtype):
        expected = [block(x), subject.run()]
        with attemper.watch(model) as watch:
            found = [block(x), subject.run()]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert watch.record.layers == ["block", "hand.layers.0", "hand.layers.1"]
    name = str(dtype).removeprefix("torch.")
    assert {info.dtype for info in watch.record.info.values()} == {name}
    with attemper.watch(model) as wide:
        block(x), subject.run()
    for low, high in zip(watch.record.to_dicts(), wide.record.to_dicts(), strict=True):
        assert low["entropy"] == pytest.approx(high["entropy"], rel=0.1)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_counted_once(reentrant):
    plain = stack()
    again = Checkpointed(reentrant, False, *plain)
    x = torch.randn(2, 5, 16)
    rows = []
    for model in (plain, again):
        with attemper.watch(model, gradients=True) as watch:
            model(x.clone().requires_grad_()).square().sum().backward()
        rows.append(watch.record.to_dicts())
    for found, expected in zip(*rows, strict=True):
        same(found, expected)
    assert rows[0][0]["rows"] == 10
    assert rows[0][0]["grad_q_rms"] > 0


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt_neo"])
def test_a_checkpointed_hugging_face_model_is_counted_once(name, reentrant):
    rows = []
    for checkpointed in (False, True):
        subject = zoo.make(name)
        subject.model.train()
        if checkpointed:
            subject.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        torch.manual_seed(1)
        with attemper.watch(subject.model, gradients=True) as watch:
            subject.run().square().mean().backward()
        rows.append(watch.record.to_dicts())
    for found, expected in zip(*rows, strict=True):
        # GPT-Neo attends in float32 always
        single = partial(in_float32, terms=zoo.WIDTH, logit=expected["peak"])
        same(found, expected, single if name == "gpt_neo" else in_float64)
        assert found["grad_k_rms"] > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_function_is_counted_once(reentrant):
    """Its attention is seen as the module's around it; a re-entrant one shows no gradients, as no module runs then."""
    model = Checkpointed(reentrant, True, Block())
    with attemper.watch(model, gradients=True) as watch:
        model(torch.randn(2, 5, 16).requires_grad_()).square().sum().backward()
    row = watch.record.to_dicts()[0]
    assert (row["layer"], row["rows"]) == ("", 10)
    assert ("grad_q_rms" in row) is not reentrant


@pytest.mark.usefixtures("float64")
def test_gradient_accumulation_adds_up():
    model, x = stack(), torch.randn(4, 5, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attemper.watch(model, gradients=True) as whole:
        model(x).square().sum().backward()
    with attemper.watch(model, optimizer=optimizer, gradients=True) as watch:
        for _ in range(2):
            for part in x.split(1):
                model(part).square().sum().backward()
            optimizer.step()
    assert watch.record.steps == [0, 1]
    rows = [{**row, "step": 0} for row in watch.record.filter(steps=1).to_dicts()]
    for found, expected in zip(rows, whole.record.to_dicts(), strict=True):
        for row in (found, expected):  # medians of parts are averaged
            del row["grad_q_median"], row["grad_k_median"]
        same(found, expected)


def test_threads():
    model, x = stack(), torch.randn(1, 5, 16)
    expected = model(x)
    found = []
    with attemper.watch(model) as watch:
        threads = [threading.Thread(target=lambda: found.append(model(x))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(output, expected) for output in found)
    assert {row["rows"] for row in watch.record.to_dicts()} == {20.0}


def test_a_submodule_called_alone_is_measured():
    model, x = stack(), torch.randn(1, 5, 16)
    with attemper.watch(model) as watch:
        model[1](x)
    assert watch.record.layers == ["1"]


def test_padding_that_no_mask_shows_can_be_given():
    model, x = stack(), torch.randn(2, 5, 16)
    keep = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    with attemper.watch(model) as watch:
        watch.rows(keep)
        model(x)
        watch.step()
        watch.rows(None)
        model(x)
    assert [entry.summary.rows[0].item() for entry in watch.record.entries] == [8, 8, 10, 10]


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_torch_func():
    model, x = Block(), torch.randn(3, 2, 5, 16)
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    expected = torch.vmap(loss, (None, 0))(parameters, x), torch.func.grad(loss)(parameters, x[0])
    with attemper.watch(model, gradients=True) as watch:
        found = torch.vmap(loss, (None, 0))(parameters, x)
        watch.step()
        gradients = torch.func.grad(loss)(parameters, x[0])
    assert torch.equal(found, expected[0])
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected[1].items())
    assert [row["rows"] for row in watch.record.to_dicts()] == [30, 30, 10, 10]
