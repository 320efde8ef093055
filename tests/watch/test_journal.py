"""Files that are appended to: whatever happens in mid-write, what is left can be read, and what is missing is said."""

import errno
import json
import os
import warnings

import pytest
import torch
from torch import nn

import attemper
import forked
from attemper.errors import InputError
from attemper.watch.record import jsonl
from attemper.watch.record.jsonl import HEADER
from watched import same

X = torch.randn(1, 5, 16)
OPENING = json.dumps(HEADER).encode() + b"\n"


@pytest.fixture
def model():
    return nn.MultiheadAttention(16, 2, batch_first=True)


def run(model, path, steps=2, **options):
    with attemper.watch(model, path=path, **options) as watch:
        for _ in range(steps):
            model(X, X, X)
            watch.step()
    return watch.record


def equal(found, expected):
    for row, wanted in zip(found.to_dicts(), expected.to_dicts(), strict=True):
        same(row, wanted)


def test_short_writes_are_gone_on_with(model, tmp_path, monkeypatch):
    path, write = tmp_path / "run.jsonl", os.write
    monkeypatch.setattr(jsonl.os, "write", lambda file, text: write(file, text[:7]))
    record = run(model, path)
    equal(attemper.Record.read(path), record)


@pytest.mark.parametrize("taken", [0, 1, 400])
def test_a_disk_that_fills_up_ends_nothing_and_the_rows_come_later(model, tmp_path, monkeypatch, taken):
    path, write = tmp_path / "run.jsonl", os.write
    room = []

    def full(file, text):
        if not room:
            return write(file, text)
        count = min(room.pop(), len(text))
        room.append(0)
        if not count:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, text[:count])

    monkeypatch.setattr(jsonl.os, "write", full)
    with attemper.watch(model, path=path) as watch:
        model(X, X, X)
        watch.step()
        whole = path.read_bytes()
        room.append(taken)
        model(X, X, X)
        with pytest.warns(
            UserWarning, match=r"^watch\(\): 'run\.jsonl' could not be written: No space left on device\..* buffered"
        ):
            watch.step()
        assert path.read_bytes() == whole
        assert attemper.Record.read(path).steps == [0]
        model(X, X, X)
        watch.step()  # said once
        room.clear()
        model(X, X, X)
    found = attemper.Record.read(path)
    equal(found, watch.record)
    assert found.steps == [0, 1, 2, 3]
    assert "could not be written" in found.notes[0]


CHILD = """
import resource, warnings, torch, attemper
path, start, limit = argv[0], int(argv[1]), int(argv[2])
model, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(1, 5, 16)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    with attemper.watch(model, path=path, start=start, keep_steps=2 if limit else 300) as watch:
        for _ in range(9 if limit else 200):
            model(x, x, x)
            watch.step()
said = " ".join(str(warning.message) for warning in said)
if limit:
    # what is not in the file is in the record, however few steps it is to keep
    assert {*attemper.Record.read(path).steps, *watch.record.steps} == set(range(9))
    for words in ("'limited.jsonl' could not be written: File too large.", "are not in 'limited.jsonl': File too large."):
        assert words in said, said
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Files that processes of their own wrote: one with a limit on its size, one of two at once."""
    pytest.importorskip("resource")
    folder = tmp_path_factory.mktemp("written")
    calls = [(folder / "limited.jsonl", 0, 3000), (folder / "two.jsonl", 0, 0), (folder / "two.jsonl", 1000, 0)]
    forked.run(CHILD, calls, folder)
    return folder


def test_a_limit_on_the_size_of_files(written):
    steps = attemper.Record.read(written / "limited.jsonl").steps  # with no warning: every line is whole
    assert 1 <= len(steps) < 9
    assert steps == list(range(len(steps)))


@pytest.mark.parametrize("length", range(0, len(OPENING), 7))
def test_a_header_that_was_cut_is_written_anew(model, tmp_path, length):
    path = tmp_path / "run.jsonl"
    path.write_bytes(OPENING[:length])
    run(model, path)
    assert path.read_bytes().startswith(OPENING)
    assert attemper.Record.read(path).steps == [0, 1]


def test_a_kill_between_header_and_rows(model, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(OPENING)
    assert len(attemper.Record.read(path)) == 0
    run(model, path)
    assert path.read_bytes().count(b"schema") == 1
    assert attemper.Record.read(path).steps == [0, 1]


def test_a_cut_at_any_byte_can_be_read_and_resumed(model, tmp_path):
    """Whole steps are left, and the one that was cut is named, also after a resume that does not write it again."""
    path = tmp_path / "run.jsonl"
    run(model, path)
    whole = path.read_bytes()
    rows = [line for line in whole.splitlines(keepends=True) if b'"head"' in line]
    ends = [whole.index(row) + len(row) for row in rows]  # two steps of two heads
    for length in sorted({*range(len(OPENING), len(whole), 97), *ends}):
        left = sum(end <= length for end in ends)
        path.write_bytes(whole[:length])
        run(model, path, start=1, steps=1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = attemper.Record.read(path)
        assert found.steps == ([0, 1] if left >= 2 else [1])
        assert len(found) == 2 * len(found.steps)
        cut = ["run.jsonl: step 0 was cut short, with 1 of its 2 rows, and is left out."] if left == 1 else []
        assert [note for note in found.notes if "cut" in note] == cut
        assert [str(warning.message) for warning in said] == [f"Record.read(): {note}" for note in cut]


def test_what_is_not_ours_is_not_touched(model, tmp_path):
    path = tmp_path / "notes.jsonl"
    for text in ("my notes", "{}\n", "my notes\n" * 3, '{"schema": "x"'):
        path.write_text(text)
        with pytest.raises(InputError, match=r"^watch\(\): '.*notes\.jsonl' is not a record of attemper"):
            attemper.watch(model, path=path)
        watch = attemper.watch(model, path=tmp_path / "late.jsonl")
        (tmp_path / "late.jsonl").write_text("my notes")  # put there in the meantime
        with pytest.raises(InputError, match="is not a record of attemper"):
            watch.__enter__()
        assert path.read_text() == text
        assert (tmp_path / "late.jsonl").read_text() == "my notes"
        (tmp_path / "late.jsonl").unlink()


def test_a_place_that_cannot_be_written_is_said_at_once(model, tmp_path, monkeypatch):
    def refuse(*args):
        raise PermissionError(errno.EACCES, "Permission denied")

    watch = attemper.watch(model, path=tmp_path / "run.jsonl")
    monkeypatch.setattr(jsonl.os, "open", refuse)
    with pytest.raises(
        InputError, match=r"^watch\(\): `path` '.*run\.jsonl' cannot be written: Permission denied\. Choose"
    ):
        watch.__enter__()


def test_a_file_that_is_taken_away_begins_anew(model, tmp_path):
    path = tmp_path / "run.jsonl"
    with attemper.watch(model, path=path) as watch:
        model(X, X, X)
        watch.step()
        path.unlink()
        model(X, X, X)
        watch.step()
    found = attemper.Record.read(path)
    assert (found.steps, found.info) == ([1], watch.record.info)


def test_a_resumed_run_that_overlaps_is_read_once(model, tmp_path):
    path = tmp_path / "run.jsonl"
    run(model, path, steps=4)
    later = run(model, path, steps=2, start=2, signs=("entropy", "visible"))
    found = attemper.Record.read(path)
    assert found.steps == [0, 1, 2, 3]
    assert len(found) == len(found.merge()) == 8
    equal(found.filter(steps=[2, 3]), later)
    (note,) = found.notes
    assert note.startswith("run.jsonl: 4 rows were written again")
    found.write(tmp_path / "again.jsonl")
    equal(attemper.Record.read(tmp_path / "again.jsonl"), found)


def test_two_watches_at_once(model, tmp_path):
    path = tmp_path / "run.jsonl"
    with attemper.watch(model, path=path) as first:
        model(X, X, X)
        first.step()
        with attemper.watch(model, path=path) as second:
            model(X, X, X)
            second.step()
            with pytest.warns(UserWarning, match=r"^watch\(\): another watch writes to 'run\.jsonl' too"):
                first.step()
    found = attemper.Record.read(path)
    assert found.steps == [0, 1]
    assert len(found) == 4
    assert "written again" in found.notes[0]


def test_two_processes_at_once(written):
    found = attemper.Record.read(written / "two.jsonl")
    assert sorted(found.steps) == [*range(200), *range(1000, 1200)]
    assert len(found) == 800
