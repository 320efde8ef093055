"""How an explanation is told: the conclusion follows the numbers; text fits its width; HTML and JSON hold what they should."""

import dataclasses
import importlib.util
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

import attemper
from attemper_lab.explain.lesson import conclude, state

REPO = Path(__file__).parents[2]
TEXT = "Love Apple phones"
HOSTILE = "<img src=x onerror=alert(1)> </script><script>alert(2)</script> \"><b>' \x1b[31m 私は大好きです"
CALLS = {
    "default": {},
    "heads": {"heads": 8},
    "many heads": {"heads": 32, "d_model": 64},
    "additive": {"score": "additive"},
    "cosine": {"score": "cosine"},
    "softcap": {"rule": "softcap"},
    "qk_norm": {"rule": "qk_norm", "d_k": 1024},
    "large logits": {"rule": "none", "d_k": 1024, "d_model": 4},
    "sqrt_dmodel": {"rule": "sqrt_dmodel", "heads": 4, "d_model": 64},
}
TEXTS = {
    "three": TEXT,
    "one": "one",
    "many": " ".join(f"word{place}" for place in range(40)),
    "long words": "Donaudampfschifffahrtsgesellschaft " * 3 + "pneumonoultramicroscopicsilicovolcanoconiosis",
    "hostile": HOSTILE,
}


SHOWN = [(text, call) for text in TEXTS for call in CALLS if call in ("default", "heads") or text == "hostile"]


@pytest.mark.parametrize(("text", "call"), SHOWN, ids=map("-".join, SHOWN))
def test_no_line_is_wider_than_the_terminal(text, call):
    options = CALLS[call]
    widths = {} if "heads" in options else {"d_k": 16}
    explanation = attemper.explain(TEXTS[text], **{"d_model": 64, **widths, **options})
    for width in (80, 120):
        console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
        console.print(explanation)
        lines = console.file.getvalue().splitlines()
        assert max(map(cell_len, lines)) <= width
        assert "\x1b" not in console.file.getvalue()
        if width == 80:
            assert [line.rstrip() for line in lines] == str(explanation).splitlines()


def test_the_text_shows_every_step_with_its_formula_and_numbers():
    explanation = attemper.explain(TEXT)
    text = str(explanation)
    for number, step in enumerate(explanation.steps, start=1):
        assert f"{number} {step.title}   {step.formula}" in text
    for words in ("[3×512]", "[512×64]", "[3×64]", "[3×3]", "64 ± 3", "1 ± 0.5", "not the size of a gradient"):
        assert words in re.sub(r"\s+", " ", text)
    assert "layer" not in text
    assert repr(explanation) == "Explanation('Love Apple phones', sqrt_dk and none; print() shows it)"


def test_attention_has_its_inputs_shape_only_after_concatenation_and_projection():
    assert "Not the input's shape [3×512] yet" in re.sub(r"\s+", " ", str(attemper.explain(TEXT)))
    assert "because d_k is d_model" in re.sub(r"\s+", " ", str(attemper.explain(TEXT, d_model=64, d_k=64)))
    assert "Only now is the shape that of the input again" in re.sub(r"\s+", " ", str(attemper.explain(TEXT, heads=8)))


def test_colour_goes_to_terminals_only():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="truecolor")
    console.print(attemper.explain(TEXT))
    assert "\x1b[" in console.file.getvalue()


def test_the_conclusion_flips_when_the_numbers_do():
    wide, narrow = attemper.explain(TEXT), attemper.explain(TEXT, d_k=1)
    assert "With none, attention is nearly one-hot" in wide.conclusion
    assert "sqrt_dk keeps" in wide.conclusion
    assert state(narrow.signs[1]) == "shared"
    assert "nothing saturates here" in narrow.conclusion
    assert "one-hot" not in narrow.conclusion
    lucky = attemper.explain(
        TEXT, seed=next(s for s in range(50) if attemper.explain(TEXT, seed=s).signs[1]["top_weight"] < 0.8)
    )
    assert "nearly one-hot" not in lucky.conclusion
    assert "dk is what makes them even" in attemper.explain(TEXT, rule="dk", d_k=1024).conclusion
    assert "none leaves" in attemper.explain(TEXT, rule="none").conclusion
    assert "whatever the scale" in attemper.explain("one").conclusion
    assert "every weight is 1/3 whatever the scale" in attemper.explain("no no no").conclusion


SIGNS = {
    "one-hot": {"top_weight": 0.97, "evenness": 0.1, "effective_keys": 1.1, "variance": 64.0},
    "narrow": {"top_weight": 0.6, "evenness": 0.3, "effective_keys": 2.0, "variance": 9.0},
    "shared": {"top_weight": 0.4, "evenness": 0.8, "effective_keys": 5.0, "variance": 1.0},
    "flat": {"top_weight": 0.1, "evenness": 0.999, "effective_keys": 9.9, "variance": 0.01},
}


@pytest.mark.parametrize("other", SIGNS)
@pytest.mark.parametrize("chosen", SIGNS)
def test_every_pair_of_states_has_a_sentence_with_its_own_numbers(chosen, other):
    lanes = attemper.explain(TEXT).lanes
    sentence = conclude(10, 10, lanes, (SIGNS[chosen], SIGNS[other]))
    assert [state(SIGNS[chosen]), state(SIGNS[other])] == [chosen, other]
    assert "{" not in sentence
    for signs in (SIGNS[chosen], SIGNS[other]):
        assert f"top weight {signs['top_weight']:#.3g}" in sentence
    assert "sqrt_dk" in sentence.rpartition(":")[2] or chosen == other or {chosen, other} == {"one-hot", "narrow"}


KEYS = ["text", "words", "settings", "lanes", "steps", "conclusion"]
STEP_KEYS = ["name", "title", "words", "formula", "matrices", "lanes", "readings", "heads", "note"]


@pytest.mark.parametrize("options", [{}, {"heads": 8}, {"score": "additive"}, {"score": "cosine"}])
@pytest.mark.parametrize("text", [TEXT, "one", HOSTILE])
def test_json_keeps_everything_under_stable_keys(text, options):
    explanation = attemper.explain(text, **options)
    written = json.dumps(explanation.to_dict(), allow_nan=False)
    read = json.loads(written)
    assert list(read) == KEYS
    assert list(read["settings"]) == ["rule", "score", "heads", "d_model", "d_k", "seed", "layer"]
    assert all(list(step) == STEP_KEYS for step in read["steps"])
    assert [lane["label"] for lane in read["lanes"]] == [lane.label for lane in explanation.lanes]
    for step, kept in zip(explanation.steps, read["steps"], strict=True):
        for matrix, data in zip((*step.matrices, *step.lanes), (*kept["matrices"], *kept["lanes"]), strict=True):
            assert data == json.loads(json.dumps(dataclasses.asdict(matrix)))


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen, self.attributes, self.text = [], set(), set(), []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("options", [{}, {"heads": 8}, {"score": "additive"}, {"score": "cosine"}, {"rule": "softcap"}])
def test_html_is_whole_quiet_and_escapes_what_words_hold(options):
    html = attemper.explain(HOSTILE, **options)._repr_html_()
    page = Tags()
    page.feed(html)
    page.close()
    assert page.open == []
    allowed = {"div", "style", "h3", "h4", "p", "span", "br", "code", "table", "caption", "tr", "th", "td"}
    drawn = {"svg", "title", "rect", "text", "tspan", "path", "polygon"}
    assert page.seen <= allowed | drawn
    placed = {"x", "y", "dx", "dy", "width", "height", "rx", "d", "points", "fill", "viewbox", "role", "aria-label"}
    assert page.attributes <= {"class", "style", "scope", "colspan"} | placed
    assert "http" not in html
    assert "url(" not in html
    assert "onerror=alert(1)>" in page.text


def test_html_sets_the_two_weights_side_by_side():
    html = attemper.explain(TEXT)._repr_html_()
    pair = re.search(r"<h4>6 Softmax.*?<div class='pair'>(.*?)</div>", html)[1]
    assert pair.count("<table>") == 2
    assert pair.count("class='weight'") == 18


def test_the_readme_picture_is_up_to_date_and_fetches_nothing():
    path = REPO / "scripts" / "screenshots.py"
    spec = importlib.util.spec_from_file_location("screenshots", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    svg = (REPO / "docs" / "images" / "explain.svg").read_text(encoding="utf-8")
    letters = re.compile(r"<text[^>]*>(.*?)</text>")
    assert letters.findall(svg) == letters.findall(module.explain()), "run python scripts/screenshots.py"
    assert set(re.findall(r"https?://[^\s\"')]+", svg)) == {"http://www.w3.org/2000/svg"}
    assert "@font-face" not in svg
