"""Runs a study of research/studies, and makes what docs/ shows of it.

`python -m research.run run NAME --results FOLDER --seconds 250 --device cuda`
                        measures what is missing in FOLDER/NAME.jsonl; the same command continues it. --preset tiny tries it out
`python -m research.run check --device cuda`
                        half a minute: recorded steps equal steps that are not, in float64; and how long `--preset short`
                        would take, or `tiny` on a CPU
`python -m research.run show NAME --results FOLDER`
                        the finding and the table of the rows in FOLDER
`python -m research.run thresholds --results FOLDER --false-alarms 0.1`
                        what every sign's threshold would be, from the rows of `warning`, beside those that `health` has
`python -m research.run pack FOLDER [FOLDER …]`
                        rows of the folders into docs/data/, the figures docs/figures/full-NAME.svg, the end of docs/training.md

Training needs torch alone; figures need `attemper[lab]`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attemper_lab.engine.experiment import Row

from .stacked import recall
from .stacked.language import Dimensions, LanguageStack
from .stacked.repeated import Repeated
from .stacked.study import Deadline, Study, free, work
from .studies import STUDIES, alarm, alpha, causal, collapse, law, rescue, study


def rows_of(path: Path) -> list[Row]:
    """The rows of a results file."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [row for line in lines for row in json.loads(line)["rows"]]


def show(found: Study, rows: list[Row]) -> None:
    print(found.finding(rows))
    tabbed(found.summary(rows))


def tabbed(table: list[Row]) -> None:
    if table:
        print(*table[0], sep="\t")
        for row in table:
            print(*(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()), sep="\t")


def pack(folders: list[Path]) -> None:
    """Rows into docs/data/, those of a study from all folders together, then the pages."""
    from . import full_size

    for name in STUDIES:
        paths = [path for folder in folders if (path := folder / f"{name}.jsonl").exists()]
        if paths:
            full_size.write(name, study(name).packed([row for path in paths for row in rows_of(path)]))
    pages()


def pages() -> None:
    """The figures, and the end of docs/training.md, from docs/data/: first what STUDIES.md there says of them."""
    from attemper_lab.engine import output

    from . import full_size
    from .figures import table

    lines = ["", "# Studies", "", INTRO, "", (full_size.DATA / "STUDIES.md").read_text(encoding="utf-8").strip(), ""]
    for name in STUDIES:
        if not (full_size.DATA / f"{name}.json").exists():
            continue
        found, rows = study(name), full_size.unpack(name)
        said = found.finding(rows)
        figure = full_size.DOCS / "figures" / f"full-{name}.svg"
        figure.write_bytes(output.render(found.draw(rows, said).to_json(), ".svg"))
        fixed = [one for one in ("parameters", "tokens", "steps", "text", "torch", "python") if one in rows[0]]
        facts = ", ".join(f"{one} {rows[0][one]}" for one in fixed if len({row.get(one) for row in rows}) == 1)
        lines += [f"### {name}", "", f"{found.question} {said}.", "", f"![{name}](figures/{figure.name})", ""]
        lines += [f"{len(rows)} rows; {facts}.", ""]
        for words, part in tables(name, found.summary(rows), rows):
            lines += [words, "", table(readable(part)), ""] if part else []
        print(f"{figure.name}: {said}")
    full_size.insert(full_size.DOCS / "training.md", full_size.STUDIED, lines)


def tables(name: str, summary: list[Row], rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """The tables of a study, each after what its columns are."""
    if name == "collapse":
        return [(COLUMNS[name], summary), (FITS, collapse.fits(rows))]
    if name == "causal":
        shares = [share for task in causal.measured(rows) for share in causal.shares(rows, task)]
        return [(COLUMNS[name], summary), (SHARES, shares)]
    if name == "law":
        return [(COLUMNS[name], summary), (OF_C, law.slopes(rows)), (EXPONENTS, law.laws(rows))]
    if name == "alpha":
        return [(COLUMNS[name], summary), (SLOPES, alpha.alphas(rows)), (RATES, alpha.by_rate(rows))]
    if name != "warning":
        return [(COLUMNS[name], summary)]
    areas = [{key: value for key, value in row.items() if key.startswith(("sign", "auc"))} for row in summary]
    leads = [{key: row[key] for key in row if key != "runs" and not key.startswith("auc")} for row in summary]
    odd = alarm.of_half(alarm.of_families(alarm.pairs(rows)), 1)
    return [
        (AREAS, areas),
        (LEADS.format(failing=len(alarm.dated(odd)), healthy=len(alarm.healthy(odd))), leads),
        (FAMILIES, alarm.by_family(rows)),
        (LEVELS, alarm.levels(rows)),
        (THRESHOLDS, health(rows)),
    ]


def readable(rows: list[Row]) -> list[Row]:
    """Without columns that hold no number; a number and its interval in one; what is infinite was never reached."""
    empty = {name for name in rows[0] if all(isinstance(row[name], float) and math.isnan(row[name]) for row in rows)}
    return [
        {
            name: NAMED[name](value) if name in NAMED else with_interval(row, name)
            for name, value in row.items()
            if name not in empty and not name.endswith(("_low", "_high"))
        }
        for row in rows
    ]


def with_interval(row: Row, name: str) -> object:
    """A value of a table, with its interval where it has one."""
    value, low, high = row[name], row.get(f"{name}_low", math.nan), row.get(f"{name}_high", math.nan)
    if value == math.inf:
        return "never"
    if isinstance(value, float) and math.isnan(value):
        return "–"
    if math.isnan(low) or math.isnan(high):
        return int(value) if isinstance(value, float) and value >= 1000 and value.is_integer() else value
    return f"{value:.3g} ({low:.3g} to {'never' if high == math.inf else f'{high:.3g}'})"


def health(rows: list[Row], share: float = alarm.FALSE_ALARMS) -> list[Row]:
    """The thresholds that runs would set, of the signs that `health` has thresholds for."""
    return [row for row in alarm.advised(rows, share) if row["health"]]


NAMED = {"sign": alarm.named, "treatment": rescue.TREATMENTS.__getitem__}
"""Column → what its values are called in a table."""


COLUMNS = {
    "collapse": (
        "`d`: the width of the one head; `pairs`: number of keys; `x`: √d_k/√(2 ln n); `steps` and `lr`: of each rule at its\n"
        "fastest rate; `at_edge`: which of these rates are at the edge of those tried. `slower`: steps without a scale divided\n"
        "by steps with it; `slower_least`: a lower bound of it where 90 % were never reached."
    ),
    "ablation": (
        "Each rule at the rate with the lowest loss on validation text (one seed; then three at that rate). `held_out`: nats\n"
        "per byte, median and range of the seeds; `cost`: the mean above 1/√d_k, with a 95 % interval; `peak`: the largest\n"
        "logit; `gradient`: that of the median query in the first and the last step, divided by the one with 1/√d_k."
    ),
    "sensitivity": (
        "`arm`: the rule or treatment. `sensitivity`: the mean over rates of the arm's loss above its best, in nats; `best`:\n"
        "the lowest mean loss of a rate; `lr`: that rate; `largest good lr`: the highest rate within 0.05 nats of it. `peak`:\n"
        "the largest logit of any run of the arm, at any rate. A clip acts after the step in which a logit is too large, so at\n"
        "a rate of 0.3 logits exceed it for one step."
    ),
    "causal": (
        "`forward`, `jacobian`, `moves`: whether the forward pass, the softmax's Jacobian and the steps of the logits are as\n"
        "with the scale. `never`: runs that never learned, which count with the steps they had; `outcome`: steps to 90 % on\n"
        "recall, nats per byte of the language model; `cost`: ln of steps, or nats, more than the arm that is scaled\n"
        "throughout; mean and 95 % interval over seeds."
    ),
    "law": (
        "`c`: of the scale c/√d_k; `pairs`: number of keys; `steps`: to 90 % at the fastest rate; `steps_least`: a lower\n"
        "bound of them."
    ),
    "alpha": (
        "`cost`: nats by which 1/d_k ends above 1/√d_k, each at its best rate; `alignment`: std(q·k) over |q||k|/√d_k at the\n"
        "end, 1 for random directions."
    ),
    "roc": (
        "`auc`: over the pairs of runs of one family, then over all pairs, and within each family; `lr · scale` is known before\n"
        "the first step. Over all pairs it also counts what tells the families apart."
    ),
    "rescue": (
        "`delay`: steps from the warning to the treatment; `lr / 3` divides the rate by 3 from there on. `gap`: nats above the\n"
        "twin at the end, the median of the runs; `gap untreated`: the same for these runs without a treatment."
    ),
}


FITS = (
    "Linear fits of ln(`slower`) to the logarithm of each variable. `left out` is the R² of cells that are predicted without\n"
    "themselves, `error` that of the fit in nats, `p` the chance of explaining so much less than two slopes if one is right."
)


SHARES = "Each switch's share of the whole: its Shapley value, mean and 95 % interval over seeds; ln of steps, or nats."
OF_C = (
    "The exponent of c for each number of keys, among the cells that learned; mean and 95 % interval over the seeds that have\n"
    "all of these cells."
)
EXPONENTS = "The exponents of steps ∝ (c · (ln n)^a)^b, and that of d_k beside them; 95 % of a bootstrap over cells."
SLOPES = (
    "α of std(q·k) ∝ d_k^α by step, at the one rate that is best over all head dims; mean and 95 % interval over seeds."
)
RATES = "The same at the last step, at every rate that all head dims have; one seed."


AREAS = (
    "How well each sign separates failing from healthy runs. `auc` is of `rate` and `unscaled`, over the failing runs whose\n"
    "departure has a date. The other columns are the same within each family, over all families whatever their twins are\n"
    "(`all together`), and with healthy runs up to their end (`whole runs`). A sign is that of the worst head, unless it is\n"
    "called a mean. An interval of 1 to 1 says little: if the runs are perfectly separated, so is every bootstrap sample."
)


LEADS = (
    "How early each sign warns. The threshold is set on the runs of `rate` and `unscaled` with even numbers, so that at most\n"
    "one in ten of the healthy ones exceeds it. `warned`, `lead` (in steps, 0 if there was no warning) and `false alarms` are\n"
    "measured on the runs with odd numbers: {failing} failing and {healthy} healthy runs."
)


FAMILIES = (
    f"Leads by family. The threshold is the one that {alarm.FALSE_ALARMS:.0%} of the family's healthy runs exceed; it is set\n"
    "and measured on the same runs. `both` is `rate` and `unscaled`, whose twins have QK-norm. `all together` also counts\n"
    "failing runs whose departure has no date. Its healthy runs are of two kinds, and no threshold fits both."
)


LEVELS = (
    "What the thresholds of `health` would have done in `rate` and `unscaled`: the share of healthy and of failing runs that\n"
    "pass them at any step, and, for failing runs whose departure has a date, the share that passes them before it (the event)."
)


THRESHOLDS = (
    f"The thresholds at which {alarm.FALSE_ALARMS:.0%} of the healthy runs of `rate` and `unscaled` raise an alarm, with a 95 %\n"
    "bootstrap interval over runs, beside those that `health` has. `python -m research.run thresholds --results FOLDER\n"
    "--false-alarms SHARE` prints all signs for any share. These are small models and short runs."
)


INTRO = (
    "A study is hundreds of training runs, stacked on one H200: `python -m research.run run NAME --device cuda --results\n"
    "FOLDER` measures, and `python -m research.run pack FOLDER` writes this part. [lab.md](lab.md) says what each study asks."
)


SMALL = Dimensions(width=16, head_dim=8, layers=2, length=32, batch=4, steps=24, warm_up=4)
TREATED = [
    {"rule": rule, "lr": 0.01, "seed": seed, "treatment": treatment, "start": 3}
    for seed, (rule, treatment) in enumerate(
        (("none", ""), ("sqrt_dk", "clip1"), ("qk_norm", ""), ("sqrt_dk", "floor"), ("sqrt_dk", "quack"))
    )
] + [{"rule": "sqrt_dk", "lr": 0.01, "seed": 0, "fault": "bfloat16", "fault_step": 5}]
ASKED = [
    {"d": 16, "pairs": pairs, "rule": rule, "lr": 0.01, "seed": 0} for pairs in (4, 9) for rule in ("none", "sqrt_dk")
]
SWITCHED = {
    task: [causal.cell_of(task, arm, 0.01, 0, {"d": 16}) for arm in causal.ARMS]
    for task in (("recall", 4), causal.LANGUAGE)
}


def check(device: str, steps: int = 24) -> None:
    """Whether recording changes a step, and what the presets cost on this machine."""
    wide = torch.float64
    stacks: dict[str, Callable[[], Any]] = {
        "recall": lambda: recall.RecallStack(16, ASKED, 8, device, wide),
        "language": lambda: LanguageStack(SMALL, TREATED, device, wide, wide, every=5),
        "causal, recall": lambda: recall.RecallStack(16, SWITCHED["recall", 4], 8, device, wide),
        "causal, language": lambda: LanguageStack(SMALL, SWITCHED[causal.LANGUAGE], device, wide, wide, every=5),
    }
    for name, made in stacks.items():
        ends = []
        for recorded in (True, False):
            stack = made()
            for one in vars(stack).values():
                if isinstance(one, Repeated) and not recorded:
                    one.warm_up = steps
            for _ in range(steps):
                stack.train()
            ends.append(stack.parameters.flat.clone())
        apart = float((ends[0] - ends[1]).abs().max())
        print(f"{name}: recorded and not recorded are {apart:.1e} apart after {steps} steps", flush=True)
    for name in STUDIES[1:]:
        found = study(name)
        timed(found, ("short" if "short" in found.presets else "full") if device.startswith("cuda") else "tiny", device)


def timed(found: Study, preset: str, device: str, steps: int = 12) -> None:
    """A few steps of the first stack (of `causal`, the language model's), and what all its runs would take at that speed."""
    settings = {**found.presets[preset], "pairs": ()} if found.name == "causal" else found.presets[preset]
    cells, given = found.plan([], settings), {**settings, "steps": steps, "warm_up": 4, "every": 10}
    began = time.perf_counter()
    measured = [rows for _, rows in found.train(cells, [], given, device, Deadline(60))]
    free(device)
    first = time.perf_counter() - began
    given = {**given, "steps": 3 * steps}
    began = time.perf_counter()
    measured += [rows for _, rows in found.train(cells, [], given, device, Deadline(60))]
    free(device)
    each = (time.perf_counter() - began - first) / (2 * steps)
    share = found.total(settings) / sum(found.weight(cell, settings) for cell in cells)
    print(
        f"{found.name} {preset}: {len(cells)} runs, {1 / each:.1f} steps/s, a stack {each * settings['steps']:.0f} s, "
        f"everything about {each * settings['steps'] * share:.0f} s ({len(measured)} runs tried)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "show"):
        one = commands.add_parser(name)
        one.add_argument("name", choices=STUDIES)
        one.add_argument("--results", type=Path, default=Path("attemper-results"))
        if name == "run":
            one.add_argument("--preset", default="full")
            one.add_argument("--device", default="cpu")
            one.add_argument("--seconds", type=float, default=600.0)
    levels = commands.add_parser("thresholds")
    levels.add_argument("--results", type=Path, default=Path("attemper-results"))
    levels.add_argument("--false-alarms", type=float, default=alarm.FALSE_ALARMS)
    commands.add_parser("check").add_argument("--device", default="cpu")
    commands.add_parser("pack").add_argument("folder", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.command in ("pack", "check"):
        pack(asked.folder) if asked.command == "pack" else check(asked.device)
        return
    if asked.command == "thresholds":
        tabbed(alarm.advised(rows_of(asked.results / "warning.jsonl"), asked.false_alarms))
        return
    found = study(asked.name)
    if asked.command == "run":
        if asked.preset not in found.presets:
            parser.error(f"unknown --preset {asked.preset!r}. Known: {', '.join(found.presets)}.")
        work(found, asked.preset, asked.results, asked.device, asked.seconds)
    show(found, rows_of(asked.results / f"{asked.name}.jsonl"))


if __name__ == "__main__":
    main()
