"""Questions that take hundreds of training runs, stacked on a GPU; `python scripts/stacked.py` runs one and draws its rows.

In the order in which to read them:

    collapse.py     does the slow-down without a scale depend on √d_k/√(2 ln n) alone?
    ablation.py     what does the scale change in a language model of 30 M parameters?
"""

from __future__ import annotations

import importlib

from ...errors import InputError, nearest
from ..stacked.study import Study

STUDIES = ("collapse", "ablation")
"""The studies, in the order in which to read them."""


def study(name: str) -> Study:
    """The study of that name."""
    if name not in STUDIES:
        raise InputError(f"stacked: unknown study {name!r}. {nearest(name, STUDIES)}")
    found: Study = importlib.import_module(f".{name}", __name__).STUDY
    return found
