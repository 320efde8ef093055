"""bench watch: its candidates do what they say, and its rows and table hold them."""

import json
import sys

import pytest
import torch

import attemper
from attemper import cli
from attemper.errors import MissingExtra
from attemper_lab.bench import run, watch, watch_compiled, watch_cuda
from judge import assert_as_exact


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(watch, "MINILM", {**watch.MINILM, "num_hidden_layers": 1, "hidden_size": 48})


def test_candidates_give_the_same_and_only_the_watched_measure(small, monkeypatch):
    made = []
    original = watch.watch
    monkeypatch.setattr(watch, "watch", lambda *args, **options: made.append(original(*args, **options)) or made[-1])
    subject = watch.Subject(2, 16, padded=True)
    calls = subject.calls()
    assert list(calls) == list(watch.CANDIDATES)
    expected = calls["unwatched"]()[0]
    assert torch.equal(calls["off_cycle"]()[0], expected)
    output, record = calls["watched"]()
    assert torch.equal(output[0], expected)
    assert {row["rows"] for row in record.to_dicts()} == {28.0}  # a quarter of the second sequence is padding
    output, record = calls["replaced"]()
    keep = torch.ones(2, 16, dtype=torch.bool)
    keep[1, 12:] = False
    exact, eager = subject.eager.double()(**subject.inputs)[0].detach(), calls["eager_attentions"]
    subject.eager.float()
    plain = [expected[keep], eager()[0][keep]]
    assert_as_exact("output", output[0][keep], plain, exact[keep])
    assert next(iter(record.info.values())).route == "replaced"
    assert len(calls["eager_attentions"]().attentions) == 1
    assert len(made[0].record) == 0  # the one that rests


@pytest.mark.parametrize("columns", [80, 120])
def test_rows_and_table(small, monkeypatch, capsys, columns, tmp_path):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(run, "QUICK", run.replace(run.QUICK, encoder=((1, 16, False), (2, 16, True))))
    target = tmp_path / "rows.json"
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "watch", "--quick", "--rounds", "3", "-o", str(target)])
    assert not ended.value.code
    out = capsys.readouterr().out
    document = json.loads(target.read_text())
    assert document["speed"] == document["memory"] == []
    assert [row["candidate"] for row in document["watch"]] == 2 * list(watch.CANDIDATES)
    assert [row["padded"] for row in document["watch"]] == 5 * [False] + 5 * [True]
    for row in document["watch"]:
        assert row["cost"]["low"] <= row["cost"]["median"] <= row["cost"]["high"]
        assert row["ms"]["median"] > 0
    assert document["watch"][0]["cost"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert max(map(len, out.splitlines())) <= columns
    for label in watch.CANDIDATES.values():
        assert sum(line.startswith(label) for line in out.splitlines()) == 2


def test_without_transformers_the_pip_line_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"^bench: watch needs transformers.* Type pip install 'attemper\[hf\]'\.$"):
        watch.Subject(1, 8, padded=False)
    assert attemper.watch is not None


def test_compiled_candidates_are_timed_counted_and_compared(monkeypatch):
    """What the GPU runs, here small and without Inductor: no graph breaks, none is compiled again, and errors are rows."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode: compiled(function, backend="eager"))
    small = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 1000}
    case = {"model": "small", "training": True, "batch": 1, "length": 8, "device": "cpu"}
    said = []

    def measured(build):
        options = {"rounds": 1, "budget": 1.0, "note": said.append, "modes": ("default",), "unmeasured": True}
        return watch_compiled.rows(build, case, **options)

    rows = measured(lambda: watch_cuda.make("gpt2", small, "cpu"))
    assert [row["candidate"] for row in rows] == [*watch_compiled.CANDIDATES, "counts", "compared"]
    assert not any("failed" in row for row in rows)
    counts, compared = rows[-2:]
    assert (counts["graph_breaks"], counts["recompilations"], counts["rows_are_complete"]) == (0, 0, True)
    assert (compared["heads"], compared["largest_error_of_entropy"]) == (2, 0.0)
    assert [json.loads(line) for line in said if line.startswith("{")] == rows
    (failed,) = measured(lambda: 1 / 0)
    assert failed["failed"].startswith("ZeroDivisionError")
