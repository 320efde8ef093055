"""torch.compile: what is watched runs eagerly and it is said; what is not runs as compiled."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import InputError
from watched import Block, stack

SENTENCE = "the model is compiled: watched steps run eagerly, the others as compiled."

# Dynamo looks at .grad of every input
pytestmark = [
    pytest.mark.usefixtures("nothing_is_left_behind"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_models_are_measured_eagerly_and_it_is_said(in_place):
    torch._dynamo.reset()
    model, x = stack(), torch.randn(1, 5, 16)
    with attemper.watch(model) as expected:
        model(x)
    compiled = model
    if in_place:
        model.compile(backend="aot_eager")
    else:
        compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    with warnings.catch_warnings(record=True, action="always") as said, attemper.watch(compiled, every=2) as watch:
        for _ in range(3):
            compiled(x)
            watch.step()
    assert [str(warning.message) for warning in said] == [f"watch(): {SENTENCE}"]
    assert watch.record.steps == [0, 2]
    assert watch.record.notes == [SENTENCE]
    rows = watch.record.filter(steps=0).to_dicts()
    assert (
        [row["layer"] for row in rows] == [row["layer"] for row in expected.record.to_dicts()] == ["0", "0", "1", "1"]
    )
    assert [row["entropy"] for row in rows] == [row["entropy"] for row in expected.record.to_dicts()]


INSIDE = """
import sys, warnings, torch, attemper
from torch import nn
assert "torch._dynamo" not in sys.modules
layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)]
model, x = nn.Sequential(*layers), torch.randn(1, 5, 16)
for in_place in (False, True):
    with warnings.catch_warnings(record=True, action="always"), attemper.watch(model) as watch:
        if in_place:
            model.compile(backend="eager")
            model(x)
        else:
            torch.compile(model, backend="eager")(x)
    assert watch.record.layers == ["0.self_attn", "1.self_attn"], watch.record.layers
    assert len(watch.record.notes) == 1, watch.record.notes
"""


def test_compiled_inside_the_block():
    """In a process of its own, where Dynamo is not loaded before: the watch loads it when it opens."""
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", INSIDE], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("way", ["wrapper", "function"])
def test_a_compiled_caller_of_a_watched_model_runs_eagerly_and_it_is_said(way):
    torch._dynamo.reset()
    model, x = stack(), torch.randn(1, 5, 16)
    compiled = torch.compile(model if way == "wrapper" else lambda x: model(x), backend="eager")
    compiled(x)
    with warnings.catch_warnings(record=True, action="always") as said, attemper.watch(model) as watch:
        compiled(x)
    assert [str(warning.message) for warning in said] == [f"watch(): {SENTENCE}"]
    assert watch.record.notes == [SENTENCE]
    assert watch.record.layers == ["0", "1"]


@pytest.mark.filterwarnings("ignore:watch.*the model is compiled:UserWarning")
def test_a_compiled_model_without_attention_is_still_an_error():
    torch._dynamo.reset()
    model = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")
    with pytest.raises(InputError, match=r"^watch\(\): found no attention call in Sequential;"), attemper.watch(model):
        model(torch.randn(2, 4))


def test_warnings_are_as_they_were_also_when_a_block_that_catches_them_overlaps():
    model, x = Block(), torch.randn(1, 5, 16)
    before = list(warnings.filters)
    watch = attemper.watch(model).__enter__()
    with warnings.catch_warnings():
        model(x)
        watch.__exit__(None, None, None)
        assert warnings.filters == before
    assert warnings.filters == before
    first, second = attemper.watch(model).__enter__(), attemper.watch(model).__enter__()
    model(x)
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert warnings.filters == before
