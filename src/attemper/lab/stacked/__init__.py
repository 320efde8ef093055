"""Many training runs of one shape as one model: every tensor has a leading dimension of runs, so a GPU is busy with small
models.

In the order in which a run passes the files:

    parameters.py   the parameters of all runs in one tensor
    adam.py         Adam over that tensor, each run with its own rate, clipped by its own norm
    repeated.py     one step, recorded once and replayed on a GPU
    study.py        which stack comes next, until everything is measured or the time is over
    recall.py       the recall task of lab/training, stacked
    text.py         the standard library's sources as bytes
    treatments.py   what a run gets beside its rule, from which step on
    probe.py        the signs of every head, kept on the device
    language.py     a causal language model, stacked
    collapse.py     does the slow-down without a scale depend on √d_k/√(2 ln n) alone?
    ablation.py     what does the scale change in a language model of 30 M parameters?

`python scripts/stacked.py` runs a study and draws its rows.
"""

from __future__ import annotations

import importlib

from ...errors import InputError, nearest
from .study import Study

STUDIES = ("collapse", "ablation")
"""The studies, in the order in which to read them."""


def study(name: str) -> Study:
    """The study of that name."""
    if name not in STUDIES:
        raise InputError(f"stacked: unknown study {name!r}. {nearest(name, STUDIES)}")
    found: Study = importlib.import_module(f".{name}", __name__).STUDY
    return found
