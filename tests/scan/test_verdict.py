"""The verdict on plain numbers: where each fault begins and ends, and what is said of it."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from attemper.health.faults import FAULTS
from attemper.scan.audit import judge as judging
from attemper.scan.audit.judge import REMARKS, MeasuredScale, explain

BARE = MeasuredScale(head_dim=64, heads=2, applied=1.0, logit_std=9.0, keys=30.0)


def judge(scale):
    """The verdict with its sentences."""
    found = judging.judge(scale)
    message, advice = explain(scale, found)
    return SimpleNamespace(**vars(found), message=message, advice=advice)


def test_what_cannot_be_told_is_no_fault():
    same = MeasuredScale(head_dim=8, heads=8, applied=1 / 8)  # 1/d_k is 1/√d_model
    assert judge(same).fault is None
    assert judge(same).rule == "dk"
    assert judge(replace(BARE, keys=3.0)).fault == "unscaled"  # too few keys to say how wide is too wide
    for excuse in (
        {"by_design": True},
        {"followed": False},
        {"norms": (1.0, 1.0)},
        {"softcap": 50.0},
        {"varies": (0.9, 1.1)},
    ):
        assert judge(replace(BARE, keys=3.0, **excuse)).fault is None, excuse


@pytest.mark.parametrize("keys", [8.0, 40.0, 5000.0])
def test_a_spread_is_too_wide_from_the_root_of_twice_the_logarithm_on(keys):
    bound = math.sqrt(2 * math.log(keys))
    assert judge(replace(BARE, keys=keys, logit_std=0.98 * bound)).fault == "unscaled"
    wide = judge(replace(BARE, keys=keys, logit_std=1.02 * bound))
    assert wide.fault == "uncontrolled"
    assert f"√(2 ln n) = {bound:.3g}" in wide.message
    assert wide.message.startswith("No scale and no QK-norm: the logit std is")
    assert "part of the weights, the scale is correct" in wide.advice


def test_a_rule_s_name_ends_half_a_percent_from_its_number():
    for off, rule in ((1.004, "sqrt_dk"), (0.996, "sqrt_dk"), (1.01, None), (0.99, None)):
        assert judge(replace(BARE, applied=off / 8)).rule == rule, off
    for off, fault in ((1.004, "sqrt_dmodel"), (1.01, "unknown")):
        assert judge(replace(BARE, applied=off * 128**-0.5)).fault == fault, off


@pytest.mark.parametrize(("number", "divisor"), [(8.0, "√d_k"), (64.0, "d_k")])
def test_a_scale_multiplied_in_place_of_divided_is_a_fault_however_small_the_logits(number, divisor):
    found = judge(replace(BARE, applied=number, logit_std=0.1))
    assert found.fault == "multiplied"
    assert f"q·k is multiplied by {number:g} = {divisor}, instead of 0.125 = 1/√d_k." in found.message
    for excuse in (
        {"norms": (1.0, 1.0)},  # as nGPT has it
        {"by_design": True},
        {"varies": (7.0, 9.0)},
        {"followed": False},
    ):
        assert judge(replace(BARE, applied=number, logit_std=0.1, **excuse)).fault is None, excuse


def test_another_number_above_1_is_said_as_it_is():
    found = judge(replace(BARE, applied=3.0))
    assert found.fault == "uncontrolled"
    assert found.message.startswith("q·k is multiplied by 3, without QK-norm: the logit std is 9, above")
    assert judge(replace(BARE, applied=3.0, logit_std=0.5)).fault is None


def test_a_negative_scale():
    found = judge(replace(BARE, applied=-0.125))
    assert found.fault == "negative"
    assert "q·k is multiplied by -0.125" in found.message
    assert judge(replace(BARE, applied=-0.125, by_design=True)).fault is None
    assert judge(replace(BARE, applied=-0.01, varies=(-0.2, 0.1))).fault is None  # learned, per head


def test_a_mean_over_heads_that_may_be_a_scale_is_remarked():
    """1/√d_k is 1/heads."""
    both = MeasuredScale(head_dim=64, heads=8, applied=0.125, row_sums=(0.125, 0.125))
    found = judge(both)
    assert (found.fault, found.after_softmax) == ("shrunk", 0.125)
    assert "both 1/heads and 1/√d_k" in found.message
    assert judge(replace(both, by_design=True)).fault is None
    assert judge(replace(both, heads=4)).fault == "after_softmax"


def test_all_faults_have_a_level_and_only_remarks_are_notes():
    for name, fault in FAULTS.items():
        assert (fault.level == "note") == (name in REMARKS), name
