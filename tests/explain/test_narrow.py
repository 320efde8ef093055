"""A narrow terminal: every reading and every head keeps its numbers, down to 40 columns."""

import re

import pytest
from rich.cells import cell_len

import attemper
from attemper_lab.explain.steps import format_measured
from attemper_lab.explain.terminal import plain

TEXT = "Love Apple phones"
CALLS = {
    "heads": {"heads": 4},
    "sqrt_dmodel": {"heads": 16, "rule": "sqrt_dmodel", "d_model": 64},
    "additive": {"heads": 4, "score": "additive", "d_model": 64},
    "cosine": {"score": "cosine", "d_k": 1024, "d_model": 64},
    "large": {"rule": "none", "d_k": 4096, "d_model": 4},
}


def sections(explanation, width):
    """What stands under each step's heading, in one line each; numbers in one piece."""
    text = plain(explanation, width)
    places = [text.index(f"\n{n:>2} {step.title}") for n, step in enumerate(explanation.steps, start=1)]
    ends = [*places[1:], text.index("\n ∴")]
    found = [re.sub(r"\s+", " ", text[start:end]).replace("> ", ">") for start, end in zip(places, ends, strict=True)]
    return dict(zip((step.name for step in explanation.steps), found, strict=True))


@pytest.mark.parametrize("call", CALLS)
def test_no_number_is_lost(call):
    explanation = attemper.explain(TEXT, **CALLS[call])
    for width in (40, 50, 60, 70, 80, 120):
        assert max(map(cell_len, plain(explanation, width).splitlines())) <= width
        found = sections(explanation, width)
        for step in explanation.steps:
            told = found[step.name]
            tokens = told.split()
            for reading in step.readings:
                assert reading.says in told
                for value in reading.values:
                    assert format_measured(value).replace("> ", ">") in tokens
                for words in (words for pair in reading.predictions for words in pair if words != "–"):
                    assert words in told
            for line in step.heads:
                assert str(line.head) in tokens
                for value in (*line.variance, *line.top_weight, *line.entropy):
                    assert format_measured(value).replace("> ", ">") in tokens
            for matrix in (*step.matrices, *step.lanes):
                assert f"{matrix.name} {matrix.size}" in told
                columns = min(3, len(matrix.values[0]))
                for row in matrix.values:
                    assert " ".join(matrix.format(value) for value in row[:columns]) in told


def test_what_is_left_out_is_marked():
    for width in (40, 60):
        rows = re.findall(r"^.*(?:Love|Apple|phones) +-?\d.*$", plain(attemper.explain(TEXT), width), re.MULTILINE)
        wide = [row for row in rows if not re.search(r"(?: +-?\d+\.\d+){3}$", row)]
        assert wide
        assert all(row.endswith(" …") for row in wide)


def test_heads_stand_in_three_tables_or_one():
    explanation = attemper.explain(TEXT, heads=4)
    assert sections(explanation, 60)["heads"].count("head sqrt_dk none") == 3
    assert sections(explanation, 80)["heads"].count("head sqrt_dk none sqrt_dk none sqrt_dk none") == 1


def test_what_a_reading_says_is_never_squeezed_into_a_word_per_line():
    explanation = attemper.explain(TEXT, heads=4)
    for width in (40, 48, 56, 64, 72, 80):
        assert not re.search(r"^ {20,}\S+\n {20,}\S+$", plain(explanation, width), re.MULTILINE)
