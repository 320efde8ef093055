"""Two processes under DistributedDataParallel: heads merge over both, rank 0 writes, a rank that differs is noticed."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import attemper
from attemper.watch.ranks import ALONE

RANK = """
import sys, warnings, torch, attemper
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

rank, folder, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
path = f"{folder}/{case}.jsonl"
early = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
watch = attemper.watch(early, gradients=True, path=path)  # made before there are ranks
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet-{case}", rank=rank, world_size=2)
torch.manual_seed(0)
layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
model = DistributedDataParallel(early if case == "alone" else layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
x = torch.randn(4, 9, 16)[2 * rank : 2 * rank + 2]
if case == "different" and rank == 1:
    layers.layers = layers.layers[:1]
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    if case != "alone":
        watch = attemper.watch(model, optimizer=optimizer, gradients=True, path=path)
    with watch:
        for _ in range(2):
            out = layers(x) if case == "different" else model(x)
            out.square().sum().backward()
            optimizer.step()
        if case == "uneven" and rank == 0:
            layers(x)  # a validation of its own, after the last step
watch.record.write(f"{folder}/{case}-{rank}.jsonl")
said = [str(warning.message) for warning in said]
assert any("ranks saw different layers" in line for line in said) == (case in ("different", "uneven")), said
assert any("there are several ranks, but the model" in line for line in said) == (case == "alone"), said
distributed.barrier()
distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All cases at once, two processes each."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), str(folder), case],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for case in ("same", "different", "uneven", "alone")
        for rank in range(2)
    ]
    for process in started:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
    return folder


def test_heads_merge_over_ranks_and_rank_0_writes(folder):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
    x = torch.randn(4, 9, 16)
    with attemper.watch(model, gradients=True) as watch:
        for part in x.split(2):
            model(part).square().sum().backward()
    ranks = [attemper.Record.read(folder / f"same-{rank}.jsonl") for rank in range(2)]
    assert repr(ranks[0].to_dicts()) == repr(ranks[1].to_dicts())
    assert repr(attemper.Record.read(folder / "same.jsonl").to_dicts()) == repr(ranks[0].to_dicts())
    assert ranks[0].steps == [0, 1]
    for found, expected in zip(ranks[0].filter(steps=0).to_dicts(), watch.record.to_dicts(), strict=True):
        assert found["rows"] == 36  # and the layers are named as without the wrapper
        for name, value in expected.items():
            wanted = pytest.approx(value, rel=1e-6, nan_ok=True) if isinstance(value, float) else value
            assert found[name] == wanted, name


def test_ranks_that_saw_different_layers_keep_their_own(folder):
    first, second = (attemper.Record.read(folder / f"different-{rank}.jsonl") for rank in range(2))
    assert (len(first.layers), len(second.layers)) == (2, 1)
    assert first.to_dicts()[0]["rows"] == 18
    assert "ranks saw different layers" in first.notes[0]


def test_a_rank_with_rows_after_its_last_step_waits_for_nobody(folder):
    first, second = (attemper.Record.read(folder / f"uneven-{rank}.jsonl") for rank in range(2))
    assert (first.steps, second.steps) == ([0, 1, 2], [0, 1])
    assert [record.filter(steps=1).to_dicts()[0]["rows"] for record in (first, second)] == [36, 36]
    assert first.filter(steps=2).to_dicts()[0]["rows"] == 18


def test_a_model_inside_of_the_wrapped_one_is_not_joined_and_it_is_said(folder):
    """The watch was made before there were ranks, and still rank 0 alone writes."""
    ranks = [attemper.Record.read(folder / f"alone-{rank}.jsonl") for rank in range(2)]
    found = attemper.Record.read(folder / "alone.jsonl")
    assert [record.to_dicts()[0]["rows"] for record in (*ranks, found)] == [36, 36, 36]  # two passes of its own 18
    assert len(found) == len(ranks[0]) == 4
    assert found.to_dicts()[0]["entropy"] == ranks[0].to_dicts()[0]["entropy"] != ranks[1].to_dicts()[0]["entropy"]
    assert found.notes == [ALONE]
    assert found.layers == ["layers.0.self_attn", "layers.1.self_attn"]
