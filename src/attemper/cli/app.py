"""The application that commands join, what they share, and where every error ends."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .. import __version__
from .._shown import safe
from ..errors import AttemperError

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
READER_LEFT = 141  # as a shell says it of a program that SIGPIPE ended
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file that -o names.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        _never_fail(stream)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="attemper")
    except AttemperError as error:
        print(f"Error: {safe(error)}", file=sys.stderr)
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


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False)  # 'attemper[hf]' is not markup


def note(line: str) -> None:
    print(safe(line), file=sys.stderr, flush=True)


def say(words: str) -> bool:
    """Print to stdout; whether there was a reader to the end: `| head` leaves once it has its lines."""
    try:
        print(words, flush=True)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # what is flushed at the end goes nowhere, silently
        return False
    return True
