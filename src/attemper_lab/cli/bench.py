"""attemper bench: what the operation costs here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from attemper.extension import files as _files
from attemper.extension.command import AsJson, Force, console, finish, note

Rounds = Annotated[
    int | None,
    typer.Option(
        "--rounds",
        min=1,
        max=1000,
        metavar="N",
        help="How often each candidate runs: 15, or 5 with --quick, if left out.",
    ),
]
Lengths = Annotated[
    list[int] | None,
    typer.Option(
        "--length",
        min=1,
        metavar="L",
        help="A length to measure the memory of, 8192, 16384 and 32768 if left out; may be repeated.",
    ),
]


def bench(
    part: Annotated[
        str | None,
        typer.Argument(
            help="speed, memory, cpu, cuda, watch, host or promises; speed and memory if left out.", metavar="PART"
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="B,H,L,E",
            help="A shape to time, 1,8,2048,64 and 1,4,4096,128 if left out; may be repeated.",
        ),
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--full", help="Time only causal attention, or only attention without a mask.", show_default="both"
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="float16, bfloat16, float32 or float64.")
    ] = "float32",
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, …")] = "cpu",
    kernel: Annotated[
        str, typer.Option("--kernel", metavar="KERNEL", help="The attemper kernel to time; `attemper env` lists them.")
    ] = "auto",
    rounds: Rounds = None,
    length: Lengths = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small shapes, few rounds: under a minute.")] = False,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.json", help="Write the JSON document here too.")
    ] = None,
    force: Force = False,
) -> None:
    """Measure the time and memory of attention, compared with torch's SDPA and eager attention, or what watching costs."""
    _files.check(output, (".json",), force)
    from ..bench import render
    from ..bench import run as runner

    typed = {
        "--shape": shape,
        "--causal": causal is not None,
        "--dtype": dtype != "float32",
        "--device": device != "cpu",
        "--kernel": kernel != "auto",
        "--rounds": rounds,
        "--length": length,
    }
    runner.check_options(part, [option for option, was in typed.items() if was])
    settings = runner.settings(
        quick,
        parts=None if part is None else (part,),
        shapes=tuple(runner.parse_shape(text) for text in shape or ()),
        masks=None if causal is None else (causal,),
        dtype=dtype,
        device=device,
        kernel=kernel,
        rounds=rounds,
        lengths=tuple(length or ()),
    )
    document = runner.run(settings, note=note)
    text = json.dumps(document, indent=1) + "\n"
    finish(
        lambda: print(json.dumps(document)) if as_json else render.show(document, console()),
        None if output is None else lambda: _files.save(output, text.encode()),
    )
