"""What the studies say of rows: planted runs, whose answer is known."""

import json
import math
import random

import pytest

from attemper_lab.stored import unpacked
from close import in_float64
from research.stacked.probe import SIGNS
from research.stacked.treatments import FAULTS
from research.studies import ablation, alarm, rescue, roc, sensitivity, separation, warning

STEPS, EVERY = 200, 5
ABOUT = {"parameters": 1, "tokens": 1, "text": "", "steps": STEPS}
PROBES = range(0, STEPS, EVERY)


def run(family, number, twin, leaves=None, rises=None, falls_back=False, fault_step=0):
    """A run whose loss leaves its twin's at a step, and whose largest logit rises at another; evenness falls 20 steps later."""
    losses = [2.0 + (0.3 if leaves is not None and step >= leaves else 0.0) for step in range(STEPS)]
    if falls_back:
        losses[-40:] = [2.0] * 40
    signs = {name: [0.5] * len(PROBES) for name in alarm.ALL}
    if rises is not None:
        signs["peak"] = [100.0 if step >= rises else 0.5 for step in PROBES]
        signs["evenness"] = [0.01 if step >= rises + 20 else 0.5 for step in PROBES]
    made = {"family": family, "number": number, "twin": twin, "every": EVERY, "losses": losses, "lr": 0.1}
    made |= {"fault": "rate" if fault_step else "", "fault_step": fault_step}
    return {**ABOUT, **made, **({} if twin else signs)}


def runs(bad=8, good=8, leaves=150, rises=100):
    rows = [run("rate", number, 0, leaves=leaves, rises=rises) for number in range(bad)]
    rows += [run("rate", number, 0) for number in range(bad, bad + good)]
    return rows + [run("rate", number, 1) for number in range(bad + good)]


def found(rows, sign):
    return next(row for row in alarm.summary(rows) if row["sign"] == sign)


def test_the_event_is_where_the_loss_leaves_its_twin():
    twin = run("rate", 0, 1)["losses"]
    assert 150 <= alarm.event(run("rate", 0, 0, leaves=150)["losses"], twin, 20) < 150 + alarm.SMOOTH
    assert alarm.event(run("rate", 0, 0)["losses"], twin, 20) == math.inf
    assert alarm.event(twin, run("rate", 0, 0, leaves=150)["losses"], 20) == math.inf  # better than its twin
    back = run("rate", 0, 0, leaves=60, falls_back=True)
    assert 60 <= alarm.event(back["losses"], twin, 20) < 60 + alarm.SMOOTH
    broken = [*twin[:70], math.nan, *twin[71:]]
    assert alarm.event(broken, twin, 20) == 70
    kept = alarm.pairs([back, run("rate", 0, 1), run("rate", 1, 0, leaves=60), run("rate", 1, 1)])
    assert [one["for good"] for one in kept] == [False, True]
    assert [one["gap"] for one in kept] == [0.0, in_float64(0.3, 2.0)]


def test_a_sign_that_rises_first_has_the_longest_lead():
    table = {row["sign"]: row for row in alarm.summary(runs())}
    assert next(iter(table)) == "peak"
    assert table["peak"]["auc"] == table["evenness"]["auc"] == 1.0
    assert table["sum_p2"]["auc"] == 0.5  # it says nothing
    event = alarm.event(runs()[0]["losses"], runs()[-1]["losses"], 20)
    assert table["peak"]["lead"] == event - 100 > 0
    assert table["evenness"]["lead"] == event - 120
    assert (table["peak"]["warned"], table["sum_p2"]["warned"]) == (1.0, 0.0)
    assert (table["peak"]["lead_low"], table["peak"]["lead_high"]) == (event - 100, event - 100)


def test_a_sign_that_rises_after_the_event_does_not_warn():
    peak = found(runs(leaves=50, rises=100), "peak")
    assert (peak["auc"], peak["lead"], peak["warned"]) == (0.5, 0.0, 0.0)


def test_what_was_bad_before_a_fault_does_not_warn_of_it():
    rows = [run("fault", number, 0, leaves=150, rises=130, fault_step=120) for number in range(4)]
    rows += [run("fault", number, 0, fault_step=120) for number in range(4, 8)]
    rows += [run("fault", number, 1) for number in range(8)]
    for row in rows[:8]:
        row["lse"] = [90.0 if step < 60 else 0.5 for step in PROBES]  # of all runs alike
    planted = {row["sign"]: row for row in alarm.summary(rows, ("fault",))}
    assert planted["lse"]["auc"] == 0.0  # a false alarm in the healthy ones
    assert planted["lse"]["warned"] == 0.0
    assert planted["peak"]["auc"] == 1.0
    assert alarm.summary(rows) == []  # no run has a twin with QK-norm
    assert [row["peak"][0][0] for row in alarm.pairs(rows)] == [120] * 4 + [STEPS // 20] * 4


def test_a_run_is_compared_with_runs_whose_twin_is_of_the_same_kind():
    """A healthy run with a planted fault may have larger logits than any failing one: its twin has them too."""
    rows = runs()
    calm = {name: found(rows, "peak")[name] for name in ("auc", "threshold", "warned", "lead")}
    for number in range(8):
        rows += [run("fault", number, 0, rises=30), run("fault", number, 1)]
        rows[-2]["peak"] = [1000.0] * len(PROBES)
    peak = found(rows, "peak")
    assert {name: peak[name] for name in calm} == calm
    assert (calm["auc"], calm["warned"], peak["auc, all together"]) == (1.0, 1.0, 0.5)
    assert alarm.advised(rows)[0]["threshold"] == 0.5
    by_family = {row["family"]: row for row in alarm.by_family(rows) if row["sign"] == "peak"}
    assert (by_family["rate"]["warned"], by_family["all together"]["warned"]) == (1.0, 0.0)
    assert (by_family["both"]["healthy"], by_family["all together"]["healthy"]) == (8, 16)


def test_an_event_before_the_first_look_has_no_date():
    """Runs that had left their twin when it was first looked for count as failing; no sign can come before that."""
    rows = runs()
    early = [run("rate", number, 0, leaves=0, rises=0) for number in range(16, 20)]
    twins = [run("rate", number, 1) for number in range(16, 20)]
    assert len(alarm.failed(alarm.pairs(rows + early + twins))) == 12
    assert len(alarm.dated(alarm.pairs(rows + early + twins))) == 8
    assert found(rows + early + twins, "peak") == found(rows, "peak")


def test_what_the_levels_of_health_would_have_done():
    rows = runs()
    for row in rows[8:10]:  # healthy
        row["peak"] = [60.0] * len(PROBES)
    table = {row["passes"]: row for row in alarm.levels(rows) if row["sign"] == "peak"}
    assert [row["level"] for row in table.values()] == ["note", "warn", "error", "critical", "diverging"]
    assert (table["above 50"]["healthy runs"], table["above 50"]["before the event"]) == (0.25, 1.0)
    assert (table["above 100"]["healthy runs"], table["above 100"]["failing runs"]) == (0.0, 0.0)  # 100 is not above it
    (evenness,) = (row for row in alarm.levels(rows) if row["sign"] == "evenness")
    assert (evenness["passes"], evenness["failing runs"], evenness["healthy runs"]) == ("below 0.05", 1.0, 0.0)
    assert table["above 50"]["lead"] == evenness["lead"] + 20


def test_healthy_runs_count_up_to_the_same_step():
    """Noise that grows with time says nothing, though the whole of a healthy run has more of it than a failing one before its
    event."""
    rows = runs()
    for row in rows:
        row["sum_p2"] = [step / STEPS for step in PROBES]
    assert found(rows, "sum_p2")["auc"] == 0.5
    assert found(rows, "sum_p2")["auc, whole runs"] == 0.0


def test_false_alarms_raise_the_threshold():
    rows = runs(bad=8, good=20)
    for row in rows:
        if row["number"] in range(8, 20) and not row["twin"]:  # more healthy runs than alarms are allowed
            row["peak"] = [80.0] * len(PROBES)
    assert found(rows, "peak")["threshold"] == 80.0
    assert found(rows, "peak")["lead"] > 0  # 100 is above it
    assert found(rows, "peak")["false alarms"] == 0.0


def test_swapped_labels_and_signs_are_said():
    """What is told of rows follows them: where healthy runs have the large logits, the sign is worse than chance."""
    rows = runs()
    for row in rows:
        if not row["twin"]:
            row["peak"] = [100.0 if row["number"] >= 8 else 1.0] * len(PROBES)
            row["grad_norm"] = [100.0 if row["number"] < 8 else 1.0] * len(PROBES)
            for sign in alarm.OURS:
                row[sign] = [0.1 + row["number"]] * len(PROBES) if sign not in alarm.FALLS else row[sign]
            row["evenness"] = [0.5] * len(PROBES)
    assert found(rows, "peak")["auc"] == 0.0
    assert found(rows, "grad_norm")["auc"] == 1.0
    assert " separates failing runs worse than gradient norm: AUC 0.50 against 1.00" in alarm.finding(rows)
    assert alarm.finding(runs()).startswith("Largest logit separates failing runs better than ")
    same = runs()
    for row in same:
        row["grad_norm"] = row.get("peak")
    assert " no better than gradient norm: AUC 1.00 against 1.00 (by 0.00 to 0.00)" in alarm.finding(same)


def table_of(rows):
    """As research/full_size.py writes rows: what is not finite is null."""

    def finite(value):
        if isinstance(value, list):
            return [finite(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {"columns": list(rows[0]), "rows": [[finite(value) for value in row.values()] for row in rows]}


def test_packed_rows_say_the_same():
    rows = runs(bad=6, good=7)
    rows[0]["peak"][-3] = math.inf
    short = unpacked({"fixed": {}, **table_of(alarm.pairs(rows))})
    assert len(short) == 13
    assert alarm.summary(short) == alarm.summary(rows)
    assert len(json.dumps(short)) < len(json.dumps(rows))


def test_thresholds_that_health_would_take():
    rows = runs(bad=8, good=40)
    healthy = [row for row in rows if row["number"] >= 8 and not row["twin"]]
    for index, row in enumerate(healthy):
        row["peak"] = [21.0 + index] * len(PROBES)  # 21 to 60
        row["evenness"] = [0.9 - 0.02 * index] * len(PROBES)  # 0.9 to 0.12
    table = {row["sign"]: row for row in alarm.advised(rows, share=0.1)}
    assert table["peak"]["threshold"] == 56.0  # four of forty are above it
    assert table["peak"]["threshold_low"] < 56.0 < table["peak"]["threshold_high"] <= 60.0
    assert table["peak"]["agrees"] == ("50" if table["peak"]["threshold_low"] <= 50 else "")
    assert table["evenness"]["threshold"] == in_float64(0.9 - 0.02 * 35)
    assert table["evenness"]["threshold_low"] < table["evenness"]["threshold"] < table["evenness"]["threshold_high"]
    assert (table["evenness"]["warns"], table["evenness"]["agrees"], table["peak"]["warns"]) == ("below", "", "above")
    assert {row["sign"]: row for row in alarm.advised(rows, share=0.5)}["peak"]["threshold"] == 40.0


def test_areas_and_curves():
    assert separation.area(separation.wins([2.0, 3.0], [1.0, 1.0])) == (1.0, 1.0, 1.0)
    assert separation.area(separation.wins([1.0], [1.0])).value == 0.5
    assert separation.area(separation.wins([1.0], [2.0])).value == 0.0
    assert math.isnan(separation.area(separation.wins([], [1.0])).value)
    assert separation.curve([2.0, 3.0], [1.0, 2.5]) == [(0.0, 0.0), (0.0, 0.5), (0.5, 0.5), (0.5, 1.0), (1.0, 1.0)]
    assert separation.median([5.0] * 9) == (5.0, 5.0, 5.0)


def test_intervals_hold_what_they_should():
    """Of the area of two normal variables a standard deviation apart, Φ(1/√2): in about 95 of 100 samples."""
    stream, inside, truth = random.Random(0), 0, 0.5 * (1 + math.erf(0.5))
    for _ in range(100):
        bad, good = ([stream.gauss(mean, 1) for _ in range(40)] for mean in (1, 0))
        one, other, apart = separation.areas([separation.wins(bad, good), separation.wins(good, bad)])
        inside += one.low <= truth <= one.high
        assert apart.value == in_float64(one.value - other.value)
        assert apart.low > 0
    assert 88 <= inside <= 100  # 88 or fewer of 100 at 95 %: once in 200


def test_z_scores_and_rises_are_of_the_past():
    values = [1.0, 2.0] * 20 + [50.0]
    scores = alarm.z_scores(values)
    assert max(scores[5:-1]) < 5 < scores[-1]
    assert alarm.rises([3.0 - 0.01 * step for step in range(50)]) == [0.0] * 50
    assert max(alarm.rises([2.0] * 30 + [3.0] * 30)) == 1.0


@pytest.mark.parametrize("family", warning.FAMILIES)
def test_a_twin_differs_in_one_thing(family):
    settings = warning.STUDY.presets["full"]
    faults = set()
    for number in range(6):
        one, other = (warning.made({"family": family, "number": number, "twin": twin}, settings) for twin in (0, 1))
        differs = {name for name in one if one[name] != other[name]}
        assert differs == ({"fault", "fault_step"} if family == "fault" else {"rule"})
        faults.add(one["fault"])
    assert faults == (set(FAULTS) - {""} if family == "fault" else {""})


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
    assert rescue.finding(rows) == (
        "Clip 30 at the warning rescues 100% of 4 failing runs (51% to 100%) and brings the median gap to the twin from 0.50 to "
        "0.02 nats; 100 steps later it rescues 0%"
    )
    worse = [{**row, "held_out": row["held_out"] + 1} if row["treatment"] in rescue.TREATMENTS else row for row in rows]
    assert rescue.finding(worse) == "No treatment rescues one of 4 failing runs; clip 30 leaves 1.02 nats to the twin"
    lost = [{**row, "held_out": math.nan} if row["treatment"] == "third" else row for row in rows]
    table = {(row["treatment"], row["delay"]): row for row in rescue.summary(lost)}
    assert table["third", 0]["rescued"] == 0.0
    assert table["third", 0]["gap"] == in_float64(rescue.UNTRAINED_LOSS - 2.0, 3)
    _, low, high = separation.share([True, False] * 5)
    assert low == in_float64(1 - high)
    assert separation.share([True] * 4).high == in_float64(1.0)


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
    assert table["1/√d_k"]["sensitivity"] == in_float64((1.0 + 0.0 + sensitivity.UNTRAINED_LOSS - 1.0) / 3, 3)
    assert table["QK-norm"]["sensitivity"] == in_float64((0.5 + 0.0 + 0.1) / 3, 3)
    assert sensitivity.finding(rows) == (
        "With QK-norm the loss depends less on the learning rate than with 1/√d_k: 0.20 against 1.85 nats at width 8 (one seed)"
    )
    assert table["1/√d_k"]["largest good lr"] == 1e-2
    again = [{**row, "seed": 1, "held_out": row["held_out"] + 0.01} for row in rows]
    assert sensitivity.finding(rows + again).endswith("than with 1/√d_k: 0.20 against 1.85 nats at width 8 (2 seeds)")
    third = [{**row, "seed": 2} for row in rows]
    assert sensitivity.finding(rows + again + third).endswith(" nats at width 8")
    wide = [{**row, "width": 16, "held_out": 1.0 + 0.01 * row["seed"]} for row in rows + again + third]
    assert sensitivity.finding(rows + again + third + wide).endswith(" at 16 (not decided)")
    found = next(row for row in sensitivity.summary(rows + again) if row["arm"] == "QK-norm")
    assert found["sensitivity_low"] <= found["sensitivity"] <= found["sensitivity_high"] < 0.22
    swapped = [{**row, "arm": {"sqrt_dk": "qk_norm"}.get(row["arm"], "sqrt_dk")} for row in rows + again]
    assert sensitivity.finding(swapped).startswith("With no arm the loss depends clearly less")
    partial = [*rows, again[0]]  # the second seed has one rate of one arm
    assert all(math.isnan(row["above 1/√d_k_low"]) for row in sensitivity.summary(partial))
    assert [row["sensitivity"] for row in sensitivity.summary(partial)] == [
        one["sensitivity"] for one in table.values()
    ]


def ablated(rule, lr, seed, loss):
    row = {**ABOUT, "head_dim": 64, "rule": rule, "lr": lr, "seed": seed, "step": STEPS, "loss": loss, "peak": 5.0}
    return {**row, "validation": loss, "held_out": loss, **{f"held_out_{index}": loss for index in range(1, 9)}}


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
    assert ablation.finding(rows).startswith("Leaving the scale out costs 0.00 ± 0.00 nats at d_k = 64")


def test_every_sign_has_a_name():
    assert set(alarm.NAMES) == {*SIGNS, *alarm.RIVALS, roc.KNOWN}
    assert len({alarm.named(sign) for sign in alarm.ALL}) == len(alarm.ALL)
