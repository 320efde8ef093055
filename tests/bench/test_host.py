"""bench host: what it compares computes the same, everything that it promises is measured, and its tables fit the terminal."""

import importlib.util
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import attemper
from attemper import cli
from attemper_lab import timing
from attemper_lab.bench import host, run, watch, watch_compiled
from close import assert_float64

SCRIPT = Path(__file__).parents[2] / "scripts" / "speed.py"


def tensors(tracked=False):
    return host.SmallCall.make(5, tracked, torch.float64, "cpu")


@pytest.mark.parametrize("name", host.CALLS)
def test_ours_and_torch_compute_the_same(name):
    kind, ours = host.CALLS[name]
    for these in (tensors().flat(),) if kind == "flat" else (tensors(),):
        expected = host.TORCH[kind](these)
        if name == "measure":
            assert torch.equal(ours(these), attemper.attention(*these.inputs).vitals.entropy)
        else:
            assert_float64(ours(these), expected)


@pytest.mark.parametrize("mode", host.MODES)
@pytest.mark.parametrize("name", host.CALLS)
def test_modes_are_what_they_say(name, mode):
    kind, call = host.CALLS[name]
    seen = []

    def spied(these):
        seen.append((torch.is_grad_enabled(), these.query.requires_grad, these.query.dim()))
        return call(these)

    found = host._in_mode(mode, spied, kind, tensors(mode in ("forward", "backward")))()
    assert set(seen) == {(mode != "no_grad", mode in ("forward", "backward"), 3 if kind == "flat" else 4)}
    if mode == "backward":
        reached = [grad is not None for grad in found]
        assert reached == [True, True, name != "measure", *([True] if name == "learned scale" else [])]
    else:
        assert found.requires_grad == (mode == "forward")


def test_by_hand_stands_in_for_sdpa_and_leaves():
    before, query = nn.functional.scaled_dot_product_attention, tensors().query
    expected = before(query, query, query, is_causal=True, scale=0.3)
    with host.by_hand() as count:
        found = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True, scale=0.3)
    assert (len(count), nn.functional.scaled_dot_product_attention) == (1, before)
    assert_float64(found, expected)


def assert_the_page_has_them(document):
    """scripts/speed.py writes every row that was measured into the tables of the docs; nothing of a GPU, which is not there."""
    spec = importlib.util.spec_from_file_location("speed", SCRIPT)
    speed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(speed)
    lines = speed.host_time(document, "cpu")
    first = {line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")}
    models = {(row["model"], row["training"]) for row in document["host"] if row["table"] != "calls"}
    assert first > {*host.CALLS, *(f"{model}, {'training' if training else 'forward'}" for model, training in models)}
    assert speed.host_time(document, "cuda") == speed.short_calls(document) == []


@pytest.mark.parametrize("columns", [40, 80])
def test_rows_and_tables(monkeypatch, capsys, tmp_path, columns):
    """Small; compiled models run as they are, since test_watch.py compiles them."""
    monkeypatch.setattr(torch, "compile", lambda function, mode: function)
    monkeypatch.setattr(host, "BATCH", 0.0)
    monkeypatch.setattr(host, "CALL_ROUNDS", 1)
    monkeypatch.setattr(host, "STEPS", 1)
    monkeypatch.setattr(host, "LENGTHS", (4,))
    monkeypatch.setattr(host, "GPT2", {**host.GPT2, "n_embd": 12, "n_layer": 1})
    monkeypatch.setattr(watch, "MINILM", {**watch.MINILM, "hidden_size": 12, "num_hidden_layers": 1})
    monkeypatch.setattr(watch_compiled, "TURNS", 1)
    monkeypatch.setattr(watch_compiled, "STEPS", 1)
    monkeypatch.setenv("COLUMNS", str(columns))
    quick = columns == 40
    target = tmp_path / "rows.json"
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "host", *(["--quick"] if quick else []), "--rounds", "3", "-o", str(target)])
    assert not ended.value.code
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert "…" not in out
    document = json.loads(target.read_text())
    assert_the_page_has_them(document)
    rows = document["host"]
    timed = [row for row in rows if row["table"] == "calls"]
    assert {(row["call"], row["mode"]) for row in timed} == {(call, mode) for call in host.CALLS for mode in host.MODES}
    for row in timed:
        assert 0 < row["over_torch"]["low"] <= row["over_torch"]["median"] <= row["over_torch"]["high"]
    layers = {(row["model"], row["training"]): [] for row in rows if row["table"] == "layers"}
    assert list(layers) == [
        (name, training) for name in list(host.MODELS)[: 1 if quick else 3] for training in (False, True)
    ]
    for row in rows:
        if row["table"] == "layers":
            layers[row["model"], row["training"]].append(row["candidate"])
    for (name, training), candidates in layers.items():
        expected = ["unwatched", "off_cycle", "watched"] + ["replaced"] * (name in host.HUGGING_FACE)
        fast_path = name == "nn.TransformerEncoder" and not training
        assert candidates == [*expected, *([] if fast_path else ["by_hand"])]
    counts = [row for row in rows if row.get("candidate") == "counts"]
    assert [row["training"] for row in counts] == ([] if quick else [False, True])
    assert all(row["graph_breaks"] == row["recompilations"] == 0 for row in counts)


@pytest.mark.parametrize(
    ("asked", "gpu", "measured"),
    [
        ("cpu", False, ("cpu",)),
        ("cpu", True, ("cpu", "cuda")),
        ("cuda", True, ("cuda",)),
        ("cuda:1", True, ("cuda:1",)),
    ],
)
def test_a_gpu_that_is_there_is_measured_too(monkeypatch, asked, gpu, measured):
    seen = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(run.env, "describe", lambda: {"cpu": {"cores": 1, "threads": 1}})
    monkeypatch.setattr(host, "rows", lambda **options: seen.update(options) or [])
    run.run(run.replace(run.QUICK, parts=("host",), device=asked), print)
    assert seen["devices"] == measured


def test_host_time_ends_when_the_call_returns(monkeypatch):
    """On a GPU: the device is idle before the clock starts, and is not waited for after."""
    said = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("idle"))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: said.append("clock") or 0.0))
    timing._on_host(lambda: said.append("call"))
    assert said == ["idle", "clock", "call", "clock"]


@pytest.mark.skipif(not timing.FINE, reason="needs a system that counts the processor time of a thread finely")
def test_what_a_call_waits_for_is_no_host_time():
    times = timing.interleave({"asleep": lambda: time.sleep(0.05)}, rounds=1, warmup=0, host=True)
    waited = timing.interleave({"asleep": lambda: time.sleep(0.05)}, rounds=1, warmup=0)
    assert times.spread("asleep").median < 0.05 <= waited.spread("asleep").median


def test_seconds_above_another_candidate():
    times = timing.Times({"ours": [3.0, 5.0, 4.0], "theirs": [1.0, 2.0, 3.5]})
    assert times.above("ours", "theirs").median == 2.0
