"""sensitivity: how much does the loss depend on the learning rate, without a scale, with 1/√d_k, and with each treatment?

After Wortsman et al. 2023 (arXiv:2309.14322): the mean over rates, spaced evenly over three decades, of how far the loss ends
above the best of the same arm; no run counts as worse than it began.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attemper_lab.engine.experiment import Cell, Row, Rows, pick
from attemper_lab.maths.stats import over_seeds
from attemper_lab.training.runs import NOTHING

from ..stacked.fit import about, fit
from ..stacked.study import Deadline, Settings, define, missing
from ..stacked.text import UNTRAINED_LOSS
from . import separation

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
FEW = 3  # seeds that an interval needs before a finding is said without their number


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
    return min(value, UNTRAINED_LOSS) if math.isfinite(value) else UNTRAINED_LOSS


def sensitivity(rows: Rows) -> tuple[float, Tensor]:
    """The mean over rates of the loss above the best rate's, losses being means over seeds; and the same for draws of a
    bootstrap over the seeds of each rate: none where a rate has one seed. One seed fewer than there are is drawn, so that the
    variance of a mean is not too small by (n − 1)/n, which is a half with two seeds (Rao & Wu 1988)."""
    by_rate = [list(map(_loss, pick(rows, lr=lr))) for lr in sorted({row["lr"] for row in rows})]
    means = [statistics.fmean(losses) for losses in by_rate]
    if min(map(len, by_rate)) < 2:
        return statistics.fmean(means) - min(means), torch.zeros(0, dtype=torch.float64, device="cpu")
    drawn = torch.stack([separation.resampled(losses, seed, fewer=1).mean(1) for seed, losses in enumerate(by_rate)], 1)
    return statistics.fmean(means) - min(means), drawn.mean(1) - drawn.amin(1)


def by_seed(rows: Rows) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(int(row["seed"]), []).append(dict(row))
    return found


def summary(rows: Rows) -> list[Row]:
    """Per width and arm: the sensitivity and how far it is above that of 1/√d_k, the best loss and its rate, the largest rate
    within 0.05 nats of it, peak. Only rates that every arm of a width has count, and of the seeds those that have all of them:
    what a deadline cut off compares no arm with another on other runs."""
    found = []
    for width in sorted({row["width"] for row in rows}):
        at_width = pick(rows, width=width)
        arms = [arm for arm in ARMS if pick(at_width, arm=arm)]
        shared = set.intersection(*({row["lr"] for row in pick(at_width, arm=arm)} for arm in arms))
        at_width = [row for row in at_width if row["lr"] in shared]
        whole = {seed for seed, some in by_seed(at_width).items() if len(some) == len(arms) * len(shared)}
        at_width = [row for row in at_width if not whole or row["seed"] in whole]
        bare = pick(at_width, arm="sqrt_dk")
        for arm in arms if shared else ():
            some = pick(at_width, arm=arm)
            by_rate = {lr: statistics.fmean(map(_loss, pick(some, lr=lr))) for lr in sorted(shared)}
            best = min(by_rate, key=lambda lr: by_rate[lr])
            value, drawn = sensitivity(some)
            other, again = sensitivity(bare) if bare else (math.nan, drawn[:0])
            apart = drawn - again if len(drawn) == len(again) else drawn[:0]  # the same seeds are drawn for both
            found.append(
                {
                    "width": width,
                    "arm": ARMS[arm][2],
                    "rates": len(shared),
                    "seeds": len({row["seed"] for row in some}),
                    **separation.interval(value, drawn).columns("sensitivity"),
                    **separation.interval(value - other, apart).columns("above 1/√d_k"),
                    "best": by_rate[best],
                    "lr": best,
                    "largest good lr": max(lr for lr in by_rate if by_rate[lr] <= by_rate[best] + NOTHING),
                    "peak": max((row["peak"] for row in some if math.isfinite(row["peak"])), default=math.nan),
                }
            )
    return found


def finding(rows: Rows) -> str:
    """The arm that depends least on the rate, at every width beside 1/√d_k."""
    table = summary(rows)
    bare = {row["width"]: row for row in table if row["arm"] == ARMS["sqrt_dk"][2]}
    others = [row for row in table if row["width"] in bare and row is not bare[row["width"]]]
    if not others:
        return "1/√d_k and another arm have no rate in common yet"
    arms = {row["arm"]: [one for one in others if one["arm"] == row["arm"]] for row in others}
    least = min(arms, key=lambda arm: statistics.fmean(row["above 1/√d_k"] for row in arms[arm]))
    said = [
        f"{row['sensitivity']:.2f} against {bare[row['width']]['sensitivity']:.2f}{' at ' if place else ' nats at width '}"
        f"{row['width']}{_sure(row)}"
        for place, row in enumerate(arms[least])
    ]
    if any(row["above 1/√d_k"] < 0 and not row["above 1/√d_k_high"] >= 0 for row in arms[least]):
        return f"With {least} the loss depends less on the learning rate than with 1/√d_k: {', '.join(said)}"
    return f"With no arm the loss depends clearly less on the learning rate than with 1/√d_k: {least} {', '.join(said)}"


def _sure(row: Row) -> str:
    """What must be said of a difference: that few seeds stand behind it, or that it is not decided."""
    if row["seeds"] < FEW:
        return " (one seed)" if row["seeds"] == 1 else f" ({row['seeds']} seeds)"
    return "" if row["above 1/√d_k_high"] < 0 else " (not decided)"


def draw(rows: Rows, finding: str) -> Any:
    """Held-out loss against the learning rate for each arm, by width."""
    import altair as alt

    from attemper_lab.figures import marks, panels, theme

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
        y = "" if found else "held-out loss, nats per byte"
        chart = marks.curve(shown, x, "held_out", y, colour, nested=True, zero=False)
        found.append(chart.properties(width=size, height=280, title=panels.heading(f"width {width}")))
    bars = _bars(summary(rows), names, colour, theme.WIDTH)
    first = rows[0]
    note = (
        f"Causal models, heads of {HEAD_DIM}, {first['tokens'] / 1e6:.1f} M bytes of the standard library's sources; warm-up, "
        "gradients clipped at 1, bfloat16 products; QuacK, clips and floor on top of 1/√d_k. "
        "Sensitivity: the mean over rates of the loss above the arm's best; a run that diverged counts as where it began. Bars: "
        "above the range of the seeds, below 95 % of a bootstrap over them."
    )
    curves = alt.hconcat(*found, spacing=18).resolve_scale(y="shared")
    return theme.finish(alt.vconcat(curves, bars, spacing=18), finding, note)


def _bars(table: Rows, names: Sequence[str], colour: Any, width: int) -> Any:
    """The sensitivity of every arm, by width of the model."""
    import altair as alt

    from attemper_lab.figures import panels, theme

    widths = sorted({row["width"] for row in table})
    size, found = (width - panels.GAP * (len(widths) - 1)) // max(1, len(widths)), []
    most = max((row["sensitivity"] for row in table), default=1.0)
    for place, one in enumerate(widths):
        base = alt.Chart(theme.data([{**row, "name": row["arm"]} for row in table if row["width"] == one]))
        axis = alt.Axis() if not place else alt.Axis(labels=False, ticks=False)
        y = alt.Y("name:N", title="", sort=list(names), axis=axis)
        x = alt.X("sensitivity:Q", title="sensitivity, nats", scale=alt.Scale(domainMin=0, domainMax=1.2 * most))
        dots = base.mark_point(filled=True, size=70, opacity=1).encode(x=x, y=y, color=colour)
        rules = base.mark_rule(strokeWidth=2).encode(
            x=alt.X("sensitivity_low:Q", title="sensitivity, nats"), x2="sensitivity_high:Q", y=y, color=colour
        )
        found.append((rules + dots).properties(width=size, height=20 * len(names)))
    return alt.hconcat(*found, spacing=40)  # 18, and the numbers of the vertical axes above


def weight(cell: Cell, settings: Settings) -> float:
    return float(cell["width"]) ** 1.5


def total(settings: Settings) -> float:
    runs = len(ARMS) * len(settings["lr"]) * len(settings["seeds"])
    return sum(weight({"width": width}, settings) for width in settings["width"]) * runs


RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
FULL = {"width": (128, 256, 512), "lr": RATES, "seeds": (0, 1, 2), "layers": 6, "length": 256, "batch": 64, "steps": 1000,
        "warm_up": 100, "every": 20, "stack": 28, "windows": 64, "compute": "bfloat16"}  # fmt: skip

STUDY = define(
    globals(),
    "How much does the loss depend on the learning rate, under each rule and treatment?",
    presets={
        "full": FULL,
        "short": {**FULL, "length": 128, "batch": 16, "steps": 300, "warm_up": 30, "stack": 56},
        "small": {**FULL, "width": (32, 64), "lr": RATES[1::2], "seeds": (0,), "layers": 2, "length": 64, "batch": 8,
                  "steps": 100, "warm_up": 10, "windows": 16, "compute": "float32"},
        "tiny": {**FULL, "width": (8,), "lr": (1e-2, 1e-1), "seeds": (0,), "layers": 1, "length": 16, "batch": 2,
                 "steps": 4, "warm_up": 2, "every": 2, "windows": 2, "compute": "float32"},
    },
    version=2,
)  # fmt: skip
