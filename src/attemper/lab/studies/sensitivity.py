"""sensitivity: how much does the loss depend on the learning rate, without a scale, with 1/√d_k, and with each treatment?

After Wortsman et al. 2023 (arXiv:2309.14322): the mean over rates, spaced evenly over three decades, of how far the loss ends
above the best of the same arm; no run counts as worse than it began.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from ..engine.experiment import Cell, Row, Rows, pick
from ..maths.stats import over_seeds
from ..stacked.fit import about, fit
from ..stacked.study import Deadline, Settings, Study, missing
from ..stacked.text import VOCABULARY
from ..training.runs import NOTHING

ARMS: dict[str, tuple[str, str, str]] = {
    "none": ("none", "", "no scale"),
    "sqrt_dk": ("sqrt_dk", "", "1/√d_k"),
    "qk_norm": ("qk_norm", "", "QK-norm"),
    "quack": ("sqrt_dk", "quack", "QuacK"),
    "clip100": ("sqrt_dk", "clip100", "clip 100"),
    "clip30": ("sqrt_dk", "clip30", "clip 30"),
    "floor": ("sqrt_dk", "floor", "entropy floor"),
}
"""Arm → its rule, its treatment, and its name in a figure."""
HEAD_DIM = 64
START = math.log(VOCABULARY)  # nats: where every run begins


def plan(rows: Rows, settings: Settings) -> list[Cell]:
    """One seed over all widths and rates first, then the next; arms that need logits in every step are in stacks of their own."""
    for seed in settings["seeds"]:
        for width in settings["width"]:
            for arms in (("none", "sqrt_dk", "qk_norm", "quack"), ("clip100", "clip30", "floor")):
                wanted: list[Cell] = [
                    {"width": width, "arm": arm, "lr": lr, "seed": seed} for lr in settings["lr"] for arm in arms
                ]
                left = missing(rows, wanted)
                if left:
                    return left[: settings["stack"] * settings["width"][0] // width]
    return []


def train(
    cells: Sequence[Cell], rows: Rows, settings: Settings, device: str, deadline: Deadline
) -> Iterator[tuple[Cell, list[Row]]]:
    runs = [{**cell, "rule": ARMS[str(cell["arm"])][0], "treatment": ARMS[str(cell["arm"])][1]} for cell in cells]
    width = int(cells[0]["width"])
    stack = fit(runs, width, min(HEAD_DIM, width), settings, device, deadline)
    if stack is None:
        return
    held = stack.held_out("test", settings["windows"])
    losses = stack.losses.tolist()
    over = (stack.probe.found[: int(stack.probe.count), 0] > 100).double().mean((1, 3)).mT.tolist()  # (runs, probes)
    for run, cell in enumerate(cells):
        signs = stack.probe.series(run)
        yield (
            cell,
            [
                {
                    **about(stack.size),
                    "held_out": held[run][0],
                    "loss": statistics.fmean(losses[run][-20:]),
                    "peak": max((one for one in signs["peak"] if math.isfinite(one)), default=math.nan),
                    "peak_end": signs["peak"][-1],
                    "evenness_end": signs["evenness"][-1],
                    "heads_over_100": over[run][-1],
                    "heads_over_100_most": max(over[run]),
                }
            ],
        )


def _loss(row: Any) -> float:
    """The held-out loss; no worse than at the start, also for a run that diverged."""
    value = float(row["held_out"])
    return min(value, START) if math.isfinite(value) else START


def summary(rows: Rows) -> list[Row]:
    """Per width and arm: the sensitivity by seed, the best loss and its rate, the largest rate within 0.05 nats of it, peak."""
    found = []
    for width in sorted({row["width"] for row in rows}):
        for arm in ARMS:
            some = pick(rows, width=width, arm=arm)
            if not some:
                continue
            rates = sorted({row["lr"] for row in some})
            by_rate = {lr: statistics.fmean(map(_loss, pick(some, lr=lr))) for lr in rates}
            best = min(by_rate, key=lambda lr: by_rate[lr])
            of_seed = []
            for seed in sorted({row["seed"] for row in some}):
                losses = [_loss(row) for row in pick(some, seed=seed)]
                if len(losses) == len(by_rate):
                    of_seed.append(statistics.fmean(losses) - min(losses))
            found.append(
                {
                    "width": width,
                    "arm": ARMS[arm][2],
                    "seeds": len(of_seed),
                    **over_seeds("sensitivity", of_seed or [math.nan]),
                    "best": by_rate[best],
                    "lr": best,
                    "largest good lr": max(lr for lr in by_rate if by_rate[lr] <= by_rate[best] + NOTHING),
                    "peak": max((row["peak"] for row in some if math.isfinite(row["peak"])), default=math.nan),
                }
            )
    return found


def finding(rows: Rows) -> str:
    width = max(row["width"] for row in rows)
    order = sorted(
        (row for row in summary(rows) if row["width"] == width and math.isfinite(row["sensitivity"])),
        key=lambda row: row["sensitivity"],
    )
    if not order:
        return "No arm has all of its rates yet"
    said = ", ".join(f"{row['arm']} {row['sensitivity']:.2f}" for row in order)
    return f"Sensitivity to the learning rate at width {width}, nats: {said}"


def draw(rows: Rows, finding: str) -> Any:
    """Held-out loss against the learning rate for each arm, by width."""
    import altair as alt

    from ..figures import marks, panels, theme

    widths = sorted({row["width"] for row in rows})
    names = [name for arm, (_, _, name) in ARMS.items() if any(row["arm"] == arm for row in rows)]
    colour = theme.series("name", "arm", names)
    size = (theme.WIDTH - panels.GAP * (len(widths) - 1)) // len(widths)
    found: list[Any] = []
    for width in widths:
        shown = [
            {"name": ARMS[arm][2], "lr": lr, **over_seeds("held_out", list(map(_loss, part)))}
            for arm in ARMS
            for lr in sorted({row["lr"] for row in rows})
            if (part := pick(rows, width=width, arm=arm, lr=lr))
        ]
        x = theme.powers("lr", "learning rate", [row["lr"] for row in shown], ".0e")
        chart = marks.curve(shown, x, "held_out", "" if found else "held-out loss, nats per byte", colour, zero=False)
        found.append(chart.properties(width=size, height=280, title=panels.heading(f"width {width}")))
    first = rows[0]
    note = (
        f"Causal models, heads of {HEAD_DIM}, {first['tokens'] / 1e6:.1f} M bytes of the standard library's sources; warm-up, "
        "gradients clipped at 1, bfloat16 products; QuacK, clips and floor on top of 1/√d_k. "
        "Sensitivity: the mean over rates of the loss above the arm's best; a run "
        "that diverged counts as where it began."
    )
    return theme.finish(alt.hconcat(*found, spacing=18).resolve_scale(y="shared"), finding, note)


def weight(cell: Cell, settings: Settings) -> float:
    return float(cell["width"]) ** 1.5


def total(settings: Settings) -> float:
    runs = len(ARMS) * len(settings["lr"]) * len(settings["seeds"])
    return sum(weight({"width": width}, settings) for width in settings["width"]) * runs


RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
FULL = {"width": (128, 256, 512), "lr": RATES, "seeds": (0, 1, 2), "layers": 6, "length": 256, "batch": 64, "steps": 1000,
        "warm_up": 100, "every": 20, "stack": 28, "windows": 64, "compute": "bfloat16"}  # fmt: skip

STUDY = Study(
    "sensitivity",
    "How much does the loss depend on the learning rate, under each rule and treatment?",
    presets={
        "full": FULL,
        "short": {**FULL, "length": 128, "batch": 16, "steps": 300, "warm_up": 30, "stack": 56},
        "small": {**FULL, "width": (32, 64), "lr": RATES[1::2], "seeds": (0,), "layers": 2, "length": 64, "batch": 8,
                  "steps": 100, "warm_up": 10, "windows": 16, "compute": "float32"},
        "tiny": {**FULL, "width": (8,), "lr": (1e-2, 1e-1), "seeds": (0,), "layers": 1, "length": 16, "batch": 2,
                 "steps": 4, "warm_up": 2, "every": 2, "windows": 2, "compute": "float32"},
    },
    plan=plan,
    train=train,
    weight=weight,
    total=total,
    finding=finding,
    summary=summary,
    draw=draw,
)  # fmt: skip
