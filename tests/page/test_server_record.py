"""A record, followed: as a watch writes it, cut short, damaged, begun again, replaced, and long."""

import json
import math
import os
import statistics

import pytest

pytest.importorskip("fastapi", reason="the page's server was not tested: fastapi is not installed")

import torch

from attemper import Record, errors, health, watch
from attemper.page.server import record as followed
from attemper.page.server.record import FollowedRecord
from close import in_float64
from page.served import serving


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


def test_a_file_that_is_written_again_in_place_and_longer(path):
    """The same file, larger than before: only its content shows that it is another run."""
    found = FollowedRecord(path)
    found.read()
    header, *_, row = path.read_text().splitlines()
    again = [json.dumps(json.loads(row) | {"step": step, "rows_in_step": 1}) for step in range(50, 80)]
    with path.open("r+") as file:
        file.truncate(0)
        file.write("\n".join([header, *again]) + "\n")
    assert found.read()
    assert [step["step"] for step in found.document()["steps"]] == list(range(50, 80))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
@pytest.mark.parametrize("put", [os.mkdir, os.mkfifo, None], ids=["folder", "pipe", "nothing"])
def test_what_is_no_file_is_waited_for(path, put):
    """It neither blocks nor asks to be read again at once; when the file is back, it is read."""
    found, content = FollowedRecord(path), path.read_bytes()
    found.read()
    path.unlink()
    if put is not None:
        put(path)
    assert not found.read()
    assert not found.more
    with pytest.raises(errors.InputError, match="Name a file that watch"):
        FollowedRecord(path).check()
    if put is not None:
        (os.rmdir if put is os.mkdir else os.unlink)(path)
    path.write_bytes(content.replace(b'"step": 2', b'"step": 7'))
    assert found.read()
    assert found.document()["steps"][-1]["step"] == 7


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


def test_facts_of_another_type_are_damaged_lines(path):
    facts = next(json.loads(line) for line in path.read_text().splitlines() if "facts" in line)
    row = json.loads(path.read_text().splitlines()[-1]) | {"rows_in_step": 1}
    wrong = {"softcap": "x", "head_dim": 0.5, "scale": True, "causal": 1, "route": None}
    with path.open("a") as file:
        for name, value in wrong.items():
            file.write(json.dumps(facts | {"facts": facts["facts"] | {name: value}}) + "\n")
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
    found = FollowedRecord(path)
    found.read()
    while found.more:
        found.read()
    steps = [step["step"] for step in found.document()["steps"]]
    assert len(steps) <= 51
    assert steps[-1] == 999
    assert steps == sorted(steps)


def test_what_is_no_record_is_refused_before_serving(tmp_path):
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"a": 1}\n')
    with pytest.raises(errors.InputError, match="is not a record"):
        FollowedRecord(wrong).check()
    with pytest.raises(errors.InputError, match="Name a file that watch"):
        FollowedRecord(tmp_path / "missing.jsonl").check()
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    FollowedRecord(empty).check()
    assert FollowedRecord(empty).document()["steps"] == []  # a training that is about to begin
