"""parallel: how much faster is one pass over a whole sequence than a loop over its tokens?"""

from __future__ import annotations

import torch

from ..attention import attention
from ..bench.timing import interleave
from .experiment import DEVICE, SEED, Cell, Expectation, Experiment, Parameter, Row, Rows, generator


def measure(cell: Cell) -> list[Row]:
    n, d, heads = int(cell["n"]), int(cell["d"]), int(cell["heads"])
    stream = generator(cell["device"], "parallel", n, d, heads, cell["seed"])
    query, key, value = torch.randn(3, heads, n, d, generator=stream, device=stream.device)

    def once() -> torch.Tensor:
        return attention(query, key, value, causal=True, signs=()).output

    def token_by_token() -> torch.Tensor:
        rows = [attention(query[:, i : i + 1], key[:, : i + 1], value[:, : i + 1], signs=()).output for i in range(n)]
        return torch.cat(rows, dim=1)

    times = interleave(
        {"pass": once, "loop": token_by_token}, rounds=int(cell["rounds"]), warmup=1, device=str(cell["device"])
    )
    faster = times.speed("pass", than="loop")
    return [
        {
            "pass_ms": times.spread("pass").median * 1e3,
            "loop_ms": times.spread("loop").median * 1e3,
            "factor": faster.median,
            "factor_low": faster.low,
            "factor_high": faster.high,
            "difference": float((once() - token_by_token()).abs().max()),
            "threads": torch.get_num_threads(),
        }
    ]


def expect(rows: Rows) -> list[Expectation]:
    return [
        Expectation(
            f"one pass against the loop, largest difference, n = {row['n']}",
            0.0,
            row["difference"],
            1e-5,
            "both compute causal attention",
            "float32 rounding",
        )
        for row in rows
    ]


def finding(rows: Rows) -> str:
    first, last = min(rows, key=lambda row: row["n"]), max(rows, key=lambda row: row["n"])
    return (
        f"One pass over {last['n']} tokens takes {last['pass_ms']:.1f} ms, a loop over them {last['loop_ms']:.0f} ms: "
        f"{last['factor']:.0f} times as long ({first['factor']:.0f} times at {first['n']})"
    )


EXPERIMENT = Experiment(
    name="parallel",
    question="How much faster is one pass over a sequence than a loop over its tokens?",
    claims=("C21",),
    parameters=(
        Parameter("n", (64, 256, 1024), "how many tokens", least=2, hint="one token is one pass"),
        Parameter("d", (64,), "the head dim, d_k", least=1),
        Parameter("heads", (8,), "how many heads", least=1),
        Parameter("rounds", (3,), "times each is run", least=1),
        SEED,
        DEVICE,
    ),
    measure=measure,
    expect=expect,
    finding=finding,
    chart="parallel",
)
