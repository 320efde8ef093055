"""The judge can fail: a kernel with one small fault is caught."""

import pytest
import torch

from attemper import kernels
from attemper.kernels import blockwise
from attemper.kernels.contract import Capabilities
from judge import SIGNS, judge
from serving import serving


def tensors():
    return {name: torch.randn(1, 2, n, 8) for name, n in (("query", 9), ("key", 11), ("value", 11))}


def test_the_honest_kernel_passes():
    judge(tensors(), {"causal": True}, "blockwise")


@pytest.mark.parametrize("name", ["output", *SIGNS])
def test_a_value_off_by_a_few_roundings_is_caught(monkeypatch, name):
    def forward(*args, **options):
        output, signs = blockwise.forward(*args, **options)
        wrong = (output if name == "output" else getattr(signs, name)).clone()
        wrong[0, 0, 5] += 2e-5
        return (wrong, signs) if name == "output" else (output, signs._replace(**{name: wrong}))

    _install(monkeypatch, forward, blockwise.backward)
    with pytest.raises(AssertionError, match=name):
        judge(tensors(), {"causal": True}, "blockwise")


@pytest.mark.parametrize("name", ["output", *SIGNS])
def test_a_forgotten_gradient_is_caught(monkeypatch, name):
    def backward(problem, saved, upstream, needs_grad):
        return blockwise.backward(problem, saved, upstream._replace(**{name: None}), needs_grad)

    _install(monkeypatch, blockwise.forward, backward)
    with pytest.raises(AssertionError, match=rf"d\({name}\)"):
        judge(tensors(), {"causal": True}, "blockwise")


@pytest.mark.usefixtures("poisoned")
def test_a_value_never_written_is_caught(monkeypatch):
    def forward(*args, **options):
        output, signs = blockwise.forward(*args, **options)
        wrong = torch.empty_like(output)
        wrong[:, :1] = output[:, :1]
        return wrong, signs

    _install(monkeypatch, forward, blockwise.backward)
    with pytest.raises(AssertionError, match="output: not finite"):
        judge(tensors(), {}, "blockwise")


def _install(monkeypatch, forward, backward):
    class Faulty:
        pass

    Faulty.forward, Faulty.backward = staticmethod(forward), staticmethod(backward)
    load = kernels.load
    monkeypatch.setattr(kernels, "load", lambda name: Faulty if name == "blockwise" else load(name))


def test_a_device_is_tested_with_the_kernels_that_serve_it(monkeypatch):
    assert serving("cpu") == [name for name, serves in kernels.KERNELS.items() if serves.devices in (None, ("cpu",))]
    assert "cpu" not in serving("cuda:0")
    monkeypatch.setitem(
        kernels.KERNELS, "absent", Capabilities(devices=("cuda",), unavailable_reason=lambda call: "is not built here")
    )
    assert serving("cuda:0")[-1] == "absent"  # and so its tests fail, where it should be and is not
    assert "absent" not in serving("cpu")
