"""attemper run, claims and cards: questions about the scale, measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from attemper.errors import InputError
from attemper.extension import files as _files
from attemper.extension.command import READER_LEFT, AsJson, Force, busy, console, deliver, failed, finish, note

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
    backend: Annotated[
        str | None,
        typer.Option(metavar="dask|ray", help="Measure on a cluster; without --address on one started here."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the cluster of --backend is: tcp://10.0.0.1:8786.")
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
    from .. import experiment
    from ..engine import clusters, render
    from ..engine import output as files
    from ..engine.command import measure, options

    if show_list or name is None:
        printed = deliver(lambda: render.listing(console()))
        raise typer.Exit(2 if not show_list else 0 if printed else READER_LEFT)
    chosen = experiment(name)
    clusters.check(backend, address, jobs)
    settings = chosen.settings(options(chosen, context.args), preset)
    files.check(output, force)
    swept = measure(chosen, settings, results, jobs, note, backend, address)
    if not swept.rows:
        fail(swept.failures)

    def show() -> None:
        if as_json:
            print(_files.json_text(files.document(chosen, swept.rows)))
        else:
            render.show(chosen, swept.rows, console())

    printed = deliver(show, None if output is None else lambda: files.write(output, chosen, swept.rows))
    if swept.failures:
        fail(swept.failures)
    if swept.save_error:
        raise InputError(swept.save_error)
    if not printed:
        raise typer.Exit(READER_LEFT)


def claims(
    name: Annotated[
        str | None, typer.Argument(help="One claim, for example C6, with its whole story.", metavar="CLAIM")
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Train the models here: takes minutes. Otherwise rows of an H200 are used.")
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
    """Measure common claims about √d_k, a line each. Verdicts: holds, holds with a condition, false, not decided, not run."""
    from ..claims import claims as lab_claims
    from ..claims import show

    if results is not None and not train:
        raise InputError("claims: --results keeps the runs of --train. Add --train, or leave --results out.")
    _files.check(output, (".html", ".json"), force)
    wanted = lab_claims.CLAIMS if name is None else (lab_claims.of_id(name),)
    judging = lab_claims.judging(wanted, train, note, results, busy)
    judged: list[lab_claims.JudgedClaim] = []

    def print_all() -> None:
        for claim in judging:
            judged.append(claim)
            if not as_json:
                (show.line if name is None else show.story)(claim, console())
                sys.stdout.flush()
        if as_json:
            print(_files.json_text(lab_claims.document(judged)))
        elif name is None:
            show.closing(judged, console())

    def write() -> None:
        judged.extend(judging)  # what is left if the reader of stdout went away
        if output is not None and len(judged) == len(wanted):
            document = lab_claims.document(judged)
            is_json = output.suffix.lower() == ".json"
            _files.save(output, _files.json_bytes(document) if is_json else f"{show.page(document)}\n".encode())

    finish(print_all, None if output is None else write)


def cards(
    as_json: AsJson = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the cards to a .tsv file for Anki, or .json."),
    ] = None,
    force: Force = False,
) -> None:
    """Print revision cards about √d_k: a question, its answer, and the number just measured."""
    from ..claims import cards as lab_cards
    from ..claims import show

    _files.check(output, (".tsv", ".json"), force)
    deck = lab_cards.deck(note)
    document = [vars(card) for card in deck]

    def write() -> None:
        if output is not None:
            is_json = output.suffix.lower() == ".json"
            _files.save(output, _files.json_bytes(document) if is_json else lab_cards.anki(deck).encode())

    finish(lambda: print(_files.json_text(document)) if as_json else show.cards(deck, console()), write)


def fail(failures: Sequence[object]) -> NoReturn:
    raise failed(*(f"failed: {failure}" for failure in failures))
