"""alpha: when does √d_k become d_k? Per head, how the spread of q·k grows with the head dim while a model trains.

Language models of one width, with head dims from 16 to 256. If q and k are unrelated, std(q·k) grows like d_k^½, the reason for
1/√d_k; if training aligns q with its keys it grows like d_k, the reason for µP's 1/d_k. α(t) is the slope of ln std(q·k)
against ln d_k at a step, fitted over the head dims; its interval is over seeds. It is taken at one rate for all head dims, since
a rate half a decade higher widens the spread by more than a head of twice the size does. The *alignment* of a head is std(q·k)
over |q||k|/√d_k, with root mean squares: 1 for random directions, √d_k if every key lies along its query or against it. Every
head dim is trained with 1/√d_k and with 1/d_k, each also at its own best rate: where 1/d_k ends lower there, µP's rule has
overtaken.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attemper_lab.engine.experiment import Cell, Row, Rows, pick
from attemper_lab.training.runs import PARTS, at_edge, cost

from ..stacked.fit import about, fit
from ..stacked.language import LanguageStack
from ..stacked.probe import LEAST_KEYS, Probe, logits_of
from ..stacked.study import Deadline, Settings, define, missing
from .ablation import chosen_rate
from .causal import interval
from .collapse import extended, rate

RULES = ("sqrt_dk", "dk")
LOGGED = 12  # rows per run


class AlignmentProbe(Probe):
    """Also how far q and k are aligned: ``aligned`` is (probes, layers, runs, heads)."""

    def __init__(self, runs: int, size: Any, probes: int, like: Tensor) -> None:
        super().__init__(runs, size, probes, like)
        self.aligned = like.new_full((probes, size.layers, runs, size.heads), math.nan)
        self.head_dim = size.head_dim

    @torch.no_grad()
    def take(self, layer: int, query: Tensor, key: Tensor) -> None:
        super().take(layer, query, key)
        logits = logits_of(query, key)[..., LEAST_KEYS - 1 :, :]
        hidden = logits == -math.inf
        seen = (~hidden).sum(-1, keepdim=True)
        shown = logits.masked_fill(hidden, 0.0)
        spread = (shown - shown.sum(-1, keepdim=True) / seen).masked_fill(hidden, 0.0).square().sum(-1) / seen[..., 0]
        sizes = [one.to(logits.dtype).square().sum(-1).mean((1, 3)) for one in (query, key)]
        found = (spread.mean((1, 3)) * self.head_dim / (sizes[0] * sizes[1])).sqrt()
        place = self.aligned[:, layer]
        place.index_copy_(0, self.count.clamp(max=len(place) - 1), found[None].to(place.dtype))


class AlphaStack(LanguageStack):
    probe_class = AlignmentProbe


def plan(rows: Rows, settings: Settings) -> list[Cell]:
    """Every head dim and rule at every rate with the first seed, more beyond an edge; then other seeds at the best rate of the
    head dim, and at that of all."""
    first, *others = settings["seeds"]
    wide: list[Cell] = []
    more: list[Cell] = []
    for head_dim in settings["head_dim"]:
        for rule in RULES:
            some = pick(rows, head_dim=head_dim, rule=rule)
            base = {"head_dim": head_dim, "rule": rule}
            powers = extended(pick(some, seed=first), settings["powers"][rule], (first,), chosen_rate)
            wide += [{**base, "lr": rate(power), "seed": first} for power in powers]
            best = dict.fromkeys((chosen_rate(some), common_rate(pick(rows, rule=rule)))) if some else {}
            more += [{**base, "lr": lr, "seed": seed} for lr in best if math.isfinite(lr) for seed in others]
    left = missing(rows, wide) or missing(rows, more)
    return [cell for cell in left if cell["head_dim"] == left[0]["head_dim"]][: settings["stack"]] if left else []


def train(
    cells: Sequence[Cell], rows: Rows, settings: Settings, device: str, deadline: Deadline
) -> Iterator[tuple[Cell, list[Row]]]:
    stack = fit(cells, settings["width"], int(cells[0]["head_dim"]), settings, device, deadline, AlphaStack)
    if stack is None:
        return
    validation, test = (stack.held_out(part, settings["windows"], PARTS) for part in ("validation", "test"))
    losses, every = stack.losses.tolist(), settings["every"]
    probe = stack.probe
    assert isinstance(probe, AlignmentProbe)
    for run, cell in enumerate(cells):
        signs = probe.series(run)
        aligned = probe.aligned[: int(probe.count), :, run].double().flatten(1).median(1).values.tolist()
        scale = stack.tables.scale[run, 0].item()
        logged = sorted({round(place * (len(aligned) - 1) / (LOGGED - 1)) for place in range(LOGGED)})
        logs: list[Row] = [
            {
                "step": place * every,
                "loss": losses[run][place * every],
                "score_std": signs["logit_std_mean"][place] / scale,
                "alignment_qk": aligned[place],
                "peak": signs["peak"][place],
                "validation": math.nan,
                "held_out": math.nan,
            }
            for place in logged
        ]
        ended = {f"held_out_{number}": value for number, value in enumerate(test[run], start=1)}
        ended |= {"validation": statistics.fmean(validation[run]), "held_out": statistics.fmean(test[run])}
        logs.append({"step": stack.size.steps, "loss": losses[run][-1], **ended})
        yield cell, [{**about(stack.size), **row} for row in logs]


def total(settings: Settings) -> float:
    groups = sum(len(settings["powers"][rule]) + len(settings["seeds"]) - 1 for rule in RULES)
    return float(len(settings["head_dim"]) * groups)


def _shared(rows: Rows) -> list[float]:
    """The rates at which every head dim was trained with the first seed."""
    first = min((row["seed"] for row in rows), default=0)
    there = {(row["lr"], row["head_dim"]) for row in pick(rows, seed=first)}
    dims = {dim for _, dim in there}
    return [lr for lr in sorted({lr for lr, _ in there}) if all((lr, dim) in there for dim in dims)]


def common_rate(rows: Rows) -> float:
    """The shared rate with the lowest mean loss on the validation text, by the first seed, of the runs of one rule."""

    first, dims = min((row["seed"] for row in rows), default=0), {row["head_dim"] for row in rows}

    def loss(lr: float) -> float:
        ends = {
            row["head_dim"]: row["validation"] for row in pick(rows, lr=lr, seed=first) if _finite(row["validation"])
        }
        return statistics.fmean(ends.values()) if set(ends) == dims else math.inf

    return min(_shared(rows), key=loss, default=math.nan)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _spreads(rows: Rows) -> list[Mapping[str, Any]]:
    return [row for row in rows if _finite(row.get("score_std"))]


def _slope(rows: Rows) -> float:
    """Of ln std(q·k) against ln d_k."""
    xs, ys = ([math.log(row[name]) for row in rows] for name in ("head_dim", "score_std"))
    return statistics.linear_regression(xs, ys).slope


def alphas(rows: Rows) -> list[Row]:
    """Per rule and step: α at the rule's common rate; intervals over the seeds that all head dims have."""
    found = []
    dims = {row["head_dim"] for row in rows}
    for rule in RULES:
        tried = pick(rows, rule=rule)
        if len(dims) < 2 or {row["head_dim"] for row in tried} != dims:
            continue
        lr = common_rate(tried)
        best = _spreads(pick(tried, lr=lr))
        for step in sorted({row["step"] for row in best}):
            of_seed = [pick(best, step=step, seed=seed) for seed in sorted({row["seed"] for row in best})]
            whole = [some for some in of_seed if len(some) == len(dims)]
            if whole:
                row = {
                    "rule": rule,
                    "lr": lr,
                    "step": step,
                    "seeds": len(whole),
                    **interval("alpha", [*map(_slope, whole)]),
                }
                aligned = [max(some, key=lambda row: row["head_dim"])["alignment_qk"] for some in whole]
                found.append({**row, "alignment at the largest d_k": statistics.median(aligned)})
    return found


def by_rate(rows: Rows) -> list[Row]:
    """Per rule and rate that all head dims have: α at the last step, of the first seed."""
    found = []
    for rule in RULES:
        tried = pick(rows, rule=rule)
        for lr in _shared(tried):
            some = _spreads(pick(tried, lr=lr, seed=min(row["seed"] for row in tried)))
            last = pick(some, step=max((row["step"] for row in some), default=0))
            if len(last) > 1 and {row["head_dim"] for row in last} == {row["head_dim"] for row in rows}:
                found.append({"rule": rule, "lr": lr, "alpha": _slope(last)})
    return found


def summary(rows: Rows) -> list[Row]:
    """Per head dim: what 1/d_k costs beside 1/√d_k, each at its best rate, and how far q and k are aligned at the end."""
    found = []
    for head_dim in sorted({row["head_dim"] for row in rows}):
        tried = {rule: pick(rows, head_dim=head_dim, rule=rule) for rule in RULES}
        if not all(tried.values()):
            continue
        best = {rule: chosen_rate(some) for rule, some in tried.items()}
        chosen = {rule: pick(some, lr=best[rule]) for rule, some in tried.items()}
        edge = [
            rule
            for rule in RULES
            if at_edge(pick(tried[rule], seed=min(row["seed"] for row in tried[rule])), best[rule])
        ]
        found.append(
            {
                "head_dim": head_dim,
                **{f"lr, {rule}": lr for rule, lr in best.items()},
                "at_edge": " and ".join(edge) or "neither",
                **cost(chosen["sqrt_dk"], chosen["dk"]).row(),
                **{f"alignment, {rule}": _last(some, "alignment_qk") for rule, some in chosen.items()},
            }
        )
    return found


def _last(rows: Rows, column: str) -> float:
    """The last logged value, the median over seeds."""
    logged = [row for row in rows if row.get(column) is not None and math.isfinite(row.get(column, math.nan))]
    last = max((row["step"] for row in logged), default=0)
    values = [row[column] for row in logged if row["step"] == last]
    return statistics.median(values) if values else math.nan


def finding(rows: Rows) -> str:
    found = [row for row in alphas(rows) if row["rule"] == "sqrt_dk"]
    if len(found) < 2:
        return "Not every head dim was trained yet"
    first, last = found[0], found[-1]
    half = f" ± {(last['alpha_high'] - last['alpha_low']) / 2:.2f}" if math.isfinite(last["alpha_low"]) else ""
    said = (
        f"With 1/√d_k at a rate of {last['lr']:g} the spread of q·k grows like d_k^{first['alpha']:.2f} at first, "
        f"d_k^{last['alpha']:.2f}{half} at the end"
    )
    better = [str(row["head_dim"]) for row in summary(rows) if row["says"] == "gains"]
    return f"{said}; 1/d_k ends lower {f'at d_k = {chr(44).join(better)}' if better else 'at no head dim'}"


def draw(rows: Rows, finding: str) -> Any:
    """α over the steps, under both rules, between the ½ of unrelated vectors and the 1 of aligned ones."""
    import altair as alt

    from attemper_lab.figures import marks, theme

    shown = theme.labelled([row for row in alphas(rows) if math.isfinite(row["alpha"])])
    lines = marks.labelled_line(0.5, "unrelated", at=40) + marks.labelled_line(1.0, "aligned", at=40)
    if not shown:
        return theme.finish(lines, finding, "")
    x = alt.X("step:Q", title="step")
    chart = lines + marks.curve(shown, x, "alpha", "α of std(q·k) ∝ d_k^α", theme.by_rule(shown), zero=False)
    dims = sorted({row["head_dim"] for row in rows})
    note = (
        f"Language model of one width, head dims {', '.join(map(str, dims))}, each rule at the one rate that is best over all of "
        f"them; mean over heads, then over seeds with 95 % intervals. At other rates the end is {_ends(rows)}. Not shown: other "
        "widths, longer training."
    )
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


def _ends(rows: Rows) -> str:
    """α at the last step from the lowest to the highest, by rule, over the rates."""
    ends = {rule: [row["alpha"] for row in by_rate(rows) if row["rule"] == rule] for rule in RULES}
    names = {"sqrt_dk": "1/√d_k", "dk": "1/d_k"}
    return " and ".join(f"{min(some):.2f} to {max(some):.2f} with {names[rule]}" for rule, some in ends.items() if some)


FULL: Mapping[str, Any] = {
    "head_dim": (16, 32, 64, 128, 256), "seeds": (0, 1, 2), "powers": {"sqrt_dk": (-7, -6, -5), "dk": (-6, -5, -4)}, "width": 512,
    "layers": 6, "length": 256, "batch": 32, "steps": 400, "warm_up": 60, "every": 10, "stack": 12, "windows": 256,
    "compute": "bfloat16",
}  # fmt: skip

STUDY = define(
    globals(),
    "When does the spread of q·k grow like d_k instead of √d_k, and does 1/d_k then train better?",
    presets={
        "full": FULL,
        "slice": {**FULL, "head_dim": (8, 16, 32, 64), "width": 64, "layers": 2, "length": 64, "batch": 8, "steps": 600,
                  "warm_up": 60, "every": 15, "windows": 128, "compute": "float32"},
        "small": {**FULL, "head_dim": (4, 16), "seeds": (0, 1), "width": 16, "layers": 1, "length": 32, "batch": 4, "steps": 40,
                  "warm_up": 8, "every": 8, "windows": 16, "compute": "float32"},
        "tiny": {**FULL, "head_dim": (4, 8), "seeds": (0, 1), "powers": {"sqrt_dk": (-6, -5), "dk": (-6, -5)}, "width": 8,
                 "layers": 1, "length": 16, "batch": 2, "steps": 6, "warm_up": 2, "every": 2, "windows": 8, "compute": "float32"},
    },
)  # fmt: skip
