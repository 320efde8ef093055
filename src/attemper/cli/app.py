"""The typer application, the options that all commands share, and how errors become a sentence and an exit code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from .._display import safe
from ..errors import AttemperError, InputError, out_of_memory
from .stopping import Stopping

if TYPE_CHECKING:
    from rich.console import Console


class Command(TyperCommand):
    """A command with -q and -v, whose --help handles a full disk and a closed stdout like all other output."""

    def __init__(self, *words: Any, params: list[Any], **options: Any) -> None:
        super().__init__(*words, params=[*params, *typer.main.get_command(_every).params], **options)

    def invoke(self, ctx: Any) -> Any:
        with open(os.devnull, "w", encoding="utf-8") if ctx.meta["quiet"] else contextlib.nullcontext(sys.stderr) as to:
            try:
                with contextlib.redirect_stderr(to):
                    return super().invoke(ctx)
            except (AttemperError, OSError, MemoryError) as error:
                if ctx.meta["verbose"]:
                    _trace(error)
                raise

    def get_help(self, ctx: Any) -> str:
        return _helped(super().get_help, ctx)


class _Commands(TyperGroup):
    """Runs every command, so that a signal always ends in the same sentence."""

    def get_help(self, ctx: Any) -> str:
        return _helped(super().get_help, ctx)

    def invoke(self, ctx: Any) -> Any:
        stopping: Stopping = ctx.obj
        try:
            return super().invoke(ctx)
        except typer.Exit as ended:
            for line in getattr(ended, "__notes__", ()):  # why, also with -q
                note(line)
            stopping.reported = True  # the command has printed its own sentence
            raise
        except AttemperError:
            raise
        except (KeyboardInterrupt, Exception) as error:
            # during an import, a signal may surface as another exception
            if stopping.number is None and not isinstance(error, KeyboardInterrupt):
                raise
            saved = " ".join(getattr(error, "__notes__", ())) or "Nothing was kept."
            note(f"Stopped by {stopping.name}. {saved}")
            stopping.reported = True
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    name="attemper",
    cls=_Commands,
    help="Scaled dot-product attention that measures itself while it runs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
INTERRUPTED = 130  # main() turns it into 143 for SIGTERM
READER_LEFT = 141  # what a shell reports for SIGPIPE
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file that -o names.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        _never_fail(stream)
    _open_streams()
    stopping = Stopping()
    try:
        with stopping:
            code = _run(arguments, stopping)
    except KeyboardInterrupt:  # before or after the command itself
        code = INTERRUPTED
    if code == INTERRUPTED and not stopping.reported:
        note(f"Stopped by {stopping.name}. Nothing was kept.")
    raise SystemExit(stopping.code if code == INTERRUPTED else code)


def _run(arguments: Sequence[str] | None, stopping: Stopping) -> int:
    """Run a command and return its exit code. Errors that the user can fix are printed as a sentence, without a traceback."""
    try:
        if sys.stdout is None:
            raise InputError("stdout is closed, so nothing can be printed. Redirect it: > out.txt, or > /dev/null.")
        try:
            app(args=None if arguments is None else list(arguments), prog_name="attemper", obj=stopping)
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except AttemperError as error:
        note(f"Error: {error}")
    except OSError as error:
        note(f"Error: {_of_the_system(error)}")
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        note("Error: there is not enough memory for this. Use smaller numbers, a shorter text or a smaller model.")
    return 2


def _of_the_system(error: OSError) -> str:
    if error.filename is None:
        return f"the system refused: {error.strerror or error}."
    return f"cannot use {str(error.filename)!r}: {error.strerror}. Check that it exists and that you may read it."


def _open_streams() -> None:
    """Open stdin, stdout and stderr where they are closed: the next file would get that number, and with it our output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with contextlib.suppress(OSError):
                empty = os.open(os.devnull, os.O_RDWR)
                if empty != number:
                    os.dup2(empty, number)
                    os.close(empty)
    if sys.stderr is None:  # print(file=None) would print to stdout
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (held to the end)


def _never_fail(stream: object) -> None:
    """Print ? for characters that the encoding lacks (√ in cp1252) instead of failing."""
    if isinstance(stream, io.TextIOWrapper):
        try:
            "√ₕ私".encode(stream.encoding, stream.errors or "strict")
        except UnicodeEncodeError:
            stream.reconfigure(errors="replace")


def _version(asked: bool) -> None:
    if asked:
        raise typer.Exit(0 if say(__version__) else READER_LEFT)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


def _keep(ctx: typer.Context, param: typer.CallbackParam, value: bool) -> None:
    """Keep -q and -v for ``Command.invoke``."""
    ctx.meta[str(param.name)] = value


_every = typer.Typer(add_completion=False)


@_every.command()
def _options(
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", callback=_keep, expose_value=False, help="Print only errors on stderr.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", callback=_keep, expose_value=False, help="Print the traceback of an error."),
    ] = False,
) -> None: ...


def _trace(error: BaseException) -> None:
    """Print the traceback of an error and of its causes."""
    shown: BaseException | None = error
    while shown is not None:
        shown.__suppress_context__ = False
        shown = shown.__cause__ or shown.__context__
    for line in "".join(traceback.format_exception(error)).splitlines():
        note(line)


def console() -> Console:
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the program here, before a file is written

    return Plain(highlight=False, markup=False)  # 'attemper[hf]' is not markup


def note(line: str) -> None:
    """Print a line to stderr, without control characters. A stderr that cannot be written to is ignored."""
    with contextlib.suppress(OSError):
        print(safe(line), file=sys.stderr, flush=True)


def failed(*sentences: str) -> typer.Exit:
    """An exit with 1 and these sentences, which -q prints too."""
    ended = typer.Exit(1)
    for sentence in sentences:
        ended.add_note(sentence)
    return ended


def say(words: str) -> bool:
    """Print to stdout; False if the reader left early (`| head`)."""
    return deliver(lambda: print(words))


def deliver(show: Callable[[], object], write: Callable[[], object] | None = None) -> bool:
    """Print the result, then write the file; a failure of one does not prevent the other.

    Returns False if the reader of stdout left early (`| head`).

    Args:
        show: prints to stdout.
        write: writes the file of `-o`; None without one.
    """
    unread: OSError | None = None
    try:
        show()
        sys.stdout.flush()
    except OSError as error:
        unread = error
        _hush()
    finally:  # after Ctrl-C too
        if write is not None:
            write()
    if unread is not None and not isinstance(unread, BrokenPipeError):
        raise InputError(f"stdout: cannot print: {unread.strerror}. Free some disk space, or redirect it elsewhere.")
    return unread is None


def finish(show: Callable[[], object], write: Callable[[], object] | None = None) -> None:
    """:func:`deliver` as the last thing of a command: exits with 141 if the reader left early."""
    if not deliver(show, write):
        raise typer.Exit(READER_LEFT)


def _helped(help_of: Callable[[Any], str], ctx: Any) -> str:
    """Print the help of a command here, so that typer prints nothing."""

    def show() -> None:
        try:
            print(help_of(ctx), end="")  # rich has printed it, or it is here
        except SystemExit:  # how rich ends if stdout was closed
            raise BrokenPipeError from None

    finish(show)
    return ""


def _hush() -> None:
    """Send the rest of the buffer to the null device, so that the final flush does not fail."""
    with contextlib.suppress(OSError, ValueError):  # not a real file, in a test or a notebook
        empty = os.open(os.devnull, os.O_WRONLY)
        os.dup2(empty, sys.stdout.fileno())
        os.close(empty)
