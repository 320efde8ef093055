"""attemper run, claims and cards: what is said about the scale, measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ..errors import InputError
from .app import READER_LEFT, AsJson, Force, console, deliver, note

MOST_JOBS = 4096  # more than any machine has cores


def run(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="The experiment; --list shows them.", metavar="NAME")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Every experiment, its question and its options.")] = False,
    preset: Annotated[str | None, typer.Option(help="Other settings by name: full.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_JOBS,
            help="Processes that measure at the same time.",
            show_default="one per core where it trains",
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
    from ..lab import experiment
    from ..lab.engine import output as files
    from ..lab.engine import render
    from ..lab.engine.command import measure, options

    if show_list or name is None:
        heard = deliver(lambda: render.listing(console()))
        raise typer.Exit(2 if not show_list else 0 if heard else READER_LEFT)
    found = experiment(name)
    settings = found.settings(options(found, context.args), preset)
    files.check(output, files.SUFFIXES, force)
    swept = measure(found, settings, results, jobs, note)
    if not swept.rows:
        fail(swept.failures)

    def show() -> None:
        if as_json:
            print(files.text(files.document(found, swept.rows)))
        else:
            render.show(found, swept.rows, console())

    heard = deliver(show, None if output is None else lambda: files.write(output, found, swept.rows))
    if swept.failures:
        fail(swept.failures)
    if swept.unkept:
        raise InputError(swept.unkept)
    if not heard:
        raise typer.Exit(READER_LEFT)


def claims(
    train: Annotated[bool, typer.Option("--train", help="Run the claims about training too: minutes.")] = False,
    results: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep finished runs of --train here, and go on from those that are here."),
    ] = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the claims here: .html or .json.")
    ] = None,
    force: Force = False,
) -> None:
    """Every claim about √d_k in the notes, measured: holds, holds with a condition, false, not decided, or not run."""
    from ..lab.claims import claims as lab_claims
    from ..lab.engine import output as files
    from ..lab.engine import render

    files.check(output, (".html", ".json"), force)
    judged = lab_claims.run(train=train, note=note, results=results)
    document = lab_claims.document(judged)

    def write() -> None:
        if output is not None:
            text = lab_claims.page(document) if output.suffix.lower() == ".html" else files.text(document, indent=1)
            files.save(output, f"{text}\n".encode())

    if not deliver(lambda: print(files.text(document)) if as_json else render.claims(judged, console()), write):
        raise typer.Exit(READER_LEFT)


def cards(
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="For Anki to import: .tsv; or .json.")
    ] = None,
    force: Force = False,
) -> None:
    """Revision cards: a question, its answer, and the number just measured."""
    from ..lab.claims import cards as lab_cards
    from ..lab.engine import output as files
    from ..lab.engine import render

    files.check(output, (".tsv", ".json"), force)
    deck = lab_cards.deck(note)
    document = [vars(card) for card in deck]

    def write() -> None:
        if output is not None:
            text = lab_cards.anki(deck) if output.suffix.lower() == ".tsv" else files.text(document, indent=1) + "\n"
            files.save(output, text.encode())

    if not deliver(lambda: print(files.text(document)) if as_json else render.cards(deck, console()), write):
        raise typer.Exit(READER_LEFT)


def fail(failures: Sequence[object]) -> NoReturn:
    for failure in failures:
        note(f"failed: {failure}")
    raise typer.Exit(1)
