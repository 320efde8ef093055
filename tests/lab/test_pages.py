"""docs/why-sqrt-dk.md and docs/training.md: their commands exist, their figures are there, their claims are all the claims."""

import re
from pathlib import Path

import pytest

from attemper.lab import NAMES, claims, experiment
from attemper.lab.verdicts import VERDICTS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "why-sqrt-dk.md").read_text(encoding="utf-8")


def test_every_experiment_is_a_step_with_its_figure():
    commands = re.findall(r"^attemper run (\w+)", PAGE, flags=re.MULTILINE)
    assert set(commands) == set(NAMES)
    assert set(re.findall(r"\]\(figures/(\w+)\.svg\)", PAGE)) == set(NAMES)


@pytest.mark.parametrize("name", ["why-sqrt-dk.md", "training.md", "numbers.md"])
def test_links_lead_somewhere(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^):#]+)\)", text):
        assert (DOCS / link).exists(), f"{name} links to {link}"


def test_the_table_has_every_claim_with_a_verdict():
    rows = dict(re.findall(r"^\| (C\d+) \| .*? \| \*\*([\w ]+)\*\*", PAGE, flags=re.MULTILINE))
    assert set(rows) == {claim.id for claim in claims.CLAIMS}
    assert set(rows.values()) <= set(VERDICTS)


def test_the_training_page_has_every_experiment_that_trains():
    text = (DOCS / "training.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)", text, flags=re.MULTILINE) == [n for n in NAMES if experiment(n).trains]
