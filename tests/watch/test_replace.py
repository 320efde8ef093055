"""What replace=True leaves behind: a name that still computes, and nothing of the watch."""

import copy
import gc
import weakref

import pytest
import torch
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
    assert {facts.scale for facts in watch.record.facts.values()} == {0.5}
