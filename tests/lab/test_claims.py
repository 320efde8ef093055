"""The claims: all twenty-three, judged from rows; a verdict flips when its numbers are tampered with."""

import copy
import json

import pytest

from attemper.lab import cards, claims, experiment
from attemper.lab.page import page
from attemper.lab.verdicts import CONDITION, FALSE, HOLDS, NOT_RUN, VERDICTS


@pytest.fixture(scope="module")
def evidence():
    return claims.gather(False, lambda line: None)


@pytest.fixture
def judged(evidence):
    return {one.claim.id: one for one in claims.judge(evidence)}


def change(rows, wanted, **new):
    for row in rows:
        if all(row[name] == value for name, value in wanted.items()):
            row.update({name: value(row) if callable(value) else value for name, value in new.items()})


# the claim, the evidence to change, which rows, what to write there, and the verdict that must follow
TAMPERED = {
    "C1": ("variance", {"d": 64}, {"variance": 70.0}, FALSE),
    "C2": ("inits", {}, {"scaled_std": 1.0}, HOLDS),
    "C3": ("variance", {"d": 5}, {"range": 0.5}, FALSE),
    "C4": ("worked", {"kind": "softmax", "place": 0}, {"value": 0.9}, FALSE),
    "C5": ("saturation", {"s": 32.0}, {"top_weight": 0.3}, FALSE),
    "C6": ("gradient", {"rule": "none"}, {"rms": 1e-4}, HOLDS),
    "C7": ("gradient", {"rule": "none"}, {"rms": 1e-4}, FALSE),
    "C8": ("precision", {"dtype": "float16"}, {"softmax_finite": False}, HOLDS),
    "C10": ("divisors", {"rule": "dk"}, {"evenness": 0.8}, FALSE),
    "C11": ("divisors", {"rule": "sqrt_dmodel"}, {"logit_std": 1.0}, FALSE),
    "C12": ("bounded", {}, {"largest_score": 0.9}, HOLDS),
    "C13": ("additive_cost", {}, {"factor": 0.5}, FALSE),
    "C14": ("real_heads", {"rule": "none"}, {"top_weight": 0.95}, HOLDS),
    "C16": ("divisors", {"rule": "sqrt_dk"}, {"effective_keys": 2.0}, FALSE),
    "C17": ("worked", {"example": "one head"}, {"value": 512.0}, HOLDS),
    "C18": ("subspaces", {}, {"different": 0.4}, FALSE),
    "C21": ("parallel", {}, {"factor": 0.9}, FALSE),
    "C22": ("gradient", {"rule": "none"}, {"w_q_small": 0.9}, HOLDS),
    "C23": ("nonunit", {"d": 64}, {"variance": lambda row: row["variance"] * 1.5}, FALSE),
}


def test_all_twenty_three_have_a_verdict(judged):
    assert list(judged) == [f"C{number}" for number in range(1, 24)]
    assert {one.verdict for one in judged.values()} <= set(VERDICTS)
    assert [name for name, one in judged.items() if one.verdict != NOT_RUN and not one.numbers] == []
    not_run = {name for name, one in judged.items() if one.verdict == NOT_RUN}
    assert not_run == {claim.id for claim in claims.CLAIMS if claim.trains}
    assert all(one.condition for one in judged.values() if one.verdict == NOT_RUN)


def test_what_is_measured_here(judged):
    """The verdicts of the code as it is; a change of one of them is news."""
    found = {verdict: {name for name, one in judged.items() if one.verdict == verdict} for verdict in VERDICTS}
    assert found[FALSE] == {"C8", "C12", "C22"}
    assert found[HOLDS] == {"C3", "C4", "C16", "C21", "C23"}
    assert found[CONDITION] == {"C1", "C2", "C5", "C6", "C7", "C10", "C11", "C13", "C14", "C17", "C18"}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_verdict_follows_its_numbers(name, evidence, judged):
    source, wanted, new, expected = TAMPERED[name]
    assert judged[name].verdict != expected
    changed = copy.deepcopy(evidence)
    change(changed[source], wanted, **new)
    after = {one.claim.id: one for one in claims.judge(changed)}
    assert after[name].verdict == expected


def test_every_measured_claim_was_tampered_with(judged):
    assert set(TAMPERED) == {name for name, one in judged.items() if one.verdict != NOT_RUN}


def test_where_to_look_further_exists():
    for claim in claims.CLAIMS:
        if claim.look:
            words = claim.look.split()
            assert words[0] == "run"
            options = dict(zip((w.removeprefix("--") for w in words[2::2]), words[3::2], strict=True))
            assert experiment(words[1]).settings(options)


def test_the_document_is_plain_data_and_the_page_stands_alone(judged):
    document = claims.document(list(judged.values()))
    assert json.loads(json.dumps(document)) == document
    text = page(document)
    assert text.count("<article>") == 23
    assert "http" not in text.replace("http-equiv", "")
    assert "additive scores lie" in text.lower()


def test_the_page_escapes(judged):
    document = claims.document([judged["C1"]])
    document["claims"][0]["claim"] = "<script>"
    assert "<script>" not in page(document)


def test_cards_carry_the_measured_number(evidence):
    deck = cards.write(evidence)
    assert len(deck) >= 12
    variance = next(row["variance"] for row in evidence["variance"] if row["d"] == 64)
    assert f"{variance:.2f}" in deck[0].measured
    lines = cards.anki(deck).splitlines()
    assert lines[0] == "#separator:tab"
    body = [line for line in lines if not line.startswith("#")]
    assert [line.count("\t") for line in body] == [1] * len(deck)
