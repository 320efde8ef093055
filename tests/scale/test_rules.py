"""The table of rules: nine, complete, each the number it says."""

import math
import subprocess
import sys

import pytest
import torch

import attemper
from attemper.errors import InputError
from attemper.scale import FACTS
from close import assert_float64, in_float32, in_float64

FACTS_OF_A_LAYER = {"head_dim": 64, "heads": 8, "layer": 2, "keys": 100}
EXPECTED = {
    "sqrt_dk": 1 / 8,
    "none": 1.0,
    "dk": 1 / 64,
    "sqrt_dmodel": 1 / math.sqrt(512),
    "layer": 1 / (3 * 8),
    "log_n": 0.43 * math.log(100) / 8,
    "learned": 1 / 8,
    "qk_norm": 8.0,
    "softcap": 1 / 8,
}


def test_the_nine_rules_in_order():
    assert list(attemper.RULES) == list(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_value(name):
    rule = attemper.rule(name)
    assert rule.scale(**FACTS_OF_A_LAYER) == in_float64(EXPECTED[name])
    only = {fact: FACTS_OF_A_LAYER[fact] for fact in rule.needs}
    assert rule.scale(**only) == rule.scale(**FACTS_OF_A_LAYER)


@pytest.mark.parametrize("rule", attemper.RULES.values(), ids=lambda rule: rule.name)
def test_every_rule_is_told_whole(rule):
    assert attemper.rule(rule.name) is rule is attemper.rule(rule)
    assert all(len(text) >= 3 for text in (rule.formula, rule.description, rule.used_by, rule.source))
    assert rule.description.endswith(".")
    assert set(rule.needs) <= set(FACTS)


def test_gpt3_divided_by_the_models_width_is_too_cold_by_the_root_of_its_heads():
    width = {"head_dim": 128, "heads": 96}
    ratio = attemper.rule("sqrt_dk").scale(**width) / attemper.rule("sqrt_dmodel").scale(**width)
    assert ratio == in_float64(math.sqrt(96))


def test_a_gain_multiplies_where_the_rule_learns_one_and_nowhere_else():
    gain = torch.tensor([1.0, 2.0], requires_grad=True)
    assert attemper.rule("learned").scale(head_dim=16, gain=gain).tolist() == [0.25, 0.5]
    assert attemper.rule("sqrt_dk").scale(head_dim=16, gain=gain) == 0.25


def test_log_n_takes_one_count_per_row():
    keys = torch.tensor([0, 1, 2, 8])
    found = attemper.rule("log_n").scale(head_dim=16, keys=keys, gain=1.0)
    assert found.tolist() == in_float32([0.0, 0.0, math.log(2) / 4, math.log(8) / 4], terms=1)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_missing_fact_is_named(name):
    rule = attemper.rule(name)
    for need in rule.needs:
        facts = {fact: value for fact, value in FACTS_OF_A_LAYER.items() if fact != need}
        with pytest.raises(InputError, match=f"`{need}`"):
            rule.scale(**facts)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "64", None])
def test_a_fact_must_be_a_count(bad):
    with pytest.raises(InputError, match="whole number, at least 1"):
        attemper.rule("sqrt_dk").scale(head_dim=bad)


def test_the_table_needs_no_torch():
    code = "import attemper, sys; attemper.rule('dk').scale(head_dim=8); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 0


@pytest.mark.parametrize("name", [name for name, rule in attemper.RULES.items() if not rule.unit and name != "log_n"])
def test_a_rules_number_is_what_attention_takes(name):
    q, k = torch.randn(2, 1, 5, 64, dtype=torch.float64)
    rule = attemper.rule(name)
    vitals = attemper.measure(q, k, scale=rule.scale(**FACTS_OF_A_LAYER), softcap=rule.softcap)
    logits = EXPECTED[name] * q @ k.mT
    logits = logits if rule.softcap is None else rule.softcap * torch.tanh(logits / rule.softcap)
    assert_float64(vitals.peak, logits.amax(-1))
