"""The lab: questions about the scale, one per file, measured. `experiment(name)` loads one.

In the order in which rows pass its folders:

    engine/      the contract of an experiment, sweeps, results, output
    exact/       experiments that train nothing
    details/     experiments on details of common explanations
    real_model/  experiments on the heads of the embedded model
    training/    experiments that train small models
    stacked/     many training runs as one model, on a GPU
    studies/     questions that take hundreds of such runs
    stored/      rows of such experiments that were measured on a GPU
    maths/       closed forms, exact means, intervals
    figures/     what the figures share; each experiment draws its own
    notes/       common notes on √d_k, sentence by sentence
    claims/      common claims about √d_k, judged from rows
"""

from __future__ import annotations

import importlib

from ..errors import InputError, nearest
from .engine.experiment import Experiment

FOLDERS = {
    "exact": ("worked", "variance", "saturation", "jacobian", "gradient", "two_keys", "divisors", "bounded", "precision",
              "additive_cost", "parallel", "init"),
    "details": ("width", "similarity", "ranges", "head_dims", "three_scores", "plateau", "scale_cost"),
    "real_model": ("real_heads", "subspaces", "antecedent", "own_key"),
    "training": ("recall", "charlm", "depth", "fold", "transplant", "scores"),
}  # fmt: skip
"""Every experiment by its folder, in the order in which to read them."""

NAMES = tuple(name for names in FOLDERS.values() for name in names)


def experiment(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in NAMES:
        raise InputError(
            f"run: unknown experiment {name!r}. {nearest(name, NAMES)} `attemper run --list` shows them all."
        )
    folder = next(folder for folder, names in FOLDERS.items() if name in names)
    found: Experiment = importlib.import_module(f".{folder}.{name}", __name__).EXPERIMENT
    return found
