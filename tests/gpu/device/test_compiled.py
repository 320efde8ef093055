"""Instrumented models on a GPU: compiled, and as CUDA graphs, with the record of the eager watch."""

import pytest
import torch
from torch._dynamo.utils import counters

import attemper
from close import in_float32

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch finds as cuda"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # Inductor would have float32 rounded
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # Inductor captures one to keep its memory
]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("train", [False, True], ids=["forward", "backward"])
def test_every_replay_is_counted(mode, train):
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    model = attemper.MultiHeadAttention(64, 4, batch_first=True, device="cuda").train(train)
    x = torch.randn(2, 40, 64, device="cuda")

    def step(run):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(train):
            output = run(x, need_weights=False)[0].square().mean()
        if train:
            model.zero_grad()
            output.backward()

    with attemper.watch(model) as expected:
        step(model)
    attemper.instrument(model)
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    with attemper.watch(compiled, every=2) as watch:
        for _ in range(9):
            step(compiled)
            watch.step()
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert watch.record.steps == [0, 2, 4, 6, 8]
    rows = expected.record.to_dicts()
    for number in watch.record.steps:
        for row, other in zip(watch.record.filter(steps=number).to_dicts(), rows, strict=True):
            assert row["rows"] == other["rows"] == 80.0
            assert row["visible"] == other["visible"]
            assert row["entropy"] == in_float32(other["entropy"], terms=64, logit=abs(other["peak"]))
