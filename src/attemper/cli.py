"""The command `attemper`: parse, call, print.

Data goes to stdout, progress to stderr. Exit 0: fine; 1: findings, or a failure; 2: wrong use. What needs torch is
imported inside a command, so that `--help` is quick.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from . import __version__
from .errors import AttemperError, InputError
from .scale import RULES

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="attemper",
    help="Scaled dot-product attention that measures itself while it runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        _never_fail(stream)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="attemper")
    except AttemperError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _never_fail(stream: object) -> None:
    """Print ? for what an encoding lacks (√ in cp1252, as of a pipe on Windows) instead of ending in an error."""
    if isinstance(stream, io.TextIOWrapper):
        try:
            "√ₕ私".encode(stream.encoding, stream.errors or "strict")
        except UnicodeEncodeError:
            stream.reconfigure(errors="replace")


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None: ...


@app.command()
def env(as_json: AsJson = False) -> None:
    """The versions, processors, kernels and extras found here."""
    from . import env as environment

    found = environment.describe()
    if as_json:
        print(json.dumps(found))
    else:
        _console().print(environment.table(found))


@app.command()
def bench(
    part: Annotated[
        str | None, typer.Argument(help="speed, memory, cpu or watch; the first two when left out.", metavar="PART")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="B,H,L,E", help="Shape to time; repeat for more.", show_default="1,8,2048,64 and 1,4,4096,128"
        ),
    ] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="One mask only.", show_default="both")] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu",
    kernel: Annotated[str, typer.Option(help="The kernel of ours to time; `attemper env` lists them.")] = "auto",
    rounds: Annotated[int | None, typer.Option(min=1, help="Times each candidate runs.", show_default="15")] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="L", help="Length for memory; repeat for more.", show_default="8192, 16384, 32768"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small shapes, few rounds: under a minute.")] = False,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.json", help="Write the JSON document here too.")
    ] = None,
) -> None:
    """What the operation costs in time and memory, beside torch SDPA and eager attention; what watching a model costs."""
    _check_output(output, (".json",))
    from .bench import render
    from .bench import run as runner

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
    document = runner.run(settings, note=_note)
    if as_json:
        print(json.dumps(document))
    else:
        render.show(document, _console())
    if output is not None:
        _write(output, json.dumps(document, indent=1) + "\n")


@app.command()
def explain(
    text: Annotated[
        list[str],
        typer.Argument(help="A sentence, in quotes or not; its words are what white space separates.", metavar="TEXT"),
    ],
    rule: Annotated[
        str | None,
        typer.Option(
            help=f"How the scores are scaled: {', '.join(RULES)}.", show_default="sqrt_dk; qk_norm for cosine"
        ),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Share d_model among this many heads.", show_default="one head is shown")
    ] = None,
    score: Annotated[str, typer.Option(help="dot, additive or cosine.")] = "dot",
    d_model: Annotated[int, typer.Option(help="The width of an embedding.")] = 512,
    d_k: Annotated[
        int | None, typer.Option(help="The width of a query and a key.", show_default="64, or d_model / heads")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws other vectors and matrices.")] = 0,
    layer: Annotated[int | None, typer.Option(help="The layer's place, from 0; rule layer needs it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Attention on a sentence, step by step, with every shape and number; the chosen scale beside none."""
    from .explain import explain as told
    from .explain.text import plain

    found = told(" ".join(text), rule=rule, heads=heads, score=score, d_model=d_model, d_k=d_k, seed=seed, layer=layer)
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    console = _console()
    if console.is_terminal:
        console.print(found)
    else:
        print(plain(found, shutil.get_terminal_size().columns))  # 80, or COLUMNS


Force = Annotated[bool, typer.Option("--force", help="Overwrite the file that -o names.")]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="The experiment; --list shows them.", metavar="NAME")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Every experiment, its question and its options.")] = False,
    preset: Annotated[str | None, typer.Option(help="Other settings by name: full.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes that measure at the same time.", show_default="one per core where it trains"
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep finished cells here, and go on from those that are here."),
    ] = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Rows (.json .csv .parquet) or figure (.svg .png .pdf .html)."
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Measure one question about the scale. An experiment's own options: --d 16,64 --rule none …"""
    from .lab import experiment, render
    from .lab import output as files
    from .lab.command import measure, options

    if show_list or name is None:
        render.listing(_console())
        raise typer.Exit(0 if show_list else 2)
    found = experiment(name)
    settings = found.settings(options(found, context.args), preset)
    files.check(output, files.SUFFIXES, force)
    swept = measure(found, settings, results, jobs, _note)
    if not swept.rows:
        _fail(swept.failures)
    if as_json:
        print(files.text(files.document(found, swept.rows)))
    else:
        render.show(found, swept.rows, _console())
    if output is not None:
        files.write(output, found, swept.rows)
    if swept.failures:
        _fail(swept.failures)


@app.command()
def claims(
    train: Annotated[bool, typer.Option("--train", help="Run the claims about training too: minutes.")] = False,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the claims here: .html or .json.")
    ] = None,
    force: Force = False,
) -> None:
    """Every claim about √d_k in the notes, measured: holds, holds with a condition, false, or not run."""
    from .lab import claims as lab_claims
    from .lab import output as files
    from .lab import render

    files.check(output, (".html", ".json"), force)
    judged = lab_claims.run(train=train, note=_note)
    document = lab_claims.document(judged)
    if as_json:
        print(files.text(document))
    else:
        render.claims(judged, _console())
    if output is not None:
        text = lab_claims.page(document) if output.suffix.lower() == ".html" else files.text(document, indent=1)
        files.save(output, f"{text}\n".encode())


@app.command()
def cards(
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="For Anki to import: .tsv; or .json.")
    ] = None,
    force: Force = False,
) -> None:
    """Revision cards: a question, its answer, and the number just measured."""
    from .lab import cards as lab_cards
    from .lab import output as files
    from .lab import render

    files.check(output, (".tsv", ".json"), force)
    deck = lab_cards.deck(_note)
    document = [vars(card) for card in deck]
    if as_json:
        print(files.text(document))
    else:
        render.cards(deck, _console())
    if output is not None:
        text = lab_cards.anki(deck) if output.suffix.lower() == ".tsv" else files.text(document, indent=1) + "\n"
        files.save(output, text.encode())


def _fail(failures: Sequence[object]) -> NoReturn:
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    raise typer.Exit(1)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False)  # 'attemper[hf]' is not markup


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"-o: cannot write {str(path)!r}: {error.strerror}. Choose another file.") from None


def _check_output(path: Path | None, suffixes: tuple[str, ...]) -> None:
    """Refuse a file that could not be written before the work, not after it."""
    if path is None:
        return
    if path.suffix not in suffixes:
        raise InputError(f"-o must end in {' or '.join(suffixes)}; got {path.name!r}.")
    if not path.parent.is_dir():
        raise InputError(f"-o: there is no folder {str(path.parent)!r}. Make it first.")
