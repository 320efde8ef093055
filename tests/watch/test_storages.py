"""Storages: facts about tensors, found by any view, gone with the tensor's memory."""

import torch
from torch import nn

from attemper.watch.attach.names import named_modules
from attemper.watch.attach.storages import FEW, Storages, address


def test_a_fact_is_found_by_every_view_and_by_no_other_tensor():
    facts: Storages[str] = Storages()
    x, y = torch.zeros(4, 6), torch.zeros(4, 6)
    assert not facts
    facts.put(x, "x")
    assert facts
    assert [facts.get(view) for view in (x, x[1:], x.mT, x.detach(), y)] == ["x"] * 4 + [None]
    facts.put(x.view(-1), "again")
    assert facts.get(x) == "again"
    facts.put(y, None)
    assert facts.has(y)
    assert facts.get(y) is None
    facts.drop(x)
    assert not facts.has(x)


def test_what_is_freed_is_forgotten_while_more_is_put():
    # what stays of a freed storage lies between a model's activations, and splits the memory that they would use again
    facts: Storages[int] = Storages()
    kept = [torch.zeros(5) for _ in range(10)]
    for index, tensor in enumerate(kept):
        facts.put(tensor, index)
    for number in range(1000):
        facts.put(torch.zeros(7), number)
        assert len(facts._facts) <= len(kept) + FEW + 1
    assert [facts.get(tensor) for tensor in kept] == list(range(10))


def test_an_address_that_is_used_again_is_not_mistaken():
    facts: Storages[int] = Storages()
    for number in range(100):
        x = torch.zeros(1000)
        assert facts.get(x) is None
        facts.put(x, number)
        del x


def test_tensors_without_a_storage_have_no_facts():
    facts: Storages[int] = Storages()
    sparse = torch.zeros(3, 3).to_sparse()
    facts.put(sparse, 1)
    assert not facts
    assert address(sparse) == 0


def test_modules_are_named_as_torch_names_them():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2), nn.Sequential(shared, nn.ReLU(), shared))
    model.register_module("absent", None)
    assert named_modules(model) == {module: name for name, module in model.named_modules()}
