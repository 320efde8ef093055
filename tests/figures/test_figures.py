"""Every figure: made from rows, its title is the finding, its colours are those of a colour-blind safe palette, every format."""

import functools
import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("altair")

from attemper.errors import InputError, MissingExtra
from attemper_lab import NAMES, experiment
from attemper_lab.engine import output
from attemper_lab.figures import panels, theme
from measured import GROUP, SMALL, small

DOCS = Path(__file__).parents[2] / "docs"
OKABE_ITO = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
pytestmark = pytest.mark.xdist_group(GROUP)  # in one process: rows are measured once


@functools.cache
def made(name):
    subject = experiment(name)
    rows = small(name)
    return subject, rows, subject.chart(rows).to_dict()


@pytest.mark.parametrize("name", SMALL)
def test_a_figure_states_its_finding(name):
    subject, rows, chart = made(name)
    assert " ".join(chart["title"]["text"]) == subject.finding(rows)
    assert chart["title"]["subtitle"]
    ranges = re.findall(r"#[0-9A-F]{6}", json.dumps(chart))
    assert set(ranges) <= OKABE_ITO | {theme.THEORY, theme.BASELINE}
    assert "http" not in json.dumps(chart).replace("https://vega.github.io/schema", "")
    assert output.render(json.dumps(chart), ".svg").startswith(b"<svg")


def test_colours_are_okabe_and_ito():
    assert {*theme.COLOURS.values(), *theme.SERIES} <= OKABE_ITO | {theme.BASELINE}


NO_CURVE = (
    "ranges",
    "head_dims",
    "scale_cost",
    "heads_cost",
    "antecedent",
    "own_key",
)  # counts, heads and times: there is no theory of them


@pytest.mark.parametrize(
    "name",
    [name for name in SMALL if name not in ("worked", "divisors", "parallel", "additive_cost", "init", *NO_CURVE)],
)
def test_theory_is_a_line_and_measurement_points(name):
    text = json.dumps(made(name)[2])
    assert '"type": "line"' in text
    assert '"type": "point"' in text


def test_every_experiment_has_a_figure_in_the_docs():
    for name in NAMES:
        assert "<text" in (DOCS / "figures" / f"{name}.svg").read_text(encoding="utf-8"), "run make figures"


@pytest.mark.parametrize(
    ("suffix", "start"),
    [
        (".svg", b"<svg"),
        (".png", b"\x89PNG"),
        (".pdf", b"%PDF"),
        (".html", b"<!DOCTYPE html>"),
        (".json", b"{"),
        (".csv", b"experiment,"),
    ],
)
def test_every_form_of_output(tmp_path, suffix, start):
    subject = experiment("two_keys")
    rows = small("two_keys")
    path = tmp_path / f"rows{suffix}"
    output.check(path, force=False)
    output.write(path, subject, rows)
    assert path.read_bytes().lstrip()[:200].upper().startswith(start.upper())
    with pytest.raises(InputError, match=r"already exists\. Add --force"):
        output.check(path, force=False)
    output.check(path, force=True)


def test_parquet_gives_the_rows_back(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    subject = experiment("two_keys")
    rows = small("two_keys")
    output.write(tmp_path / "rows.parquet", subject, rows)
    assert parquet.read_table(tmp_path / "rows.parquet").to_pylist() == rows


def test_a_missing_package_is_named_before_the_work(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(MissingExtra, match=r"needs vl_convert. Type pip install 'attemper\[lab\]'"):
        output.check(tmp_path / "figure.png", force=False)


def test_what_cannot_be_written_is_said(tmp_path):
    folder = tmp_path / "a.csv"
    folder.mkdir()
    with pytest.raises(InputError, match=r"is a folder. Choose another file"):
        output.check(folder, force=False)
    with pytest.raises(
        InputError, match=r"-o must end in .json, .csv, .parquet, .svg, .png, .pdf or .html; got 'a.xls'"
    ):
        output.check(tmp_path / "a.xls", force=False)
    with pytest.raises(InputError, match="there is no folder"):
        output.check(tmp_path / "no" / "a.csv", force=False)
    with pytest.raises(InputError, match=r"-o: cannot write '.*': File name too long. Choose another file."):
        output.check(tmp_path / ("a" * 300 + ".csv"), force=False)


def test_looking_whether_a_file_can_be_written_leaves_no_trace(tmp_path):
    there = tmp_path / "there.csv"
    there.write_text("mine", encoding="utf-8")
    output.check(there, force=True)
    output.check(tmp_path / "new.csv", force=False)
    assert [(path.name, path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()] == [("there.csv", "mine")]


def test_marks_that_lie_on_one_another_are_drawn_from_large_to_small():
    """In the order of the legend, whatever the order of the rows."""
    colour = theme.series("name", "", ["a", "b", "c"])
    rows = theme.in_order([{"name": name} for name in "cab"], colour, "size", 100, 40)
    assert rows == [{"name": "a", "size": 100}, {"name": "b", "size": 70}, {"name": "c", "size": 40}]
    assert theme.in_order([{"name": "a"}], theme.series("name", "", ["a"]), "size", 100, 40)[0]["size"] == 100


@pytest.mark.parametrize(("low", "high"), [(0.05, 40.0), (11.0, 60.0), (6.0, 9.0), (1e-9, 1e-2)])
def test_a_logarithmic_panel_names_at_least_two_values(low, high):
    inside = [value for value in panels._few_decades(low, high).values if low <= value <= high]
    assert 2 <= len(inside) <= 5
    assert panels._few_decades(120.0, 180.0).tickCount == 3  # no round number in between
