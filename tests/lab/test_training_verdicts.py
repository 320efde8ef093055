"""What rows of training say about the claims: every number that is printed can turn its verdict, or is marked as context."""

import inspect
import math
import re

import pytest

from attemper_lab.claims.judge_training import commits_early, converges_faster, falls_apart, limits_depth
from attemper_lab.claims.judgement import CONDITION, FALSE, HOLDS, UNDECIDED
from attemper_lab.engine.experiment import pick
from attemper_lab.training import charlm, depth, fold, recall
from attemper_lab.training.runs import LESS, MORE, OPEN, SAME, Cost, mean_cost
from close import in_float64, printed
from flips import judged_by_id

SEEDS, NOISE = (0, 1, 2), (-0.002, 0.0, 0.002)


def recall_rows(rule, last, lr=1e-3, at=50, steps=150):
    """Runs that reach ``last`` at step ``at``."""
    base = {"d": 256, "lr": lr, "rule": rule, "loss": 1.0, "peak": 1.0, "entropy": 1.0, "w_q_grad": 1.0, "steps": steps}
    return [
        {**base, "batch": 32, "seed": s, "step": t, "accuracy": a, "validation": a}
        for s in SEEDS
        for t, a in ((0, 0.0), (at, last), (steps, last))
    ]


def lm_rows(rule, loss, *, init="unit", layers=2, lr=1e-3, entropy=3.0, seen=None, noise=NOISE, ends=None):
    """Runs that fall from 4 nats to ``loss``, by seed a little apart; ``ends`` replaces the loss of a run that diverged."""
    base = {"lr": lr, "rule": rule, "init": init, "layers": layers, "peak": 1.0, "bigram": 2.4}
    base |= {
        "steps": 300,
        "batch": 16,
        "length": 48,
        "d_model": 64,
        "text": 10_000,
        "entropy": entropy,
        "top_weight": 0.5,
    }
    found = []
    for seed in SEEDS:
        last = loss + noise[seed]
        for step, part in ((0, 0.0), (20, 0.2), (40, 0.4), (100, 1.0)):
            held = 4 + part * (last - 4)
            row = {**base, "seed": seed, "step": step, "loss": held, "held_out": held, "validation": held}
            row["seen"] = 4 + part * ((last if seen is None else seen) - 4)
            if step == 100:
                row |= {f"held_out_{index}": held for index in range(1, 9)} | (ends or {})
            found.append(row)
    return found


def evidence(scaled=1.0, bare=0.1, at=50, small=0.0, unit=0.1, noise=NOISE, ends=None):
    """Recall and two language models."""
    return {
        "recall": recall_rows("sqrt_dk", scaled) + recall_rows("none", bare, at=at),
        "charlm": [
            *lm_rows("sqrt_dk", 2.0, init="small", noise=(0, 0, 0)),
            *lm_rows("none", 2.0 + small, init="small", noise=noise),
            *lm_rows("sqrt_dk", 2.0, noise=(0, 0, 0)),
            *lm_rows("none", 2.0 + unit, noise=noise, ends=ends),
        ],
    }


def depths(*cost, loss=2.0, noise=NOISE):
    rows = []
    for layers, more in zip((1, 2, 4, 8), cost, strict=False):
        rows += lm_rows("sqrt_dk", loss, layers=layers, noise=(0, 0, 0))
        rows += lm_rows("none", loss + more, layers=layers, noise=noise)
    return {"depth": rows}


def memory(entropy=1.0, held=2.5, scaled=2.5, seen=1.5, noise=NOISE):
    return {
        "memorise": [
            *lm_rows("sqrt_dk", scaled, entropy=3.0, seen=seen, noise=(0, 0, 0)),
            *lm_rows("none", held, entropy=entropy, seen=seen, noise=noise),
        ]
    }


WIDE = (-0.1, 0.0, 0.1)


CASES = [
    (falls_apart, evidence(), CONDITION),
    (falls_apart, evidence(bare=0.95), FALSE),  # the bare accuracy
    (falls_apart, evidence(bare=0.95, unit=0.8), CONDITION),  # recall is learned, a language model is not
    (falls_apart, evidence(bare=0.95, small=0.8, unit=0.8), CONDITION),
    (
        falls_apart,
        evidence(scaled=0.03, bare=0.03),
        UNDECIDED,
    ),  # the scaled accuracy: nothing learned decides nothing
    (falls_apart, evidence(small=0.8, unit=0.2), CONDITION),  # each cell's cost
    (falls_apart, evidence(small=0.8, unit=0.8), HOLDS),
    (falls_apart, evidence(small=0.8, unit=0.8, noise=(-0.5, 0, 0.5)), CONDITION),
    (falls_apart, evidence(small=0.8, ends={"loss": math.nan}), HOLDS),  # a run that diverges has fallen apart
    (converges_faster, evidence(), CONDITION),
    (converges_faster, evidence(bare=1.0), FALSE),  # as fast
    (converges_faster, evidence(bare=1.0, at=40), FALSE),  # faster
    (converges_faster, evidence(scaled=0.03, bare=0.03), UNDECIDED),
    (converges_faster, evidence(small=0.2, unit=0.2), HOLDS),
    (converges_faster, evidence(small=0.2, unit=-0.2), CONDITION),
    (converges_faster, evidence(small=0.2, unit=0.2, noise=WIDE), CONDITION),
    (commits_early, memory(), FALSE),
    (commits_early, memory(entropy=3.5, held=3.0), FALSE),  # either entropy
    (commits_early, memory(held=2.8), HOLDS),  # the loss at equal fit
    (commits_early, memory(held=2.2), FALSE),
    (commits_early, memory(seen=2.5), UNDECIDED),  # the gap: nothing was memorised
    (commits_early, memory(noise=WIDE), UNDECIDED),
    (limits_depth, depths(0.0, 0.1, 0.2, 0.3), HOLDS),
    (limits_depth, depths(0.2, 0.2, 0.2, 0.2), CONDITION),  # the deepest alike, and the growth
    (limits_depth, depths(0.3, 0.3, 0.3, 0.0), FALSE),  # the deepest
    (limits_depth, depths(0.3, 0.1, 0.1, 0.1), CONDITION),  # the shallowest
    (limits_depth, depths(0.0, 0.6, 0.0, 0.3), HOLDS),
    (limits_depth, depths(0.0, 0.9, 0.0, 0.1), CONDITION),  # one in between
    (limits_depth, depths(0.0, 0.1, 0.2, 0.3, noise=(-0.3, 0.0, 0.3)), UNDECIDED),
    (limits_depth, depths(0.0, 0.1, 0.2, 0.3, loss=2.5), UNDECIDED),  # pairs not learned
    (limits_depth, depths(-0.026, 0.049, 0.022, 0.027, noise=(-0.02, 0.0, 0.02)), UNDECIDED),
]


@pytest.mark.parametrize(("judge", "rows", "verdict"), CASES)
def test_a_verdict_follows_its_rows(judge, rows, verdict):
    assert judge(rows).verdict == verdict


def test_every_verdict_that_a_judge_can_give_is_reached():
    """As test_verdicts.py has it for the other claims."""
    named = {"HOLDS": HOLDS, "CONDITION": CONDITION, "FALSE": FALSE, "UNDECIDED": UNDECIDED}
    for judge in (falls_apart, converges_faster, commits_early, limits_depth):
        words = re.findall(r"\b(HOLDS|CONDITION|FALSE|UNDECIDED)\b", inspect.getsource(judge))
        assert {verdict for one, _, verdict in CASES if one is judge} == {named[word] for word in words}


def test_conditions_say_how_long_was_trained_and_what_was_tried():
    assert "within 150 steps of 32 sequences" in falls_apart(evidence()).condition
    assert "edge of those tried: sqrt_dk, none" in falls_apart(evidence()).condition
    rows = evidence()
    for lr in (1e-4, 1e-2):
        rows["recall"] += recall_rows("none", 0.01, lr) + recall_rows("sqrt_dk", 0.5, lr)
    assert "edge" not in falls_apart(rows).condition


def test_what_stands_beside_a_verdict_is_said():
    judged = falls_apart(evidence())
    assert judged.context["held-out loss of counting pairs of characters, nats"] == 2.4
    assert not set(judged.context) & set(judged.numbers)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([[0.01], [0.0], [-0.01]], SAME),
        ([[0.2], [0.21], [0.19]], MORE),
        ([[-0.2], [-0.21], [-0.19]], LESS),
        ([[0.04], [0.041], [0.042]], SAME),  # all seeds agree on the sign, and it is still nothing
        ([[0.035], [0.046], [0.057]], MORE),  # above 0, beyond 0.05 or not: it costs something
        ([[-0.035], [-0.046], [-0.057]], LESS),
        ([[0.3], [0.0], [-0.2]], OPEN),
        ([[0.2]], OPEN),  # one seed decides nothing
        ([[0.4, -0.4], [0.4, -0.4], [0.4, -0.4]], OPEN),  # seeds agree, pieces of text do not
    ],
)
def test_a_difference_is_seen_only_where_its_interval_allows(values, says):
    assert mean_cost(values).says == says


def test_an_interval_by_hand():
    found = mean_cost([[1.0, 3.0], [3.0, 5.0], [5.0, 7.0]])
    # seeds 2, 4, 6: variance 4 of 3; parts 3, 5: variance 2 of 2; t of two degrees of freedom
    assert found.mean == 4
    assert (found.high - 4) / math.sqrt(4 / 3 + 2 / 2) == printed(4.3027, 4)


def test_no_difference_is_an_interval_not_a_disagreement_of_signs():
    rows = evidence(small=0.03, noise=(-0.001, 0.0, 0.001))["charlm"]
    assert charlm.cells(rows)["small", 1e-3].says == SAME
    rows = evidence(small=0.0, noise=WIDE)["charlm"]
    assert charlm.cells(rows)["small", 1e-3].says == OPEN


def test_seeds_that_diverged_are_counted_and_left_out():
    found = charlm.cells(evidence(ends={"loss": math.nan})["charlm"])["unit", 1e-3]
    assert (found.diverged, found.diverged_scaled) == (3, 0)
    assert math.isnan(found.mean)
    assert found.says == OPEN


def test_growth_is_the_line_through_every_depth():
    rows = depths(0.0, 0.1, 0.2, 0.3)["depth"]
    assert depth.growth(rows).mean == in_float64(0.3)
    assert depth.costs(rows)[8].mean == in_float64(0.3)
    assert isinstance(depth.growth(rows), Cost)


def test_fitting_less_is_not_generalising_worse():
    """A rule that stops at a higher training loss is compared where the other one passed that loss."""
    rows = lm_rows("sqrt_dk", 2.0, seen=1.0, noise=(0, 0, 0)) + lm_rows("none", 3.0, seen=2.5, noise=(0, 0, 0))
    # both fall on straight lines from (4, 4): at a training loss of 2.5 the first is at 3.0 too
    assert charlm.at_equal_fit(rows).mean == in_float64(0.0)


def test_text_that_disagrees_widens_the_interval_at_equal_fit():
    rows = memory(held=2.8)
    for row in rows["memorise"]:
        if row["rule"] == "none" and "held_out_1" in row:
            row["held_out_1"] += 2.0
    assert commits_early(rows).verdict == UNDECIDED


def test_a_training_claim_whose_rows_are_missing_says_so():
    """Without --train rows that come with the package judge them."""
    judged = judged_by_id({}, train=True)
    assert all("a run that it needs failed" in judged[name].condition for name in ("C9", "C15", "C19", "C20"))
    judged = judged_by_id(evidence() | memory() | depths(0.0, 0.1))
    assert {judged[name].verdict for name in ("C9", "C15", "C19", "C20")} <= {HOLDS, CONDITION, FALSE, UNDECIDED}


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ((0.0, 0.1, 0.2, 0.3), r": \+0\.300 nats \(.*\) more from the shallowest to the deepest$"),
        ((0.6, 0.55, 0.5, 0.4), r": it does not grow with depth; -0\.1\d\d nats"),
        ((0.2, 0.2, 0.2, 0.2), ": the same at every depth; "),
    ],
)
def test_the_title_of_depth_says_whether_the_cost_grows(cost, words):
    assert re.search(words, depth.finding(depths(*cost)["depth"]))


def test_the_table_of_depth_says_which_best_learning_rate_may_not_be_the_best():
    rows = depths(0.2, 0.2)["depth"]
    others = [{**row, "lr": lr, "validation": 9.0} for row in rows for lr in (1e-4, 1e-2)]
    with_better = [{**row, "validation": 0.0} if row["rule"] == "none" and row["lr"] == 1e-2 else row for row in others]
    rows = [{**row, "validation": 1.0} for row in rows]
    assert [row["at_edge"] for row in depth.summary(rows + others)] == ["neither", "neither"]
    found = depth.summary(rows + with_better)[0]
    assert (found["lr, sqrt_dk"], found["lr, none"], found["at_edge"]) == (1e-3, 1e-2, "none")


def test_the_title_of_charlm_says_where_it_gains():
    said = charlm.finding(evidence(small=-0.2, unit=0.3)["charlm"])
    assert said.endswith("model -0.200 (std 0.02, lr 0.001) to +0.300 (unit variance, lr 0.001) nats")
    assert "not seen at this size" in charlm.finding(evidence(small=0.0, unit=0.01)["charlm"])


def test_the_title_of_recall_says_what_was_learned_and_how_fast():
    rows = recall_rows("sqrt_dk", 1.0) + recall_rows("none", 0.1)
    assert recall.finding(rows).endswith(": learned with 1/√d_k (100%); not learned with no scale (10%)")
    assert "at the edge of the learning rates tried: 1/√d_k, no scale" in recall.at_the_edge(
        recall.summary(rows), "rule", recall.NAMES
    )
    rows = recall_rows("sqrt_dk", 1.0) + recall_rows("none", 0.95, at=120) + recall_rows("dk", 0.97)
    assert "90 % takes 120 steps with no scale and 50 with 1/√d_k, each at its fastest" in recall.finding(rows)


def test_the_title_of_fold_says_under_which_optimizers_it_is_another_training():
    last = {("adam", "scaled"): 1.0, ("adam", "folded"): 0.5, ("sgd", "scaled"): 0.95, ("sgd", "folded"): 0.93}
    rows = [
        {**row, "optimizer": optimizer, "how": how}
        for (optimizer, how), end in last.items()
        for row in recall_rows("none", end)
    ]
    said = fold.finding(rows)
    assert said.endswith("; training then differs under Adam, and is the same under SGD")
    assert fold.rates(rows).endswith("divided / folded / neither: Adam 0.001 / none / none; SGD 0.001 / 0.001 / none")
    untrained = [
        {**row, "how": how} for row in pick(rows, optimizer="sgd", how="folded") for how in ("scaled", "folded")
    ]
    said = fold.finding([{**row, "accuracy": 0.03} for row in untrained])
    assert said == "Folding the scale into W_q gives the same function at step 0; under SGD neither way learns"
