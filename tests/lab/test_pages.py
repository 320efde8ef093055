"""docs/why-sqrt-dk.md and docs/training.md: their commands exist, their figures are there, their claims are all the claims."""

import html
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attemper.lab import NAMES, experiment, stored
from attemper.lab.claims import claims
from attemper.lab.claims.judgement import VERDICTS
from attemper.lab.maths import gradients
from attemper.lab.studies import ablation, collapse
from attemper.lab.training import charlm
from close import printed

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


def test_the_page_has_the_derivation_whole():
    """What a class is handed: the formula, the shift, mean and variance of a term and of the sum, the root, J, other forms."""
    for words in (
        "softmax(Q Kᵀ / √d_k) V", "softmax(z + c) = softmax(z)", "E[q_i k_i]", "Var(q_i k_i)", "E[q·k] = 0", "Var(q·k) = d_k",
        "J = diag(p) − p pᵀ", "√512 = 22.6", "(|q||k|/√d_k) cos θ", "wᵀ tanh(W_q q + W_k k)", "(d_k − 1) E‖J‖_F² + E‖J Kq/|q|‖²",
        "So what does the scale protect?", "We suspect", "Random-energy model", "2505.24333", "Hong, Lee 2025",
    ):  # fmt: skip
        assert words in PAGE, words


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
    rows = [row for row in full_size.unpack("charlm") if row["init"] == "small" and row["rule"] in stored.RULES]
    last = {lr: of_step[800] for lr, of_step in charlm.gradient_ratios(rows, "grad_q_median").items()}
    said = f"{last[1e-4]:.1f} and {last[3e-4]:.1f} times"
    assert said in PAGE
    for page in ("training.md", "data/README.md"):
        assert f"({said} after 800 steps)" in (DOCS / page).read_text(encoding="utf-8"), page


def test_what_the_page_says_of_the_collapse_is_its_fit(full_size):
    """R² and slopes of the text from the rows of docs/data, with the cells that never learned and without."""
    joint, width, _, free, censored = collapse.fits(full_size.unpack("collapse"))
    words = " ".join(PAGE.split())
    assert f"explains it with R² = {joint['r2']:.2f}, √d_k alone with {width['r2']:.2f}" in words
    assert f"as two variables with {free['r2']:.2f}" in words
    by_width, by_keys = (f"{float(slope):.1f}" for slope in free["slope"].split(" and "))
    assert f"(√d_k)^{by_width}. But more keys make it larger, like (ln n)^{by_keys}" in words
    by_width, by_keys = (f"{float(slope):.1f}" for slope in censored["slope"].split(" and "))
    assert f"they bring the exponents to {by_width} and {by_keys}" in words
    assert f"{censored['cells'] - free['cells']} of {censored['cells']} cells had not learned" in words


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
    assert all(rows[dim, rule]["says"] == "not decided" for dim in (64, 128) for rule in ("dk", "qk_norm"))
    assert all(
        rows[dim, rule]["lr"] > 3 * rows[dim, "sqrt_dk"]["lr"] for dim in (64, 128) for rule in ("dk", "qk_norm")
    )
    assert {row["seeds"] for row in rows.values()} == {3}


def test_the_stored_rows_are_those_in_the_docs(full_size):
    kept = [row for row in full_size.unpack("charlm") if row["rule"] in stored.RULES and row["init"] == stored.INIT]
    assert [{name: row[name] for name in stored.COLUMNS} for row in kept] == [
        {name: row[name] for name in stored.COLUMNS} for row in stored.rows()
    ], "run scripts/full_size.py"


def test_the_figure_of_what_the_scale_protects_is_of_these_rows():
    pytest.importorskip("altair")
    from attemper.lab.figures import protects

    drawn = html.unescape((DOCS / "figures" / "protects.svg").read_text(encoding="utf-8"))
    assert protects.finding(stored.rows()) in drawn, "run scripts/figures.py protects"
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
    judged = [one for one in claims.judge(evidence) if one.claim.trains and one.numbers]
    assert [one.claim.id for one in judged] == ["C9", "C15", "C20"]
    for one in judged:
        assert f"| {one.claim.id} | {one.claim.sentence} | **{one.verdict}**: {one.condition} |" in page


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
    from attemper.lab.engine.store import Store

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
