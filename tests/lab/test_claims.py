"""The claims C1 to C23, judged from rows; a verdict flips when its numbers are tampered with."""

import copy
import dataclasses
import io
import json
import math
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from attemper.explain.lesson import ONE_HOT
from attemper.lab import experiment
from attemper.lab.claims import cards, claims, judge_exact, show
from attemper.lab.claims.judgement import CONDITION, FALSE, HOLDS, NOT_RUN, VERDICTS
from attemper.lab.claims.show import page
from attemper.lab.maths.theory import NEARLY_ONE_HOT
from attemper.lab.notes.sentences import said
from attemper.lab.real_model.real_heads import ALMOST_ALL
from flips import assert_turns, change, times
from measured import GROUP

pytestmark = pytest.mark.xdist_group(GROUP)  # in one process: the evidence is gathered once


@pytest.fixture
def judged(evidence):
    return {one.claim.id: one for one in claims.judge(evidence)[:23]}  # the others: test_note_claims.py


NONE, SCALED = {"rule": "none"}, {"rule": "sqrt_dk"}
ALL_OTHER_INITS = [("inits", {}, {"variance": 64.0, "scaled_variance": 1.0})]


def one_init(name, column, off, met):
    """With every other initialisation as the claim wants it, this one alone decides."""
    return (
        [*ALL_OTHER_INITS, ("inits", {"init": name}, {column: off})],
        [("inits", {"init": name}, {column: met})],
        HOLDS,
    )


OTHERS = "weight of a key equal to q beside 1024 others"
ADDITIVE = "additive scores, w drawn with variance 1"
BEFORE = {128: "gradient", 1024: "gradient_long"}
STATISTICS = {"median": "median", "rms": "RMS"}
WHERE = {"logits": "at the softmax's input", "query": "at q"}


def every(factor):
    """Every gradient without the scale, before training and while training, times a factor."""
    columns = [f"{unit}_{statistic}" for unit in WHERE for statistic in STATISTICS]
    changes = [(source, NONE, times(factor, *columns)) for source in BEFORE.values()]
    return [*changes, ("trained", NONE, times(factor, "grad_q_median", "grad_q_rms"))]


# the beginning of a number's name → a change of what it is computed from
GRADIENTS = {
    **{
        f"{said} gradient {where} before training, without the scale ÷ with it (d_k = 128, {n} keys)": (
            lambda factor, source=source, column=f"{unit}_{statistic}": (source, NONE, times(factor, column))
        )
        for n, source in BEFORE.items()
        for unit, where in WHERE.items()
        for statistic, said in STATISTICS.items()
    },
    **{
        f"{said} gradient at q after 800 training steps, without the scale ÷ with it, {word}": (
            lambda factor, column=f"grad_q_{statistic}": ("trained", NONE, times(factor, column))
        )
        for statistic, said in STATISTICS.items()
        for word in ("largest", "smallest")
    },
}


# claim → the beginning of a number's name → what to change first, what to change then, and the verdict that must follow.
# Every number that a claim prints is here: none is for show.
FLIPS = {
    "C1": {
        "smallest Var(q·k)": ([], [("variance", {"d": 64}, {"variance": 60.0})], FALSE),
        "largest Var(q·k)": ([], [("variance", {"d": 64}, {"variance": 70.0})], FALSE),
        **{
            f"Var(q·k) ÷ d_k, {judge_exact.NAMES[name]} init": one_init(name, "variance", 20.0, 64.0)
            for name in ("fan_in", "linear", "xavier", "gpt2")
        },
    },
    "C2": {
        "smallest variance": ([], [("variance", {"d": 16}, {"scaled_variance": 0.8})], FALSE),
        "largest variance": ([], [("variance", {}, {"scaled_variance": 5.0})], FALSE),
        **{
            f"variance of q·k{what}, {judge_exact.NAMES[name]} init": one_init(name, "scaled_variance", 0.3, 1.0)
            for name, what in (
                ("fan_in", "/√d_k"),
                ("linear", "/√d_k"),
                ("xavier", "/√d_k"),
                ("gpt2", "/√d_k"),
                ("t5", " (it does not divide)"),
            )
        },
    },
    "C3": {
        "largest minus smallest score, mean, d_k = 2": ([], [("variance", {"d": 2}, {"range": 18.0})], FALSE),
        "largest minus smallest score, mean, d_k = 5": ([], [("variance", {"d": 5}, {"range": 12.0})], FALSE),
    },
    "C4": {
        f"softmax([{example}]), weight {place + 1}": (
            [],
            [("worked", {"quantity": "softmax", "example": example, "place": place}, {"value": 0.5})],
            FALSE,
        )
        for example, places in (("7, 3", 2), ("25, 2, -3", 3))
        for place in range(places)
    },
    "C5": {
        "mean top weight at a logit std of 64": ([], [("saturation", {"s": 64.0}, {"top_weight": 0.85})], FALSE),
        **{
            f"logit std at which one key gets half the weight ÷ √(2 ln n), {n} keys": (
                [],
                [("saturation", {"n": n}, {"s": lambda row: row["s"] * 3})],
                HOLDS,
            )
            for n in (16, 1024, 8192)
        },
    },
    "C6": {
        "mean ‖J‖_F² of nearly one-hot rows": ([], [("jacobian", {"d": 64}, {"one_hot_square": 0.08})], FALSE),
        "mean ‖J‖_F² where it is largest": (
            [],
            [("jacobian", {}, {"square": lambda row: min(row["square"], 0.001)})],
            FALSE,
        ),
        **{name: ([*every(1e-9), part(1e15)], [part(1e-15)], HOLDS) for name, part in GRADIENTS.items()},
    },
    "C7": {name: ([*every(1e9), part(1e-15)], [part(1e15)], HOLDS) for name, part in GRADIENTS.items()},
    "C8": {
        "softmaxes of torch": (
            [],
            [("precision", {"dtype": "float16", "size": 8.0}, {"softmax_finite": False})],
            HOLDS,
        ),
        "fused attentions": (
            [("precision", {"dtype": "float16"}, {"plain_overflows_none": 0.0})],
            [("precision", {"dtype": "bfloat16", "size": 8.0}, {"fused_finite": False})],
            CONDITION,
        ),
        **{
            f"share of rows in which a float16 softmax overflows that does not subtract the maximum, {words}": (
                [],
                [("precision", {"dtype": "float16"}, {f"plain_overflows_{rule}": share})],
                FALSE,
            )
            for rule, words, share in (("none", "no scale", 0.0), ("sqrt_dk", "1/√d_k", 1.0))
        },
    },
    "C10": {
        "evenness of the weights under 1/d_k": ([], [("divisors", {"rule": "dk"}, {"evenness": 0.8})], FALSE),
        "evenness of the weights under 1/√d_k": ([], [("divisors", SCALED, {"evenness": 1.0})], FALSE),
        f"{OTHERS}, under 1/d_k": (
            [],
            [("divisors", {"rule": "dk"}, {"aligned_weight": 0.9})],
            FALSE,
        ),
        f"{OTHERS}, under 1/√d_k": (
            [],
            [("divisors", SCALED, {"aligned_weight": 0.1})],
            FALSE,
        ),
    },
    "C11": {
        "temperature with √d_model": (
            [],
            [("divisors", {"rule": "sqrt_dmodel"}, {"logit_std": 1.0})],
            FALSE,
        ),
        f"{OTHERS}, with √d_model": (
            [],
            [("divisors", {"rule": "sqrt_dmodel"}, {"aligned_weight": 0.9})],
            CONDITION,
        ),
        f"{OTHERS}, with √d_k": (
            [],
            [("divisors", SCALED, {"aligned_weight": 0.1})],
            CONDITION,
        ),
    },
    "C12": {
        "largest additive score": (
            [("bounded", {}, {"smallest_score": -0.5})],
            [("bounded", {}, {"largest_score": 0.5})],
            HOLDS,
        ),
        "smallest additive score": (
            [("bounded", {}, {"largest_score": 0.5})],
            [("bounded", {}, {"smallest_score": -0.5})],
            HOLDS,
        ),
    },
    "C13": {
        "times as slow": ([], [("additive_cost", {}, {"factor": 0.5, "factor_low": 0.4})], FALSE),
        f"{ADDITIVE}/d": (
            [],
            [("additive_cost", {"d": 256}, {"additive_variance_fan_in": 9.0})],
            FALSE,
        ),
        f"{ADDITIVE}:": (
            [],
            [("additive_cost", {"d": 256}, times(0.2, "additive_variance_unit"))],
            HOLDS,
        ),
        "unscaled dot products": ([], [("additive_cost", {"d": 256}, times(0.1, "dot_variance"))], FALSE),
    },
    "C14": {
        "heads of 72 whose mean top weight is above 0.9, without": (
            [],
            [("real_heads", NONE, {"top_weight": 0.95})],
            HOLDS,
        ),
        "heads of 72 whose mean top weight is above 0.9, with 1": (
            [],
            [("real_heads", SCALED, {"top_weight": 0.95})],
            FALSE,
        ),
    },
    "C16": {
        "effective keys of 1024 before training with 1": ([], [("divisors", SCALED, {"effective_keys": 2.0})], FALSE),
        "effective keys of 1024 before training without": ([], [("divisors", NONE, {"effective_keys": 700.0})], FALSE),
        "effective keys after 800 training steps with 1": (
            [],
            [("trained", SCALED, {"effective_keys": 40.0})],
            HOLDS,
        ),
        "effective keys after 800 training steps without": (
            [],
            [("trained", NONE, {"effective_keys": 20.0})],
            FALSE,
        ),
    },
    "C17": {
        "numbers per token, input": ([], [("worked", {"example": "input"}, {"value": 500.0})], FALSE),
        "numbers per token, one head": ([], [("worked", {"example": "one head"}, {"value": 512.0})], HOLDS),
        "numbers per token, heads joined": ([], [("worked", {"example": "heads joined"}, {"value": 64.0})], FALSE),
    },
    "C18": {
        "share of pairs of heads": ([], [("subspaces", {}, {"different": 0.4})], FALSE),
        "overlap of the query subspaces of two heads": ([], [("subspaces", {}, {"overlap": 0.6})], FALSE),
        "overlap of two random subspaces": ([], [("subspaces", {}, {"chance": 0.99})], HOLDS),
    },
    "C21": {
        "speed of one pass": ([], [("parallel", {}, {"factor": 0.9, "factor_low": 0.8})], FALSE),
        "the same, without": ([], [("parallel", {}, {"work_factor": 0.9})], CONDITION),
        "largest difference between": ([], [("parallel", {}, {"difference": 0.1})], FALSE),
    },
    "C22": {
        "share of W_q's": ([], [("gradient", NONE, {"w_q_small": 0.9})], HOLDS),
        "share of W_k's": ([], [("gradient", NONE, {"w_k_small": 0.9})], HOLDS),
    },
    "C23": {
        f"variance of q·k at d_k = 64 ÷ that at d_k = 1, a = {a:g}": (
            [],
            [("nonunit", {"d": 64, "a": a}, times(1.5, "variance"))],
            FALSE,
        )
        for a in (0.25, 9.0)
    },
}


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="there is one process")
def test_a_group_stays_in_one_process(request):
    """xdist does it by this name; where a release of pytest or xdist breaks that, the tests take a quarter longer."""
    assert request.node.nodeid.endswith(f"@{GROUP}")


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
    assert found[FALSE] == {"C12", "C22"}
    assert found[HOLDS] == {"C3", "C4", "C10", "C11", "C21", "C23"}
    assert found[CONDITION] == {"C1", "C2", "C5", "C6", "C7", "C8", "C13", "C14", "C16", "C17", "C18"}


@pytest.mark.parametrize(("name", "number"), [(name, number) for name, flips in FLIPS.items() for number in flips])
def test_every_number_of_a_claim_can_turn_it(name, number, evidence):
    assert_turns(name, number, FLIPS[name][number], evidence)


def test_no_number_is_for_show(judged):
    exact = {name: one for name, one in judged.items() if one.verdict != NOT_RUN and name in FLIPS}
    assert set(exact) >= {f"C{n}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 16, 17, 18, 21, 22, 23)}
    for name, one in exact.items():
        covered = {full for full in one.numbers for start in FLIPS[name] if full.startswith(start)}
        assert covered == set(one.numbers), name


def test_the_table_in_the_docs_is_of_this_code(judged):
    """The same numbers decide, the same stand beside them in italics; digits are the run's own."""
    page = (Path(__file__).parents[2] / "docs" / "why-sqrt-dk.md").read_text(encoding="utf-8")
    lines = dict(re.findall(r"^\| (C\d+) \| (.*)$", page, flags=re.MULTILINE))
    trained = ("C10",)  # measured before training here, and after it there
    for name, one in judged.items():
        if one.verdict == NOT_RUN or name in trained:
            continue
        decides, _, beside = re.sub(r"\d+", "#", lines[name].replace("\\|", "|")).partition("; *")
        for part, names in ((decides, one.numbers), (beside, one.context)):
            assert [each for each in names if re.sub(r"\d+", "#", each) not in part] == [], f"{name}: run make figures"


def test_words_follow_their_numbers(evidence):
    """A condition says what the rows say: which initialisations, whether queries go without, how one-hot the least head is."""
    changed = copy.deepcopy(evidence)
    change(changed["inits"], {"init": "gpt2"}, variance=64.0)
    change(changed["gradient"], NONE, small_share=0.001)
    change(changed["real_heads"], {"rule": "none", "layer": 0, "head": 0}, top_weight=0.3)
    after = {one.claim.id: one for one in claims.judge(changed)}
    assert "fan-in, GPT-2's give that, torch.nn.Linear's, Xavier's do not" in after["C1"].condition
    assert "nearly every weight" in after["C22"].condition
    assert "the others spread it more" in after["C14"].condition
    least = next(one for one in claims.judge(evidence) if one.claim.id == "C14").condition
    assert re.search(r"every other head gives one token at least 0\.\d\d\d", least)


def test_gradient_claims_turn_when_the_training_rows_are_swapped(evidence):
    """Rows of training without the scale taken for rows with it: the median would not vanish, and the RMS not be larger."""
    swapped = copy.deepcopy(evidence)
    for row in swapped["trained"]:
        row["rule"] = {"none": "sqrt_dk", "sqrt_dk": "none"}[row["rule"]]
    before, after = ({one.claim.id: one.verdict for one in claims.judge(rows)} for rows in (evidence, swapped))
    assert (before["C6"], before["C7"]) == (CONDITION, CONDITION)
    assert (after["C6"], after["C7"]) == (FALSE, FALSE)


def test_what_is_said_of_the_gradient_has_both_units_and_both_times(judged):
    for name in ("C6", "C7"):
        numbers = {**judged[name].numbers, **judged[name].context}
        for words in (
            "at the softmax's input before",
            "at q before",
            "at q after 800",
            "at q at step 0",
            "which the median",
        ):
            assert any(words in one for one in numbers), f"{name}: {words}"
    bare = re.compile(r"^(none|largest|smallest|with|without|of|at d_k = \d+|[\w ]{0,7})$")
    labels = [label for one in judged.values() for label in (*one.numbers, *one.context)]
    assert [label for label in labels if bare.match(label)] == [], "a label must be understood alone"
    assert [one.claim.id for one in judged.values() if not said(one.claim.id)] == [], "some note says it"


def test_nearly_one_hot_has_one_threshold():
    assert {NEARLY_ONE_HOT, ALMOST_ALL, ONE_HOT} == {0.9}


def test_dividing_by_d_k_is_judged_by_what_it_learns(evidence):
    """C10 before training, and after it where recall was run: learned with it, not learned with it, learned with neither."""

    def after(**accuracy):
        rows = [
            {"rule": rule, "d": 256, "lr": 1e-3, "seed": seed, "step": step, "loss": 0.1, "accuracy": end * step / 100,
             "peak": 1.0, "entropy": 1.0, "w_q_grad": 1.0}
            for rule, end in accuracy.items() for seed in (0, 1, 2) for step in (0, 100)
        ]  # fmt: skip
        return next(one for one in claims.judge({**evidence, "recall": rows}) if one.claim.id == "C10")

    assert after(sqrt_dk=1.0, dk=1.0).verdict == CONDITION
    assert after(sqrt_dk=1.0, dk=0.2).verdict == HOLDS
    assert "not learned" in after(sqrt_dk=1.0, dk=0.2).condition
    assert after(sqrt_dk=0.1, dk=0.1).numbers == after(sqrt_dk=1.0).numbers


def test_where_to_look_further_exists():
    for claim in claims.CLAIMS:
        if claim.look:
            words = claim.look.split()
            assert words[0] == "run"
            options = dict(zip((w.removeprefix("--") for w in words[2::2]), words[3::2], strict=True))
            assert experiment(words[1]).settings(options)


def test_the_document_is_plain_data_and_the_page_stands_alone(judged):
    document = claims.document(list(judged.values()))
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    text = page(document)
    assert text.count("<article>") == 23
    assert "http" not in text.replace("http-equiv", "")
    assert "additive scores lie" in text.lower()


def test_what_is_not_a_number_is_null_and_a_dash(judged):
    odd = dataclasses.replace(judged["C6"], numbers={"a": math.inf, "b": math.nan}, context={"c": -math.inf})
    document = claims.document([odd])
    assert document["claims"][0]["numbers"] == {"a": None, "b": None}
    json.dumps(document, allow_nan=False)
    assert page(document).count("<dd") == 3


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


def test_the_terminal_prints_sentences(judged):
    """A symbol keeps its spelling at the beginning of a line, a word gets a capital, and no label has a name of the code."""
    console = Console(width=400, file=io.StringIO())
    show.claims(judged.values(), console)
    lines = [line.strip()[2:] for line in console.file.getvalue().splitlines() if line.strip().startswith("- ")]
    assert any(line.startswith("d_k from which") for line in lines)
    assert any(line.startswith("Median gradient") for line in lines)
    assert not [line for line in lines if re.match(r"D_k|Softmax\(|Fan|Gpt", line)]
    assert not [line for line in lines if re.search(r"fan_in|gpt2|nn_linear|thread\(s\)", line)]
