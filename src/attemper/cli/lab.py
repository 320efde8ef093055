"""attemper run, claims and cards: questions about the scale, measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .. import _files
from ..errors import InputError
from .app import READER_LEFT, AsJson, Force, console, deliver, failed, finish, note

MOST_JOBS = 4096  # more than any machine has cores


def run(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="The experiment to run, for example variance.", metavar="NAME")
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="List every experiment with its question and its options.")
    ] = False,
    preset: Annotated[
        str | None,
        typer.Option(metavar="PRESET", help="Use a named set of settings, for example full; --list shows them."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_JOBS,
            metavar="N",
            help="How many processes measure at the same time.",
            show_default="one per core for experiments that train",
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep finished results here, and continue from those found here."),
    ] = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the rows (.json .csv .parquet) or the figure (.svg .png .pdf .html).",
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Run one experiment about the scale. --list shows the experiments and the options of each, such as --d 16,64 --rule none."""
    from ..lab import experiment
    from ..lab.engine import output as files
    from ..lab.engine import render
    from ..lab.engine.command import measure, options

    if show_list or name is None:
        printed = deliver(lambda: render.listing(console()))
        raise typer.Exit(2 if not show_list else 0 if printed else READER_LEFT)
    found = experiment(name)
    settings = found.settings(options(found, context.args), preset)
    files.check(output, force)
    swept = measure(found, settings, results, jobs, note)
    if not swept.rows:
        fail(swept.failures)

    def show() -> None:
        if as_json:
            print(_files.json_text(files.document(found, swept.rows)))
        else:
            render.show(found, swept.rows, console())

    printed = deliver(show, None if output is None else lambda: files.write(output, found, swept.rows))
    if swept.failures:
        fail(swept.failures)
    if swept.unkept:
        raise InputError(swept.unkept)
    if not printed:
        raise typer.Exit(READER_LEFT)


def claims(
    train: Annotated[
        bool, typer.Option("--train", help="Also measure the claims about training: takes minutes.")
    ] = False,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="With --train: keep finished runs here, and continue from those found here."
        ),
    ] = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the claims to a .html or .json file.")
    ] = None,
    force: Force = False,
) -> None:
    """Measure common claims about √d_k. Verdicts: holds, holds with a condition, false, not decided, not run."""
    from ..lab.claims import claims as lab_claims
    from ..lab.claims import show

    if results is not None and not train:
        raise InputError("claims: --results keeps the runs of --train. Add --train, or leave --results out.")
    _files.check(output, (".html", ".json"), force)
    judged = lab_claims.run(train=train, note=note, results=results)
    document = lab_claims.document(judged)
    _answer(document, as_json, lambda: show.claims(judged, console()), output, lambda: f"{show.page(document)}\n")


def cards(
    as_json: AsJson = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the cards to a .tsv file for Anki, or .json."),
    ] = None,
    force: Force = False,
) -> None:
    """Print revision cards about √d_k: a question, its answer, and the number just measured."""
    from ..lab.claims import cards as lab_cards
    from ..lab.claims import show

    _files.check(output, (".tsv", ".json"), force)
    deck = lab_cards.deck(note)
    document = [vars(card) for card in deck]
    _answer(document, as_json, lambda: show.cards(deck, console()), output, lambda: lab_cards.anki(deck))


def _answer(
    document: Any, as_json: bool, show: Callable[[], None], output: Path | None, text: Callable[[], str]
) -> None:
    """Print the document or ``show`` it, and write it to ``output``: as JSON, or as ``text``."""

    def write() -> None:
        if output is not None:
            is_json = output.suffix.lower() == ".json"
            _files.save(output, _files.json_bytes(document) if is_json else text().encode())

    finish(lambda: print(_files.json_text(document)) if as_json else show(), write)


def fail(failures: Sequence[object]) -> NoReturn:
    raise failed(*(f"failed: {failure}" for failure in failures))
