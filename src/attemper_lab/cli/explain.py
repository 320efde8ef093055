"""attemper explain: attention on a sentence, step by step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from attemper import RULES
from attemper.extension.command import AsJson, Force, console, finish


def explain(
    text: Annotated[
        list[str],
        typer.Argument(help="A sentence, with or without quotes, split into words at white space.", metavar="TEXT"),
    ],
    rule: Annotated[
        str | None,
        typer.Option(
            help=f"The rule that scales the scores: {', '.join(RULES)}.", show_default="sqrt_dk; qk_norm for cosine"
        ),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="How many heads share d_model.", show_default="one head is shown")
    ] = None,
    score: Annotated[str, typer.Option(help="How q and k are compared: dot, additive or cosine.")] = "dot",
    d_model: Annotated[int, typer.Option(help="The width of an embedding.")] = 512,
    d_k: Annotated[
        int | None, typer.Option(help="The width of a query and a key.", show_default="64, or d_model / heads")
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the random vectors and matrices.")] = 0,
    layer: Annotated[int | None, typer.Option(help="The index of the layer, from 0; the rule layer needs it.")] = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the flow as a picture (.svg .png), a page (.html) or data (.json).",
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Show attention on a sentence step by step, with every shape and number, for the chosen scale and for none."""
    from ..explain import explain as compute
    from ..explain import files
    from ..explain.terminal import plain

    files.check(output, force)

    explanation = compute(
        " ".join(text), rule=rule, heads=heads, score=score, d_model=d_model, d_k=d_k, seed=seed, layer=layer
    )
    screen = console()

    def show() -> None:
        if as_json:
            print(json.dumps(explanation.to_dict()))
        elif screen.is_terminal:
            screen.print(explanation)
        else:
            print(plain(explanation, shutil.get_terminal_size().columns))  # 80, or COLUMNS

    finish(show, None if output is None else lambda: files.write(output, explanation))
