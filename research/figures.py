"""Makes what docs/ shows of the lab.

`python -m research.figures`           figures of the exact experiments, docs/numbers.md, the claims in docs/why-sqrt-dk.md
`python -m research.figures training`  figures of the experiments that train, and docs/training.md; minutes, resumed from
                                      attemper-results/. A folder after it is taken instead; names after that are measured
                                      and the others' sections kept
`python -m research.figures variance`  that figure alone
`python -m research.figures claims`    the claims in docs/why-sqrt-dk.md alone
`python -m research.figures protects`  what the scale protects: the figure and the animation, from attemper_lab/stored/

What ran on another machine comes from docs/data/, by research/full_size.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from attemper import __version__
from attemper_lab import NAMES, experiment, stored
from attemper_lab.claims import claims
from attemper_lab.claims.claims import NOTE_CLAIMS
from attemper_lab.claims.judgement import NOT_RUN, Evidence
from attemper_lab.engine import output, render
from attemper_lab.engine.command import RESULTS
from attemper_lab.engine.experiment import Experiment, Row, Rows, pick
from attemper_lab.engine.sweep import sweep
from attemper_lab.exact.jacobian import peak as peak_of
from attemper_lab.maths import gradients, moments
from attemper_lab.notes.lines import TEN_LINES
from attemper_lab.training import charlm, depth, fold, recall, transplant

from . import numbers
from . import protects as protected
from .full_size import FULL, STUDIED, TIMED, TIMINGS, insert, kept

DOCS = Path(__file__).parents[1] / "docs"
MEASURED = ("<!-- measured -->", "<!-- /measured -->")
TABLE = ("<!-- claims -->", "<!-- /claims -->")
LINES = ("<!-- ten lines -->", "<!-- /ten lines -->")
NOTED = {claim.id for claim in NOTE_CLAIMS}
"""Claims and experiments of docs/notes.md, which research/notes.py makes."""


def draw(name: str, results: Path | None = None) -> Rows:
    """Measure, or go on from results, and write the figure."""
    found = experiment(name)
    print(f"docs/figures/{name}.svg", file=sys.stderr)
    rows = sweep(found, found.settings(), results=results).rows
    output.write(DOCS / "figures" / f"{name}.svg", found, rows)
    return rows


def write_claims(judged: list[claims.JudgedClaim]) -> None:
    """The claims as a table in docs/why-sqrt-dk.md; a claim that was not run keeps the line of an earlier run, with its date."""
    page = DOCS / "why-sqrt-dk.md"
    head, rest = page.read_text(encoding="utf-8").split(TABLE[0])
    old, tail = rest.split(TABLE[1])
    kept = {line.split(" | ")[0]: line for line in old.splitlines()}
    made = f"{date.today()}, {__version__}, torch {torch.__version__}"
    lines = ["| | claim | verdict | numbers; *context* | measured |", "|---|---|---|---|---|"]
    for one in judged:
        if one.claim.id in NOTED:
            continue
        verdict = f"**{one.verdict}**" + (f": {one.condition}" if one.condition else "")
        cells = (
            one.claim.id,
            numbers.anchored(one.claim.id, one.claim.sentence),
            verdict,
            numbered(one),
            made if one.numbers else "",
        )
        line = f"| {' | '.join(map(numbers.cell, cells))} |"
        lines.append(kept.get(f"| {one.claim.id}", line) if one.verdict == NOT_RUN else line)
    page.write_text("\n".join([f"{head}{TABLE[0]}", *lines, f"{TABLE[1]}{tail}"]), encoding="utf-8")


def write_measured(evidence: Evidence) -> None:
    """The numbers that docs/why-sqrt-dk.md speaks of, with their intervals, as a table."""
    page = DOCS / "why-sqrt-dk.md"
    head, rest = page.read_text(encoding="utf-8").split(MEASURED[0])
    rows = [*_exact_rows(evidence), *_trained_rows(evidence["trained"])]
    page.write_text(f"{head}{MEASURED[0]}\n{table(rows)}\n{MEASURED[1]}{rest.split(MEASURED[1])[1]}", encoding="utf-8")


def _exact_rows(evidence: Evidence) -> list[Row]:
    spread, jacobian = pick(evidence["variance"], d=64)[0], pick(evidence["jacobian"], d=64)[0]
    peak_at, peak = peak_of(1024)
    wanted = (
        ("Var(q·k), d_k = 64", spread, "variance", "64"),
        ("Var(q·k/√d_k), d_k = 64", spread, "scaled_variance", "1"),
        ("kurtosis of q·k, d_k = 64", spread, "kurtosis", f"3 + 6/64 = {3 + 6 / 64:.3f}"),
        (
            "mean top weight, no scale, d_k = 64, 1024 keys",
            jacobian,
            "top_weight",
            f"{moments.top_weight_of_dot_products(64, 1024, 1.0):.4f}",
        ),
        ("share of rows with a top weight above 0.9, the same", jacobian, "one_hot", ""),
        (
            "E‖J‖_F², the same",
            jacobian,
            "square",
            f"{jacobian['square_theory']:.4f}; at most {peak:.4f}, at d_k = {peak_at}",
        ),
    )
    found: list[Row] = [
        {"quantity": name, "measured": f"{row[column]:.4g}", "interval": _ends(row[f"{column}_low"], row[f"{column}_high"]),
         "exact": exact}
        for name, row, column, exact in wanted
    ]  # fmt: skip
    for (n, unit), crossing in gradients.CROSSINGS.items():
        name = f"d_k from which the median gradient {gradients.UNITS[unit]} is smaller without the scale, {n} keys"
        error = 2 * gradients.CROSSING_ERRORS[n, unit]
        found.append(
            {
                "quantity": name,
                "measured": f"{crossing:.4g}",
                "interval": _ends(crossing - error, crossing + error),
                "exact": "",
            }
        )
    return found


def _trained_rows(rows: Rows) -> list[Row]:
    """Gradients while training, without the scale over those with it: the median over seeds, the least and the most."""
    found: list[Row] = []
    last = max(row["step"] for row in rows)
    for statistic, said in (("median", "median"), ("rms", "RMS")):
        for lr in sorted({row["lr"] for row in rows}):
            for step in (0, last) if lr == 3e-4 else (last,):
                some = pick(rows, lr=lr, step=step)
                ratio = charlm.gradient_ratios(some, f"grad_q_{statistic}")[lr][step]
                of_seed = [
                    charlm.gradient_ratios(pick(some, seed=seed), f"grad_q_{statistic}")[lr][step]
                    for seed in sorted({row["seed"] for row in some})
                ]
                name = f"{said} gradient at q, without the scale ÷ with it, step {step}, language model, lr {lr:g}"
                interval = f"{_ends(min(of_seed), max(of_seed))}, the seeds"
                found.append({"quantity": name, "measured": f"{ratio:.3g}", "interval": interval, "exact": ""})
    return found


def _ends(low: float, high: float) -> str:
    return f"{low:.4g} to {high:.4g}"


def numbered(one: claims.JudgedClaim) -> str:
    """The numbers that decide a claim, and in italics those beside them."""
    shown, beside = (
        "; ".join(f"{name} {render.number(value)}" for name, value in some.items())
        for some in (one.numbers, one.context)
    )
    return shown + (f"; *{beside}*" if beside else "")


def exact() -> None:
    for name in NAMES:
        if not experiment(name).trains and name not in TIMED and not NOTED & set(experiment(name).claims):
            draw(name)
    protects()
    print("docs/numbers.md, docs/why-sqrt-dk.md", file=sys.stderr)
    page = DOCS / "numbers.md"
    timings = kept(page, TIMINGS)
    page.write_text(numbers.page(numbers.measured()) + ("\n" + timings if timings else ""), encoding="utf-8")
    judged()


def write_lines() -> None:
    """The ten lines at the top of docs/why-sqrt-dk.md."""
    lines = [f"{index}. {words} `{command}`" for index, (words, command) in enumerate(TEN_LINES, start=1)]
    insert(DOCS / "why-sqrt-dk.md", LINES, lines)


def judged() -> None:
    write_lines()
    evidence = claims.gather(False, lambda line: None)
    write_measured(evidence)
    write_claims(claims.judge(evidence))


def protects() -> None:
    rows = stored.rows()
    print("docs/figures/protects.svg, docs/figures/protects-animated.svg", file=sys.stderr)
    (DOCS / "figures" / "protects.svg").write_bytes(output.render(protected.chart(rows).to_json(), ".svg"))
    (DOCS / "figures" / "protects-animated.svg").write_text(protected.animation(rows), encoding="utf-8")


ALONE: dict[str, Callable[[], None]] = {"protects": protects, "claims": judged}
"""What can be made alone besides the figures of experiments."""


SUMMARIES: dict[str, Callable[[Rows], list[Row]]] = {
    "recall": recall.summary,
    "charlm": charlm.differences,
    "depth": depth.summary,
    "fold": fold.summary,
    "transplant": lambda rows: [
        {"κ": kappa, "held-out loss": middle, "least": low, "most": high}
        for kappa, found in transplant.losses(rows).items()
        for middle, low, high in (found.values(),)
    ],
    "scores": lambda rows: recall.summary(rows, "score"),
}


NOTES = {
    "fold": "Adam's steps do not depend on the size of a weight: a W_q drawn √d_k times smaller moves √d_k times as far, "
    "relative to its size.",
    "transplant": "κ is defined as by Wortsman et al.: the RMS of q times that of k; logits reach κ√d_k. Wortsman et al. saw the "
    "loss deteriorate near κ = 1000. In this run it rises at a κ ten times smaller, and neither more steps nor larger batches "
    "change that. With `--steps 1000` (one seed) κ = 1, 10, 100, 1000 end at 1.91, 2.20, 2.32, 2.44; with `--batch 256` at "
    "2.08, 2.21, 2.28, 2.34: all train better, and the distance to κ = 1 grows. The logits have a spread of κ from the start, "
    "and above √(2 ln 48) = 2.8 a few keys have all the weight (`attemper run saturation`). The other differences from their "
    "figure (100,000 steps of 131,072 tokens, warm-up, clipped gradients, 512 keys) were not tried here. The results agree at "
    "κ = 10,000: attention does not lower the loss, which is that of counting pairs of characters or worse.",
    "scores": "The default stops at d = 256, which two cores finish in two minutes. d = 512 and 1024, where the table of Britz "
    "et al. has its lowest number, are at full size below. The vital signs of additive attention are measured by its own layer, "
    "because `watch` measures only scores that are products of q and k.",
}
"""What the numbers alone do not say."""


INTRO = """# Training

<!-- made by `python -m research.figures training`; do not edit -->

This page has the results of the experiments that train. First come the default settings on a CPU; `attemper run NAME` repeats
one. Then come the [full size](#full-size) and the [studies](#studies), measured on a GPU.

The tables have medians over seeds, with the smallest and the largest (`_low`, `_high`). A cost is the held-out loss without the
scale minus the loss with it: a mean with a 95 % interval over seeds and pieces of held-out text. If several learning rates were
tried, every rule has its own best (`lr`), chosen on sequences or text that are not the reported ones; `at_edge` says whether it
is the lowest or the highest that was tried. `fast_lr` is the rate with the fewest steps to 90 % (`steps_to_90`), `peak` the
largest logit, `first_entropy` the entropy of the weights at the first logged step, `first_gradient` the size of W_q's gradient
there.
"""


def training(results: Path, names: list[str]) -> None:
    """The page, section by section; a section that is not named stays as it is."""
    page = DOCS / "training.md"
    old = page.read_text(encoding="utf-8").partition(FULL[0])[0] if page.exists() else ""
    sections = {part.split("\n")[0]: part for part in old.split("\n## ")[1:]}
    for name in [one for one in SUMMARIES if not names or one in names]:
        sections[name] = section(name, draw(name, results))
    parts = [INTRO.rstrip(), *(f"## {sections[name].rstrip()}" for name in SUMMARIES)]
    beside = [part for part in (kept(page, FULL), kept(page, STUDIED)) if part]
    page.write_text("\n\n".join(parts) + "\n\n" + "\n".join(beside), encoding="utf-8")


def section(name: str, rows: Rows) -> str:
    """What an experiment found: the sentence, the figure, the settings, the table, and each number beside its source."""
    found, first = experiment(name), rows[0]
    fixed = [p.name for p in found.parameters if len({row[p.name] for row in rows}) == 1 and p.name != "device"]
    settings = ", ".join(f"{one} {first[one]}" for one in fixed)
    lines = [name, "", f"{found.question} {found.finding(rows)}.", "", *([NOTES[name], ""] if name in NOTES else [])]
    lines += [f"![{name}](figures/{name}.svg)", ""]
    lines += [f"{settings}; attemper {first['attemper']}, torch {first['torch']}, {date.today()}.", ""]
    return "\n".join([*lines, table(SUMMARIES[name](rows)), "", *expectations(found, rows)])


def expectations(found: Experiment, rows: Rows) -> list[str]:
    """What was expected beside what was measured, agreeing or not."""
    expected = [
        {
            "quantity": one.quantity,
            "expected": one.written()[0],
            "measured": one.measured,
            "within": one.written()[1],
            "agrees": "yes" if one.agrees else "**no**",
            "source": one.source,
        }
        for one in found.expect(rows)
    ]
    return [table(expected), ""] if expected else []


def table(rows: list[Row]) -> str:
    """Rows as a Markdown table."""
    head = list(rows[0])
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join(lines + [f"| {' | '.join(map(_cell, row.values()))} |" for row in rows])


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(names: list[str]) -> None:
    (DOCS / "figures").mkdir(exist_ok=True)
    if not names:
        exact()
    elif names[0] == "training":
        training(Path(names[1]) if names[1:] else RESULTS, names[2:])
    else:
        for name in names:
            if name in ALONE:
                ALONE[name]()
                continue
            draw(name, RESULTS if experiment(name).trains else None)


if __name__ == "__main__":
    main(sys.argv[1:])
