"""docs/numbers.md: at least twenty numbers with sources, every one measured again here and within its interval."""

import re
from pathlib import Path

import pytest

from attemper.lab.claims import numbers
from measured import GROUP

PAGE = Path(__file__).parents[2] / "docs" / "numbers.md"

pytestmark = pytest.mark.xdist_group(GROUP)  # in one process: they are measured once


def table_rows(text: str) -> dict[str, list[str]]:
    """quantity → the other cells, of every row of the page but its timings, which are one machine's."""
    text = text.partition("## Timings")[0]
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| ")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines if cells[0].strip() != "quantity"}


def test_each_measurement_lies_within_its_interval(measured):
    apart = [number for found in measured.values() for number in found if not number.agrees]
    assert apart == []


def test_no_interval_is_so_wide_that_nothing_could_fail(measured):
    """An interval of half the number would accept anything from half to one and a half times what theory says."""
    numbers_ = [number for found in measured.values() for number in found if number.expected and not number.above]
    # the level of a test, 5 %, as its own exchanges show it: it would fail if the test erred by two fifths
    levels = [one for one in numbers_ if one.source == "the level of the test"]
    assert [one for one in levels if one.within > 0.4 * one.expected] == []
    assert [one for one in numbers_ if one not in levels and one.within > 0.25 * abs(one.expected)] == []


def test_a_source_can_be_found(measured):
    """A paper, a closed form, a definition, a note: not what somebody once measured and did not write down."""
    sources = {number.source for found in measured.values() for number in found}
    assert [source for source in sources if "pilot" in source or "common" in source] == []


def test_the_page_lists_them_with_sources(measured):
    page = table_rows(PAGE.read_text(encoding="utf-8"))
    found = {numbers.cell(number.quantity): number for part in measured.values() for number in part}
    assert len(found) >= 20
    assert set(page) == set(found), "run make figures"
    assert f"\n{sum(map(len, measured.values()))} numbers beside" in PAGE.read_text(encoding="utf-8"), (
        "run make figures"
    )
    for quantity, (expected, shown, within, agrees, source, because) in page.items():
        number = found[quantity]
        # the closed form that is fed by a measurement may differ in its last digits from machine to machine
        assert expected == number.written()[0] or float(expected) == pytest.approx(number.expected, rel=0.05)
        assert abs(float(shown) - number.measured) <= 2 * number.within + 1e-3 * abs(number.measured)
        assert float(within.removeprefix("±")) == pytest.approx(number.within, rel=0.25), (
            f"{quantity}: run make figures"
        )
        assert agrees == "yes"
        assert source
        assert because


def test_what_the_issue_names_is_there(measured):
    text = "\n".join(number.quantity for found in measured.values() for number in found)
    for words in ("Var(q·k)", "kurtosis", "‖J‖_F", "tr J", "two keys", "largest weight", "folded", "bfloat16", "init"):
        assert words in text


def test_a_number_off_its_interval_does_not_agree(measured):
    number = measured["two_keys"][0]
    from dataclasses import replace

    assert not replace(number, measured=number.expected + 2 * number.within).agrees
    assert not replace(number, measured=float("nan")).agrees
