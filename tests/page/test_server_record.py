"""A record, followed: as a watch writes it, cut short, damaged, begun again, replaced, and long."""

import json
import math
import statistics

import pytest

pytest.importorskip("fastapi", reason="the page's server was not tested: fastapi is not installed")

import torch

from attemper import Record, errors, health, watch
from attemper.page.server import record as followed
from attemper.page.server.record import FollowedRecord
from close import in_float64


@pytest.fixture
def path(tmp_path):
    """Three steps of a watch, with gradients."""
    found = tmp_path / "run.jsonl"
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with watch(model, path=str(found), gradients=True) as watching:
        for _ in range(3):
            model(torch.randn(2, 9, 16)).sum().backward()
            watching.step()
    return found


def read(path):
    found = FollowedRecord(path)
    while found.read():
        pass
    return found.document()


def test_it_says_what_the_record_says(path):
    document, record = read(path), Record.read(path)
    rows = [row for row in record.to_dicts() if row["step"] == max(record.steps)]
    last = document["steps"][-1]
    assert [step["step"] for step in document["steps"]] == sorted(record.steps)
    assert last["peak"] == max(row["peak"] for row in rows)
    assert last["entropy"] == in_float64(statistics.fmean(row["entropy"] for row in rows))
    assert last["logit_std"] == in_float64(math.sqrt(statistics.fmean(row["variance"] for row in rows)))
    assert last["grad_q_median"] == in_float64(statistics.median(row["grad_q_median"] for row in rows))
    assert [one["says"] for one in document["findings"]] == [one.says for one in health.check(record)]
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
    found = FollowedRecord(path)
    while found.read():
        pass
    assert [(step["step"], step.get("loss")) for step in found.document()["steps"]] == [(0, 5.0), (2, 3.0), (4, 1.0)]
    assert not [step for step in found._parsed.logged if step < 4]  # what has been taken is not kept


def test_a_loss_that_is_no_number_is_left_out(path):
    with path.open("a") as file:
        file.write('{"step": 2, "logged": {"loss": NaN}}\n')
    assert "loss" not in read(path)["steps"][-1]


def test_a_step_counts_when_it_is_whole(path):
    *lines, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines))
    assert len(read(path)["steps"]) == 2
    path.write_text("".join(lines) + last[: len(last) // 2])
    found = FollowedRecord(path)
    found.read()
    assert len(found.document()["steps"]) == 2
    with path.open("a") as file:
        file.write(last[len(last) // 2 :])
    assert found.read()
    assert len(found.document()["steps"]) == 3


def test_damaged_lines_are_counted_and_left_out(path):
    with path.open("a") as file:
        file.write('not JSON\n{"step": -1}\n[1]\n' + "x" * 3_000_000 + "\n")
    document = read(path)
    assert document["damaged"] >= 3
    assert len(document["steps"]) == 3


def test_a_file_that_is_replaced_is_read_from_its_beginning(path):
    found = FollowedRecord(path)
    found.read()
    assert len(found.document()["steps"]) == 3
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"step": 2' not in line))
    assert found.read()
    assert len(found.document()["steps"]) == 2


def test_a_long_run_is_thinned(path, monkeypatch):
    monkeypatch.setattr(followed, "MOST", 50)
    row = json.loads(path.read_text().splitlines()[-1]) | {"rows_in_step": 1}
    with path.open("a") as file:
        file.writelines(json.dumps(row | {"step": step}) + "\n" for step in range(10, 1000))
    found = FollowedRecord(path)
    while found._offset < path.stat().st_size:
        found.read()
    steps = [step["step"] for step in found.document()["steps"]]
    assert len(steps) <= 51
    assert steps[-1] == 999
    assert steps == sorted(steps)


def test_what_is_no_record_is_refused_before_serving(tmp_path):
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"a": 1}\n')
    with pytest.raises(errors.InputError, match="is not a record"):
        FollowedRecord(wrong)
    with pytest.raises(errors.InputError, match="Name a file that watch"):
        FollowedRecord(tmp_path / "missing.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert FollowedRecord(empty).document()["steps"] == []  # a training that is about to begin
