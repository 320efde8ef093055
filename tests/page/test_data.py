"""The documents that come with the page: they say what the library says, and hold what the panels draw."""

import base64
import copy
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attemper import errors
from attemper_lab.claims.claims import CLAIMS
from attemper_lab.claims.judgement import NOT_RUN, VERDICTS
from attemper_lab.notes.lines import ONE_LINE
from attemper_lab.notes.sentences import said
from attemper_lab.page.data import bundle, embedded, training
from attemper_lab.page.data.bundle import PARTS, STORED, stored
from attemper_lab.training import recall
from research.claim_figures import drawn

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def maker():
    """research/page_data.py, which makes the documents."""
    return importlib.import_module("research.page_data")


def test_the_claims_are_those_of_the_library():
    found = stored("claims")["claims"]
    assert [one["id"] for one in found] == [claim.id for claim in CLAIMS]
    for one, claim in zip(found, CLAIMS, strict=True):
        assert one["claim"] == claim.sentence
        assert one["look"] == (f"attemper {claim.look}" if claim.look else None)
        assert [(note["note"], note["says"]) for note in one["said"]] == list(said(claim.id))
        assert one["verdict"] in set(VERDICTS) - {NOT_RUN}
        assert one["numbers"]


def test_the_verdicts_are_those_of_the_docs():
    """docs/why-sqrt-dk.md has the verdicts of C1 to C23, which other tests hold to the rows."""
    text = (ROOT / "docs" / "why-sqrt-dk.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| (C\d+) \| .*? \| \*\*([\w ]+)\*\*", text, flags=re.MULTILINE))
    found = {one["id"]: one["verdict"] for one in stored("claims")["claims"]}
    assert len(table) == 23
    assert {name: found[name] for name in table} == table
    assert stored("claims")["one_line"] == ONE_LINE


def test_every_claim_has_a_figure_of_its_own_numbers():
    for one in stored("claims")["claims"]:
        assert one["figure"] == json.loads(json.dumps(drawn(one))), one["id"]
        assert len(one["figure"]["bars"]) >= 2
        assert all(bar["value"] in {**one["numbers"], **one["context"]}.values() for bar in one["figure"]["bars"])


def test_a_figure_whose_words_fit_no_number_is_an_error():
    claim = {"id": "C3", "numbers": {"d_k = 2": 1.0}, "context": {}}
    with pytest.raises(errors.InputError, match="must be those of one number"):
        drawn(claim)
    assert drawn({**claim, "numbers": {}}) is None


def test_the_recorded_runs_are_those_of_the_docs(maker):
    assert stored("training") == json.loads(json.dumps(maker.recorded()))


LESS_EXACT = {"evenness_without_sinks": 4e-3}
"""It divides by what the sinks leave, 1e-3 at least, so another processor moves it by up to 1.1e-3 of itself (six settings)."""


def alike(stored, found, name="", words=re.compile(r"\d[\d.e+-]*")):
    """Whether two documents agree: floats to five digits, sentences but for their numbers, all else exactly."""
    if isinstance(found, dict):
        return stored.keys() == found.keys() and all(alike(stored[key], found[key], key) for key in found)
    if isinstance(found, list):
        return len(stored) == len(found) and all(map(alike, stored, found))
    if isinstance(found, float) and isinstance(stored, float | int):
        return stored == pytest.approx(found, rel=LESS_EXACT.get(name, 1e-5), abs=1e-5)
    return words.sub("#", stored) == words.sub("#", found) if isinstance(found, str) else stored == found


def test_the_stored_heads_are_those_of_the_model():
    """If not, python -m research.page_data heads."""
    ours = copy.deepcopy(stored("heads"))  # the process has one: what is taken out below must stay in it
    pairs = zip(ours["texts"], json.loads(json.dumps(embedded.heads()))["texts"], strict=True)
    for kept, found in pairs:
        numbers = [
            torch.frombuffer(bytearray(base64.b64decode(one.pop("logits"))), dtype=torch.float32)
            for one in (kept, found)
        ]
        assert alike(numbers[0].tolist(), numbers[1].tolist())
        for one in (kept, found):
            one["scan"] = {key: value for key, value in one["scan"].items() if key not in ("created", "torch")}
        assert alike(kept, found)


def test_a_run_from_the_page_is_the_experiments_own():
    settings = {"d": 8, "lr": 1e-3, "steps": 15, "seed": 3}
    found = list(training.training_rows(["sqrt_dk", "none"], **settings))
    assert [row["done"] for row in found] == sorted(row["done"] for row in found)
    assert found[-1]["done"] == 1
    for rule in ("sqrt_dk", "none"):
        rows = recall.train({**training.TASK, **settings}, rule)
        ours = [row for row in found if row["rule"] == rule]
        assert [{name: row[name] for name in training.SHOWN if name in row} for row in rows] == [
            {name: row[name] for name in training.SHOWN if name in row} for row in ours
        ]


def test_stored_parts_need_no_torch():
    code = (
        f"import sys; from attemper_lab.page.data import bundle; print(len(bundle({STORED!r})), 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(len(STORED)), "False"]
    assert set(STORED) < set(PARTS)
    assert set(bundle(STORED)) == set(STORED)
