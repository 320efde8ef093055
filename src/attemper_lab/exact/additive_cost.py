"""additive_cost: what does additive attention cost compared with the dot product, and how do its scores spread?

Two weights w: `unit` has entries of variance 1, `fan_in` of variance 1/d, as layers are initialised.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attemper import Vitals, additive_attention, attention
from attemper.errors import InputError

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator, pick
from ..figures import alt, marks, theme
from ..maths.stats import Estimate, expect_column, over_batches
from ..memory import MIB, of_fresh_process, rise
from ..timing import interleave

SPREAD_TOKENS = 64
WEIGHTS = 32  # draws of w, with queries and keys of their own
CALLS = ("dot", "additive")


def measure(cell: Cell) -> Row:
    n, d = int(cell["n"]), int(cell["d"])
    calls = _calls(cell)
    device = str(cell["device"])
    times = interleave(calls, rounds=int(cell["rounds"]), warmup=1, budget=10.0, device=device, host=device == "cpu")
    stream = generator(cell["device"], "additive_cost spread", d, cell["seed"])
    query, key = torch.randn(2, WEIGHTS, SPREAD_TOKENS, d, generator=stream, device=stream.device)
    weight = torch.randn(WEIGHTS, d, generator=stream, device=stream.device)
    spread = {
        name: _variances(additive_attention(query, key, key[..., :1], weight * factor, signs=("variance",)).vitals)
        for name, factor in (("unit", 1.0), ("fan_in", 1 / math.sqrt(d)))
    }
    dot = _variances(attention(query, key, key[..., :1], scale=1.0, signs=("variance",)).vitals)
    return {
        **times.milliseconds(*CALLS),
        **times.speed("dot", than="additive").columns("factor"),
        **{f"{name}_mib": size / MIB for name, size in _memory(cell).items()},
        "whole_mib": n * n * d * 4 / MIB,  # what q + k would take if every sum were kept
        **dot.columns("dot_variance"),
        **spread["unit"].columns("additive_variance_unit"),
        **spread["fan_in"].columns("additive_variance_fan_in"),
        "threads": torch.get_num_threads(),
    }


def _variances(vitals: Vitals) -> Estimate:
    return over_batches(vitals.variance * SPREAD_TOKENS / (SPREAD_TOKENS - 1))  # to the unbiased estimate


def _calls(cell: Cell) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    n, d = int(cell["n"]), int(cell["d"])
    stream = generator(cell["device"], "additive_cost", n, d, cell["seed"])
    query, key, value = torch.randn(3, n, d, generator=stream, device=stream.device)
    weight = torch.randn(d, generator=stream, device=stream.device) / math.sqrt(d)
    return {
        "dot": lambda: (attention(query, key, value, signs=()).output,),
        "additive": lambda: (additive_attention(query, key, value, weight, signs=()).output,),
    }


def _memory(cell: Cell) -> dict[str, int]:
    """Bytes beyond inputs and outputs at the peak of each call, in a fresh process so that nothing freed is reused."""
    try:
        sizes: dict[str, int] = of_fresh_process(__name__, dict(cell))
    except RuntimeError as error:
        raise InputError(f"run additive_cost: measuring memory failed: {error}. Use a smaller --n.") from None
    return sizes


def main() -> None:
    cell = json.loads(sys.argv[1])
    sizes = {}
    for name in CALLS:
        _calls({**cell, "n": min(64, cell["n"])})[name]()  # loads the libraries, which a later call would count
        sizes[name], _ = rise(_calls(cell)[name], cell["device"])
    print(json.dumps(sizes))


def expect(rows: Rows) -> list[Expectation]:
    inside = tanh_variance()
    expectations = []
    for d in dict.fromkeys(row["d"] for row in rows):
        row = pick(rows, d=d)[0]
        quantity = f"variance of additive scores, w of variance 1/d, d = {d}"
        source = "closed form: E‖w‖² E_q Var_k tanh(q + k), q and k unit normal"
        expectations.append(expect_column(row, "additive_variance_fan_in", quantity, inside, source))
    return expectations


def tanh_variance() -> float:
    """E_q Var_k tanh(q + k) for unit normal q and k: what each entry of w contributes to a row's variance."""
    grid = torch.linspace(-8, 8, 801, dtype=torch.float64, device="cpu")
    weight = torch.exp(-grid.square() / 2)
    weight = weight / weight.sum()
    bent = torch.tanh(grid[:, None] + grid)  # (q, k)
    mean = bent @ weight
    return float(weight @ (bent.square() @ weight - mean.square()))


def finding(rows: Rows) -> str:
    last = max(rows, key=lambda row: (row["n"], row["d"]))
    return (
        f"Additive attention takes {last['factor']:.0f} times as long as the dot product, on this machine, with "
        f"{last['n']} tokens and d = {last['d']}"
    )


SPREADS = {
    "dot_variance": "dot product, unscaled",
    "additive_variance_unit": "additive, w ~ 1",
    "additive_variance_fan_in": "additive, w ~ 1/√d",
}


def draw(rows: Rows, finding: str) -> Any:
    """Time of additive attention over the dot product, and how both scores spread, against d."""
    x = theme.powers("d", "head dim d", [row["d"] for row in rows])
    shown = [{**row, "tokens": f"{row['n']} tokens"} for row in rows]
    lengths = theme.series("tokens", "length", [f"{n} tokens" for n in sorted({row["n"] for row in rows})])
    lengths = lengths.title(None).legend(orient="bottom", columns=1)
    time = marks.curve(shown, x, "factor", "times as long as the dot product", lengths)
    spreads = theme.unpivoted(rows, "d", "score", SPREADS, "variance")
    colour = alt.Color("score:N", title=None,
        legend=alt.Legend(orient="bottom", columns=1), sort=list(SPREADS.values()),
                      scale=alt.Scale(domain=list(SPREADS.values()), range=theme.SERIES[2:5]))  # fmt: skip
    spread = marks.curve(spreads, x, "variance", "variance of the scores", colour, log=True)
    chart = theme.side_by_side(time, spread, theme.WIDTH // 2 + 10, 280).resolve_scale(color="independent")
    note = "CPU, float32, forward. Left: median of ratios within each round, with 95 % intervals. Right: how the scores spread."
    return theme.finish(chart, finding, note)


EXPERIMENT = define(globals())

if __name__ == "__main__":
    main()
