"""Every command under every bad condition: full and read-only disks, closed streams, unreadable input, signals, absurd numbers.

    python scripts/hostile.py            all of it, a few minutes: the table of exit codes, and what went wrong
    python scripts/hostile.py --quick    what the tests run: no case whose path another takes too

torch is imported once, and a case is a fork of that; what begins with an interpreter (imports, worker processes) has one. What
must hold, and how it is judged, is in tests/hostile.py. Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import attemper
from attemper import cli
from attemper.scan.input import pipes, trial
from attemper_lab.bench import cpu, memory, run, watch
from attemper_lab.claims import claims
from attemper_lab.exact import additive_cost
from attemper_lab.timing import median_interval

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from folders import save
from hostile import Case, Ended, Struck, as_nobody, call, closed, limit_files, onto, spent, strike, unread

PRECIOUS = "precious"
RUN = ["run", "two_keys", "--d", "4,16", "--samples", "1000"]
COMMANDS: dict[str, list[str]] = {
    "scan": ["scan", "MODEL", "--text", "the dog sat"],
    "report": ["report", "RECORD"],
    "explain": ["explain", "a b"],
    "claims": ["claims"],
    "cards": ["cards"],
    "run": RUN,
    "bench speed": ["bench", "speed", "--shape", "1,1,16,8", "--rounds", "1"],
    "bench memory": ["bench", "memory", "--length", "64"],
    "bench cpu": ["bench", "cpu", "--quick"],
    "bench watch": ["bench", "watch", "--quick", "--rounds", "1"],
    "env": ["env"],
}
FILES = {
    "scan": "o.html",
    "report": "o.html",
    "explain": "o.svg",
    "claims": "o.html",
    "cards": "o.tsv",
    "run": "o.json",
}
FILES |= {name: "o.json" for name in COMMANDS if name.startswith("bench")}
TWINS = ("bench memory", "bench cpu", "bench watch")
STOPS = {signal.SIGINT: 130, signal.SIGTERM: 143}
# what runs at a moment, by command: the signal comes when it is called
LOADING = {
    "scan": "attemper.scan.command:load",
    "report": "attemper.watch.examine:read",
    "explain": "attemper_lab.explain:check",
    "claims": "attemper_lab.claims.claims:_measured",
    "cards": "attemper_lab.claims.claims:gather",
    "run": "attemper_lab.engine.experiment:Experiment.settings",
    "env": "attemper.env:describe",
} | {name: "attemper_lab.bench.run:settings" for name in COMMANDS if name.startswith("bench")}
MEASURING = {
    "scan": "attemper.scan.run:call",
    "report": "attemper.report.run:document",
    "explain": "attemper_lab.explain:compute",
    "claims": "attemper_lab.claims.claims:_judged",
    "cards": "attemper_lab.claims.cards:write",
    "run": "attemper_lab.engine.experiment:Experiment.rows",
    "bench speed": "attemper_lab.bench.speed:interleave",
    "bench memory": "attemper_lab.bench.memory:peak",
    "bench cpu": "attemper_lab.bench.cpu:interleave",
    "bench watch": "attemper_lab.bench.watch:interleave",
    "env": "attemper.env:table",
}
POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:4665a5ea\nsize 91\n"  # what a clone without Git LFS has
)
NESTED = '{"a":' * 1000 + "1" + "}" * 1000
TOMORROW = '{"schema": "attemper.record", "version": 2}\n'
ABSURD = ("0", "-1", "1e18", "1000000000000000000", "nan", "inf", "9" * 400)
EVIDENCE: dict[str, Any] = {
    "worked": ("worked", {}),
    "variance": ("variance", {"d": (2, 5, 64, 1024), "init": ("unit",), "samples": (1000,)}),
    "inits": ("variance", {"d": (64,), "init": ("fan_in", "linear", "xavier", "gpt2", "t5")}),
    "nonunit": ("variance", {"d": (1, 64), "init": ("unit",), "a": (0.25,), "samples": (1000,)}),
    "saturation": ("saturation", {"n": (16, 1024), "rows": (32,)}),
    "jacobian": ("jacobian", {"n": (1024,), "d": (64,), "batches": (8,), "rule": ("none",)}),
    "gradient": (
        "gradient",
        {"d": (128, 1024), "n": (128,), "rule": ("none", "sqrt_dk"), "batches": (2,), "projected": (1,)},
    ),
    "divisors": ("divisors", {"d": (128,), "heads": (96,), "batches": (8,)}),
    "bounded": ("bounded", {"score": ("additive",), "bound": (10.0,), "n": (16,)}),
    "precision": ("precision", {}),
    "additive_cost": ("additive_cost", {"n": (16,), "d": (16, 256), "rounds": (1,)}),
    "parallel": ("parallel", {"n": (8,), "rounds": (1,)}),
}
EVIDENCE["gradient_long"] = EVIDENCE["gradient"]


def filled(words: list[str], model: Path) -> list[str]:
    """The words of a command, with the folder of the model and the record beside it."""
    return [{"MODEL": str(model), "RECORD": str(model.with_name("run.jsonl"))}.get(word, word) for word in words]


def cases(model: Path, quick: bool) -> list[Case]:
    found: list[Case] = []
    for command, typed in COMMANDS.items():
        words = filled(typed, model)
        found += [*_streams(command, words), *_signals(command, words)]
        found += _outputs(command, words) if command in FILES else []
    found += [*_inputs(model), *_helps(), *_numbers(model), *_workers(), _stuck()]
    return [case for case in found if not quick or _is_essential(case)]


def _is_essential(case: Case) -> bool:
    """Whether the tests run it: parts of bench end alike, as do the two signals, and typer refuses what is no whole number."""
    twin = case.command in TWINS and not case.condition.startswith("--length")
    if twin or any(case.condition.endswith(f" {value}") for value in ("-1", "1e18", "inf")):
        return False
    if case.fresh:
        return case.condition in ("SIGINT importing", "SIGTERM workers start") and case.command in ("explain", "run")
    taken = {"SIGINT": ("loading", "printing"), "SIGTERM": ("measuring", "writing", "inside C")}
    name, _, moment = case.condition.partition(" ")
    return name not in taken or moment in taken[name]


def _signals(command: str, words: list[str]) -> list[Case]:
    found = []
    for number, code in STOPS.items():
        name = signal.Signals(number).name
        # a scan prints what it has, which says itself how far it came
        said = "" if command == "scan" else "Stopped by"
        found += [
            Case(command, f"{name} loading", words, (code,), strike(LOADING[command], number), said="Stopped"),
            Case(command, f"{name} measuring", words, (code,), strike(MEASURING[command], number), said=said),
            Case(command, f"{name} printing", words, (code,), lambda n=number: setattr(sys, "stdout", Struck(n)), said="Stopped"),
        ]  # fmt: skip
        fresh = FRESH.format(arm=IMPORTING.format(number=int(number)))
        found.append(Case(command, f"{name} importing", words, (code,), said="Stopped", fresh=fresh))
    return found


def _streams(command: str, words: list[str]) -> list[Case]:
    return [
        Case(command, "stdout full", words, (2,), onto("/dev/full", 1), said="stdout: cannot print"),
        Case(command, "stdout closed", words, (2,), lambda: closed(1), said="stdout is closed"),
        Case(command, "stdout unread", words, (141,), lambda: unread(1)),
        Case(command, "stderr full", words, (0,), onto("/dev/full", 2), printed=True),
        Case(command, "stderr closed", words, (0,), lambda: closed(2), printed=True),
        Case(command, "stderr unread", words, (0,), lambda: unread(2), printed=True),
        Case(command, "stdin closed", words, (0,), lambda: closed(0), printed=True),
    ]


def _outputs(command: str, words: list[str]) -> list[Case]:
    name = FILES[command]
    here = [*words, "-o", name]
    over = [*here, "--force"]
    link = lambda to: lambda: os.symlink(to, name)  # noqa: E731
    there = {name: PRECIOUS}
    found = [
        Case(command, "-o full disk", over, (2,), limit_files, there, printed=True, said="cannot write"),
        Case(command, "-o full, unread", over, (2,), lambda: (limit_files(), unread(1)), there, said="cannot write"),
        Case(command, "-o read-only", here, (2,), lambda: (os.chmod(".", 0o555), as_nobody()), printed=False),
        Case(command, "-o is there", here, (2,), there=there, printed=False, said="--force"),
        Case(command, "-o a folder", over, (2,), lambda: os.mkdir(name), printed=False),
        Case(command, "-o a loop", over, (2,), link(name), printed=False),
        Case(command, "-o a device", over, (2,), link("/dev/full"), printed=False, said="is a device"),
        Case(command, "-o a pipe", over, (2,), lambda: os.mkfifo(name), printed=False),
        Case(command, "-o unread", here, (141,), lambda: unread(1), made=name),
    ]
    for number, code in STOPS.items():
        whole = strike("os:fsync", number, lambda file: os.fstat(file).st_size > 0)  # not the one before the work
        found.append(Case(command, f"{signal.Signals(number).name} writing", over, (code,), whole, there))
    return found


def _inputs(model: Path) -> list[Case]:
    def copy(change: Callable[[Path], object]) -> Callable[[], None]:
        def prepare() -> None:
            shutil.copytree(model, "model")
            change(Path("model"))
            os.chmod(".", 0o777)
            as_nobody()

        return prepare

    def turned(path: Path) -> None:
        path.unlink()
        path.mkdir()

    def looped(path: Path) -> None:
        path.unlink()
        path.symlink_to(path.name)

    def exploding(at: Path) -> None:
        steps = [
            {"type": "Replace", "pattern": {"String": one}, "content": 1000 * next_one}
            for one, next_one in ("dx", "xy", "yz")
        ]
        written = json.loads((at / "tokenizer.json").read_text())
        (at / "tokenizer.json").write_text(
            json.dumps({**written, "normalizer": {"type": "Sequence", "normalizers": steps}})
        )
        trial.MEMORY = 2**28

    def silent(change: Callable[[], object]) -> Callable[[], None]:
        def prepare() -> None:
            pipes.PATIENCE = 0.3
            change()

        return prepare

    scan = ["scan", "model", "--text", "the dog"]
    embedded = ["scan", str(model)]
    kept = [*RUN, "--results", "kept"]
    bad = {
        "config a folder": (scan, copy(lambda at: turned(at / "config.json"))),
        "config a loop": (scan, copy(lambda at: looped(at / "config.json"))),
        "config locked": (scan, copy(lambda at: (at / "config.json").chmod(0))),
        "weights locked": (scan, copy(lambda at: (at / "model.safetensors").chmod(0))),
        "weights a folder": (scan, copy(lambda at: turned(at / "model.safetensors"))),
        "weights a pipe": (
            scan,
            copy(lambda at: ((at / "model.safetensors").unlink(), os.mkfifo(at / "model.safetensors"))),
        ),
        "tokenizer locked": (scan, copy(lambda at: (at / "tokenizer.json").chmod(0))),
        "folder locked": (scan, copy(lambda at: at.chmod(0))),
        "file a folder": ([*embedded, "--file", "."], lambda: None),
        "file a loop": ([*embedded, "--file", "loop"], lambda: os.symlink("loop", "loop")),
        "file a pipe": ([*embedded, "--file", "pipe"], silent(lambda: os.mkfifo("pipe"))),
        "file - closed": ([*embedded, "--file", "-"], lambda: closed(0)),
        "baseline a folder": ([*embedded, "--baseline", "."], lambda: None),
        "baseline a loop": ([*embedded, "--baseline", "loop"], lambda: os.symlink("loop", "loop")),
        "baseline a pipe": ([*embedded, "--baseline", "pipe"], silent(lambda: os.mkfifo("pipe"))),
        "config a pointer": (scan, copy(lambda at: (at / "config.json").write_text(POINTER))),
        "weights a pointer": (scan, copy(lambda at: (at / "model.safetensors").write_text(POINTER))),
        "tokenizer a pointer": (scan, copy(lambda at: (at / "tokenizer.json").write_text(POINTER))),
        "config nested": (scan, copy(lambda at: (at / "config.json").write_text(NESTED))),
        "special tokens nested": (scan, copy(lambda at: (at / "special_tokens_map.json").write_text(NESTED))),
        "tokenizer a bomb": (scan, copy(exploding)),
        "model a record": (["scan", "run.jsonl"], lambda: Path("run.jsonl").touch()),
        "record a folder": (["report", "."], lambda: None),
        "record a folder of them": (["report", "."], lambda: Path("run.jsonl").touch()),
        "record -": (["report", "-"], lambda: None),
        "record empty": (["report", "run.jsonl"], lambda: Path("run.jsonl").touch()),
        "record a scan": (["report", "o.json"], lambda: Path("o.json").write_text('{"schema": "attemper.scan/1"}')),
        "record of tomorrow": (["report", "o.jsonl"], lambda: Path("o.jsonl").write_text(TOMORROW)),
        "record a loop": (["report", "loop"], lambda: os.symlink("loop", "loop")),
        "record a pipe": (["report", "pipe"], lambda: os.mkfifo("pipe")),
        "record no record": (["report", "words"], lambda: Path("words").write_text("words\n")),
        "record locked": (["report", "locked"], lambda: (Path("locked").touch(0), os.chmod(".", 0o777), as_nobody())),
        "results a file": (kept, lambda: Path("kept").touch()),
        "results a loop": (kept, lambda: os.symlink("kept", "kept")),
        "results locked": (kept, lambda: (os.mkdir("kept"), os.chmod("kept", 0), as_nobody())),
        "results read-only": (kept, lambda: (os.chmod(".", 0o555), as_nobody())),
        "cells a folder": (kept, lambda: os.makedirs("kept/two_keys.jsonl")),
        "cells a pipe": (kept, lambda: (os.mkdir("kept"), os.mkfifo("kept/two_keys.jsonl"))),
    }
    found = [Case(words[0], name, words, (2,), before, printed=False) for name, (words, before) in bad.items()]
    return [
        *found,
        Case("run", "results full disk", kept, (2,), limit_files, printed=None, said="cannot keep"),
    ]


def _helps() -> list[Case]:
    """--help is printed by rich, in the name of typer, and ends as what a command prints."""
    found = []
    for command, words in (("env", []), ("env", ["--help"]), ("env", ["--version"]), ("scan", ["scan", "--help"])):
        name = words[-1] if words else "no words"
        full = Case(command, f"{name}, full", words, (2,), onto("/dev/full", 1), said="stdout: cannot print")
        found += [full, Case(command, f"{name}, unread", words, (141,), lambda: unread(1))]
    return found


def _numbers(model: Path) -> list[Case]:
    options = {
        "explain": (["explain", "a b", "--rule", "layer"], ["--heads", "--d-model", "--d-k", "--seed", "--layer"]),
        "run": (["run", "worked"], ["--jobs", "--d_model", "--heads", "--seed"]),
        "bench speed": (COMMANDS["bench speed"], ["--rounds", "--shape"]),
        "bench memory": (["bench", "memory"], ["--length"]),
        "scan": (["scan", str(model)], ["--what-if"]),
    }  # fmt: skip
    found = []
    for command, (words, names) in options.items():
        for name in names:
            for value in ABSURD:
                typed = f"1,1,{value},8" if name == "--shape" else value
                shown = value if len(value) < 40 else f"{value[0]}×{len(value)}"
                fine = name in ("--seed", "--rounds", "--layer", "--what-if", "--jobs")  # some of which do no harm
                layer = ["--layer", "1"] if command == "explain" and name != "--layer" else []
                typed_words = [*words, *layer, f"{name}={typed}"]
                found.append(Case(command, f"{name} {shown}", typed_words, (0, 2) if fine else (2,)))
    return found


FRESH = """
import os, sys
{arm}
from attemper.cli import main
main(sys.argv[1:])
"""
IMPORTING = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Finder())
"""


def _workers() -> list[Case]:
    """The signal comes once there are workers, while they start and while they measure; to the process, or to all as Ctrl-C."""
    words = ["run", "recall", "--steps", "100000", "--lr", "1e-3", "--jobs", "2", "--results", "kept"]
    said, fresh = "of 9 cells are kept in 'kept'", FRESH.format(arm="")
    found = []
    for number, code in STOPS.items():
        for busy, when in ((0.5, "workers start"), (10.0, "workers run")):
            name = f"{signal.Signals(number).name} {when}"
            found.append(Case("run", name, words, (code,), said=said, fresh=fresh, busy=busy, number=number))
    return found


def _stuck() -> Case:
    """A call into C that does not come back soon, as of a product of large matrices."""

    def arm() -> None:
        from attemper.cli import stopping
        from attemper_lab.exact import two_keys

        stopping.PATIENCE = 0.5
        big = torch.ones(8192, 8192, dtype=torch.float64)

        def measure(cell: Any) -> list[Any]:
            before, parent = time.process_time(), os.getpid()
            if not os.fork():  # from outside, in the middle of the product
                while spent(parent) < before + 0.2:
                    time.sleep(0.01)
                os.kill(os.getppid(), signal.SIGTERM)
                os._exit(0)
            return [torch.mm(big, big)]

        object.__setattr__(two_keys.EXPERIMENT, "measure", measure)

    return Case("run", "SIGTERM inside C", RUN, (143,), arm, said="cannot be interrupted")


def little() -> None:
    """Commands that measure for minutes measure a little; the memory of a call is asked of no process."""
    claims.EVIDENCE = EVIDENCE
    known = {*EVIDENCE, *claims.STORED}
    claims.CLAIMS = tuple(claim for claim in claims.CLAIMS if known.issuperset((*claim.needs, *claim.also)))
    additive_cost._memory = lambda cell: dict.fromkeys(additive_cost.CALLS, 1)
    memory.peak = lambda candidate, case: memory.Peak(candidate, case, 1024, 512, "blockwise")
    cpu.QUICK, cpu.ROUNDS = ((1, 1, 16, 8),), 1
    watch.MINILM |= {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    run.QUICK = replace(run.QUICK, encoder=((1, 8, False),), budget=0.1)
    median_interval.__defaults__ = (10,)


def warm(model: Path, place: Path, quick: bool) -> None:
    """Every command once, with its file, and one that is wrong, so that no fork has to import anything."""
    typed = [
        [*words, *(["-o", str(place / f"{name}.{FILES[name]}")] if name in FILES else [])]
        for name, words in COMMANDS.items()
        if not quick or name not in TWINS
    ]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for words in [*typed, ["run", "--jobs", "nan"]]:
            with contextlib.suppress(SystemExit):
                cli.main(filled(words, model))
    gc.freeze()


def table(found: list[Ended]) -> str:
    """Conditions down, commands across: the exit code, with ! where something was wrong."""
    marks = {}
    for one in found:
        code = "hung" if one.code is None else str(one.code)
        marks[one.case.condition, one.case.command] = code + ("!" if one.wrong else "")
    names = list(COMMANDS)
    lines = [f"{'':26}" + "".join(f"{name.replace('bench ', 'b '):>9}" for name in names)]
    for condition in dict.fromkeys(one.case.condition for one in found):
        lines.append(f"{condition:26}" + "".join(f"{marks.get((condition, name), ''):>9}" for name in names))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="a part of 'command: condition'")
    parser.add_argument("--times", action="store_true", help="how long each took")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it
    place = Path(tempfile.mkdtemp(prefix="attemper-hostile-"))
    place.chmod(0o755)  # for nobody
    found = []
    try:
        model = save(place / "tiny-bert", "bert")
        with attemper.watch(layer := torch.nn.MultiheadAttention(8, 2)) as watching:
            layer(*(torch.zeros(3, 8),) * 3)
        watching.record.write(place / "run.jsonl")
        little()
        evidence = claims.gather(False, lambda line: None)
        ends = {row["step"] for row in evidence["trained"]}
        evidence["trained"] = [row for row in evidence["trained"] if row["step"] in (min(ends), max(ends))]
        claims.gather = lambda train, note, results=None: evidence
        claims._measured = lambda name, *rest: evidence[name]
        warm(model, place, asked.quick)
        for number, case in enumerate(cases(model, asked.quick)):
            if asked.only not in f"{case.command}: {case.condition}":
                continue
            (folder := place / str(number)).mkdir()
            started = time.monotonic()
            found.append(call(case, folder))
            if asked.times:
                print(f"{time.monotonic() - started:6.2f} s  {case.command}: {case.condition}", flush=True)
            folder.chmod(0o755)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(table(found))
    wrong = [one for one in found if one.wrong]
    for one in wrong:
        print(
            f"\n{one.case.command}: {one.case.condition}: {'; '.join(one.wrong)}\n  $ attemper {' '.join(one.case.words)[:200]}"
        )
        print("".join(f"  | {line}\n" for line in (one.out[-300:] + one.err[-1500:]).splitlines()), end="")
    print(f"\n{len(found)} cases, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
