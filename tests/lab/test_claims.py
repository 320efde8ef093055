"""The claims C1 to C23, judged from rows; a verdict flips when its numbers are tampered with."""

import copy
import dataclasses
import io
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from attemper_lab import experiment
from attemper_lab.claims import cards, claims, judge_exact, show
from attemper_lab.claims.judgement import CONDITION, FALSE, HOLDS, NOT_RUN, VERDICTS
from attemper_lab.claims.show import page
from attemper_lab.notes.sentences import said
from flips import assert_turns, change, judged_by_id, names_by_verdict, times
from measured import GROUP

pytestmark = pytest.mark.xdist_group(GROUP)  # in one process: the evidence is gathered once


@pytest.fixture
def judged(evidence):
    return dict(list(judged_by_id(evidence).items())[:23])  # the others: test_note_claims.py


NONE, SCALED = {"rule": "none"}, {"rule": "sqrt_dk"}
ALL_OTHER_INITS = [("inits", {}, {"variance": 64.0, "scaled_variance": 1.0})]


def one_init(name, column, off, met):
    """With every other initialisation as the claim wants it, this one alone decides."""
    return (
        [*ALL_OTHER_INITS, ("inits", {"init": name}, {column: off})],
        [("inits", {"init": name}, {column: met})],
        HOLDS,
    )


PARTS = tuple(f"held_out_{place}" for place in range(1, 9))
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
        "smallest Var(q·k)": ([], [("variance", {"d": 64}, {"variance": 60.0})], CONDITION),
        "largest Var(q·k)": ([], [("variance", {}, times(1.3, "variance"))], FALSE),
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
            f"logit std at which one key gets 0.9 of the weight ÷ √(2 ln n), {n} keys": (
                [("saturation", {"n": other}, times(0.1, "s")) for other in (16, 1024, 8192) if other != n],
                [("saturation", {"n": n}, times(0.1, "s"))],
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
    "C7": {
        name: ([*every(1e9), part(1e-15)], [part(1e15)], HOLDS)
        for name, part in GRADIENTS.items()
        if name.startswith("RMS") and ("softmax" in name or "trained" in name or "after" in name)
    },
    "C8": {
        "softmaxes of torch": (
            [],
            [("precision", {"dtype": "float16", "size": 8.0}, {"softmax_finite": False})],
            HOLDS,
        ),
        "fused attentions": (
            [],
            [("precision", {"dtype": "bfloat16", "size": 8.0}, {"fused_finite": False})],
            CONDITION,
        ),
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
        "held-out loss of a trained language model with 1/d_k": (
            [],
            [("larger", {"rule": "dk"}, times(2.0, *PARTS))],
            HOLDS,
        ),
        "the same without a scale": ([], [("larger", NONE, times(0.5, *PARTS))], HOLDS),
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
            "the temperature differs",
        ),
        f"{OTHERS}, with √d_k": (
            [],
            [("divisors", SCALED, {"aligned_weight": 0.1})],
            "the temperature differs",
        ),
        "held-out loss of a trained language model with √d_model": (
            [],
            [("dmodel", {"rule": "sqrt_dmodel"}, times(2.0, *PARTS))],
            HOLDS,
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
        "mean top weight, the least": ([], [("charlm", NONE, {"top_weight": 0.95})], HOLDS),
        "mean top weight, the most": ([], [("charlm", NONE, {"top_weight": 0.5})], FALSE),
        "mean top weight of those trained with": ([], [("charlm", SCALED, {"top_weight": 0.95})], FALSE),
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
        f"share of W_{name}'s": (
            [
                ("gradient", NONE, {"w_q_half": 0.04, "w_k_half": 0.04}),
                ("gradient", NONE, {f"w_{name.lower()}_half": 0.08}),
            ],
            [("gradient", NONE, {f"w_{name.lower()}_half": 0.04})],
            HOLDS,
        )
        for name in ("Q", "K")
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


def test_every_claim_has_a_verdict_and_numbers(judged):
    assert {judgement.verdict for judgement in judged.values()} <= set(VERDICTS) - {NOT_RUN}
    assert [name for name, judgement in judged.items() if not judgement.numbers] == []


def test_what_is_measured_here(judged):
    """The verdicts of this code, so that a change of one shows."""
    names = names_by_verdict(judged)
    assert names[FALSE] == {"C7", "C8", "C12", "C22"}
    assert names[HOLDS] == {"C1", "C3", "C4", "C21", "C23"}
    assert names[CONDITION] == {f"C{n}" for n in (2, 5, 6, 9, 10, 11, 13, 14, 15, 16, 17, 18, 20)}


@pytest.mark.parametrize(("name", "number"), [(name, number) for name, flips in FLIPS.items() for number in flips])
def test_every_number_of_a_claim_can_turn_it(name, number, evidence):
    assert_turns(name, number, FLIPS[name][number], evidence)


def test_no_number_is_for_show(judged):
    for name, flips in FLIPS.items():
        numbers = set(judged[name].numbers)
        assert {number for number in numbers if number.startswith(tuple(flips))} == numbers, name


def test_the_table_in_the_docs_is_of_this_code(judged):
    """The same numbers decide, the same stand beside them in italics; digits are the run's own."""
    page = (Path(__file__).parents[2] / "docs" / "why-sqrt-dk.md").read_text(encoding="utf-8")
    lines = dict(re.findall(r"^\| (C\d+) \| (.*)$", page, flags=re.MULTILINE))
    trained = ("C10",)  # measured before training here, and after it there
    for name, judgement in judged.items():
        if judgement.verdict == NOT_RUN or name in trained:
            continue
        decides, _, beside = re.sub(r"\d+", "#", lines[name].replace("\\|", "|")).partition("; *")
        for part, names in ((decides, judgement.numbers), (beside, judgement.context)):
            assert [each for each in names if re.sub(r"\d+", "#", each) not in part] == [], f"{name}: run make figures"


def test_words_follow_their_numbers(evidence):
    """A condition says what the rows say: which initialisations, how few queries send the gradient, in how many settings."""
    changed = copy.deepcopy(evidence)
    change(changed["inits"], {"init": "gpt2"}, variance=64.0)
    change(changed["gradient"], NONE, query_half=0.123)
    change(changed["charlm"], {"rule": "none", "init": "small", "lr": 1e-4}, top_weight=0.95)
    after, before = map(judged_by_id, (changed, evidence))
    assert "fan-in, GPT-2's give that, torch.nn.Linear's, Xavier's do not" in after["C1"].condition
    assert "of 128, 12.3% send half" in after["C22"].condition
    assert before["C14"].condition.startswith("in 2 of 6 settings")
    assert after["C14"].condition.startswith("in 3 of 6 settings")


def test_gradient_claims_turn_when_the_training_rows_are_swapped(evidence):
    """Rows of training without the scale taken for rows with it: the median would not vanish, and the RMS would be larger."""
    swapped = copy.deepcopy(evidence)
    for row in swapped["trained"]:
        row["rule"] = {"none": "sqrt_dk", "sqrt_dk": "none"}[row["rule"]]
    before, after = map(judged_by_id, (evidence, swapped))
    assert (before["C6"].verdict, before["C7"].verdict) == (CONDITION, FALSE)
    assert after["C6"].verdict == FALSE


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
            assert any(words in number for number in numbers), f"{name}: {words}"
    bare = re.compile(r"^(none|largest|smallest|with|without|of|at d_k = \d+|[\w ]{0,7})$")
    labels = [label for judgement in judged.values() for label in (*judgement.numbers, *judgement.context)]
    assert [label for label in labels if bare.match(label)] == [], "a label must be understood alone"
    assert [judgement.claim.id for judgement in judged.values() if not said(judgement.claim.id)] == [], (
        "some note says it"
    )


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


def printed_by(show_one, judged, width):
    console = Console(width=width, file=io.StringIO())
    for one in judged:
        show_one(one, console)
    return console.file.getvalue().splitlines()


def test_a_story_is_in_sentences(judged):
    """A symbol keeps its spelling at the beginning of a line, a word gets a capital, and no label has a name of the code."""
    lines = [line.strip()[2:] for line in printed_by(show.story, judged.values(), 400) if line.strip().startswith("- ")]
    assert any(line.startswith("d_k from which") for line in lines)
    assert any(line.startswith("Median gradient") for line in lines)
    assert not [line for line in lines if re.match(r"D_k|Softmax\(|Fan|Gpt", line)]
    assert not [line for line in lines if re.search(r"fan_in|gpt2|nn_linear|thread\(s\)", line)]


def test_the_table_has_a_line_for_each_claim_and_fits_a_terminal(evidence):
    """Every claim whole in 80 columns: its short sentence, its verdict, its one number; then a tally that counts them all."""
    every = claims.judge(evidence)
    lines = printed_by(show.line, every, 80)
    assert [line.split()[0] for line in lines] == [claim.id for claim in claims.CLAIMS]
    assert [line for line in lines if "…" in line] == []
    assert all(len(claim.short) <= show.SENTENCE for claim in claims.CLAIMS)
    counts = claims.tally(every)
    assert sum(counts.values()) == len(every)
    console = Console(width=80, file=io.StringIO())
    show.closing(every, console)
    said = " ".join(console.file.getvalue().split())
    assert (
        f"36 claims: {counts[HOLDS]} hold, {counts[CONDITION]} hold with a condition, {counts[FALSE]} are false" in said
    )
    assert len(lines) + len(console.file.getvalue().splitlines()) <= 60


def test_a_claim_is_judged_as_soon_as_what_it_needs_is_there(monkeypatch):
    """The first verdicts do not wait for the last measurement, and one claim alone measures what it needs."""
    measured = []
    run = claims._measured
    monkeypatch.setattr(claims, "_measured", lambda name, *rest: (measured.append(name), run(name, *rest))[1])
    first = next(claims.judging())
    assert (first.claim.id, measured) == ("C1", ["variance", "inits"])
    assert [judgement.claim.id for judgement in claims.judging([claims.of_id("c4")])] == ["C4"]
    assert measured[2:] == ["worked"]
