"""Which machines the Triton kernels refuse, and the clause that says why; without a GPU, by what torch would say on them."""

import sys
from types import SimpleNamespace

import pytest
import torch

from attemper import kernels

NVIDIA, AMPERE, TURING = "13.0", (8, 0), (7, 5)


@pytest.fixture
def why(monkeypatch):
    """The clause on a machine with these devices, this CUDA (None: ROCm) and this triton, whose kernels fail to load so."""

    def ask(capabilities, cuda=NVIDIA, version="3.6.0", fails=None):
        def load(name):
            if fails is not None:
                raise fails

        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda at=0: capabilities[at])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda at=0: "Tesla T4")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(kernels, "load", load)
        module = None if version is None else SimpleNamespace(__version__=version)
        monkeypatch.setitem(sys.modules, "triton", module)
        return kernels._why_triton_is_missing.__wrapped__()

    return ask


def test_it_is_there(why):
    assert why([AMPERE, (12, 0)]) is None
    assert why([AMPERE], version="3.10.0+git1234") is None


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"capabilities": []}, "needs an NVIDIA GPU of the Ampere generation"),
        ({"capabilities": [(9, 4)], "cuda": None}, "needs an NVIDIA GPU"),
        ({"capabilities": [TURING]}, "cuda:0 is a Tesla T4"),
        ({"capabilities": [AMPERE, TURING]}, "cuda:1 is a Tesla T4, which CUDA_VISIBLE_DEVICES can hide"),
        ({"capabilities": [AMPERE], "version": "3.4.0"}, "needs the package triton 3.6 or newer; found 3.4.0"),
        ({"capabilities": [AMPERE], "version": None}, "needs the package triton, as of version 3.6: "),
        ({"capabilities": [AMPERE], "fails": AttributeError("no attribute 'knobs'")}, "3.6: no attribute 'knobs'"),
    ],
    ids=str,
)
def test_a_clause_says_what_is_missing(why, machine, said):
    assert said in why(**machine)
