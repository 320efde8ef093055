"""The command `attemper`: parse, call, print.

    commands.py                  every command of the library, and of the lab if it is installed, in the groups of --help
    app.py                       the application, what all commands share, how errors end
    progress.py                  what is being done, on stderr
    stopping.py                  Ctrl-C and SIGTERM
    scan.py, report.py, env.py   a command each; those that explain and compare are in attemper_lab.cli

Data goes to stdout, progress to stderr. Exit 0: fine; 1: findings, or a failure; 2: wrong use, or a file that cannot be
read or written; 130: Ctrl-C; 143: SIGTERM; 141: the reader of stdout closed it. What needs torch is imported inside a command, so
that `--help` is quick.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit."""
    try:
        from .commands import main as run
    except KeyboardInterrupt:  # during the imports
        raise SystemExit(130) from None
    run(arguments)
