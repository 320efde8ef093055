"""docs/: what is said of the studies sensitivity, warning and rescue follows from the rows in docs/data/."""

import html
import math
import re
import statistics
from pathlib import Path

import pytest

from attemper.health import thresholds
from research.stacked import treatments
from research.studies import STUDIES, ablation, alarm, rescue, roc, sensitivity, study

DOCS = Path(__file__).parents[2] / "docs"
RUN = [name for name in STUDIES if (DOCS / "data" / f"{name}.json").exists()]
"""The studies that have been run: their rows are there."""


def words(name):
    """A page as one line: sentences are wrapped."""
    return " ".join((DOCS / name).read_text(encoding="utf-8").replace("**", "").split())


@pytest.fixture(scope="module")
def rows(full_size):
    return {name: full_size.unpack(name) for name in RUN}


@pytest.fixture(scope="module")
def signs(rows):
    return {row["sign"]: row for row in alarm.summary(rows["warning"])}


@pytest.fixture(scope="module")
def levels(rows):
    return {(row["sign"], row["passes"]): row for row in alarm.levels(rows["warning"])}


@pytest.fixture(scope="module")
def runs(rows):
    return alarm.pairs(rows["warning"])


def percent(row, column):
    return " to ".join(f"{100 * row[f'{column}_{end}']:.0f}" for end in ("low", "high"))


@pytest.mark.parametrize("name", ["sensitivity", "warning", "rescue", "alpha", "roc"])
def test_a_study_is_on_the_page_with_its_figure(name, rows):
    said = study(name).finding(rows[name])
    assert f" {said}." in (DOCS / "training.md").read_text(encoding="utf-8"), "run python -m research.run pack FOLDER"
    drawn = html.unescape((DOCS / "figures" / f"full-{name}.svg").read_text(encoding="utf-8"))
    assert max(re.findall(r"Title text '(.*?)'\" pointer-events", drawn), key=len) == said


def test_what_is_said_first_stands_on_the_page():
    assert words("data/STUDIES.md") in words("training.md"), "run python -m research.run pack FOLDER"
    bullets = [one for one in words("data/README.md").split(" - ") if re.search(rf"`({'|'.join(RUN[1:])}).json`", one)]
    assert len(bullets) == len(RUN[1:])
    assert all(one in words("training.md") for one in bullets), "run python -m research.full_size"


def test_the_runs_are_counted(runs):
    page, slow = words("data/STUDIES.md"), alarm.of_families(runs)
    assert f"{len(alarm.failed(runs))} failing and {len(alarm.healthy(runs))} healthy runs" in page
    assert f"In all {len(alarm.dated(slow))} failing runs whose departure has a date" in page
    assert (
        f"{len(alarm.failed(slow)) - len(alarm.dated(slow))} failing runs were above their twin at the first look"
        in page
    )
    planted = [run for run in runs if run["fault"] == "bfloat16"]
    calm = alarm.healthy(planted)
    assert (
        f"{len(calm)} of those healthy runs have bfloat16 scores at rates up to {max(run['lr'] for run in calm):.2g},"
        in page
    )
    assert f"harmed {len(alarm.failed(planted))} of {len(planted)} runs for good" in page
    assert f"which reach {max(value for run in calm for _, value in run['peak']):,.0f}." in page
    bad = [run for run in alarm.failed(slow) if run["family"] == "rate"]
    least = min(run["lr"] for run in bad)
    assert f"every run of `rate` fails from {least:.2g} on" in page
    assert len(bad) == sum(run["family"] == "rate" and run["lr"] >= least for run in runs)


def test_what_is_said_of_levels(levels, rows, runs):
    page, guide = words("data/STUDIES.md"), words("training-guide.md")
    fifty, hundred, thousand = (levels["peak", f"above {value}"] for value in (50, 100, 1000))
    good = len(alarm.healthy(alarm.of_families(runs)))
    bad = len(alarm.dated(alarm.of_families(runs)))
    lead = f"{fifty['lead_low']:.0f} to {fifty['lead_high'] + 0.01:.0f}"
    assert fifty["before the event"] == 1.0
    assert (
        f"it was above 50 before the loss left, {math.ceil(fifty['lead'])} steps before in the median ({lead})" in page
    )
    assert f"above 50 a median of {math.ceil(fifty['lead'])} steps ({lead}) before the loss showed it" in guide
    passed = round(good * fifty["healthy runs"])
    assert f"{passed} of {good} healthy runs passed 50 ({fifty['healthy runs']:.0%}".replace("%", " %") in page
    assert f"({fifty['healthy runs']:.0%}, {percent(fifty, 'healthy runs')})".replace("%", " %") in page
    assert hundred["healthy runs"] == 0.0
    assert f"none of them 100 ({percent(hundred, 'healthy runs')} %)" in page
    late = [f"{row['before the event']:.0%}".replace("%", " %") for row in (hundred, thousand)]
    assert f"{late[0]} of these runs passed 100 before their loss left, and {late[1]} passed 1,000." in page
    sources = {one.value: one.source for one in thresholds.PEAK}
    assert f"{thresholds.STUDY}: {bad} of {bad} failing and {passed} of {good} healthy runs passed it" in sources[50]
    assert f"{thresholds.STUDY}: 0 of {good} healthy runs passed it" in sources[100]
    assert f"all {bad} failing runs passed 50 before their loss left, and {passed} of {good} healthy ones did" in guide
    assert (
        f"{round(bad * thousand['before the event'])} of {bad} failing runs passed it before their loss left" in guide
    )
    every = len(alarm.failed(alarm.of_families(runs)))
    assert (
        f"{round(every * levels['peak', 'above 10000']['failing runs'])} of our {every} failing runs passed 10,000"
        in guide
    )
    notes = [levels["evenness", "below 0.05"], levels["saturated", "above 0.5"]]
    for row, threshold in zip(notes, (thresholds.COLLAPSED, thresholds.SATURATED), strict=True):
        assert f"{round(good * row['healthy runs'])} of {good} healthy runs passed it" in threshold.source
    shares = [round(100 * row["healthy runs"]) for row in notes]
    assert f"{shares[0]} and {shares[1]} % of healthy runs have such a head" in guide
    (peak,) = (row for row in alarm.advised(rows["warning"]) if row["sign"] == "peak")
    level = f"{peak['threshold']:.0f} ({peak['threshold_low']:.0f} to {peak['threshold_high']:.0f})"
    assert f"With one false alarm in ten the level is {level}" in page
    assert f"one false alarm in ten is at {level}" in guide
    assert peak["threshold_low"] <= 50 <= peak["threshold_high"], "the level of warn"


def test_what_is_said_of_signs(signs, rows, runs):
    page = words("data/STUDIES.md")
    table = {(row["family"], row["sign"]): row for row in alarm.by_family(rows["warning"])}
    peak = table["both", "peak"]
    assert (
        f"warns of {peak['warned']:.0%} of failing runs ({percent(peak, 'warned')}), {peak['lead']:.0f} steps before "
        f"({peak['lead_low']:.0f} to {peak['lead_high']:.0f})".replace("90%", "90 %")
        in page
    )
    worst = [signs[name]["auc"] for name in ("entropy", "evenness", "saturated")]
    assert {f"{value:.2f}" for value in worst} == {"0.98"}
    assert "The worst head's have an AUC of 0.98" in page
    some = [table["both", name] for name in ("evenness", "saturated")]
    share = " to ".join(f"{100 * row['warned']:.0f}" for row in some)
    lead = " to ".join(f"{row['lead']:.0f}" for row in some)
    assert f"leaves them {share} % of the failing runs, {lead} steps before" in page
    assert max(signs, key=lambda name: signs[name]["auc"]) == "sum_p2_mean"
    assert f"(Σ p²: {signs['sum_p2_mean']['auc']:.2f}), and lead by {signs['sum_p2_mean']['lead']:.0f} steps" in page
    update = signs["update_ratio"]
    assert update["auc, rate"] == update["auc, unscaled"] == 1.0
    assert f"and of {update['auc']:.2f} over both" in page
    assert f"That of the largest logit does not ({signs['peak']['auc']:.2f})" in page
    guide = words("training-guide.md")
    assert f"AUC {signs['peak']['auc']:.2f}, and above 50" in guide
    assert f"`logit_std` did as well ({signs['logit_std']['auc']:.2f})" in guide
    ours = [signs[name]["auc, fault"] for name in alarm.OURS]
    assert f"Signs of attention have an AUC of {min(ours):.2f} to {max(ours):.2f}" in page
    planted = alarm.failed(alarm.of_families(runs, ("fault",)))
    after = {
        fault: statistics.median(run["event"] - run["fault_step"] for run in planted if run["fault"] == fault)
        for fault in ("temperature", "rate")
    }
    assert (
        f"the loss leaves {after['temperature']:.0f} steps later (median); if the rate is, {after['rate']:.0f} step"
        in page
    )
    assert f"within {after['temperature']:.0f} steps if logits jump, within {after['rate']:.0f} if" in words(
        "data/README.md"
    )
    assert f"{after['temperature']:.0f} steps after logits were multiplied, and {after['rate']:.0f} step after" in guide
    before = [alarm.statistic(run, "peak") for run in planted]
    seen = [value for value in before if value > -math.inf]
    assert f"{len(before) - len(seen)} of these {len(before)} runs have no measured step in between" in page
    assert f"the largest logit was {min(seen):.0f} or more by then" in page
    norm = signs["grad_norm"]
    assert f"not higher ({norm['auc, rate']:.2f} and {norm['auc, unscaled']:.2f})" in page
    mixed = [signs[name]["auc, all together"] for name in alarm.OURS]
    rival = max(signs[name]["auc, all together"] for name in alarm.RIVALS)
    assert (
        f"an AUC of {min(mixed):.2f} to {max(mixed):.2f} for signs of attention and at most {rival:.2f} for rivals"
        in page
    )
    together = table["all together", "peak"]
    assert f"{100 * together['warned']:.0f} % of failing runs warned by the largest logit" in page
    assert together["lead"] == 0.0
    best = max((signs[name] for name in alarm.RIVALS), key=lambda row: row["auc"])
    assert best["sign"] == "loss_z"
    assert f"the z-score of the loss, has {best['auc']:.2f} and no lead" in words("data/README.md")
    low = [
        row
        for row in alarm.advised(rows["warning"])
        if row["sign"] in ("loss_z", "loss_rise", "grad_norm", "grad_norm_z")
    ]
    assert (min(row["warned"] for row in low), round(100 * max(row["warned"] for row in low))) == (0.0, 8)
    assert "warned of 0 to 8 % of them" in page


def test_what_is_said_of_treatments(rows):
    page, treat, guide, data = (
        words(f"{name}.md") for name in ("data/STUDIES", "treat", "training-guide", "data/README")
    )
    table = {(row["treatment"], row["delay"]): row for row in rescue.summary(rows["rescue"])}
    gaps = {name: f"{table[name, 0]['gap']:.2f}" for name in rescue.TREATMENTS}
    saved = [round(20 * table["clip30", delay]["rescued"]) for delay in (0, 50, 100, 200)]
    assert {row["runs"] for row in table.values()} == {20}
    assert {row["rescued"] for (name, _), row in table.items() if name != "clip30"} == {0.0}
    bare = f"{table['clip30', 0]['gap untreated']:.2f}"
    assert (
        f"rescued {saved[0]} of 20 runs, one of them with 0.050, the limit itself, and left {gaps['clip30']} of {bare} nats; 50 "
        f"steps later it rescued {saved[1]}," in page
    )
    assert saved[2:] == [0, 0]
    assert f"left {gaps['clip100']}, a third of the rate {gaps['third']}, the entropy floor {gaps['floor']}." in page
    assert f"they leave {gaps['clip100']}, {gaps['third']} and {gaps['floor']} of {bare} nats" in data
    assert (
        f"rescues {saved[0]} ({percent(table['clip30', 0], 'rescued')} %; one of them with 0.050, the limit itself), 50 steps "
        f"later {saved[1]}, later none" in data
    )
    assert f"left {gaps['third']}, and 100 steps later {table['third', 100]['gap']:.2f}" in guide
    assert f"left half of the gap ({table['clip30', 200]['gap']:.2f} nats)" in treat
    for name, label in (("clip30", "clip at 30"), ("clip100", "clip at 100"), ("third", "a third of the rate")):
        assert re.search(
            rf"\| {label} \| [^|]*\| {round(20 * table[name, 0]['rescued'])} of 20, {gaps[name]} \|", treat
        ), name
    assert f"| 0 of 20, {gaps['floor']} |" in treat


def test_what_is_said_of_rates(rows):
    page, treat = words("data/STUDIES.md"), words("treat.md")
    table = {(row["width"], row["arm"]): row for row in sensitivity.summary(rows["sensitivity"])}
    above = {
        arm: [table[width, arm]["above 1/√d_k"] for width in (128, 256)]
        for arm in {arm for _, arm in table} - {"1/√d_k"}
    }
    labels = {
        "QK-norm": "QK-norm",
        "clip 30": "clip at 30",
        "clip 100": "clip at 100",
        "QuacK": "`scale_rates` (QuacK)",
    }
    for arm, label in labels.items():
        assert f"| {label} | {', '.join(f'{value:.2f}' for value in above[arm])} |".replace("-0", "−0") in treat
        assert all(table[width, arm]["above 1/√d_k_high"] < 0 for width in (128, 256))
    share = (
        f"{treatments.WEIGHT} / {sensitivity.STUDY.presets['short']['layers']}"  # the study has the mean over layers
    )
    floored = ", ".join(f"{value:+.2f}" for value in above["entropy floor"])
    assert f"`floor(model, {treatments.FLOOR}, {share})` | {floored} (not decided)" in treat
    assert min(above, key=lambda arm: sum(above[arm])) == "QK-norm"
    assert f"comes near ({-above['clip 30'][0]:.2f} and {-above['clip 30'][1]:.2f})" in page
    assert f"is between ({-above['clip 100'][0]:.2f} and {-above['clip 100'][1]:.2f})" in page
    assert f"QuacK gives {-above['QuacK'][0]:.2f} and {-above['QuacK'][1]:.2f}" in page
    best = {key: row["best"] - table[key[0], "1/√d_k"]["best"] for key, row in table.items()}
    assert all(abs(value) < 0.02 for (width, arm), value in best.items() if width == 128 and arm != "no scale")
    assert f"QK-norm is {-best[256, 'QK-norm']:.2f} and a clip at 30 is {-best[256, 'clip 30']:.2f} better" in page
    assert f"it is {best[128, 'no scale']:.2f} and {best[256, 'no scale']:.2f} worse" in page
    for width, times in ((128, 3.33), (256, 1.0), (512, 3.0)):
        for arm in ("QK-norm", "clip 30"):
            found = table[width, arm]["largest good lr"] / table[width, "1/√d_k"]["largest good lr"]
            assert round(found, 2) == times
    wide = [row for row in rows["sensitivity"] if row["width"] == 512]
    assert min(row["held_out"] for row in wide if row["lr"] == 0.3) > 3
    left = {row["arm"]: row["sensitivity"] for row in sensitivity.summary([row for row in wide if row["lr"] < 0.3])}
    said = "{:.2f} nats with QK-norm, {:.2f} with a clip at 30, {:.2f} with 1/√d_k"
    assert said.format(left["QK-norm"], left["clip 30"], left["1/√d_k"]) in page


def test_what_is_said_below_the_best_rate(rows):
    """QK-norm costs something there; and at rates that are too high it is the best but where the guide says."""
    page, guide, treat = (words(f"{name}.md") for name in ("data/STUDIES", "training-guide", "treat"))
    every = [row for row in rows["sensitivity"] if row["seed"] < 2 or row["width"] < 512]  # as summary(): whole seeds
    held = {
        (width, arm, lr): statistics.fmean(
            row["held_out"] for row in every if (row["width"], row["arm"], row["lr"]) == (width, arm, lr)
        )
        for width in (128, 256, 512)
        for arm in sensitivity.ARMS
        for lr in sensitivity.RATES
    }
    above = {key: value - held[key[0], "sqrt_dk", key[2]] for key, value in held.items()}
    low = [above[width, "qk_norm", 3e-4] for width in (128, 256, 512)]
    said = f"{min(low):.2f} to {max(low):.2f}"
    assert f"by {said} nats at 0.0003 and by {above[128, 'qk_norm', 1e-3]:.2f} and" in page
    assert f"and {above[256, 'qk_norm', 1e-3]:.2f} at 0.001 (widths 128 and 256)" in page
    assert f"at rates below the best it cost {said} nats" in guide
    assert f"at rates below the best it cost {said} nats" in treat
    clips = [above[width, arm, lr] for width in (128, 256) for arm in ("clip30", "clip100") for lr in (3e-4, 1e-3)]
    assert max(map(abs, clips)) < 0.001
    not_best = [
        (width, lr)
        for width in (128, 256, 512)
        for lr in sensitivity.RATES
        if lr >= 1e-2 and min(sensitivity.ARMS, key=lambda arm: above[width, arm, lr]) != "qk_norm"
    ]
    assert not_best == [(256, 0.3), (512, 0.3)]


def test_the_rate_decides_within_a_family_and_the_runs_of_rescue_are_named(rows, runs):
    page = words("data/STUDIES.md")
    for family, said in (("rate", "0.0051"), ("unscaled", "0.00036")):
        some = alarm.of_families(runs, (family,))
        assert (
            max(run["lr"] for run in alarm.healthy(some)) < float(said) < min(run["lr"] for run in alarm.failed(some))
        )
        assert f"above {said}" in page
    bad = rescue.failing(rows["rescue"]).values()
    warned = [run["warned"] for run in bad]
    assert f"steps {min(warned)} to {max(warned)}, within the warm-up" in page
    assert max(warned) < rescue.STUDY.presets["short"]["warm_up"]
    (best,) = (
        row["lr"]
        for row in sensitivity.summary(rows["sensitivity"])
        if (row["width"], row["arm"]) == (rescue.STUDY.presets["short"]["width"], "1/√d_k")
    )
    times = [run["lr"] / best for run in bad if run["rule"] == "sqrt_dk"]
    assert f"rates {min(times):.0f} to {max(times):.0f} times the best, or without a scale" in page


def test_what_is_said_of_the_ablation(rows):
    data = words("data/README.md")
    table = {(row["head_dim"], row["rule"]): row for row in ablation.summary(rows["ablation"])}
    small, large = table[64, "none"], table[128, "none"]
    cost = [f"+{row['cost']:.2f} ± {(row['cost_high'] - row['cost_low']) / 2:.2f}" for row in (small, large)]
    assert f"costs {cost[0]} nats at d_k = 64 and {cost[1]} at 128" in data
    assert f"the largest logits are {small['peak']:.0f} and {large['peak']:.0f}" in data
    assert round(small["gradient, last"], 7) == 2e-6
    assert round(large["gradient, last"], 6) == 1.5e-5
    assert {table[dim, rule]["says"] for dim in (64, 128) for rule in ("dk", "qk_norm")} == {"not decided"}


def test_what_is_said_of_runs_near_the_critical_rate(rows):
    page = words("data/README.md")
    table = {row["sign"]: row for row in roc.summary(rows["roc"])}

    def whole(sign, name="auc"):
        row = table[sign]
        return f"{row[name]:.2f} ({row[f'{name}_low']:.2f} to {row[f'{name}_high']:.2f})"

    failing = alarm.dated(rows["roc"])
    assert f"{len(failing)} runs fail and {len(alarm.healthy(alarm.pairs(rows['roc'])))} stay healthy" in page
    assert (
        f"the largest logit has an AUC of {whole('peak')}, the best of 12 signs, the spectral norm, {whole('spectral_norm')},"
        in page
    )
    assert f"and the rate, as intended, {whole(roc.KNOWN)}" in page
    assert (
        f"log-sum-exp has {whole('lse', 'auc, together')} and the rate times the scale {whole(roc.KNOWN, 'auc, together')}"
        in page
    )
    assert f"{statistics.median(run['gap'] for run in failing):.2f} nats in the median" in page
    assert f"the largest logit has an AUC of {whole('peak')}" in words("data/STUDIES.md")
    for family in alarm.NORMED:
        rates = [run["lr"] for run in rows["roc"] if run["family"] == family]
        assert max(rates) / min(rates) < 1.38
