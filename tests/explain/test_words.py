"""Words as they are shown: in one line, without what a terminal or a page would obey, and no wider than reads well."""

import re

from rich.cells import cell_len

import attemper
from attemper_lab.explain.settings import MOST_CELLS, label_of

LONG = "x" * 5000


def headline(explanation):
    return str(explanation).splitlines()[0].strip()


def test_white_space_of_any_kind_separates_words_in_the_title():
    explanation = attemper.explain("Love\nApple\tphones\r\n")
    assert headline(explanation) == "Love Apple phones"
    assert "<h3>Love Apple phones</h3>" in explanation._repr_html_()
    assert explanation.to_dict()["text"] == "Love\nApple\tphones\r\n"


def test_nothing_that_turns_or_hides_text_reaches_a_page_or_a_terminal():
    hostile = "\u202eevil\u202c \u2066iso\u2069 nul\x00l \x1b[31mred zero\u200bwidth \x07"
    explanation = attemper.explain(hostile)
    pages = (str(explanation), explanation._repr_html_(), repr(explanation))
    for page in pages:
        assert all(letter.isprintable() or letter == "\n" for letter in page)
        assert re.search(r"evil iso null \[31mred zerowidth ·", page)
    assert explanation.to_dict()["words"] == hostile.split()


def test_a_long_word_is_shortened_for_showing_and_whole_in_the_data():
    explanation = attemper.explain(f"{LONG} b")
    assert headline(explanation) == "x" * 23 + "… b"
    plain = attemper.explain("xx b")
    assert len(str(explanation).splitlines()) <= len(str(plain).splitlines()) + 2
    assert len(explanation._repr_html_()) < len(plain._repr_html_()) + 1500
    assert len(repr(explanation)) < 100
    assert explanation.to_dict()["words"] == [LONG, "b"]
    assert explanation.to_dict()["text"] == f"{LONG} b"


def test_a_label_counts_cells():
    assert label_of("x" * MOST_CELLS) == "x" * MOST_CELLS
    assert label_of("私" * 12) == "私" * 12
    assert label_of("私" * 13) == "私" * 11 + "…"
    for word in ("私" * 100, "x" + "私" * 100, "é" * 100, "e" + "\u0301" * 5000, "👍" * 100, "क्षि" * 100):
        assert cell_len(label_of(word)) <= MOST_CELLS
        assert len(label_of(word)) <= 2 * MOST_CELLS + 1
        assert label_of(word).endswith("…")
    assert label_of("\u202e") == "·"


def test_many_words_make_one_line_of_title():
    html = attemper.explain("word " * 3000, d_model=8, d_k=4)._repr_html_()
    assert len(re.search(r"<h3>(.*?)</h3>", html)[1]) == 200
