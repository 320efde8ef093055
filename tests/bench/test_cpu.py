"""The CPU's table: what it holds, what it divides, and that it prints."""

import io

import pytest
from rich.console import Console

from attemper_lab.bench import cpu, render
from attemper_lab.bench.candidates import Case
from close import in_float64

TINY = [
    ("forward, full", Case((1, 1, 32, 8), False)),
    ("forward, full", Case((1, 1, 64, 8), False)),
    ("forward + backward, causal", Case((1, 2, 32, 8), True, "forward_backward")),
    ("decode", Case((1, 2, 64, 8), False, rows=1)),
]


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(cpu, "cases", lambda quick, kernel, dtype: TINY)
    return cpu.rows(quick=True, kernel="auto", note=lambda line: None)


def test_a_row_has_both_rivals_and_the_machine(rows):
    assert [row["table"] for row in rows] == [table for table, _ in TINY]
    for row in rows:
        spread = row["speed_vs_sdpa"]
        assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert row["rate"] >= 0
        assert row["machine_rate"] > 0
        assert (row["speed_vs_eager_statistics"] is None) == (row["table"] == "decode")


def test_growth_is_told_where_the_length_alone_grew(rows):
    assert [row["growth"] is not None for row in rows] == [False, True, False, False]


def test_the_default_covers_short_and_long_full_and_causal_backward_and_decode():
    found = cpu.cases(False, "auto")
    shapes = {case.shape for _, case in found}
    assert {(8, 12, 128, 64), (1, 8, 8192, 128)} <= shapes
    tables = [table for table, _ in found]
    assert set(tables) == {
        "forward, full",
        "forward, causal",
        "forward + backward, full",
        "forward + backward, causal",
        "decode",
    }
    assert tables == sorted(tables, key=tables.index)  # one table each


def test_the_mean_is_geometric():
    assert cpu.geometric_mean([{"speed_vs_sdpa": {"median": x}} for x in (0.5, 2.0)]) == in_float64(1.0)


def test_it_prints_within_eighty_columns(rows):
    console = Console(width=80, record=True, file=io.StringIO())
    for table in render._cpu(rows, wide=False):
        console.print(table)
    said = console.export_text()
    assert "geometric mean" in said
    assert "…" not in said
