"""parallel: how much faster is one pass over a whole sequence than a loop over its tokens?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attemper import attention
from attemper.extension.tools import plural

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator, pick
from ..figures import marks, theme
from ..timing import interleave


def measure(cell: Cell) -> Row:
    n, d, heads = int(cell["n"]), int(cell["d"]), int(cell["heads"])
    stream = generator(cell["device"], "parallel", n, d, heads, cell["seed"])
    query, key, value = torch.randn(3, heads, n, d, generator=stream, device=stream.device)

    def once() -> Tensor:
        torch.set_num_threads(int(cell["threads"]))
        return attention(query, key, value, causal=True, signs=()).output

    def call(token: int, keys: int) -> Tensor:
        return attention(query[:, token : token + 1], key[:, :keys], value[:, :keys], signs=()).output

    def token_by_token() -> Tensor:
        torch.set_num_threads(1)  # one token leaves nothing to share out
        return torch.cat([call(token, token + 1) for token in range(n)], dim=1)

    # the processor time of one thread, which other programs do not lengthen
    alone = cell["device"] == "cpu" and int(cell["threads"]) == 1
    timer: dict[str, Any] = {"rounds": int(cell["rounds"]), "warmup": 1, "device": str(cell["device"]), "host": alone}
    before = torch.get_num_threads()
    try:
        times = interleave({"pass": once, "loop": token_by_token}, **timer)
        torch.set_num_threads(1)
        each = [
            interleave({"call": partial(call, token, token + 1), "empty": partial(call, token, 1)}, **timer).seconds
            for token in range(n)
        ]
        difference = float((once() - token_by_token()).abs().max())
    finally:
        torch.set_num_threads(before)
    calls, work = without_calls(each)
    return {
        **times.milliseconds("pass", "loop"),
        "calls_ms": calls * 1e3,
        "work_ms": work * 1e3,
        **times.speed("pass", than="loop").columns("factor"),
        "work_factor": work / min(times.seconds["pass"]),
        "difference": difference,
    }


def without_calls(each: Sequence[Mapping[str, Sequence[float]]]) -> tuple[float, float]:
    """Seconds that a loop spends on calling, and on computing, from the times of each token's call and an empty call (one key).

    Computing time is a small difference of two large times. So both calls are timed in turn and the fastest of each counts,
    because disturbances only add time. Noise can still make the difference negative; it is then 0.
    """
    calls = sum(min(token["empty"]) for token in each)
    return calls, max(0.0, sum(min(token["call"]) for token in each) - calls)


def expect(rows: Rows) -> list[Expectation]:
    quantity, source = "one pass against the loop, largest difference", "both compute causal attention"
    names = [f"{quantity}, n = {row['n']}, {row['threads']} threads" for row in rows]
    return [
        Expectation(name, 0.0, row["difference"], 1e-5, source, "float32 rounding")
        for row, name in zip(rows, names, strict=True)
    ]


def finding(rows: Rows) -> str:
    few = min(row["threads"] for row in rows)
    last = max(pick(rows, threads=few), key=lambda row: row["n"])
    return (
        f"One pass over {last['n']} tokens is {last['factor']:.0f} times as fast as a loop over them, and "
        f"{last['work_factor']:.1f} times without the cost of the loop's calls"
    )


def draw(rows: Rows, finding: str) -> Any:
    """One pass over a sequence against a loop over its tokens: time against length."""
    few = min(row["threads"] for row in rows)
    lines = [("loop", few, "loop"), ("calls", few, "loop: calls"), ("work", few, "loop: computing")]
    lines += [
        ("pass", threads, f"one pass, {plural(threads, 'thread')}")
        for threads in sorted({row["threads"] for row in rows})
    ]
    parts = [
        {"n": row["n"], "how": how, "ms": row[f"{name}_ms"]}
        for name, threads, how in lines
        for row in rows
        if row["threads"] == threads and row[f"{name}_ms"] > 0  # computing can be less than the clock sees
    ]
    x = theme.powers("n", "tokens", [row["n"] for row in rows])
    colour = theme.series("how", "computed", [how for _, _, how in lines])
    chart = marks.curve(parts, x, "ms", "milliseconds", colour, log=True)
    first = rows[0]
    note = (
        f"Causal attention, d_k = {first['d']}, {first['heads']} heads, float32, CPU; the loop on one thread. "
        "Calls: as many calls with one key each. Computing: the time that the loop takes beyond that. "
        "Both are of the fastest of each call."
    )
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(globals())
