"""Following a record that a watch writes, that is cut short, damaged, restarted, replaced, or long."""

import json
import math
import os
import statistics

import pytest

pytest.importorskip("fastapi", reason="needs the package fastapi")

import torch

from attemper import Record, errors, health, watch
from attemper_lab.page.server import record as followed
from attemper_lab.page.server.record import FollowedRecord
from close import in_float64
from page.served import serving


@pytest.fixture
def path(tmp_path):
    """Three steps of a watch, with gradients."""
    file = tmp_path / "run.jsonl"
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with watch(model, path=str(file), gradients=True) as watching:
        for _ in range(3):
            model(torch.randn(2, 9, 16)).sum().backward()
            watching.step()
    return file


def read(path):
    reader = FollowedRecord(path)
    while reader.read():
        pass
    return reader.document()


def test_the_document_agrees_with_the_record(path):
    document, record = read(path), Record.read(path)
    rows = [row for row in record.to_dicts() if row["step"] == max(record.steps)]
    last = document["steps"][-1]
    assert [step["step"] for step in document["steps"]] == sorted(record.steps)
    assert last["peak"] == max(row["peak"] for row in rows)
    assert last["entropy"] == in_float64(statistics.fmean(row["entropy"] for row in rows))
    assert last["logit_std"] == in_float64(math.sqrt(statistics.fmean(row["variance"] for row in rows)))
    assert last["grad_q_median"] == in_float64(statistics.median(row["grad_q_median"] for row in rows))
    assert [one["message"] for one in document["findings"]] == [one.message for one in health.check(record)]
    assert len(document["heads"]) == len(rows)
    assert document["name"] == "run.jsonl"


@pytest.mark.parametrize("name", followed.LOSSES)
def test_the_loss_that_was_logged_is_on_its_step(tmp_path, name):
    path, model = tmp_path / "run.jsonl", torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with watch(model, path=str(path), every=2) as watching:
        for step in range(5):
            model(torch.randn(1, 9, 16))
            watching.log({name: 5.0 - step, "lr": 0.1})
            watching.step()
    reader = FollowedRecord(path)
    while reader.read():
        pass
    assert [(step["step"], step.get("loss")) for step in reader.document()["steps"]] == [(0, 5.0), (2, 3.0), (4, 1.0)]
    assert not [step for step in reader._parsed.logged if step < 4]  # what has been taken is not kept


def test_a_loss_that_is_no_number_is_left_out(path):
    with path.open("a") as file:
        file.write('{"step": 2, "logged": {"loss": NaN}}\n')
    assert "loss" not in read(path)["steps"][-1]


def test_a_step_counts_when_it_is_whole(path):
    *lines, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines))
    assert len(read(path)["steps"]) == 2
    path.write_text("".join(lines) + last[: len(last) // 2])
    reader = FollowedRecord(path)
    reader.read()
    assert len(reader.document()["steps"]) == 2
    with path.open("a") as file:
        file.write(last[len(last) // 2 :])
    assert reader.read()
    assert len(reader.document()["steps"]) == 3


def test_damaged_lines_are_counted_and_left_out(path):
    with path.open("a") as file:
        file.write('not JSON\n{"step": -1}\n[1]\n' + "x" * 3_000_000 + "\n")
    document = read(path)
    assert document["damaged"] >= 3
    assert len(document["steps"]) == 3


def test_a_file_that_is_replaced_is_read_from_its_beginning(path):
    reader = FollowedRecord(path)
    reader.read()
    assert len(reader.document()["steps"]) == 3
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"step": 2' not in line))
    assert reader.read()
    assert len(reader.document()["steps"]) == 2


def test_a_file_that_is_written_again_in_place_and_longer(path):
    """The same file, larger than before: only its content shows that it is another run."""
    reader = FollowedRecord(path)
    reader.read()
    header, *_, row = path.read_text().splitlines()
    new_rows = [json.dumps(json.loads(row) | {"step": step, "rows_in_step": 1}) for step in range(50, 80)]
    with path.open("r+") as file:
        file.truncate(0)
        file.write("\n".join([header, *new_rows]) + "\n")
    assert reader.read()
    assert [step["step"] for step in reader.document()["steps"]] == list(range(50, 80))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
@pytest.mark.parametrize("put", [os.mkdir, os.mkfifo, None], ids=["folder", "pipe", "nothing"])
def test_a_path_without_a_file_is_waited_for(path, put):
    """Reading neither blocks nor reports more to read; once the file is back, it is read."""
    reader, content = FollowedRecord(path), path.read_bytes()
    reader.read()
    path.unlink()
    if put is not None:
        put(path)
    assert not reader.read()
    assert not reader.more
    if put is not None:
        with pytest.raises(errors.InputError, match="Name a file that watch"):
            FollowedRecord(path).check()
        (os.rmdir if put is os.mkdir else os.unlink)(path)
    path.write_bytes(content.replace(b'"step": 2', b'"step": 7'))
    assert reader.read()
    assert reader.document()["steps"][-1]["step"] == 7


@pytest.mark.parametrize("number", [-1.0, 1e200, 1.7e308, -1.7e308, "inf", "-inf", None], ids=str)
def test_numbers_that_no_training_writes(path, number):
    row = json.loads(path.read_text().splitlines()[-1])
    wrong = {name: number for name, value in row.items() if isinstance(value, float)}
    with path.open("a") as file:
        file.writelines(
            json.dumps(row | wrong | {"step": 9, "rows_in_step": 2, "head": head}) + "\n" for head in (0, 1)
        )
    document = read(path)
    assert [step["step"] for step in document["steps"]] == [0, 1, 2, 9]
    json.dumps(document, allow_nan=False)


def test_info_of_another_type_is_a_damaged_line(path):
    info = next(json.loads(line) for line in path.read_text().splitlines() if "info" in line)
    row = json.loads(path.read_text().splitlines()[-1]) | {"rows_in_step": 1}
    wrong = {"softcap": "x", "head_dim": 0.5, "scale": True, "causal": 1, "route": None}
    with path.open("a") as file:
        for name, value in wrong.items():
            file.write(json.dumps(info | {"info": info["info"] | {name: value}}) + "\n")
        file.write(json.dumps(row | {"step": 9}) + "\n")
    document = read(path)
    assert document["damaged"] == len(wrong)
    assert document["steps"][-1]["step"] == 9


def test_a_stream_that_fails_says_so(path, monkeypatch, capfd):
    def broken(self):
        raise RuntimeError("a secret: /etc/passwd")

    monkeypatch.setattr(FollowedRecord, "read", broken)
    with serving(record=path) as live:
        code, _, content = live.ask("GET", "/record/events")
    assert code == 200
    assert b"event: failed" in content
    assert b"secret" not in content
    assert "a secret" in capfd.readouterr().err


def test_a_long_run_is_thinned(path, monkeypatch):
    monkeypatch.setattr(followed, "MOST", 50)
    row = json.loads(path.read_text().splitlines()[-1]) | {"rows_in_step": 1}
    with path.open("a") as file:
        file.writelines(json.dumps(row | {"step": step}) + "\n" for step in range(10, 1000))
    reader = FollowedRecord(path)
    reader.read()
    while reader.more:
        reader.read()
    steps = [step["step"] for step in reader.document()["steps"]]
    assert len(steps) <= 51
    assert steps[-1] == 999
    assert steps == sorted(steps)


def test_what_is_no_record_is_refused_before_serving(tmp_path):
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"a": 1}\n')
    with pytest.raises(errors.InputError, match="is not a record"):
        FollowedRecord(wrong).check()
    with pytest.raises(errors.InputError, match="Name a file that watch"):
        FollowedRecord(tmp_path / "no folder" / "run.jsonl").check()
    with pytest.raises(errors.InputError, match="Name a file that watch"):
        FollowedRecord(tmp_path).check()
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    FollowedRecord(empty).check()
    assert FollowedRecord(empty).document()["steps"] == []  # a training that is about to begin


def test_a_file_that_a_training_has_yet_to_write_is_waited_for(tmp_path):
    path = tmp_path / "run.jsonl"
    growing = FollowedRecord(path)
    growing.check()
    assert not growing.read()
    assert growing.document()["steps"] == []
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with watch(model, path=path) as watching:
        for _ in range(3):
            model(torch.randn(1, 5, 8)).sum().backward()
            watching.step()
    assert growing.read()
    assert [step["step"] for step in growing.document()["steps"]] == [0, 1, 2]
