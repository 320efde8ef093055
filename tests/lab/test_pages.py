"""docs/why-sqrt-dk.md and docs/training.md: their commands exist, their figures are there, their claims are all the claims."""

import html
import math
import re
import statistics
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attemper_lab import NAMES, experiment, stored
from attemper_lab.claims import claims
from attemper_lab.claims.judgement import VERDICTS
from attemper_lab.engine.experiment import pick
from attemper_lab.maths import gradients, moments
from attemper_lab.maths.theory import critical_std
from attemper_lab.notes.lines import TEN_LINES
from attemper_lab.training import charlm
from attemper_lab.training.runs import last_loss, pooled, runs
from close import printed
from research.studies import ablation, alpha, causal, collapse, law

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "why-sqrt-dk.md").read_text(encoding="utf-8")
NOTES = (DOCS / "notes.md").read_text(encoding="utf-8")


def test_every_experiment_is_a_step_with_its_figure():
    """On one of the two pages: the derivation, or the notes sentence by sentence."""
    commands = re.findall(r"^attemper run (\w+)", PAGE + NOTES, flags=re.MULTILINE)
    assert set(commands) == set(NAMES)
    assert set(re.findall(r"\]\(figures/(\w+)\.svg\)", PAGE + NOTES)) == {*NAMES, "protects"}


@pytest.mark.parametrize("name", ["why-sqrt-dk.md", "notes.md", "training.md", "numbers.md"])
def test_links_lead_somewhere(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^):#]+)\)", text):
        assert (DOCS / link).exists(), f"{name} links to {link}"


def test_the_table_has_every_claim_with_a_verdict():
    rows = dict(re.findall(r"^\| (C\d+) \| .*? \| \*\*([\w ]+)\*\*", PAGE + NOTES, flags=re.MULTILINE))
    assert set(rows) == {claim.id for claim in claims.CLAIMS}
    assert set(rows.values()) <= set(VERDICTS)


def test_the_training_page_has_every_experiment_that_trains():
    text = (DOCS / "training.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)", text, flags=re.MULTILINE) == [n for n in NAMES if experiment(n).trains]


@pytest.mark.parametrize("name", [n for n in NAMES if experiment(n).trains or n in ("additive_cost", "parallel")])
def test_a_figure_says_what_its_page_says(name):
    """A figure that was not drawn again would keep an older finding as its title."""
    page = (DOCS / ("training.md" if experiment(name).trains else "numbers.md")).read_text(encoding="utf-8")
    for figure in (name, f"full-{name}") if experiment(name).trains else (name,):
        drawn = html.unescape((DOCS / "figures" / f"{figure}.svg").read_text(encoding="utf-8"))
        title = max(re.findall(r"Title text '(.*?)'\" pointer-events", drawn), key=len)  # panels have short ones
        assert f"{title}." in page, f"draw docs/figures/{figure}.svg again"


def test_what_the_page_says_of_training_is_in_the_stored_rows():
    """The ratios of the text, in its digits, from the rows that come with the package."""
    for column, lr, step, said in (
        ("grad_q_median", 1e-4, 0, "3.6"), ("grad_q_median", 1e-4, 53, "1.05"), ("grad_q_median", 1e-4, 800, "0.19"),
        ("grad_q_median", 3e-4, 800, "0.041"), ("grad_q_median", 1e-3, 800, "0.00008"),
    ):  # fmt: skip
        ratio = charlm.gradient_ratios(stored.rows(), column)[lr][step]
        assert ratio == printed(float(said), len(said.partition(".")[2]))
        assert said in PAGE
    ratios = charlm.gradient_ratios(stored.rows(), "grad_q_rms").values()
    assert min(min(some.values()) for some in ratios) > 1.7
    for (n, unit), crossing in gradients.CROSSINGS.items():
        rounded = f"d_k ≈ {crossing:.0f}" if crossing < 1000 else f"d_k ≈ {round(crossing, -1):.0f}"
        assert rounded in PAGE, (n, unit)


def test_what_the_pages_say_of_small_projections_is_in_the_rows(full_size):
    """The same ratios from std 0.02: the medians over seeds, without the scale ÷ with it, after the last step."""
    rows = [row for row in full_size.unpack("charlm") if row["init"] == "small" and row["rule"] in full_size.RULES]
    last = {lr: of_step[800] for lr, of_step in charlm.gradient_ratios(rows, "grad_q_median").items()}
    said = f"{last[1e-4]:.1f} and {last[3e-4]:.1f} times"
    assert said in PAGE
    for page in ("training.md", "data/README.md"):
        assert f"({said} after 800 steps)" in (DOCS / page).read_text(encoding="utf-8"), page


def test_what_the_page_says_of_the_collapse_is_its_fit(full_size):
    """R² and slopes of the text from the rows of docs/data, with the cells that never learned and without."""
    rows = full_size.unpack("collapse")
    fits = {row["variable"]: row for row in collapse.fits(rows)}
    joint, product, width, free = (
        fits[name] for name in (collapse.RATIO, collapse.PRODUCT, "√d_k alone", collapse.FREE)
    )
    *_, censored, freed = fits.values()
    words = " ".join(PAGE.split())
    said = f"explains it with R² = {product['r2']:.2f} ({product['left out']:.2f} if each cell is predicted without itself)"
    assert f"{said}, the ratio with {joint['r2']:.2f}, √d_k alone with {width['r2']:.2f}" in words
    assert f"two free slopes with {free['r2']:.2f} ({free['left out']:.2f})" in words
    assert f"(F test, p = {product['p']:.2f})" in words
    by_width, by_keys = map(float, freed["slope"].split(" and "))
    assert f"√d_k · (ln n)^{by_keys / by_width:.1f} instead of ^0.5 (p = {censored['p']:.3f})" in words
    assert f"{freed['cells'] - free['cells']} of {freed['cells']} cells had not learned" in words
    assert collapse.dropped(rows) == [(16, 512)]
    assert "d_k = 16 with 512 keys, is in no fit" in words


def test_the_ten_lines_are_those_of_the_package_and_of_the_rows(full_size, evidence):
    """Every number of the ten lines, from the rows that its command measures or that come with the package."""
    lines = [words for words, _ in TEN_LINES]
    for index, (words, command) in enumerate(TEN_LINES, start=1):
        assert f"\n{index}. {words} `{command}`\n" in PAGE, "run python -m research.figures claims"
    threshold = critical_std(1024)
    assert f"e^(−1/2) = {100 * math.exp(-0.5):.0f} %" in lines[4]
    assert f"one of 1024 keys holds {100 * moments.top_weight(8, 1024):.0f} %" in lines[4]
    half, hot = (moments.spread_at(1024, level) / threshold for level in (0.5, 0.9))
    said = f"{threshold:.1f} for 1024 keys, weight condenses: one key has {moments.top_weight(threshold, 1024):.2f} of it there"
    assert f"{said}, half at {half:.2f} times that, 0.9 at {hot:.0f} times" in lines[5]
    bare, scaled = (row["query_half"] for row in evidence["gradient"] if row["d"] == 1024)
    keys = evidence["gradient"][0]["n"]
    assert f"from {100 * bare:.0f} % of {keys} queries, with the scale from {100 * scaled:.0f} %" in lines[5]
    ends = {
        (rule, step): statistics.median(row["logit_std"] for row in pick(stored.rows(), rule=rule, lr=1e-3, step=step))
        for rule in ("none", "sqrt_dk") for step in (0, 800)
    }  # fmt: skip
    said = f"from {ends['none', 0]:.0f} to {ends['none', 800]:.0f}, with the scale from {ends['sqrt_dk', 0]:.1f}"
    assert f"{said} to {ends['sqrt_dk', 800]:.1f}" in lines[6]
    rows = {(row["head_dim"], row["rule"]): row for row in ablation.summary(full_size.unpack("ablation"))}
    costs = {
        dim: (rows[dim, "none"]["cost"], rows[dim, "none"]["cost_high"] - rows[dim, "none"]["cost"])
        for dim in (64, 128)
    }
    said = "{:.2f} ± {:.2f} nats higher without it at d_k = 64 and {:.2f} ± {:.2f} at 128"
    assert said.format(*costs[64], *costs[128]) in lines[7]
    slower = [row["slower"] for row in collapse.summary(full_size.unpack("collapse")) if math.isfinite(row["slower"])]
    assert f"takes {min(slower):.1f} to {max(slower):.0f} times as many steps" in lines[7]
    dk, norm = (pooled(stored.rows("larger"), rule) for rule in ("dk", "qk_norm"))
    assert f"1/d_k ends {dk.mean:.2f} nats ({dk.low:.2f} to {dk.high:.2f}) above 1/√d_k" in lines[8]
    assert f"QK-norm {-norm.mean:.2f} ({-norm.high:.2f} to {-norm.low:.2f}) below" in lines[8]
    stds = [row["variance"] ** 0.5 for row in pick(evidence["real_heads"], rule="sqrt_dk")]
    assert f"between {min(stds):.1f} and {max(stds):.0f}" in lines[9]
    first, *_, last = pick(alpha.alphas(full_size.unpack("alpha")), rule="sqrt_dk")
    said = f"like d_k^{first['alpha']:.2f} at first and d_k^{last['alpha']:.2f}"
    assert f"{said} ({last['alpha_low']:.2f} to {last['alpha_high']:.2f}) in the end" in lines[9]


def test_what_the_pages_say_of_the_causes_is_in_the_rows(full_size):
    """The shares of the three switches; of two cells of recall the steps of three arms and the gradients of the first step;
    of the language model what each arm costs."""
    rows = full_size.unpack("causal")
    words = " ".join(PAGE.split())
    tasks = [("recall", 8), ("recall", 32), causal.LANGUAGE]
    cells = [{row["switch"]: row for row in causal.shares(rows, task)} for task in tasks]

    def said(row, name="share"):
        ends = (f"{row[f'{name}_{end}']:.2f}" for end in ("low", "high"))
        return f"{row[name]:.2f} ({' to '.join(ends)})".replace("-", "−")

    wholes = [said(cell["all three"]) for cell in cells]
    assert (
        f"which is {' and '.join(wholes[:2])} more in ln steps. The language model ends {wholes[2]} nats higher"
        in words
    )
    back = [{row["switch"]: row for row in causal.undone(rows, task)} for task in tasks]
    names = {"jacobian": "the Jacobian has its scale back", "forward": "the forward pass has it back"}
    names["moves"] = "W_Q and W_K have rates divided by √d_k"
    for switch, name in names.items():
        assert f"| {name} | {' | '.join(said(task[switch], 'undone') for task in back)} |" in words
    effects = [
        [row["effect"] for row in causal.effects(rows, task) if row["switch"] == "jacobian"] for task in tasks[:2]
    ]
    assert f"costs {min(map(min, effects)):.1f} to {max(map(max, effects)):.1f} in ln steps whatever" in words
    steps, costs = [{}, {}], {}
    for row in map(arm_row, causal.summary(rows)):
        if row["task"] == causal.named(causal.LANGUAGE):
            costs[causal.arm_of(row)] = row
        else:
            steps["32" in row["task"]][causal.arm_of(row)] = f"{row['outcome']:.0f}"
        assert not row["at_edge"]
    notes = " ".join((full_size.DATA / "README.md").read_text().split())
    lost, saturated, faster = (said(costs[arm], "cost") for arm in ((0, 1, 0), (1, 0, 0), (0, 0, 1)))
    assert f"the lost gradient {lost}, the saturated forward pass {saturated} and the faster logits {faster}" in words
    assert f"alone cost it {lost}, {saturated} and {faster}" in notes
    others = [row["cost"] for task in tasks[:2] for row in map(arm_row, causal.summary(rows))
              if row["task"] == causal.named(task) and causal.arm_of(row) in ((1, 0, 0), (0, 0, 1))]  # fmt: skip
    assert f"The other two cost {min(others):.1f} to {max(others):.1f} each if they are alone" in words
    unscaled = sorted(f"{row['cost']:.2f}" for arm, row in costs.items() if arm[0])
    assert f"loses {unscaled[0]} to {unscaled[-1]} nats, whichever" in words
    assert f"still loses {said(costs[1, 1, 0], 'cost')}" in words
    worst = max(costs, key=lambda arm: costs[arm]["cost"])
    assert worst == (0, 1, 1)
    assert f"worst of all, {costs[worst]['cost']:.2f}" in words
    ends = {
        arm: row["logit_std_mean"]
        for arm in ((0, 0, 1), (1, 1, 1))
        for row in causal.of_arm(rows, causal.LANGUAGE, arm)
        if (row["lr"], row["seed"]) == (0.0018, 0)
    }
    assert f"their std ends at {ends[0, 0, 1]:.0f}, and at {ends[1, 1, 1]:.0f} without the scale" in words
    few, many = steps
    assert (
        f"takes {few[1, 1, 1]} steps to 90 % instead of {few[0, 0, 0]}, and {many[1, 1, 1]} instead of {many[0, 0, 0]}"
        in words
    )
    assert f"needs {few[1, 0, 1]} and {many[1, 0, 1]} steps" in words
    first = {
        (keys, what): statistics.median(row[f"grad_first_{what}"] for row in bare)
        / statistics.median(row[f"grad_first_{what}"] for row in scaled)
        for keys in (8, 32) for what in ("median", "rms")
        for bare, scaled in [[causal.of_arm(rows, ("recall", keys), arm) for arm in ((1, 1, 1), (0, 0, 0))]]
    }  # fmt: skip
    assert f"the median is {first[8, 'median']:.2f} times that with the scale with 8 keys" in words
    assert (
        f"{first[32, 'median']:.2f} times with 32, where the RMS is even {first[32, 'rms']:.1f} times as large" in words
    )
    gains = [(task["jacobian"], cell["all three"]) for task, cell in zip(back, cells, strict=True)]
    few, many = (f"{gain['undone']:.2f} of {whole['share']:.2f}" for gain, whole in gains[:2])
    small = f"{said(gains[2][0], 'undone')} of {gains[2][1]['share']:.2f} nats"
    assert f"back undoes {few} and {many} in ln steps in two small cells of recall, but {small}" in TEN_LINES[7][0]


def test_what_the_pages_say_of_alpha_is_in_the_rows(full_size):
    rows = full_size.unpack("alpha")
    said = {
        "why-sqrt-dk.md": " ".join(PAGE.split()),
        "README.md": " ".join((full_size.DATA / "README.md").read_text().split()),
    }
    first, peak, last = (pick(alpha.alphas(rows), rule="sqrt_dk", step=step)[0] for step in (0, 60, 585))
    (ended,) = pick(alpha.alphas(rows), rule="dk", step=585)
    rates = {rule: [row["alpha"] for row in alpha.by_rate(rows) if row["rule"] == rule] for rule in alpha.RULES}
    cost = {row["head_dim"]: row for row in alpha.summary(rows)}

    def whole(row, name, sign=1):
        ends = sorted(sign * row[f"{name}_{end}"] for end in ("low", "high"))
        return f"{sign * row[name]:.2f} ({ends[0]:.2f} to {ends[1]:.2f})".replace("(-", "(−")

    assert {row["seeds"] for row in (first, peak, last, ended)} == {3}
    assert {row["lr"] for row in alpha.alphas(rows)} == {0.01}
    for words in said.values():
        assert f"{first['alpha']:.2f} " in words
        assert all(whole(row, "alpha") in words for row in (peak, last, ended))
        assert f"ends between {min(rates['sqrt_dk']):.2f} and {max(rates['sqrt_dk']):.2f}" in words
        assert f"between {min(rates['dk']):.2f} and {max(rates['dk']):.2f} (one seed each)" in words
        assert f"{last['alignment at the largest d_k']:.1f} times" in words
        assert whole(cost[32], "cost", -1) in words
    assert whole(cost[64], "cost", -1) in said["README.md"]
    assert [dim for dim, row in cost.items() if row["says"] == "gains"] == [32]
    assert sum(one < 0 for row in cost.values() for one in of_pairs(rows, row)) == 12


def of_pairs(rows, row):
    """By how much 1/d_k ends above 1/√d_k, seed by seed, each at its best rate."""
    dk, scaled = (
        {run["seed"]: run["held_out"] for run in pick(rows, head_dim=row["head_dim"], rule=rule, lr=row[f"lr, {rule}"])
         if run.get("held_out_1") is not None}
        for rule in ("dk", "sqrt_dk")
    )  # fmt: skip
    return [dk[seed] - scaled[seed] for seed in sorted(scaled)]


def arm_row(row):
    """A line of the summary with the columns that `arm_of` reads."""
    rates = {("unscaled", "unscaled"): "same", ("scaled", "scaled"): "same", ("scaled", "unscaled"): "times"}
    rules = {name: "none" if row[name] == "unscaled" else "sqrt_dk" for name in ("forward", "jacobian")}
    return {**row, "rule": rules["forward"], "jacobian": rules["jacobian"],
            "rates": rates.get((row["forward"], row["moves"]), "divided")}  # fmt: skip


def test_what_the_page_says_of_the_law_is_in_the_rows(full_size):
    """The slice of `law`: the exponent of c for each number of keys, and the slow-down beside that of `collapse`."""
    rows, words = full_size.unpack("law"), " ".join(PAGE.split())
    notes = " ".join((full_size.DATA / "README.md").read_text().split())
    found = {(row["optimizer"], row["d"], row["pairs"]): row for row in law.slopes(rows)}
    assert {row["seeds"] for row in found.values()} == {3}
    for (optimizer, d, pairs), row in found.items():
        ends = f"c^{row['of c']:.2f}", f"({row['of c_low']:.2f} to {row['of c_high']:.2f}"
        said = f" with {pairs}" + " keys" * (pairs == 8) if (optimizer, d) == ("adam", 64) else ""
        for text in (words, notes):
            assert f"{ends[0]}{said} {ends[1]}" in text
    assert found["adam", 16, 128]["c, at most"] == 4
    steps = {(row["pairs"], row["c"]): row["steps"] for row in pick(law.summary(rows), optimizer="adam", d=64)}
    narrow = {row["pairs"]: row["slower"] for row in collapse.summary(full_size.unpack("collapse")) if row["d"] == 64}
    grown = [f"{steps[n, 8] / steps[n, 1]:.1f}" for n in (8, 32, 128)]
    other = [f"{narrow[n]:.1f}" for n in (8, 32, 128)]
    said = "by a factor of {} with 8 keys, {} with 32 and {} with 128, as in the runs above at width 64 ({}, {} and {})"
    assert said.format(*grown, *other) in words, said.format(*grown, *other)


def test_what_the_page_says_against_its_own_median_is_in_the_rows(full_size):
    """The rows of the larger model that speak against the vanishing median as the cause."""
    ends = {
        key: (last_loss(run), [row["grad_q_median"] for row in run if math.isfinite(row["grad_q_median"])][-1])
        for key, run in runs(pick(full_size.unpack("ablation"), head_dim=64), "rule", "lr", "seed").items()
    }
    words = " ".join(PAGE.split())
    scaled = ends["sqrt_dk", 0.0032, 0]
    assert f"the median gradient falls to {scaled[1]:.1e}".replace("e-0", "e-") in words
    assert f"and the loss, {scaled[0]:.2f}, is lower" in words
    best = min(loss for (rule, *_), (loss, _) in ends.items() if rule == "none")
    assert scaled[0] < best
    assert f"({best:.2f} or more)" in words
    slow, fast = ends["none", 0.00032, 0], ends["none", 0.001, 0]
    assert f"({slow[1]:.1e} against {fast[1]:.1e})".replace("e-0", "e-") in words
    assert f"the loss is worse ({slow[0]:.2f} against {fast[0]:.2f})" in words


def test_what_the_page_says_of_the_ablation_is_in_the_rows(full_size):
    rows = {(row["head_dim"], row["rule"]): row for row in ablation.summary(full_size.unpack("ablation"))}
    narrow, wide = rows[64, "none"], rows[128, "none"]
    words = " ".join(PAGE.split())
    said = f"it ends {narrow['cost']:.2f} nats higher at d_k = 64 and {wide['cost']:.2f} higher at d_k = 128, with logits up to"
    assert f"{said} {narrow['peak']:.0f} and {wide['peak']:.0f}" in words
    first, last = ([row[f"gradient, {when}"] for row in (narrow, wide)] for when in ("first", "last"))
    said = (
        f"is {first[0]:.2f} and {first[1]:.2f} times that with the scale at the first step, and {1e6 * last[0]:.0f} and"
    )
    assert f"{said} {1e6 * last[1]:.0f} millionths of it at the last" in words
    assert all(
        rows[dim, rule]["lr"] > 3 * rows[dim, "sqrt_dk"]["lr"] for dim in (64, 128) for rule in ("dk", "qk_norm")
    )
    assert {row["seeds"] for row in rows.values()} == {3}


def test_the_stored_rows_are_those_in_the_docs(full_size):
    kept = [
        row for row in full_size.unpack("charlm") if row["rule"] in full_size.RULES and row["init"] == full_size.INIT
    ]
    assert [{name: row[name] for name in full_size.TRAINED} for row in kept] == [
        {name: row[name] for name in full_size.TRAINED} for row in stored.rows()
    ], "run research/full_size.py"


def test_the_figure_of_what_the_scale_protects_is_of_these_rows():
    pytest.importorskip("altair")
    from research import protects

    drawn = html.unescape((DOCS / "figures" / "protects.svg").read_text(encoding="utf-8"))
    assert protects.finding(stored.rows()) in drawn, "run research/figures.py protects"
    moving = protects.animation(stored.rows())
    assert (DOCS / "figures" / "protects-animated.svg").read_text(encoding="utf-8") == moving
    tree = ElementTree.fromstring(moving)
    grown = [part for part in tree.iter() if part.tag.endswith("animate")]
    assert len(grown) == 4 * 3  # in each panel what is shown of the lines, and both ends of the cursor
    assert all(part.get("values").split(";")[1] == part.get("values").split(";")[2] for part in grown)


@pytest.mark.parametrize("figure", sorted((DOCS / "figures").glob("*.svg"), key=lambda path: path.name))
def test_a_title_is_one_finding(figure):
    """Two lines at most. Figures of the embedded model's heads are made elsewhere."""
    drawn = html.unescape(figure.read_text(encoding="utf-8"))
    titles = re.findall(r"Title text '(.*?)'\" pointer-events", drawn)
    assert max(map(len, titles), default=0) <= 2 * 92


def test_what_is_said_at_full_size_follows_from_the_rows_in_the_docs(full_size):
    page = full_size.kept(DOCS / "training.md", full_size.FULL)
    names = re.findall(r"^### (\w+)$", page, flags=re.MULTILINE)
    assert names == [name for name in NAMES if experiment(name).trains]
    for name in names:
        rows = full_size.unpack(name)
        assert f"{experiment(name).finding(rows)}." in page
        assert {row["device"] for row in rows} == {"cuda"}
        assert len({row["seed"] for row in rows}) >= 3
        assert {"entropy", "peak", "grad_q_rms", "grad_q_median"} <= set(rows[0])


def test_the_claims_at_full_size_are_judged_from_the_rows_in_the_docs(full_size):
    page = full_size.kept(DOCS / "training.md", full_size.FULL)
    evidence = {name: full_size.unpack(name) for name in ("recall", "charlm", "depth")}
    judged = [judgement for judgement in claims.judge(evidence) if judgement.numbers]
    assert [judgement.claim.id for judgement in judged] == ["C9", "C14", "C15", "C20"]
    for judgement in judged:
        assert (
            f"| {judgement.claim.id} | {judgement.claim.sentence} | **{judgement.verdict}**: {judgement.condition} |"
            in page
        )


def test_what_of_the_preset_was_not_run_is_named(full_size):
    """Values that nothing was run with, and learning rates that one rule was not run with and another was."""
    found = experiment("recall")
    rows = [
        {**dict.fromkeys(found.settings(preset="full")), **cell} for cell in found.cells(found.settings(preset="full"))
    ]
    assert full_size.unrun(found, rows) == []
    rows = [row for row in rows if row["d"] != 128 and not (row["rule"] == "dk" and row["lr"] > 1e-3)]
    assert full_size.unrun(found, rows) == ["d 128", "dk with lr 0.003, 0.01"]


def test_timings_follow_from_the_rows_in_the_docs(full_size):
    page = full_size.kept(DOCS / "numbers.md", full_size.TIMINGS)
    for name in full_size.TIMED:
        assert experiment(name).finding(full_size.unpack(name)) in page
    assert all(row["work_factor"] >= 0 for row in full_size.unpack("parallel")), "no time is less than nothing"


def test_packed_rows_come_back(full_size, tmp_path, monkeypatch):
    from attemper_lab.engine.store import Store

    rows = [{"rule": "none", "seed": seed, "x": 1 / 3, "y": float("nan"), "step": 2} for seed in (0, 1)]
    rows[1]["at the end"] = 0.5  # a column that only some rows have
    cell = {"rule": "none", "d": 4, "lr": 0.1, "steps": 1, "batch": 1, "pairs": 2, "device": "cpu"}
    with Store(tmp_path, "recall") as store:
        for seed in (1, 0):
            store.add({**cell, "seed": seed}, [rows[seed]])
        store.add({**cell, "seed": 0, "lr": 0.2}, [rows[0]])  # its other seed is missing
    monkeypatch.setattr(full_size, "DATA", tmp_path / "data")
    full_size.pack(tmp_path)
    found = full_size.unpack("recall")
    assert [row["seed"] for row in found] == [0, 1]
    assert found[0]["x"] == 0.3333
    assert found[0]["y"] != found[0]["y"]
