"""attemper report of what is no record: one sentence that says what it is and what to type, and never a traceback."""

import contextlib
import json
import os
import random
import re
import sys
from pathlib import Path

import pytest
import torch

import attemper
from attemper.errors import InputError
from attemper.watch.record.jsonl import HEADER
from watched import Block

pytest.importorskip("pyarrow", reason="needs the package pyarrow")
import pyarrow
from pyarrow import parquet


@pytest.fixture(scope="module")
def record():
    model = torch.nn.Sequential(Block())
    with attemper.watch(model) as watch:
        for _ in range(2):
            model(torch.randn(1, 4, 16))
            watch.step()
    return watch.record


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def jsonl(record):
    record.write("run.jsonl")
    return Path("run.jsonl").read_text()


def with_header(header):
    return lambda record, path: path.write_text(jsonl(record).replace(json.dumps(HEADER), json.dumps(header)))


def cut_parquet(record, path):
    record.write(path)
    path.write_bytes(path.read_bytes()[:-100])


def metadata(words):
    table = pyarrow.table({"a": [1]}).replace_schema_metadata({HEADER["schema"]: json.dumps({**HEADER, **words})})
    return lambda record, path: parquet.write_table(table, path)


def folder(*names):
    return lambda record, path: (path.mkdir(), [(path / name).touch() for name in names])


def text(words):
    return lambda record, path: path.write_text(words)


NO_RECORD = "is not a record of attemper: its first line does not name the schema. Write a record with"
CASES = {
    "a folder": (
        "runs",
        folder("b.jsonl", "a.parquet"),
        "is a folder, .* Give one of its files: 'runs/a.parquet', 'runs/b.jsonl'.",
    ),
    "a folder without records": ("runs", folder("config.json"), "is a folder, .*Give the file that watch"),
    "stdin": ("-", None, "a record is read from a file, not from stdin. Save it, and give its name"),
    "nothing": ("run.jsonl", None, "there is no file 'run.jsonl'. Check the path"),
    "an empty file": ("run.jsonl", text(""), "'run.jsonl' is empty. If the run has just begun, try again"),
    "an empty Parquet": ("run.parquet", text(""), "'run.parquet' is empty."),
    "a cut first line": ("run.jsonl", text('{"schema": "attem'), "it has no complete line. If the run has just begun"),
    "one line of words": ("run.jsonl", text("words"), NO_RECORD),
    "lines of another program": ("run.jsonl", text('{"loss": 1.0}\n{"loss": 2.0}\n'), NO_RECORD),
    "an array": ("run.json", text("[1, 2]\n"), NO_RECORD),
    "deep JSON": ("run.jsonl", text("[" * 100_000 + "\n"), NO_RECORD),
    "a record without its first line": (
        "cut.jsonl",
        lambda record, path: path.write_text(jsonl(record).split("\n", 1)[1]),
        NO_RECORD,
    ),
    "a scan": (
        "scan.json",
        text('{\n "schema": "attemper.scan/1",\n "model": {}\n}\n'),
        "is not a record but a document with the schema 'attemper.scan/1'. Read the .jsonl",
    ),
    "a report": (
        "run.json",
        text('{"schema": "attemper.run/1"}'),
        "is not a record but a document with the schema 'attemper.run/1'",
    ),
    "a later version": (
        "run.jsonl",
        with_header({**HEADER, "version": 2}),
        "has schema version 2; this attemper reads version 1. Read it with",
    ),
    "no version": ("run.jsonl", with_header({"schema": HEADER["schema"]}), "has schema version None; this"),
    "only bad lines": (
        "run.jsonl",
        text(f"{json.dumps(HEADER)}\nfoo\n{{}}\n"),
        "lines 2, 3 are not rows of a record and are left out.\nError: report: the record has no rows",
    ),
    "a cut Parquet": ("run.parquet", cut_parquet, "is not a Parquet file, or is damaged. Read the .jsonl"),
    "a Parquet of words": ("run.parquet", text("words\n"), "is not a Parquet file, or is damaged."),
    "a Parquet of another program": (
        "run.parquet",
        lambda record, path: parquet.write_table(pyarrow.table({"a": [1]}), path),
        NO_RECORD,
    ),
    "a Parquet with other info": ("run.parquet", metadata({"info": 3}), "is not a Parquet file, or is damaged."),
    "a table": ("run.csv", lambda record, path: record.write(path), "is a table of rows, .* Read the .jsonl or"),
}
if sys.platform != "win32":
    CASES["a pipe"] = ("pipe", lambda record, path: os.mkfifo(path), "is a pipe or a device, .* Save it first")


@pytest.mark.parametrize("name", CASES)
def test_what_is_no_record_is_one_sentence(name, record, attemper_command):
    file, make, says = CASES[name]
    if make is not None:
        make(record, Path(file))
    code, out, err = attemper_command("report", file)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert "\nError: report: " in f"\n{err}"
    assert re.search(says, err), err


@pytest.mark.parametrize(("made", "named"), [("a.jsonl", "a.parquet"), ("a.parquet", "a.jsonl"), ("a.parquet", "a")])
def test_a_record_with_another_suffix_is_read_as_what_it_is(made, named, record):
    record.write(made)
    Path(made).rename(named)
    assert str(attemper.Record.read(named).to_dicts()) == str(record.to_dicts())  # a NaN is not itself


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_file_with_flipped_bytes_is_read_or_refused(suffix, record, recwarn):
    whole, path, dice = bytearray(), Path(f"run{suffix}"), random.Random(0)
    record.write(path)
    whole[:] = path.read_bytes()
    for _ in range(60):
        bad = bytearray(whole)
        for _ in range(dice.choice((1, 3, 20))):
            bad[dice.randrange(len(bad))] = dice.randrange(256)
        path.write_bytes(bad)
        with contextlib.suppress(InputError):
            attemper.Record.read(path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run.jsonl"], "If it is the record of a watch, type attemper report run.jsonl."),
        (["--baseline", "run.jsonl"], "'run.jsonl' is the record of a watch, not a scan; attemper report shows it."),
    ],
)
def test_a_record_where_a_scan_is_expected_is_said(words, says, record, attemper_command):
    record.write("run.jsonl")
    code, out, err = attemper_command("scan", *words)
    assert (code, out) == (2, "")
    assert says in err
