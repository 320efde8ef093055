"""The lab: one question per file. `experiment(name)` loads one; `experiment.py` holds the contract."""

from __future__ import annotations

import importlib

from ..errors import InputError, nearest
from .experiment import Experiment

NAMES = (
    "worked",
    "variance",
    "saturation",
    "jacobian",
    "gradient",
    "two_keys",
    "divisors",
    "bounded",
    "precision",
    "additive_cost",
    "parallel",
    "init",
    "real_heads",
    "subspaces",
    "recall",
    "charlm",
    "depth",
    "fold",
    "transplant",
    "scores",
)
"""Every experiment, in the order in which to read them."""


def experiment(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in NAMES:
        raise InputError(
            f"run: unknown experiment {name!r}. {nearest(name, NAMES)} `attemper run --list` says what they ask."
        )
    found: Experiment = importlib.import_module(f".{name}", __name__).EXPERIMENT
    return found
