"""additive_cost: what does additive attention cost compared with the dot product, and how do its scores spread?

Two weights w: `unit` has entries of variance 1, `fan_in` of variance 1/d, as layers are initialised.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._memory import MIB, rise
from ..._timing import interleave
from ...attention import attention
from ...errors import InputError
from ...scores import additive_attention
from ...vitals import Vitals
from ..engine.experiment import Cell, Expectation, Parameter, Row, Rows, define, generator, pick
from ..maths.stats import Estimate, expect_column, over_batches

SPREAD_TOKENS = 64
WEIGHTS = 32  # draws of w, with queries and keys of their own
CALLS = ("dot", "additive")


def measure(cell: Cell) -> Row:
    n, d = int(cell["n"]), int(cell["d"])
    calls = _calls(cell)
    times = interleave(calls, rounds=int(cell["rounds"]), warmup=1, budget=10.0, device=str(cell["device"]))
    slower = times.speed("dot", than="additive")
    stream = generator(cell["device"], "additive_cost spread", d, cell["seed"])
    query, key = torch.randn(2, WEIGHTS, SPREAD_TOKENS, d, generator=stream, device=stream.device)
    weight = torch.randn(WEIGHTS, d, generator=stream, device=stream.device)
    spread = {
        name: _variances(additive_attention(query, key, key[..., :1], weight * factor, signs=("variance",)).vitals)
        for name, factor in (("unit", 1.0), ("fan_in", 1 / math.sqrt(d)))
    }
    dot = _variances(attention(query, key, key[..., :1], scale=1.0, signs=("variance",)).vitals)
    return {
        "dot_ms": times.spread("dot").median * 1e3,
        "additive_ms": times.spread("additive").median * 1e3,
        "factor": slower.median,
        "factor_low": slower.low,
        "factor_high": slower.high,
        **{f"{name}_mib": size / MIB for name, size in _memory(cell).items()},
        "whole_mib": n * n * d * 4 / MIB,  # what q + k would take if every sum were kept
        **dot.columns("dot_variance"),
        **spread["unit"].columns("additive_variance_unit"),
        **spread["fan_in"].columns("additive_variance_fan_in"),
        "threads": torch.get_num_threads(),
    }


def _variances(vitals: Vitals) -> Estimate:
    return over_batches(vitals.variance * SPREAD_TOKENS / (SPREAD_TOKENS - 1))  # the sample's is that much smaller


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
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(dict(cell))], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"signal {-done.returncode}"])[-1]
        raise InputError(f"run additive_cost: measuring memory failed: {last}. Use a smaller --n.")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    cell = json.loads(sys.argv[1])
    sizes = {}
    for name in CALLS:
        _calls({**cell, "n": min(64, cell["n"])})[name]()  # loads what is loaded once
        risen, results = rise(_calls(cell)[name], cell["device"])
        sizes[name] = max(0, risen - sum(tensor.nbytes for tensor in results))
    print(json.dumps(sizes))


def expect(rows: Rows) -> list[Expectation]:
    inside = tanh_variance()
    found = []
    for d in dict.fromkeys(row["d"] for row in rows):
        row = pick(rows, d=d)[0]
        quantity = f"variance of additive scores, w of variance 1/d, d = {d}"
        source = "closed form: E‖w‖² E_q Var_k tanh(q + k), q and k unit normal"
        found.append(expect_column(row, "additive_variance_fan_in", quantity, inside, source))
    return found


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
    import altair as alt

    from ..figures import marks, theme

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


EXPERIMENT = define(
    __name__,
    question="What does additive attention cost compared with the dot product, and how do its scores spread?",
    claims=("C13",),
    parameters=(
        Parameter("n", (256, 1024), "number of tokens", least=2, hint="one token has nothing to compare"),
        Parameter("d", (16, 64, 256), "the head dim, d_k", least=1),
        Parameter("rounds", (5,), "how often each is timed", least=1),
    ),
)

if __name__ == "__main__":
    main()
