"""The lab: one question per file. `experiment(name)` loads one; `experiment.py` holds the contract."""

from __future__ import annotations

import importlib

from ..errors import InputError, nearest
from .engine.experiment import Experiment

ROOMS = {
    "worked": "exact",
    "variance": "exact",
    "saturation": "exact",
    "jacobian": "exact",
    "gradient": "exact",
    "two_keys": "exact",
    "divisors": "exact",
    "bounded": "exact",
    "precision": "exact",
    "additive_cost": "exact",
    "parallel": "exact",
    "init": "exact",
    "real_heads": "real_model",
    "subspaces": "real_model",
    "recall": "training",
    "charlm": "training",
    "depth": "training",
    "fold": "training",
    "transplant": "training",
    "scores": "training",
}
"""Every experiment and its room, in the order in which to read them."""

NAMES = tuple(ROOMS)


def experiment(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in NAMES:
        raise InputError(
            f"run: unknown experiment {name!r}. {nearest(name, NAMES)} `attemper run --list` says what they ask."
        )
    found: Experiment = importlib.import_module(f".{ROOMS[name]}.{name}", __name__).EXPERIMENT
    return found
