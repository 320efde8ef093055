"""What replace=True leaves behind: a name that still computes, and nothing of the watch."""

import copy
import gc
import weakref

import pytest
import torch
import transformers
from torch._subclasses import FakeTensorMode

import attemper
import zoo
from judge import assert_as_exact


def test_a_copy_made_while_replaced_still_runs():
    subject = zoo.make("llama")
    before = subject.run()
    with attemper.watch(subject.model, replace=True) as watch:
        subject.run()
        copied = copy.deepcopy(subject.model)
    rows = len(watch.record)
    assert subject.model.config._attn_implementation != "attemper"
    assert_as_exact("output", copied(**subject.inputs)[0], [before], zoo.in_float64(subject).run())
    assert len(watch.record) == rows
    gone = weakref.ref(watch)
    del watch
    gc.collect()
    assert gone() is None  # what stays registered holds nothing of it


@pytest.mark.parametrize("kind", ["fake", "meta"])
@pytest.mark.filterwarnings("ignore:watch")
def test_tensors_without_memory_are_not_measured(kind):
    """The rows of signs are read by their addresses."""
    model = zoo.make("llama").model
    ids = torch.ones(1, 5, dtype=torch.long)
    with attemper.watch(model, replace=True) as watch:
        if kind == "fake":
            with FakeTensorMode(allow_non_fake_inputs=True):
                model(ids)
        else:
            model.to("meta")(ids.to("meta"))
    assert watch.unmeasured
    assert not watch.record.to_dicts()
    assert all("not measured: attention on" in note for note in watch.record.notes)


def test_the_facts_of_a_learned_scale_are_those_of_the_last_call():
    subject = zoo.make("llama")
    layers = [module for module in subject.model.modules() if hasattr(module, "scaling")]
    scale = torch.nn.Parameter(torch.tensor(0.25))
    for layer in layers:
        layer.scaling = scale
    with torch.no_grad(), attemper.watch(subject.model, replace=True) as watch:
        subject.run()
        scale.fill_(0.5)
        subject.run()
    assert {info.scale for info in watch.record.info.values()} == {0.5}


def test_several_models_are_replaced_at_once():
    """Each is measured by its own watch, also after the one that was opened first has closed."""
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 1}
    models = [transformers.GPT2Model(transformers.GPT2Config(**sizes)).eval() for _ in range(2)]
    ids = torch.randint(0, 32, (2, 9))
    watches = [attemper.watch(model, replace=True) for model in models]
    for watch in watches:
        watch.__enter__()
    for length in (9, 5):
        for model, watch in zip(models, watches, strict=True):
            model(ids[:, :length])
            watch.step()
    watches[0].__exit__(None, None, None)
    models[1](ids)
    watches[1].step()
    watches[1].__exit__(None, None, None)
    assert [watch.record.steps for watch in watches] == [[0, 1], [0, 1, 2]]
    for watch in watches:
        assert {info.route for info in watch.record.info.values()} == {"replaced"}
        assert [row["rows"] for row in watch.record.to_dicts()][:4] == [18.0, 18.0, 10.0, 10.0]
    assert all(model.config._attn_implementation == "sdpa" for model in models)


def test_a_floor_and_the_replaced_attention_of_another_model():
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 1}
    one, two = (transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)) for _ in range(2))
    ids = torch.randint(0, 32, (2, 9))
    with attemper.floor(one) as floor, attemper.watch(two, replace=True):
        one(ids, labels=ids).loss.backward()
        two(ids, labels=ids).loss.backward()
    assert floor.calls == 1
