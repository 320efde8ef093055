"""scale_cost: does the scale change the time that attention takes? Timed against the same call with a scale of 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attemper import attention
from attemper.extension.tools import plural

from ..engine.experiment import Cell, Row, Rows, define, generator
from ..figures import marks, theme
from ..timing import interleave


def measure(cell: Cell) -> Row:
    n, d, way = int(cell["n"]), int(cell["d"]), str(cell["way"])
    stream = generator(cell["device"], "scale_cost", n, d, cell["seed"])
    query, key, value = torch.randn(3, n, d, generator=stream, device=stream.device)
    call = _fused if way == "attemper" else _eager
    calls = {"with": lambda: call(query, key, value, d**-0.5), "without": lambda: call(query, key, value, None)}
    device = str(cell["device"])
    times = interleave(calls, rounds=int(cell["rounds"]), warmup=2, budget=10.0, device=device, host=device == "cpu")
    return {
        **times.milliseconds("with", "without"),
        **times.speed("with", than="without").columns("speed"),
        "share_of_operations": 1 / (4 * d + 1),  # one product per score, beside 2 d for q·k and 2 d for the values
        "threads": torch.get_num_threads(),
    }


def _fused(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    return attention(query, key, value, scale=1.0 if scale is None else scale, signs=()).output


def _eager(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    scores = query @ key.T
    return torch.softmax(scores if scale is None else scores * scale, -1) @ value


def finding(rows: Rows) -> str:
    parts = [
        f"{row['speed']:.2f} ({row['speed_low']:.2f} to {row['speed_high']:.2f}) times as fast ({row['way']})"
        for row in sorted(rows, key=lambda row: -int(row["n"]))[: len({row["way"] for row in rows})]
    ]
    return f"With the scale, attention of {max(row['n'] for row in rows)} tokens is {'; '.join(parts)}"


def draw(rows: Rows, finding: str) -> Any:
    """How many times as fast attention is with the scale as without it, against the number of tokens."""
    colour = theme.series("way", "computed by", list(dict.fromkeys(row["way"] for row in rows)))
    x = theme.powers("n", "tokens", [row["n"] for row in rows])
    points = marks.measured(rows, x, "speed", "speed with 1/√d_k / speed with 1", colour, zero=False)
    chart = marks.labelled_line(1.0, "no difference", at=60) + points
    threads = rows[0]["threads"]
    note = (
        f"d_k = {rows[0]['d']}, {plural(threads, 'thread')}; 95 % intervals. On a CPU the processor time of a thread."
    )
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(globals())
