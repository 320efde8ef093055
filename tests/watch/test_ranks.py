"""Two processes under DistributedDataParallel: heads merge over both, rank 0 writes, a rank that differs is noticed."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import attemper

RANK = """
import sys, warnings, torch, attemper
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

rank, folder, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet-{case}", rank=rank, world_size=2)
torch.manual_seed(0)
layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
x = torch.randn(4, 9, 16)[2 * rank : 2 * rank + 2]
if case == "different" and rank == 1:
    layers.layers = layers.layers[:1]
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    with attemper.watch(model, optimizer=optimizer, gradients=True, path=f"{folder}/{case}.jsonl") as watch:
        for _ in range(2):
            out = model(x) if case == "same" else layers(x)
            out.square().sum().backward()
            optimizer.step()
watch.record.write(f"{folder}/{case}-{rank}.jsonl")
assert any("ranks saw different layers" in str(w.message) for w in said) == (case == "different")
distributed.barrier()
distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Both cases at once, four processes."""
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
        for case in ("same", "different")
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
        assert found.pop("layer") == "module." + expected.pop("layer")
        assert found["rows"] == 36
        for name, value in expected.items():
            wanted = pytest.approx(value, rel=1e-6, nan_ok=True) if isinstance(value, float) else value
            assert found[name] == wanted, name


def test_ranks_that_saw_different_layers_keep_their_own(folder):
    first, second = (attemper.Record.read(folder / f"different-{rank}.jsonl") for rank in range(2))
    assert (len(first.layers), len(second.layers)) == (2, 1)
    assert first.to_dicts()[0]["rows"] == 18
    assert "ranks saw different layers" in first.notes[0]
