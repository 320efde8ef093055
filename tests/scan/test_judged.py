"""A handful of what `make judge-scan` judges, and that its faults are faults: each gives other numbers than its right twin."""

from __future__ import annotations

import inspect

import pytest
import torch

import judged
from judged.judging import called, floats, judge_fault, judge_innocent
from serving import SEED

judged.load()
pytestmark = pytest.mark.filterwarnings("ignore")  # some of the faults are what torch warns of


def numbers(model, batch):
    """What a model gives: in both modes, for the batch and its items backwards, and by steps with its cache; its gradients."""
    turned = {name: value.flip(0) for name, value in batch.items()}
    found = []
    for mode in (False, True):
        model.train(mode)
        for inputs in (batch, turned):
            torch.manual_seed(SEED)
            found += floats(called(model, inputs))
    if "past_key_values" in inspect.signature(model.forward).parameters:
        ids, past = batch["input_ids"], None
        for step in ids.split([8, 1, 3], 1):
            logits, past = model(step, past_key_values=past)
            found.append(logits)
    sum(one.float().square().sum() for one in found if one.requires_grad).backward()
    return found + [torch.zeros(()) if parameter.grad is None else parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("name", judged.FAULTS)
def test_a_fault_gives_other_numbers_than_its_right_twin(name):
    case = judged.FAULTS[name]
    models = []
    for build in (case.build, case.right):
        torch.manual_seed(SEED)
        models.append(build())
    wrong, right = models
    if case.classes[0] != "zeros" and wrong.state_dict().keys() == right.state_dict().keys():
        right.load_state_dict(wrong.state_dict())
    pairs = list(zip(numbers(wrong, case.batch()), numbers(right, case.batch()), strict=False))
    assert not all(
        one.shape == other.shape and torch.allclose(one.double(), other.double(), 1e-4, 1e-6) for one, other in pairs
    )


def test_there_are_enough_of_both_kinds():
    others = [case for case in judged.INNOCENTS.values() if case.group != "own"]
    assert len(judged.FAULTS) >= 60
    assert len(judged.INNOCENTS) >= 60
    assert len(others) >= 30
    assert all(case.source and case.right for case in judged.FAULTS.values())


@pytest.mark.parametrize(
    "name",
    [
        "SoftmaxOverQueriesOfAnEinsum",
        "CausalInTrainingAlone",
        "PaddingHidesRows",
        "StepsBeginAtZero",
        "DividedByTheScale",
        "padding_mask_of_an_earlier_batch",
        "memory_of_the_first_call",
        "memory_is_not_encoded",
        "each_layer_reads_the_embedding",
        "the_first_key_head_alone",
        "a_third_of_qkv_is_not_read",
        "token_types_are_not_read",
        "a_masked_lm_that_is_causal",
        "a_window_in_training_alone",
    ],
)
def test_the_scan_names_a_fault_and_not_its_right_twin(name):
    result = judge_fault(judged.FAULTS[name])
    assert result["state"] == "named right", result
    assert not result["twin"]


@pytest.mark.parametrize(
    "name",
    [
        "PrefixMask",
        "LearnedSink",
        "FourthRootOfEach",
        "QueriesAreKeys",
        "alibi_both_ways",
        "turns_in_order",
        "frames_in_order",
    ],
)
def test_the_scan_accuses_no_innocent(name):
    assert judge_innocent(judged.INNOCENTS[name])["state"] == "passed"
