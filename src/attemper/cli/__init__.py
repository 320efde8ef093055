"""The command `attemper`: parse, call, print.

    app.py                  the application, what all commands share, how errors end
    progress.py             what is being done, on stderr
    stopping.py             Ctrl-C and SIGTERM
    scan.py, report.py      one file for each group of commands
    explain.py, lab.py, bench.py

Data goes to stdout, progress to stderr. Exit 0: fine; 1: findings, or a failure; 2: wrong use, or a file or a disk that is in
the way; 130: Ctrl-C; 143: SIGTERM; 141: the reader of stdout closed it. What needs torch is imported inside a command, so that
`--help` is quick.
"""

try:
    from .app import Command
    from .app import app as app
    from .app import main as main
    from .bench import bench, env
    from .explain import explain
    from .lab import cards, claims, run
    from .report import report
    from .scan import scan
except KeyboardInterrupt:  # before main() could say so
    raise SystemExit(130) from None

OWN_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}  # an experiment's, which `run` hands on

# --help lists them in this order
for command in (scan, report, explain, claims, cards, run, bench, env):
    app.command(cls=Command, context_settings=OWN_OPTIONS if command is run else None)(command)
