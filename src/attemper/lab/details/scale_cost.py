"""scale_cost: does the scale change the time that attention takes? Timed against the same call with a scale of 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._display import plural
from ..._timing import interleave
from ...attention import attention
from ..engine.experiment import Cell, Expectation, Parameter, Row, Rows, define, generator

WAYS = ("attemper", "eager")


def measure(cell: Cell) -> Row:
    n, d, way = int(cell["n"]), int(cell["d"]), str(cell["way"])
    stream = generator(cell["device"], "scale_cost", n, d, cell["seed"])
    query, key, value = torch.randn(3, n, d, generator=stream, device=stream.device)
    call = _fused if way == "attemper" else _eager
    calls = {"with": lambda: call(query, key, value, d**-0.5), "without": lambda: call(query, key, value, None)}
    times = interleave(calls, rounds=int(cell["rounds"]), warmup=2, budget=10.0, device=str(cell["device"]))
    faster = times.speed("with", than="without")
    return {
        "with_ms": times.spread("with").median * 1e3,
        "without_ms": times.spread("without").median * 1e3,
        "speed": faster.median,
        "speed_low": faster.low,
        "speed_high": faster.high,
        "share_of_operations": 1 / (4 * d + 1),  # one product per score, beside 2 d for q·k and 2 d for the values
        "threads": torch.get_num_threads(),
    }


def _fused(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    return attention(query, key, value, scale=1.0 if scale is None else scale, signs=()).output


def _eager(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    scores = query @ key.T
    return torch.softmax(scores if scale is None else scores * scale, -1) @ value


def expect(rows: Rows) -> list[Expectation]:
    """No time is known beforehand."""
    return []


def finding(rows: Rows) -> str:
    parts = [
        f"{row['speed']:.2f} ({row['speed_low']:.2f} to {row['speed_high']:.2f}) times as fast ({row['way']})"
        for row in sorted(rows, key=lambda row: -int(row["n"]))[: len({row["way"] for row in rows})]
    ]
    return f"With the scale, attention of {max(row['n'] for row in rows)} tokens is {'; '.join(parts)}"


def draw(rows: Rows, finding: str) -> Any:
    """How many times as fast attention is with the scale as without it, against the number of tokens."""
    from ..figures import marks, theme

    colour = theme.series("way", "computed by", list(dict.fromkeys(row["way"] for row in rows)))
    x = theme.powers("n", "tokens", [row["n"] for row in rows])
    points = marks.measured(rows, x, "speed", "speed with 1/√d_k / speed with 1", colour, zero=False)
    chart = marks.labelled_line(1.0, "no difference", at=60) + points
    threads = rows[0]["threads"]
    note = f"d_k = {rows[0]['d']}, {plural(threads, 'thread')}; 95 % intervals. Times are this machine's."
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(
    __name__,
    question="Does the scale change the time that attention takes?",
    claims=("C28",),
    parameters=(
        Parameter("n", (256, 1024), "number of tokens", least=1, most=65536),
        Parameter("d", (64,), "the head dim, d_k", least=1, most=8192),
        Parameter("way", WAYS, "attemper's kernel, or three lines of torch", choices=WAYS),
        Parameter("rounds", (31,), "how often each is timed", least=3, most=10_000),
    ),
)
