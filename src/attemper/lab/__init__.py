"""The lab: questions about the scale, one per file, measured. `experiment(name)` loads one.

In the order in which rows pass its folders:

    engine/      the contract of an experiment, sweeps, results, output
    maths/       closed forms, exact means, intervals
    exact/       experiments that train nothing
    real_model/  experiments on the heads of the embedded model
    training/    experiments that train small models
    figures/     what the figures share; each experiment draws its own
    claims/      common claims about √d_k, judged from rows
"""

from __future__ import annotations

import importlib

from ..errors import InputError, nearest
from .engine.experiment import Experiment

FOLDERS = {
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
"""Every experiment and its folder, in the order in which to read them."""

NAMES = tuple(FOLDERS)


def experiment(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in NAMES:
        raise InputError(
            f"run: unknown experiment {name!r}. {nearest(name, NAMES)} `attemper run --list` shows them all."
        )
    found: Experiment = importlib.import_module(f".{FOLDERS[name]}.{name}", __name__).EXPERIMENT
    return found
