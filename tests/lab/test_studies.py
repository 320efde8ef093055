"""What the studies say of rows: planted runs, whose answer is known."""

import math

import pytest

from attemper.lab.stacked.probe import SIGNS
from attemper.lab.studies import ablation, rescue, sensitivity, warning
from close import in_float64

STEPS, EVERY = 200, 5
ABOUT = {"parameters": 1, "tokens": 1, "text": "", "steps": STEPS}


def quiet(name):
    return [0.5] * (STEPS // EVERY) if name == "evenness" else [1.0] * (STEPS // EVERY)


def run(family, number, twin, leaves=None, rises=None, falls_back=False):
    """A run whose loss leaves its twin's at a step, and whose largest logit rises at another."""
    losses = [2.0 + (0.3 if leaves is not None and step >= leaves else 0.0) for step in range(STEPS)]
    if falls_back:
        losses[-40:] = [2.0] * 40
    signs = {name: quiet(name) for name in warning.ALL}
    if rises is not None:
        signs["peak"] = [100.0 if place * EVERY >= rises else 1.0 for place in range(STEPS // EVERY)]
        signs["evenness"] = [0.01 if place * EVERY >= rises + 20 else 0.5 for place in range(STEPS // EVERY)]
    made = {"family": family, "number": number, "twin": twin, "every": EVERY, "losses": losses, "lr": 0.1}
    return {**ABOUT, **made, **signs}


def runs(bad=8, good=8):
    rows = [run("rate", number, 0, leaves=150, rises=100) for number in range(bad)]
    rows += [run("rate", number, 0) for number in range(bad, bad + good)]
    return rows + [run("rate", number, 1) for number in range(bad + good)]


def test_the_event_is_where_the_loss_leaves_its_twin():
    twin = run("rate", 0, 1)["losses"]
    assert 150 <= warning.event(run("rate", 0, 0, leaves=150)["losses"], twin, 20) < 150 + warning.SMOOTH
    assert warning.event(run("rate", 0, 0)["losses"], twin, 20) == math.inf
    back = run("rate", 0, 0, leaves=60, falls_back=True)["losses"]
    assert 60 <= warning.event(back, twin, 20) < 60 + warning.SMOOTH
    assert not warning._apart(back, twin)
    assert warning._apart(run("rate", 0, 0, leaves=60)["losses"], twin)
    assert warning._apart([*twin[:-1], math.nan], twin)
    broken = [*twin[:70], math.nan, *twin[71:]]
    assert warning.event(broken, twin, 20) == 70


def test_a_sign_that_rises_first_has_the_longest_lead():
    table = {row["sign"]: row for row in warning.summary(runs())}
    assert next(iter(table)) == "peak"
    assert table["peak"]["auc"] == table["evenness"]["auc"] == 1.0
    assert table["p2"]["auc"] == 0.5  # it says nothing
    assert table["peak"]["lead"] == table["evenness"]["lead"] + 20
    assert table["peak"]["lead"] == 50 + warning.event(runs()[0]["losses"], runs()[-1]["losses"], 20) - 150
    assert table["p2"]["warned"] == 0.0
    assert warning.finding(runs()).startswith("largest logit warns 5")


def test_a_sign_that_rises_after_the_event_does_not_warn():
    rows = [run("rate", number, 0, leaves=50, rises=100) for number in range(8)]
    rows += [run("rate", number, 0) for number in range(8, 16)] + [run("rate", number, 1) for number in range(16)]
    peak = next(row for row in warning.summary(rows) if row["sign"] == "peak")
    assert (peak["auc"], peak["lead"], peak["warned"]) == (0.5, 0.0, 0.0)


def test_false_alarms_raise_the_threshold():
    rows = runs(bad=8, good=20)
    for row in rows:
        if (
            row["number"] in range(8, 20) and not row["twin"]
        ):  # more healthy runs with a large logit than alarms are allowed
            row["peak"] = [80.0] * (STEPS // EVERY)
    peak = next(row for row in warning.summary(rows) if row["sign"] == "peak")
    assert peak["threshold"] == 80.0
    assert peak["lead"] > 0  # 100 is above it


def test_areas_and_curves():
    assert warning.area([2.0, 3.0], [1.0, 1.0]) == 1.0
    assert warning.area([1.0], [1.0]) == 0.5
    assert warning.roc([2.0, 3.0], [1.0, 2.5]) == [(0.0, 0.0), (0.0, 0.5), (0.5, 0.5), (0.5, 1.0), (1.0, 1.0)]
    assert warning.bootstrap([5.0] * 9) == (5.0, 5.0)


def test_z_scores_are_of_the_past():
    values = [1.0, 2.0] * 20 + [50.0]
    found = warning.z_scores(values)
    assert max(found[5:-1]) < 5 < found[-1]


@pytest.mark.parametrize("family", warning.FAMILIES)
def test_a_twin_differs_in_one_thing(family):
    settings = warning.STUDY.presets["full"]
    for number in range(6):
        one, other = (warning.made({"family": family, "number": number, "twin": twin}, settings) for twin in (0, 1))
        differs = {name for name in one if one[name] != other[name]}
        assert differs == ({"fault", "fault_step"} if family == "fault" else {"rule"})


def rescued(number, treatment, delay, loss, warned=60):
    return {**ABOUT, "number": number, "treatment": treatment, "delay": delay, "held_out": loss, "warned": warned}


def test_a_rescue_is_judged_by_the_twin():
    rows = []
    for number in range(4):
        rows += [rescued(number, "", 0, 2.5), rescued(number, "twin", 0, 2.0, math.inf)]
        rows += [
            rescued(number, "clip30", 0, 2.02),
            rescued(number, "clip30", 100, 2.3),
            rescued(number, "third", 0, 2.1),
        ]
    rows += [rescued(9, "", 0, 2.01), rescued(9, "twin", 0, 2.0), rescued(9, "clip30", 0, 2.0)]  # it does not fail
    table = {(row["treatment"], row["delay"]): row for row in rescue.summary(rows)}
    assert table["clip30", 0]["rescued"] == 1.0
    assert table["clip30", 0]["runs"] == 4
    assert table["clip30", 100]["rescued"] == 0.0
    assert table["third", 0]["gap"] == in_float64(0.1, 2.0)
    assert rescue.finding(rows) == "Rescued when treated at the warning: clip 30 100%, lr / 3 0% of 4 failing runs"
    low, high = rescue.wilson(0.5, 10)
    assert low == in_float64(1 - high)


def test_treatments_begin_at_the_warning():
    settings = {**rescue.STUDY.presets["tiny"], "steps": 1000, "delays": (0, 50)}
    rows = [rescued(number, treatment, 0, 2.5) | {"start": 0} for number in (0, 1) for treatment in ("", "twin")]
    cells = rescue.plan(rows, settings)
    assert {(cell["delay"], cell["start"]) for cell in cells} == {(0, 60), (50, 110)}
    assert {cell["treatment"] for cell in cells} == set(rescue.TREATMENTS)


def test_sensitivity_is_the_mean_above_the_best():
    rows = []
    for arm, losses in {"sqrt_dk": (2.0, 1.0, 9.0), "qk_norm": (1.5, 1.0, 1.1)}.items():
        for lr, loss in zip((1e-3, 1e-2, 1e-1), losses, strict=True):
            rows.append({**ABOUT, "width": 8, "arm": arm, "lr": lr, "seed": 0, "held_out": loss, "peak": 1.0})
    table = {row["arm"]: row for row in sensitivity.summary(rows)}
    assert table["1/√d_k"]["sensitivity"] == in_float64((1.0 + 0.0 + sensitivity.START - 1.0) / 3, 3)
    assert table["QK-norm"]["sensitivity"] == in_float64((0.5 + 0.0 + 0.1) / 3, 3)
    assert sensitivity.finding(rows).startswith("Sensitivity to the learning rate at width 8, nats: QK-norm")
    assert table["1/√d_k"]["largest good lr"] == 1e-2


def ablated(rule, lr, seed, loss):
    row = {**ABOUT, "head_dim": 64, "rule": rule, "lr": lr, "seed": seed, "step": STEPS, "loss": loss, "peak": 5.0}
    return {**row, "validation": loss, "held_out": loss, **{f"held_out_{place}": loss for place in range(1, 9)}}


def test_the_ablation_goes_beyond_an_edge_and_repeats_the_best():
    settings = {
        **ablation.STUDY.presets["tiny"],
        "head_dim": (64,),
        "seeds": (0, 1),
        "powers": (-7, -6, -5),
        "stack": 99,
    }
    losses = {"sqrt_dk": (3, 1, 2), "none": (1, 2, 3), "dk": (3, 2, 1), "qk_norm": (2, 1, 2)}
    rows = [
        ablated(rule, ablation.rate(power), 0, float(loss))
        for rule, some in losses.items()
        for power, loss in zip(settings["powers"], some, strict=True)
    ]
    beyond = ablation.plan(rows, settings)
    assert {(cell["rule"], cell["lr"]) for cell in beyond} == {("none", ablation.rate(-8)), ("dk", ablation.rate(-4))}
    rows += [ablated(cell["rule"], cell["lr"], 0, 5.0) for cell in beyond]
    repeated = ablation.plan(rows, settings)
    assert {cell["seed"] for cell in repeated} == {1}
    assert {cell["rule"]: cell["lr"] for cell in repeated}["sqrt_dk"] == ablation.rate(-6)
    rows += [ablated(cell["rule"], cell["lr"], 1, 1.1) for cell in repeated]
    normed = ablation.plan(rows, settings)  # in a stack of its own
    assert [(cell["rule"], cell["lr"], cell["seed"]) for cell in normed] == [("qk_norm", ablation.rate(-6), 1)]
    rows += [ablated(cell["rule"], cell["lr"], 1, 1.1) for cell in normed]
    assert ablation.plan(rows, settings) == []
    assert all(not row["at_edge"] for row in ablation.summary(rows))
    table = {row["rule"]: row for row in ablation.summary(rows)}
    assert {row["seeds"] for row in table.values()} == {2}


def test_the_ablation_chooses_a_rate_by_the_seed_that_all_rates_have():
    """A bad second seed at the chosen rate must be reported, not avoided by going to a rate with one seed."""
    lrs = [ablation.rate(power) for power in (-7, -6, -5)]
    rows = [
        ablated(rule, lr, 0, loss) for rule in ablation.RULES for lr, loss in zip(lrs, (2.0, 1.0, 1.2), strict=True)
    ]
    rows += [ablated(rule, lrs[1], seed, 1.5) for rule in ablation.RULES for seed in (1, 2)]
    for row in ablation.summary(rows):
        assert row["lr"] == lrs[1]
        assert row["seeds"] == 3
        assert row["held_out"] == 1.5
        assert row["cost"] == 0.0
    assert ablation.finding(rows).startswith("Leaving the scale out costs +0.000 nats (+0.000 to +0.000) at d_k = 64")


def test_every_sign_has_a_name():
    assert set(warning.NAMES) == {*SIGNS, *warning.RIVALS}
