"""causal: what does leaving the scale out cost: by a saturated forward pass, by a lost gradient, or by logits that move faster?

The three come together whenever the scale is left out. Here each is switched alone. `forward`: the weights are softmax(q·k) or
softmax(q·k/√d_k). `jacobian`: the backward pass goes through the softmax's Jacobian at one of these two temperatures, whatever
the forward pass was (stacked/surrogate.py). `moves`: a first step of Adam moves the logits √d_k times as far, or as far as with
the scale; this is a matter of the rates of W_Q and W_K, which are multiplied or divided by √d_k where the forward pass would give
the other. So each switch has two levels: dividing the rates of a model with the scale, too, would make a third. Later steps of a
model with the scale and multiplied rates move its logits further than no scale does, as its W_Q and W_K themselves change more.

Eight arms, on recall (steps to 90 % of unseen answers) and on the language model of `ablation` (held-out loss). Every arm has
its own best rate, chosen on validation data, and with more rates tried beyond an edge. On recall all seeds are trained at all
rates, and all choose; of the language model the first seed chooses, and the others follow at that rate. A switch's share is its
Shapley value: what it adds, averaged over the orders in which the three can be switched; the shares sum to the whole cost. Where
switches overlap or undo one another a share says little: `undone` is what the model without the scale gains if one is set back.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attemper.errors import InputError
from attemper_lab.engine.experiment import Cell, Row, Rows, pick
from attemper_lab.maths.stats import t_quantile
from attemper_lab.training.runs import PARTS

from ..stacked.fit import about, fit
from ..stacked.recall import RecallStack
from ..stacked.study import Deadline, Settings, define, missing
from .collapse import _steps, extended, raced, rate

SWITCHES = ("forward", "jacobian", "moves")
WORDS = {
    "forward": "a saturated forward pass",
    "jacobian": "a lost gradient",
    "moves": "faster logits",
}
BACK = {"forward": "a scaled forward pass", "jacobian": "a scaled Jacobian", "moves": "a slower rate"}
"""What sets each switch back."""
ARMS = tuple(itertools.product((0, 1), repeat=3))
"""1 where a switch is as it is without the scale, in the order of SWITCHES."""
Task = tuple[str, int]
"""recall with a number of keys, or LANGUAGE."""
LANGUAGE: Task = ("language", 0)


def tasks(settings: Settings) -> list[Task]:
    return [("recall", pairs) for pairs in settings["pairs"]] + [LANGUAGE] * settings["language"]


def task_of(row: Mapping[str, Any]) -> Task:
    return ("recall", int(row["pairs"])) if row["task"] == "recall" else LANGUAGE


def named(task: Task) -> str:
    return "language model" if task == LANGUAGE else f"recall of {task[1]} keys"


def cell_of(task: Task, arm: Sequence[int], lr: float, seed: int, settings: Settings) -> Cell:
    """How an arm is trained: the rule of the forward pass, that of the Jacobian, and the rates of W_Q and W_K."""
    forward, jacobian, moves = arm
    rates = {(0, 0): "same", (1, 1): "same", (0, 1): "times", (1, 0): "divided"}[forward, moves]
    rules = ["none" if switched else "sqrt_dk" for switched in (forward, jacobian)]
    cell: Cell = {"task": task[0], "rule": rules[0], "jacobian": rules[1], "rates": rates, "lr": lr, "seed": seed}
    return cell if task == LANGUAGE else {**cell, "d": settings["d"], "pairs": task[1]}


def arm_of(row: Mapping[str, Any]) -> tuple[int, int, int]:
    forward = int(row["rule"] == "none")
    moves = {"same": forward, "times": 1, "divided": 0}[row["rates"]]
    return forward, int(row["jacobian"] == "none"), moves


def of_arm(rows: Rows, task: Task, arm: Sequence[int]) -> list[Mapping[str, Any]]:
    return [row for row in rows if task_of(row) == task and arm_of(row) == tuple(arm)]


def plan(rows: Rows, settings: Settings) -> list[Cell]:
    """Recall whole, which is quick; then the language model at every rate with the first seed, then other seeds at the best."""
    first, *others = settings["seeds"]
    for task in tasks(settings):
        wide, more = [], []
        for arm in ARMS:
            some = of_arm(rows, task, arm)
            seeds, choose = ((first,), _lowest) if task == LANGUAGE else (settings["seeds"], _quickest)
            tried = [row for row in some if row["seed"] in seeds]
            powers = extended(tried, settings["powers"][task[0]], seeds, choose)
            wide += [cell_of(task, arm, rate(power), seed, settings) for power in powers for seed in seeds]
            more += [cell_of(task, arm, _chosen(some, task), seed, settings) for seed in others if some]
        left = missing(rows, wide) or missing(rows, more)
        if left:
            return left[: settings["stack"][task[0]]]
    return []


def _chosen(rows: Rows, task: Task) -> float:
    """The best rate on validation data."""
    return math.nan if not rows else _lowest(rows) if task == LANGUAGE else _quickest(rows)


def _quickest(rows: Rows) -> float:
    """The rate with the lowest mean of ln(steps), at which every seed learns; the most accurate if they do at none."""

    def order(lr: float) -> tuple[float, float]:
        some = pick(rows, lr=lr)
        return statistics.fmean(math.log(_steps(row, "validation")) for row in some), -statistics.fmean(
            row["accuracy"] for row in some
        )

    return min(sorted({row["lr"] for row in rows}), key=order)


def _lowest(rows: Rows) -> float:
    """The rate with the lowest loss of the language model, by the seed that all rates have."""
    tried = pick(rows, seed=min(row["seed"] for row in rows))
    return float(min(tried, key=lambda row: row["validation"] if math.isfinite(row["validation"]) else math.inf)["lr"])


def train(
    cells: Sequence[Cell], rows: Rows, settings: Settings, device: str, deadline: Deadline
) -> Iterator[tuple[Cell, list[Row]]]:
    if cells[0]["task"] == "recall":
        stack = RecallStack(settings["d"], cells, settings["recall_batch"], device, width=settings["recall_width"])
        yield from raced(stack, cells, pick(rows, task="recall"), settings["recall_steps"], deadline)
        return
    made = fit(cells, settings["width"], settings["head_dim"], settings, device, deadline)
    if made is None:
        return
    validation, test = (made.held_out(part, settings["windows"], PARTS) for part in ("validation", "test"))
    losses = made.losses.tolist()
    for run, cell in enumerate(cells):
        signs = made.probe.series(run)
        ended = {f"held_out_{number}": value for number, value in enumerate(test[run], start=1)}
        ended |= {"validation": statistics.fmean(validation[run]), "held_out": statistics.fmean(test[run])}
        last = {sign: signs[sign][-1] for sign in ("peak", "logit_std_mean", "top_weight_mean")}
        yield cell, [{**about(made.size), "step": made.size.steps, "loss": losses[run][-1], **ended, **last}]


def weight(cell: Cell, settings: Settings) -> float:
    return 1.0 if cell["task"] == "recall" else float(settings["language_weight"])


def total(settings: Settings) -> float:
    """The weight of all cells, without the rates that are added at edges."""
    found, seeds = 0.0, len(settings["seeds"])
    for task in tasks(settings):
        rates = len(settings["powers"][task[0]])
        runs = rates + seeds - 1 if task == LANGUAGE else rates * seeds
        found += len(ARMS) * runs * weight({"task": task[0]}, settings)
    return found


def summary(rows: Rows) -> list[Row]:
    """Per task and arm, at its best rate: the outcome (steps, or nats per byte), and what it costs beside the arm that is as
    with the scale throughout: the ratio of steps, or the difference of losses; with 95 % intervals over seeds."""
    found = []
    for task in measured(rows):
        outcomes = _by_arm(rows, task)
        scaled = outcomes[0, 0, 0]
        for arm, of_seed in outcomes.items():
            tried = of_arm(rows, task, arm)
            if not of_seed or not scaled:
                continue
            lr = _chosen(tried, task)
            edge = lr in (min(row["lr"] for row in tried), max(row["lr"] for row in tried))
            costs = [of_seed[seed] - scaled[seed] for seed in sorted(set(of_seed) & set(scaled))]
            values = [value if task == LANGUAGE else math.exp(value) for value in of_seed.values()]
            found.append(
                {
                    "task": named(task),
                    **{name: "unscaled" if on else "scaled" for name, on in zip(SWITCHES, arm, strict=True)},
                    "lr": lr,
                    "at_edge": edge,
                    "seeds": len(costs),
                    "never": 0 if task == LANGUAGE else sum(math.isinf(_steps(row)) for row in pick(tried, lr=lr)),
                    "outcome": statistics.median(values),
                    **interval("cost", costs),
                }
            )
    return found


def undone(rows: Rows, task: Task) -> list[Row]:
    """By switch: what the model without the scale gains if that alone is set back, with its 95 % interval over seeds."""
    outcomes = _by_arm(rows, task)
    found: list[Row] = []
    for place, switch in enumerate(SWITCHES):
        back = outcomes[tuple(int(one != place) for one in range(len(SWITCHES)))]
        gains = [outcomes[1, 1, 1][seed] - back[seed] for seed in sorted(set(outcomes[1, 1, 1]) & set(back))]
        found.append({"task": named(task), "switch": switch, "seeds": len(gains), **interval("undone", gains)})
    return found


def measured(rows: Rows) -> list[Task]:
    """The tasks that rows are of, the language model last; all must be of one size."""
    for kind, size in (("recall", "d"), ("language", "parameters")):
        if len({row.get(size) for row in rows if row["task"] == kind}) > 1:
            raise InputError(f"causal: these rows are of {kind} at several sizes ({size}). Pack those of one size.")
    return sorted({task_of(row) for row in rows}, key=lambda task: (task == LANGUAGE, task))


def _by_arm(rows: Rows, task: Task) -> dict[tuple[int, ...], dict[int, float]]:
    """By arm, the outcome of each seed."""
    return {arm: _outcomes(of_arm(rows, task, arm), task) for arm in ARMS}


def _outcomes(rows: Rows, task: Task) -> dict[int, float]:
    """Seed → ln(steps to 90 %), or the held-out loss, at the best rate. A run that never learned counts with the steps it had:
    its arm is at least so slow."""
    if not rows:
        return {}
    some = pick(rows, lr=_chosen(rows, task))
    if task == LANGUAGE:
        return {row["seed"]: row["held_out"] for row in some}
    return {row["seed"]: math.log(min(_steps(row), row["step"])) for row in some}


def interval(name: str, values: Sequence[float]) -> Row:
    """The mean over seeds and its 95 % interval, as columns; NaN where a run diverged."""
    if not values or not all(map(math.isfinite, values)):
        return {name: math.nan, f"{name}_low": math.nan, f"{name}_high": math.nan}
    mean = statistics.fmean(values)
    half = (
        t_quantile(len(values) - 1, 0.05) * statistics.stdev(values) / math.sqrt(len(values))
        if len(values) > 1
        else math.nan
    )
    return {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}


def shares(rows: Rows, task: Task) -> list[Row]:
    """Each switch's Shapley value by seed, as a mean with its 95 % interval: ln of steps on recall, else nats."""
    outcomes = _by_arm(rows, task)
    if not all(outcomes.values()):
        return []
    seeds = sorted(set.intersection(*(set(of_seed) for of_seed in outcomes.values())))
    found: list[Row] = []
    for place, switch in enumerate(SWITCHES):
        of_seed = [shapley({arm: outcomes[arm][seed] for arm in ARMS}, place) for seed in seeds]
        found.append({"task": named(task), "switch": switch, "seeds": len(seeds), **interval("share", of_seed)})
    whole = [outcomes[1, 1, 1][seed] - outcomes[0, 0, 0][seed] for seed in seeds]
    return [*found, {"task": named(task), "switch": "all three", "seeds": len(seeds), **interval("share", whole)}]


def effects(rows: Rows, task: Task) -> list[Row]:
    """By switch: what it adds in each setting of the other two, the mean over seeds."""
    mean = {arm: statistics.fmean(of_seed.values()) for arm, of_seed in _by_arm(rows, task).items()}
    return [
        {"switch": switch, "effect": mean[arm] - mean[tuple(on * (one != place) for one, on in enumerate(arm))]}
        for place, switch in enumerate(SWITCHES)
        for arm in ARMS
        if arm[place]
    ]


def shapley(outcome: Mapping[tuple[int, ...], float], place: int) -> float:
    """What switching this one adds, averaged over the orders in which all are switched."""
    count, total = len(next(iter(outcome))), 0.0
    others = [one for one in range(count) if one != place]
    for chosen in itertools.product((0, 1), repeat=len(others)):
        size = sum(chosen)
        share = math.factorial(size) * math.factorial(count - size - 1) / math.factorial(count)
        with_it, without = [1] * count, [0] * count
        for one, on in zip(others, chosen, strict=True):
            with_it[one] = without[one] = on
        total += share * (outcome[tuple(with_it)] - outcome[tuple(without)])
    return total


def finding(rows: Rows) -> str:
    parts = []
    for task in measured(rows):
        *_, whole = shares(rows, task) or [{}]
        if not whole or not math.isfinite(whole["share"]):
            continue
        cost = f"{whole['share']:.2f} {'nats' if task == LANGUAGE else 'ln steps'}"
        most = max(undone(rows, task), key=lambda row: float(row["undone"]))
        if most["undone_low"] > 0:
            parts.append(f"{named(task)}: {BACK[most['switch']]} undoes {most['undone']:.2f} of {cost}")
        else:
            parts.append(f"{named(task)}: nothing surely undoes its {cost}")
    said = "; ".join(parts) or "not every arm was trained yet"
    return said[0].upper() + said[1:]


def draw(rows: Rows, finding: str) -> Any:
    """Each switch's share of what leaving the scale out costs, by task, with 95 % intervals."""
    import altair as alt

    from attemper_lab.figures import panels, theme

    charts = []
    for task in measured(rows):
        shown = [{**row, "name": WORDS.get(row["switch"], row["switch"])} for row in shares(rows, task)]
        if not shown:
            continue
        title = (
            "nats per byte, more than with the scale"
            if task == LANGUAGE
            else "ln(steps to 90 %), more than with the scale"
        )
        base = alt.Chart(theme.data(shown)).encode(y=alt.Y("name:N", title="", sort=None))
        bars = base.mark_rule(strokeWidth=3).encode(x=alt.X("share_low:Q", title=title), x2="share_high:Q")
        dots = base.mark_point(filled=True, size=70, opacity=1, color=theme.SERIES[0]).encode(x="share:Q")
        each = alt.Chart(theme.data([{**row, "name": WORDS[row["switch"]]} for row in effects(rows, task)]))
        rings = each.mark_point(size=45, color=theme.SERIES[1]).encode(x="effect:Q", y=alt.Y("name:N", sort=None))
        charts.append(
            (bars + dots + rings).properties(width=theme.WIDTH - 180, height=110, title=panels.heading(named(task)))
        )
    note = (
        "Each arm at its own best rate. Rings: what a switch adds in each setting of the other two. Dots: its share of the "
        "whole, their weighted mean, with a 95 % interval over seeds. Not shown: other head dims, optimizers, longer training."
    )
    return theme.finish(alt.vconcat(*charts, spacing=18), finding, note)


FULL = {
    "language": True, "seeds": (0, 1, 2), "d": 256, "pairs": (32,), "recall_width": 256, "recall_batch": 64, "recall_steps": 3000,
    "powers": {"recall": tuple(power / 2 for power in range(-18, -7)), "language": (-8, -7, -6, -5, -4)},
    "stack": {"recall": 200, "language": 8},
    "width": 512, "head_dim": 64, "layers": 10, "length": 256, "batch": 64, "steps": 400, "warm_up": 60, "every": 10,
    "windows": 512, "compute": "bfloat16", "language_weight": 40,
}  # fmt: skip

STUDY = define(
    globals(),
    "What does leaving the scale out cost by a saturated forward pass, by a lost gradient, and by logits that move faster?",
    presets={
        "full": FULL,
        "short": {**FULL, "steps": 150, "warm_up": 30, "layers": 6, "width": 256},
        "small": {
            **FULL, "d": 64, "pairs": (8,), "recall_width": 64, "recall_batch": 32, "recall_steps": 150, "seeds": (0, 1),
            "powers": {"recall": (-6, -5, -4), "language": (-6, -5, -4)}, "width": 32, "head_dim": 16, "layers": 1,
            "length": 32, "batch": 4, "steps": 40, "warm_up": 8, "windows": 16, "compute": "float32", "language_weight": 1,
            "stack": {"recall": 200, "language": 24},
        },
        "recall": {
            **FULL, "language": False, "d": 64, "pairs": (8, 32), "recall_width": 64, "recall_batch": 32,
            "powers": {"recall": (-6, -5.5, -5, -4.5, -4, -3.5, -3)},
        },
        "language": {
            **FULL, "pairs": (), "seeds": (0, 1, 2, 3, 4), "powers": {"language": (-6, -5.5, -5, -4.5, -4)}, "width": 128,
            "layers": 2, "length": 128, "batch": 8, "steps": 800, "warm_up": 80, "windows": 256, "compute": "float32",
            "language_weight": 1, "stack": {"language": 4},
        },
        "tiny": {
            **FULL, "d": 4, "pairs": (2,), "recall_width": 8, "recall_batch": 2, "recall_steps": 6, "seeds": (0, 1),
            "powers": {"recall": (-6, -5), "language": (-6, -5)}, "width": 8, "head_dim": 4, "layers": 1, "length": 16,
            "batch": 2, "steps": 6, "warm_up": 2, "every": 2, "windows": 8, "compute": "float32", "language_weight": 1,
            "stack": {"recall": 200, "language": 24},
        },
    },
)  # fmt: skip
