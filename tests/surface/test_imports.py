"""What importing attemper loads, and how long it takes beside torch. Each measurement is a fresh process."""

import json
import subprocess
import sys
from typing import Any

import pytest

HEAVY = {"triton", "transformers", "pandas", "matplotlib", "rich", "typer", "networkx", "sympy", "altair", "fastapi"}
BUDGET = 0.15  # seconds of CPU time over `import torch`,
TORCH = 1.2  # where that takes these; on a slower machine both take longer


def fresh(code: str) -> Any:
    """Run code in a new process; it prints one JSON value."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    return json.loads(done.stdout)


def loads(statement: str, after: str = "torch") -> dict:
    """What a statement loads after `import torch`, and the CPU time that both take."""
    return fresh(
        f"import json, sys, time; start = time.process_time(); import {after}; first = time.process_time() - start\n"
        "before = set(sys.modules); start = time.process_time()\n"
        f"{statement}\n"
        "spent = time.process_time() - start\n"
        "print(json.dumps({'new': sorted(set(sys.modules) - before), 'seconds': spent, 'before': first}))"
    )


@pytest.fixture(scope="module")
def first():
    return loads("import attemper; attemper.attention; attemper.Vitals; attemper.kernels.why")


def test_import_attemper_alone_loads_no_torch():
    loaded = fresh("import json, sys, attemper; print(json.dumps(list(sys.modules)))")
    assert "attemper" in loaded
    assert {name for name in loaded if name.startswith("attemper.")} == set()
    assert not ({"torch", "numpy"} | HEAVY) & set(loaded)


def test_attention_adds_nothing_but_attemper_to_torch(first):
    assert {name for name in first["new"] if name.split(".")[0] != "attemper"} == set()
    assert "attemper.attention" in first["new"]
    assert not {"attemper.cli", "attemper_lab.bench", "attemper.kernels.blockwise"} & set(first["new"])


def test_attention_costs_little_beside_torch(first):
    # the best of three: a busy machine may slow one process down
    spent = [first["seconds"] / max(1, first["before"] / TORCH)]
    while min(spent) >= BUDGET and len(spent) < 3:
        again = loads("import attemper; attemper.attention")
        spent.append(again["seconds"] / max(1, again["before"] / TORCH))
    assert min(spent) < BUDGET, f"importing attemper.attention took {spent} s of CPU time over torch"


def test_the_measurement_can_fail():
    found = loads("import wave; end = start + 0.2\nwhile time.process_time() < end: pass", after="math")
    assert "wave" in found["new"]
    assert found["seconds"] > BUDGET
