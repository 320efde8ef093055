"""The studies causal, law, alpha and roc: their parts by hand, and what they say of planted rows."""

import itertools
import math

import pytest
import torch

from attemper.errors import InputError
from close import assert_float64, in_float64
from research.run import readable, tables
from research.stacked import recall
from research.stacked.language import Dimensions, LanguageStack
from research.stacked.surrogate import surrogate_softmax
from research.studies import alpha, causal, collapse, law, roc, study

ONE = torch.ones((), dtype=torch.float64)


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def test_the_surrogate_is_softmax_where_the_temperatures_agree():
    logits = drawn(3, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: surrogate_softmax(z, ONE), logits)
    assert_float64(surrogate_softmax(logits.detach(), ONE), logits.detach().softmax(-1))


@pytest.mark.parametrize("ratio", [0.125, 8.0])
def test_the_surrogate_has_the_jacobian_of_the_other_temperature(ratio):
    """J(softmax(ratio z)) g by hand; a hidden key has no weight and gets no gradient."""
    logits, upstream = drawn(4, 6), drawn(4, 6).flip(0)
    logits[:, 2] = -math.inf
    logits.requires_grad_()
    weights = surrogate_softmax(logits, ratio * ONE)
    assert_float64(weights.detach(), logits.detach().softmax(-1))
    (found,) = torch.autograd.grad(weights, logits, upstream)
    other = (ratio * logits.detach()).softmax(-1)
    jacobian = torch.diag_embed(other) - other[:, :, None] * other[:, None]
    assert_float64(found, (jacobian @ upstream[:, :, None])[..., 0])
    assert not found[:, 2].any()


ARMS = [causal.cell_of(("recall", 4), arm, 0.01, 0, {"d": 8}) for arm in ((0, 0, 0), (1, 1, 1), (1, 1, 0), (0, 1, 1))]


def test_arms_that_switch_together_are_the_models_with_and_without_the_scale():
    """With one temperature in both passes and the rates as they are, the stack is the one without a surrogate."""
    plain = [{"d": 8, "pairs": 4, "rule": rule, "lr": 0.01, "seed": 0} for rule in ("sqrt_dk", "none")]
    stacks = [recall.RecallStack(8, cells, 4, "cpu", torch.float64) for cells in (ARMS[:2], plain)]
    assert stacks[0].ratio is not None
    assert stacks[1].ratio is None
    for _ in range(6):
        for stack in stacks:
            stack.train()
    for name, values in stacks[1].parameters.views.items():
        assert_float64(stacks[0].parameters.views[name].detach(), values.detach(), name)


def test_the_rates_of_w_q_and_w_k_are_multiplied_by_a_power_of_d_k():
    """The first step: the same gradient, so the same update but for the factor; nothing else has it."""
    stack = recall.RecallStack(8, ARMS, 4, "cpu", torch.float64)
    before = {name: view.detach().clone() for name, view in stack.parameters.views.items()}
    stack.train()
    moved = {name: view.detach() - before[name] for name, view in stack.parameters.views.items()}
    for name in ("w_q", "w_k"):
        assert_float64(moved[name][2] * 8**0.5, moved[name][1], name)  # both unscaled; one has rates divided by √8
    assert_float64(moved["w_v"][2], moved["w_v"][1])
    assert stack.factor.tolist() == [in_float64(x) for x in (1.0, 1.0, 8**-0.5, 8**0.5)]


def test_a_language_model_with_the_surrogate_is_the_one_without_where_they_agree():
    size = Dimensions(width=8, head_dim=4, layers=1, length=12, batch=2, steps=4, warm_up=1)
    arms = [causal.cell_of(causal.LANGUAGE, arm, 0.01, 0, {}) for arm in ((0, 0, 0), (1, 1, 1))]
    plain = [{"rule": rule, "lr": 0.01, "seed": 0} for rule in ("sqrt_dk", "none")]
    stacks = [LanguageStack(size, cells, "cpu", torch.float64, torch.float64) for cells in (arms, plain)]
    for _ in range(4):
        for stack in stacks:
            stack.train()
    assert_float64(stacks[0].losses, stacks[1].losses)
    assert_float64(stacks[0].parameters.flat, stacks[1].parameters.flat)


def test_an_arm_comes_back_from_its_cell():
    for arm in causal.ARMS:
        assert causal.arm_of(causal.cell_of(causal.LANGUAGE, arm, 0.01, 0, {})) == arm
    rates = {arm: causal.cell_of(causal.LANGUAGE, arm, 0.01, 0, {})["rates"] for arm in causal.ARMS}
    assert rates[1, 0, 0] == rates[1, 1, 0] == "divided"
    assert rates[0, 0, 1] == rates[0, 1, 1] == "times"


def test_shares_sum_to_the_whole_and_are_the_parts_of_a_sum():
    outcome = {arm: float(value) for arm, value in zip(causal.ARMS, drawn(8).tolist(), strict=True)}
    shares = [causal.shapley(outcome, index) for index in range(3)]
    assert sum(shares) == in_float64(outcome[1, 1, 1] - outcome[0, 0, 0])
    added = {arm: 2.0 + 0.1 * arm[0] + 0.02 * arm[1] + 0.3 * arm[2] for arm in causal.ARMS}
    assert [causal.shapley(added, index) for index in range(3)] == [in_float64(x) for x in (0.1, 0.02, 0.3)]


def planted(parts):
    """Rows of the language model whose loss is a sum over the switches, lowest at the middle one of five rates."""
    rows = []
    for arm, (step, power), seed in itertools.product(causal.ARMS, enumerate((-8, -7, -6, -5, -4)), (0, 1, 2)):
        loss = 1.2 + sum(part * on for part, on in zip(parts, arm, strict=True)) + 0.1 * abs(step - 2)
        loss += 0.001 * seed * (1 + arm[0])
        row = causal.cell_of(causal.LANGUAGE, arm, collapse.rate(power), seed, {})
        rows.append({**row, "validation": loss, "held_out": loss, "loss": loss, "step": 300})
    return rows


def test_the_finding_follows_what_was_planted():
    said = causal.finding(planted((0.02, 0.05, 0.2)))
    assert said == "Language model: a slower rate undoes 0.20 of 0.27 nats"
    said = causal.finding(planted((0.2, 0.05, 0.0)))
    assert said == "Language model: a scaled forward pass undoes 0.20 of 0.25 nats"
    (first, *_), whole = causal.shares(planted((0.2, 0.05, 0.0)), causal.LANGUAGE)[:3], 0.25
    assert first["share_low"] < 0.2 < first["share_high"] < whole
    assert [row["at_edge"] for row in causal.summary(planted((0.2, 0.05, 0.0)))] == [False] * 8
    assert causal.finding([]) == "Not every arm was trained yet"


def test_rows_of_two_sizes_are_not_read_as_one():
    rows = planted((0.2, 0.05, 0.0))
    with pytest.raises(InputError, match=r"language at several sizes \(parameters\)"):
        causal.finding([{**row, "parameters": 10 + row["seed"]} for row in rows])


def test_what_a_switch_adds_in_each_setting_of_the_others():
    found = causal.effects(planted((0.2, 0.05, 0.0)), causal.LANGUAGE)
    assert [row["switch"] for row in found] == [switch for switch in causal.SWITCHES for _ in range(4)]
    assert [round(row["effect"], 2) for row in found] == [0.2] * 4 + [0.05] * 4 + [0.0] * 4


def test_no_best_rate_is_at_an_edge_when_the_plan_is_over():
    settings = {**study("causal").presets["full"], "pairs": ()}
    rows = [row for row in planted((0.2, 0.0, 0.0)) if row["seed"] == 0]
    falling = [{**row, "validation": -math.log(row["lr"]) * -1.0} for row in rows]  # lowest at the lowest rate
    wanted = causal.plan(falling, settings)
    assert {cell["lr"] for cell in wanted} == {collapse.rate(-9)}
    assert {cell["seed"] for cell in causal.plan(rows, settings)} == {1, 2}
    assert causal.plan(planted((0.2, 0.0, 0.0)), settings) == []


def test_the_law_finds_planted_exponents(monkeypatch):
    """(c · (ln n)^a)^b from cells of which the slowest never learned."""
    rows = []
    for d, n, c, factor in itertools.product((16, 64), (8, 32, 128, 512), (1, 2, 4, 8, 16, 32), (2.0, 1.0, 2.0)):
        lr = {2.0: 0.001, 1.0: 0.003}[factor] if not rows or rows[-1]["lr"] != 0.003 else 0.01
        steps = 20 * factor * (c * math.log(n) ** 0.6) ** 1.4
        learned = steps < 3000
        row = {"optimizer": "adam", "d": d, "pairs": n, "c": c, "lr": lr, "seed": 0, "accuracy": 0.9, "step": 3000}
        rows.append({**row, **dict.fromkeys(("steps_test", "steps_validation"), steps if learned else math.inf)})
    monkeypatch.setattr(law, "DRAWS", 30)
    found = law.law(rows)
    assert found["never learned"] > 2
    assert abs(found["b, of c"] - 1.4) < 0.05
    assert abs(found["a, of ln n"] - 0.6) < 0.1
    assert found["b, of c_low"] <= found["b, of c"] <= found["b, of c_high"]
    assert abs(found["of d_k"]) < 0.1
    assert {round(row["of c"], 6) for row in law.slopes(rows)} == {1.4}
    said = "At a fixed width and d_k = 64 the steps to learn grow like c^1.40 with 8 keys, c^1.40 with 32 keys, c^1.40 with 128"
    assert law.finding(rows).startswith(said)


@pytest.mark.parametrize("slope", [0.5, 0.8])
def test_alpha_is_the_planted_slope(slope):
    """At one rate, although the widest head is best at another, at which the spread is ten times as wide."""
    rows = [
        {
            "head_dim": d, "rule": "sqrt_dk", "lr": lr, "seed": seed, "step": step, "alignment_qk": 1.0, "loss": 1.0,
            "score_std": (1 + step) * d**slope * (10.0 if lr == 0.01 else 1.0),
            "validation": loss, "held_out": loss,
        }
        for d in (16, 64, 256) for seed in (0, 1) for step in (0, 10)
        for lr, loss in ((0.001, 1.0), (0.01, 0.9 if d == 256 else 2.0))
    ]  # fmt: skip
    assert alpha.common_rate(rows) == 0.001
    assert [row["alpha"] for row in alpha.alphas(rows)] == [in_float64(slope)] * 2
    assert [(row["lr"], row["alpha"]) for row in alpha.by_rate(rows)] == [
        (0.001, in_float64(slope)),
        (0.01, in_float64(slope)),
    ]


def test_a_rate_at_which_a_head_dim_diverged_is_not_the_common_one():
    rows = [
        {"head_dim": d, "rule": "dk", "lr": lr, "seed": 0, "validation": math.nan if d > 16 and lr == 0.01 else 1 / lr}
        for d in (16, 64) for lr in (0.001, 0.01)
    ]  # fmt: skip
    assert alpha.common_rate(rows) == 0.001


def test_an_aligned_head_is_told_from_an_unrelated_one():
    """1 for random directions; √d_k where every key is its query, or minus it."""
    size = Dimensions(width=16, head_dim=16, layers=1, length=64, batch=4, steps=1)
    probe = alpha.AlignmentProbe(2, size, 1, torch.zeros((), dtype=torch.float64))
    query, signs = drawn(2, 4, 1, 64, 16), drawn(2, 4, 1, 64, 1).sign()
    key = drawn(64, 2, 4, 1, 16).permute(1, 2, 3, 0, 4).clone()
    query[1] = query[1, :, :, :1]
    key[1] = query[1] * signs[1]
    probe.take(0, query, key)
    unrelated, aligned = probe.aligned[0, 0, :, 0].tolist()
    assert 0.8 < unrelated < 1.2
    assert 0.9 * 4 < aligned <= 4.2


def test_runs_near_the_critical_rate_differ_in_what_the_rate_does_not_say():
    settings = {"warm_up": 50, "steps": 500, "ranges": roc.RANGES}
    made = [roc.made({"number": number, "twin": 0}, settings) for number in range(60)]
    for run in made:
        low, high = roc.RANGES[run["family"]]
        assert low <= run["lr"] <= high
    assert len({run["warm_up"] for run in made}) > 20
    assert len({run["spread"] for run in made}) > 20
    twin = roc.made({"number": 4, "twin": 1}, settings)
    assert {name for name in twin if twin[name] != made[4][name]} == {"rule"}


def near_the_rate(peak, known):
    """40 runs, half of which fail; what the largest logit and the settings of run number `n` are, failing or not."""
    rows = []
    for number in range(40):
        bad, n = number % 2, number // 2
        signs = {sign: [[0, 1.0]] for sign in roc.KEPT} | {"peak": [[50, peak(n, bad)]]}
        about = {"family": "rate", "number": number, "steps": 500, "every": 5, "settings": known(n, bad), "lr": 0.005}
        rows.append({**about, **signs, "event": 200.0 if bad else math.inf, "for good": bool(bad), "fault": ""})
    return rows


def test_what_is_known_before_the_first_step_is_judged_with_the_signs():
    """Failing and healthy runs whose rate says nothing, and whose largest logit says everything."""
    rows = near_the_rate(lambda n, bad: 60.0 + 40 * bad + n / 50, lambda n, bad: 0.005 + 1e-5 * n)
    table = {row["sign"]: row for row in roc.summary(rows)}
    assert table["peak"]["auc"] == 1.0
    assert table[roc.KNOWN]["auc"] == in_float64(0.5)
    assert "rate times the scale" in [
        row["sign"] for _, part in tables("roc", [*table.values()], rows) for row in readable(part)
    ]
    assert "the largest logit tells failing runs from others with an AUC of 1.00" in roc.finding(rows)
    assert ", better than the rate times the scale: 0.50" in roc.finding(rows)


def test_a_sign_that_says_no_more_than_the_rate_is_not_called_better():
    rows = near_the_rate(lambda n, bad: 60.0 + 40 * bad + n / 50, lambda n, bad: 0.005 + 1e-3 * bad + 1e-5 * n)
    assert "with an AUC of 1.00 (1.00 to 1.00), not clearly better than" in roc.finding(rows)


def test_signs_that_say_nothing_are_called_so():
    rows = near_the_rate(lambda n, bad: 60.0 + n / 50, lambda n, bad: 0.005 + 1e-5 * n)
    assert roc.finding(rows).startswith(
        "Near the critical rate no sign surely tells failing runs apart: the best of 12,"
    )


def test_what_tells_families_apart_tells_no_failing_run():
    """Most unscaled runs fail, most others do not, and only the family says how large a logit is."""
    found = near_the_rate(lambda n, bad: 60.0, lambda n, bad: 0.005)
    rows = [
        {**row, "family": family, "peak": [[50, level]], "number": place}
        for place, (row, family, level) in enumerate(
            [(row, "rate", 10.0) for row in found[:20:2] + found[1:6:2]]
            + [(row, "unscaled", 90.0) for row in found[:6:2] + found[1::2]]
        )
    ]
    (peak,) = (row for row in roc.summary(rows) if row["sign"] == "peak")
    assert peak["auc"] == in_float64(0.5)
    assert peak["auc, together"] > 0.7
