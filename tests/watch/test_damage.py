"""Files that were damaged: whatever stands in them, the rest is read, or one sentence says why not."""

import json
import os
import random

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import InputError
from attemper.watch.record.jsonl import HEADER


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Header, info, and four rows: two steps of two heads."""
    path = tmp_path_factory.mktemp("whole") / "run.jsonl"
    model, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(1, 5, 16)
    with attemper.watch(model, path=path, gradients=True) as watch:
        for _ in range(2):
            model(x, x, x)[0].sum().backward()
            watch.step()
    found = path.read_text().splitlines(keepends=True)
    assert len(found) == 6
    return found


def changed(line, **changes):
    row = {**json.loads(line), **changes}
    return json.dumps({name: value for name, value in row.items() if value != "gone"}) + "\n"


BROKEN = {
    "no JSON": lambda row: "{oops\n",
    "two lines in one": lambda row: row[:50] + row,
    "binary": lambda row: "\x00\x01\n",
    "empty": lambda row: "\n",
    "a list": lambda row: "[1]\n",
    "a word": lambda row: '"info"\n',
    "a number": lambda row: "3\n",
    "another object": lambda row: '{"a": 1}\n',
    "a deep one": lambda row: "[" * 100_000 + "\n",
    "no layer": lambda row: changed(row, layer="gone"),
    "no rows": lambda row: changed(row, rows="gone"),
    "no count": lambda row: changed(row, evenness_rows="gone"),
    "half the gradients": lambda row: changed(row, grad_q_count="gone"),
    "a head that is a word": lambda row: changed(row, head="x"),
    "a step that is half": lambda row: changed(row, step=0.5),
    "a step below 0": lambda row: changed(row, step=-1),
    "a sign that is a word": lambda row: changed(row, entropy="high"),
    "a sign that is a list": lambda row: changed(row, entropy=[1]),
    "a number too large": lambda row: changed(row, entropy=10**400),
    "a note that is none": lambda row: '{"note": 3}\n',
    "another version": lambda row: json.dumps({**HEADER, "version": 2}) + "\n",
    "an unknown field": lambda row: '{"layer": "", "kind": "self", "info": {"root": "sdpa"}}\n',
    "info that is none": lambda row: '{"layer": "", "kind": "self", "info": 3}\n',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_bad_line_is_left_out_and_named(lines, tmp_path, name):
    path = tmp_path / "run.jsonl"
    path.write_text("".join([*lines[:3], BROKEN[name](lines[3]), *lines[4:]]))
    with pytest.warns(UserWarning, match=r"^Record\.read\(\): run\.jsonl: line 4 .*left out\.$") as said:
        found = attemper.Record.read(path)
    assert [(row["step"], row["head"]) for row in found.to_dicts()] == [(0, 0), (1, 0), (1, 1)]
    assert len(found.info) == 1
    assert [f"Record.read(): {note}" for note in found.notes] == [str(one.message) for one in said]


def test_several_bad_lines_are_one_sentence(lines, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("".join([*lines, *["{oops\n"] * 12]))
    with pytest.warns(UserWarning, match=r"lines 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 2 more .*left out"):
        assert len(attemper.Record.read(path)) == 4


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_header_may_come_again(lines, tmp_path, ending):
    path = tmp_path / "run.jsonl"
    path.write_bytes("".join([lines[0], *lines]).replace("\n", ending).encode())
    assert len(attemper.Record.read(path)) == 4


@pytest.mark.filterwarnings("ignore:Record.read.*left out:UserWarning")
def test_any_damage_is_read_or_refused(lines, tmp_path):
    path, whole = tmp_path / "run.jsonl", "".join(lines).encode()
    draw, read = random.Random(0), 0
    for _ in range(200):
        text = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(text))
            text[place : place + draw.randint(0, 30)] = draw.randbytes(draw.randint(0, 9))
        path.write_bytes(text)
        try:
            found = attemper.Record.read(path)
        except InputError:
            continue
        found.merge().to_dicts()
        read += 1
    assert 0 < read < 200  # most damage is left out line by line; a header that is gone is refused


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", r"empty\. If the run has just begun, try again"),
        (b"PAR1xxxx", r"not a Parquet file, or is damaged\. Read"),
        (b"PAR1" + b"\0" * 40 + b"PAR1", r"not a Parquet file, or is damaged\. Read"),
    ],
)
def test_a_damaged_parquet_file(tmp_path, content, says):
    pytest.importorskip("pyarrow")
    path = tmp_path / "run.parquet"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"^Record\.read\(\): '.*run\.parquet' is {says}"):
        attemper.Record.read(path)


def test_a_write_that_fails_leaves_what_was_there(lines, tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(lines))
    record = attemper.Record.read(path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        InputError, match=r"^Record\.write\(\): '.*' could not be written: No space left on device\. Nothing"
    ):
        record.write(path)
    assert path.read_text() == "".join(lines)
    assert [found.name for found in tmp_path.iterdir()] == ["run.jsonl"]


def test_what_is_no_path():
    with pytest.raises(
        InputError, match=r"^Record\.read\(\): `path` must be a string or a Path; got int 3\. Use 'run\.jsonl'\.$"
    ):
        attemper.Record.read(3)
