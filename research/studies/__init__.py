"""Questions that take hundreds of training runs, stacked on a GPU; `python -m research.run` runs one and draws its rows.

In the order in which to read them:

    collapse.py     does the slow-down without a scale depend on √d_k/√(2 ln n) alone?
    ablation.py     what does the scale change in a language model of 30 M parameters?
    sensitivity.py  how much does the loss depend on the learning rate, under each rule and treatment?
    alarm.py        when a sign would have warned, and how well it tells failing runs from others
    warning.py      which sign says first that a run will fail, and how many steps before?
    causal.py       which part of leaving the scale out costs what: saturation, lost gradient, faster logits
    law.py          how the steps to learn grow with the scale, at a fixed width
    alpha.py        when the spread of q·k grows like d_k instead of √d_k
    roc.py          which sign tells runs apart that the settings cannot
    rescue.py       does a treatment that comes after the warning still save a run?
"""

from __future__ import annotations

import importlib

from attemper.errors import InputError
from attemper.extension.tools import nearest

from ..stacked.study import Study

STUDIES = ("collapse", "ablation", "sensitivity", "warning", "rescue", "causal", "law", "alpha", "roc")
"""The studies, in the order in which to read them."""


def study(name: str) -> Study:
    """The study of that name."""
    if name not in STUDIES:
        raise InputError(f"stacked: unknown study {name!r}. {nearest(name, STUDIES)}")
    found: Study = importlib.import_module(f".{name}", __name__).STUDY
    return found
