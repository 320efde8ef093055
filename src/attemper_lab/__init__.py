"""attemper_lab: explain and prove. Attention step by step, claims about √d_k measured, the page, and speed compared.

It uses the public names of attemper and `attemper.extension`. Experiments are questions about the scale, one per file, with their
parameters in experiments.toml; `experiment(name)` loads one. In the order in which their rows pass these folders:

    engine/      the contract of an experiment, sweeps, results, output
    exact/       experiments that train nothing
    details/     experiments on details of common explanations
    real_model/  experiments on the heads of the embedded model
    training/    experiments that train small models
    stored/      rows of such experiments that were measured on a GPU
    maths/       closed forms, exact means, intervals
    figures/     what the figures share; each experiment draws its own
    notes/       common notes on √d_k, sentence by sentence
    claims/      common claims about √d_k, judged from rows

Beside these:

    explain/     attention on a sentence, step by step
    page/        the page on which one drags the scale
    bench/       time and memory compared with torch; timing.py and memory.py measure them
    cli/         the commands of all of it
"""

from __future__ import annotations

import importlib

from attemper.errors import InputError
from attemper.extension.tools import nearest

from .engine.experiment import Experiment, tables

NAMES = tuple(tables()["experiments"])
"""Every experiment, in the order in which to read them."""


def experiment(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in NAMES:
        raise InputError(
            f"run: unknown experiment {name!r}. {nearest(name, NAMES)} `attemper run --list` shows them all."
        )
    folder = tables()["experiments"][name]["folder"]
    loaded: Experiment = importlib.import_module(f".{folder}.{name}", __name__).EXPERIMENT
    return loaded
