"""docs/checkpoints.md: its words and tables are those that the recorded numbers give, and the thresholds quote them rightly."""

import copy
import importlib.util
import json
import re
from pathlib import Path

import pytest

from attemper.health import thresholds

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "data" / "checkpoints.json"


@pytest.fixture(scope="module")
def script():
    found = importlib.util.spec_from_file_location("checkpoints", ROOT / "scripts" / "checkpoints.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def document():
    return json.loads(DATA.read_text(encoding="utf-8"))


def test_the_page_is_made_of_the_numbers(script, document):
    assert script.page(document) == (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    assert DATA.stat().st_size <= 300_000


def test_the_words_follow_the_numbers(script, document):
    document = copy.deepcopy(document)
    for model in document["models"]:
        for layer in model["layers"]:
            layer["sinks"] = layer["heads"] if model["subject"] == "molecules" else 0
    title, _ = script.about_sinks(document["models"])
    assert title.startswith("In 0 of 4 models")
    assert "at most 100 %" in title


def test_no_published_model_comes_near_the_level_critical(document):
    largest = max(layer["peak"] for model in document["models"] for layer in model["layers"])
    critical = next(rung for rung in thresholds.PEAK if rung.level == "critical")
    (quoted,) = re.findall(r"largest logit of twelve published models is (\d+)", critical.source)
    assert round(largest) == int(quoted)
    assert len(document["models"]) == 12
    assert largest < critical.value / 2


def test_no_head_of_a_published_model_is_called_saturated_or_collapsed(document):
    """As the sources of both thresholds say."""
    for threshold in (thresholds.SATURATED, thresholds.COLLAPSED):
        assert "no head of twelve published models" in threshold.source
    assert not [model for model in document["models"] if re.search("saturated|collapsed", model["verdict"]["line"])]


def test_every_layer_was_found_in_order(document):
    assert {model["verdict"]["level"] for model in document["models"]} <= {"ok", "note"}
    depths = {model["name"]: len(model["layers"]) for model in document["models"]}
    assert depths["rxnmapper"] == 12  # one layer, twelve times
