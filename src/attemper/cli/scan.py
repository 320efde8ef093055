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


def scan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model folder with .safetensors, an id of the Hugging Face hub, demo:scaled, demo:unscaled or "
            "demo:smollm2; if left out, the embedded MiniLM.",
            metavar="MODEL",
        ),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", metavar="TEXT", help="A text to run the model on; may be repeated.")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option("--file", metavar="FILE", help="A text file; - is stdin, which is also read if no text is given."),
    ] = None,
    image: Annotated[
        list[str] | None, typer.Option("--image", metavar="FILE", help="An image file, for models with image input.")
    ] = None,
    audio: Annotated[
        list[str] | None, typer.Option("--audio", metavar="FILE", help="A WAV file, for models with audio input.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK", help="The task head to load, for example fill-mask.", show_default="as it was saved"
        ),
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Truncate a text that is too long for the model.")
    ] = False,
    token: Annotated[
        str | None, typer.Option(metavar="WORD", help="A word of the text: show which tokens it attends to.")
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(
            metavar="RULES",
            help="Other scales to try, separated by commas: a rule (none, dk), a number (0.5), a factor (x2).",
        ),
    ] = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Also run experiments: do future tokens, padding or the KV cache change the output?"
        ),
    ] = False,
    declare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=no]",
            help="What is intended, where a design cannot be told from a fault: causal, causal=no, or the name of a fault, as a "
            "finding gives it; may be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
    attention: Annotated[bool, typer.Option("--attention", help="Include the attention weights in the JSON.")] = False,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="OLD.json", help="Show what changed since an older scan, written with -o OLD.json."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the report (.html), the document (.json) or a table of heads (.csv .parquet).",
        ),
    ] = None,
    force: Force = False,
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="LEVEL",
            help="Exit with 1 if a finding has this level or a worse one: note, warn, error, critical, diverging.",
        ),
    ] = None,
    allow_download: Annotated[
        bool, typer.Option("--allow-download", help="Download MODEL from the hub; otherwise nothing is downloaded.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="float16, bfloat16, float32 or float64.", show_default="as stored"),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, …; auto: a GPU if there is one.")
    ] = "auto",
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of --json and exit.")] = False,
) -> None:
    """Find the scale that each layer of a model applies, and whether its attention is healthy."""
    if schema:
        from ..scan.document import schema as published

        raise typer.Exit(0 if say(json.dumps(published(), indent=1, ensure_ascii=False)) else READER_LEFT)
    try:
        with progress() as note_progress:
            note_progress("loading torch")  # importing it takes most of the time of a short scan
            from ..scan import command

            rules = command.check(fail_on, output, force, what_if, attention, as_json)
            declared = command.parsed(declare or ())
            older = None if baseline is None else command.baseline.read(baseline, note_progress)
            texts = command.read_texts(text or (), file or (), bool(image or audio), note_progress)
            loaded = command.load(
                model, task=task, dtype=dtype, device=device, allow_download=allow_download, progress=note_progress
            )
            note_progress("reading the inputs")
            inputs = command.make(
                loaded, texts=texts, images=image or (), sounds=audio or (), truncate=truncate, progress=note_progress
            )
            note_progress("running the model")
            pictures = attention or (output is not None and output.suffix.lower() == ".html")
            scanned = command.run(
                loaded,
                inputs,
                rules=rules,
                token=token,
                pictures=pictures,
                deep=deep,
                declared=declared,
                progress=note_progress,
            )
            if older is not None and baseline is not None:
                scanned.document["baseline"] = command.baseline.compare(older, scanned.document, baseline.name)
    except KeyboardInterrupt as stop:
        stop.add_note("Nothing was measured.")
        raise

    def write() -> None:
        if output is not None:
            scanned.write(output, attention)
            note(f"{output} written" + ("; open it in a browser" if output.suffix.lower() == ".html" else ""))

    printed = deliver(lambda: _show(scanned, as_json, attention), write)
    if scanned.interrupted:
        raise typer.Exit(130)
    finding = command.fails(scanned.document, fail_on)
    if finding:
        raise failed(finding)
    if not printed:
        raise typer.Exit(READER_LEFT)


def _show(scanned: Scan, as_json: bool, attention: bool) -> None:
    if as_json:
        print(escaped_json(scanned.to_dict(attention)))
        return
    screen = console()
    if screen.is_terminal:
        screen.print(scanned)
        return
    from ..scan.show.terminal import text

    print(text(scanned.document, shutil.get_terminal_size().columns))
