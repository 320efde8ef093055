"""The documents that come with the page: they say what the library says, and hold what the panels draw."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attemper import errors
from attemper.lab.claims.claims import CLAIMS
from attemper.lab.claims.judgement import NOT_RUN, VERDICTS
from attemper.lab.notes.sentences import said
from attemper.lab.training import recall
from attemper.page.data import bundle, claims, figures, training
from attemper.page.data.bundle import PARTS, STORED

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def maker():
    """scripts/page_data.py, which makes both documents."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import page_data
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return page_data


def test_the_claims_are_those_of_the_library():
    found = claims.judged()["claims"]
    assert [one["id"] for one in found] == [claim.id for claim in CLAIMS]
    for one, claim in zip(found, CLAIMS, strict=True):
        assert one["claim"] == claim.sentence
        assert one["look"] == (f"attemper {claim.look}" if claim.look else None)
        assert [(note["note"], note["says"]) for note in one["said"]] == list(said(claim.id))
        assert one["verdict"] in set(VERDICTS) - {NOT_RUN}
        assert one["numbers"]


def test_the_verdicts_are_those_of_the_docs(maker):
    """docs/why-sqrt-dk.md has the verdicts of C1 to C23, which other tests hold to the rows."""
    table = maker.kept((ROOT / "docs" / "why-sqrt-dk.md").read_text(encoding="utf-8"))
    found = {one["id"]: one for one in claims.judged()["claims"]}
    assert len(table) == 23
    for name, line in table.items():
        assert found[name]["verdict"] == line["verdict"], name
    trained = [claim.id for claim in CLAIMS if claim.trains]
    assert trained
    for name in trained:
        assert found[name]["numbers"].keys() == table[name]["numbers"].keys(), name


def test_every_claim_has_a_figure_of_its_own_numbers():
    for one in claims.judged()["claims"]:
        assert one["figure"] == json.loads(json.dumps(figures.drawn(one))), one["id"]
        assert len(one["figure"]["bars"]) >= 2
        assert all(bar["value"] in {**one["numbers"], **one["context"]}.values() for bar in one["figure"]["bars"])


def test_a_figure_whose_words_fit_no_number_is_an_error():
    claim = {"id": "C3", "numbers": {"d_k = 2": 1.0}, "context": {}}
    with pytest.raises(errors.InputError, match="must be those of one number"):
        figures.drawn(claim)
    assert figures.drawn({**claim, "numbers": {}}) is None


def test_the_recorded_runs_are_those_of_the_docs(maker):
    assert training.recorded() == json.loads(json.dumps(maker.recorded()))


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
    code = f"import sys; from attemper.page.data import bundle; print(len(bundle({STORED!r})), 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(len(STORED)), "False"]
    assert set(STORED) < set(PARTS)
    assert set(bundle(STORED)) == set(STORED)
