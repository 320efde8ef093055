"""attemper scan: which scale a model applies, and whether its attention is healthy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._display import escaped_json
from .app import READER_LEFT, AsJson, Force, console, deliver, failed, note, say
from .progress import progress

if TYPE_CHECKING:
    from ..scan import Scan

Model = Annotated[
    str | None,
    typer.Argument(
        help="A model folder with .safetensors, an id of the Hugging Face hub, demo:scaled or demo:unscaled; if left out, the "
        "embedded MiniLM.",
        metavar="MODEL",
    ),
]
Texts = Annotated[
    list[str] | None, typer.Option("--text", metavar="TEXT", help="A text to run the model on; may be repeated.")
]
Files = Annotated[
    list[str] | None,
    typer.Option("--file", metavar="FILE", help="A text file; - is stdin, which is also read if no text is given."),
]
Images = Annotated[
    list[str] | None, typer.Option("--image", metavar="FILE", help="An image file, for models with image input.")
]
Sounds = Annotated[
    list[str] | None, typer.Option("--audio", metavar="FILE", help="A WAV file, for models with audio input.")
]
Task = Annotated[
    str | None,
    typer.Option(metavar="TASK", help="The task head to load, for example fill-mask.", show_default="as it was saved"),
]
Truncate = Annotated[bool, typer.Option("--truncate", help="Truncate a text that is too long for the model.")]
Token = Annotated[str | None, typer.Option(metavar="WORD", help="A word of the text: show which tokens it attends to.")]
WhatIfOption = Annotated[
    str | None,
    typer.Option(
        metavar="RULES",
        help="Other scales to try, separated by commas: a rule (none, dk), a number (0.5), a factor (x2).",
    ),
]
Deep = Annotated[
    bool,
    typer.Option("--deep", help="Also run experiments: do future tokens, padding or the KV cache change the output?"),
]
Attention = Annotated[bool, typer.Option("--attention", help="Include the attention weights in the JSON.")]
BaselineOption = Annotated[
    Path | None,
    typer.Option(metavar="OLD.json", help="Show what changed since an older scan, written with -o OLD.json."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the report (.html), the document (.json) or a table of heads (.csv .parquet).",
    ),
]
FailOn = Annotated[
    str | None,
    typer.Option(
        metavar="LEVEL",
        help="Exit with 1 if a finding has this level or a worse one: note, warn, act, critical, diverging.",
    ),
]
Download = Annotated[
    bool, typer.Option("--allow-download", help="Download MODEL from the hub; otherwise nothing is downloaded.")
]
Dtype = Annotated[
    str | None, typer.Option(metavar="DTYPE", help="float16, bfloat16, float32 or float64.", show_default="as stored")
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, …; auto: a GPU if there is one.")
]
Schema = Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of --json and exit.")]


def scan(
    model: Model = None,
    text: Texts = None,
    file: Files = None,
    image: Images = None,
    audio: Sounds = None,
    task: Task = None,
    truncate: Truncate = False,
    token: Token = None,
    what_if: WhatIfOption = None,
    deep: Deep = False,
    as_json: AsJson = False,
    attention: Attention = False,
    baseline: BaselineOption = None,
    output: Output = None,
    force: Force = False,
    fail_on: FailOn = None,
    allow_download: Download = False,
    dtype: Dtype = None,
    device: Device = "auto",
    schema: Schema = False,
) -> None:
    """Find the scale that each layer of a model applies, and whether its attention is healthy."""
    if schema:
        from ..scan.schema import schema as published

        raise typer.Exit(0 if say(json.dumps(published(), indent=1, ensure_ascii=False)) else READER_LEFT)
    try:
        with progress() as note_progress:
            note_progress("loading torch")  # importing it takes most of the time of a short scan
            from ..scan import command

            asked = command.ScanOptions(
                model=model,
                texts=text or (),
                files=file or (),
                images=image or (),
                sounds=audio or (),
                task=task,
                truncate=truncate,
                token=token,
                what_if=what_if,
                deep=deep,
                as_json=as_json,
                attention=attention,
                baseline=baseline,
                output=output,
                force=force,
                fail_on=fail_on,
                allow_download=allow_download,
                dtype=dtype,
                device=device,
            )
            found = command.answer(asked, note_progress)
    except KeyboardInterrupt as stop:
        stop.add_note("Nothing was measured.")
        raise

    def write() -> None:
        if output is not None:
            found.write(output, attention)
            note(f"{output} written" + ("; open it in a browser" if output.suffix.lower() == ".html" else ""))

    printed = deliver(lambda: _show(found, as_json, attention), write)
    if found.interrupted:
        raise typer.Exit(130)
    finding = command.fails(found.document, fail_on)
    if finding:
        raise failed(finding)
    if not printed:
        raise typer.Exit(READER_LEFT)


def _show(found: Scan, as_json: bool, attention: bool) -> None:
    if as_json:
        print(escaped_json(found.to_dict(attention)))
        return
    screen = console()
    if screen.is_terminal:
        screen.print(found)
        return
    from ..scan.show.terminal import text

    print(text(found.document, shutil.get_terminal_size().columns))
