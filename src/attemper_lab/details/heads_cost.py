"""heads_cost: do h heads of d/h take longer than one head of d? Both have the same products; h heads have h times the weights."""

from __future__ import annotations

from typing import Any

import torch

from attemper import attention
from attemper.extension.tools import plural

from ..engine.experiment import Cell, Row, Rows, define, generator
from ..figures import marks, theme
from ..timing import interleave


def measure(cell: Cell) -> Row:
    n, width, heads = int(cell["n"]), int(cell["d_model"]), int(cell["heads"])
    stream = generator(cell["device"], "heads_cost", n, width, cell["seed"])
    whole = torch.randn(3, n, 1, width, generator=stream, device=stream.device)
    one, many = (whole.reshape(3, n, count, -1).transpose(1, 2) for count in (1, heads))
    calls = {"one": lambda: attention(*one, signs=()), "many": lambda: attention(*many, signs=())}
    device = str(cell["device"])
    times = interleave(calls, rounds=int(cell["rounds"]), warmup=2, budget=10.0, device=device, host=device == "cpu")
    return {
        **times.milliseconds("one", "many"),
        **times.speed("one", than="many").columns("longer"),
        "weights": heads,  # times as many exponentials as one head has, n² each
        "threads": torch.get_num_threads(),
    }


def finding(rows: Rows) -> str:
    last = max(rows, key=lambda row: (row["n"], row["heads"]))
    said = f"{last['longer']:.1f} ({last['longer_low']:.1f} to {last['longer_high']:.1f}) times as long"
    width = last["d_model"]
    return f"{last['heads']} heads of {width // last['heads']} take {said} as one of {width}, on {last['n']} tokens"


def draw(rows: Rows, finding: str) -> Any:
    """How many times as long h heads take, against h."""
    rows = [{**row, "tokens": f"{row['n']} tokens"} for row in rows]
    colour = theme.series("tokens", "tokens", list(dict.fromkeys(row["tokens"] for row in rows)))
    x = theme.powers("heads", "heads", [row["heads"] for row in rows])
    points = marks.measured(rows, x, "longer", "time of h heads / time of one", colour, zero=False)
    chart = marks.labelled_line(1.0, "no difference", at=60) + points
    threads = plural(rows[0]["threads"], "thread")
    note = f"Width {rows[0]['d_model']}, {threads}; 95 % intervals. On a CPU the processor time of a thread."
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(globals())
