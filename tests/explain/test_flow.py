"""The flow as a picture: every shape and number of the explanation, inside its frame, in one scale of type; and the files."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import attemper
from attemper import cli
from attemper.errors import InputError
from attemper_lab.explain import canvas, flow

REPO = Path(__file__).parents[2]
TEXT = "Love Apple phones"
SPACE = "{http://www.w3.org/2000/svg}"
CALLS = {
    "default": {},
    "heads": {"heads": 8},
    "none": {"rule": "none"},
    "additive": {"score": "additive"},
    "cosine": {"score": "cosine"},
    "softcap": {"rule": "softcap"},
    "large logits": {"rule": "none", "d_k": 1024, "d_model": 4},
    "one word": {"text": "one"},
    "many words": {"text": " ".join(f"word{place}" for place in range(40))},
    "hostile": {"text": '<b>x</b> &amp; "q" \' \u202eevil \x1b[31m 漢字漢字漢字漢字'},
    "gpt3": {"text": "a b", "d_model": 12288, "d_k": 128, "heads": None},
}


def drawn(name):
    explanation = attemper.explain(**{"text": TEXT, **CALLS[name]})
    return explanation, ElementTree.fromstring(explanation.flow())


@pytest.mark.parametrize("name", CALLS)
def test_it_shows_every_shape_and_the_numbers_of_both_lanes(name):
    explanation, picture = drawn(name)
    words = ["".join(text.itertext()) for text in picture.iter(f"{SPACE}text")]
    steps = {step.name: step for step in explanation.steps}
    for step in ("embeddings", "projections", "queries", "logits", "weights", "context", "output"):
        for matrix in (*steps[step].matrices, *steps[step].lanes) if step in steps else ():
            assert any(word.endswith(matrix.size) for word in words), (step, matrix.name)
    for lane in steps["weights"].lanes:
        assert lane.format(lane.values[0][0]).replace("-", "−") in words
    for signs in explanation.signs:
        assert any(f"top weight {flow.format_measured(signs['top_weight'])}" in word for word in words)
        assert any(f"variance {flow.format_measured(signs['variance'])}" == word for word in words)
    assert [word for word in words if not word.isprintable()] == []


@pytest.mark.parametrize("name", CALLS)
def test_everything_is_inside_the_frame(name):
    """A letter is 0.61 of its size wide in fonts of one width, and 0.55 on average in others; a wide one twice that."""
    _, picture = drawn(name)
    _, _, wide, tall = map(float, picture.get("viewBox").split())
    for text in picture.iter(f"{SPACE}text"):
        names, words = text.get("class").split(), "".join(text.itertext())
        size = next(int(one[1:]) for one in names if re.fullmatch(r"t\d+", one))
        long = (0.61 if "mono" in names else 0.55) * size * flow.cell_len(words)
        left = float(text.get("x")) - (long / 2 if "middle" in names else long if "end" in names else 0)
        assert left >= 0, words
        assert left + long <= wide, words
        assert 0 < float(text.get("y")) < tall
    for box in picture.iter(f"{SPACE}rect"):
        x, y, w, h = (float(box.get(one, 0)) for one in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= wide
        assert 0 <= y <= y + h <= tall


def test_one_scale_of_type_and_one_colour_each():
    _, picture = drawn("default")
    sizes = {one for text in picture.iter() for one in text.get("class", "").split() if re.fullmatch(r"t\d+", one)}
    assert sizes == {"t12", "t14", "t20"}
    arrows = [path.get("class").split()[1] for path in picture.iter(f"{SPACE}path")]
    assert [arrows.count(name) for name in "QKV"] == [3, 3, 3]  # into W, into Q, and on
    style = picture.find(f"{SPACE}style").text
    for colours in canvas.COLOURS.values():
        assert all(colour in style for colour in colours)  # on light paper and on dark


def test_the_lane_without_a_scale_is_on_the_left_and_the_chosen_one_goes_on():
    for rule, chosen in (("sqrt_dk", "right"), ("none", "left")):
        picture = ElementTree.fromstring(attemper.explain(TEXT, rule=rule).flow())
        labels = {"".join(text.itertext()): float(text.get("x")) for text in picture.iter(f"{SPACE}text")}
        assert labels["none"] < labels["sqrt_dk"]
        last = [path.get("d") for path in picture.iter(f"{SPACE}path") if path.get("class") == "line chosen"][-1]
        start = float(re.match(r"M([\d.]+)", last)[1])
        assert (start > flow.WIDTH / 2) == (chosen == "right")


def test_a_number_on_a_dark_cell_is_light():
    marks = canvas.Canvas(10)
    marks.number(0, 0, "0.9", 0.9, True)
    marks.number(0, 0, "0.1", 0.1, True)
    assert [re.search(r"(\w+)\">0", part)[1] for part in marks.parts] == ["on", "off"]


def test_files(tmp_path, capsys):
    for suffix, start in ((".svg", b"<svg"), (".png", b"\x89PNG"), (".html", b"<!doctype html>"), (".json", b"{")):
        path = tmp_path / f"flow{suffix}"
        with pytest.raises(SystemExit) as ended:
            cli.main(["explain", TEXT, "-o", str(path)])
        assert not ended.value.code
        assert path.read_bytes().startswith(start)
    assert "http" not in (tmp_path / "flow.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "flow.json").read_text(encoding="utf-8"))["text"] == TEXT
    explanation = attemper.explain(TEXT)
    with pytest.raises(InputError, match=r"already exists. Add --force"):
        explanation.write(tmp_path / "flow.svg")
    explanation.write(tmp_path / "flow.svg", force=True)
    with pytest.raises(InputError, match=r"must end in .svg, .png, .html or .json; got 'flow.gif'"):
        explanation.write(tmp_path / "flow.gif")


def test_a_notebook_gets_the_picture_and_the_steps():
    explanation = attemper.explain(TEXT)
    assert explanation._repr_svg_() == explanation.flow()
    assert explanation._repr_html_().count("<svg") == 1


def test_the_picture_of_the_docs_is_up_to_date():
    kept = (REPO / "docs" / "images" / "flow.svg").read_text(encoding="utf-8")
    assert kept == attemper.explain(TEXT).flow() + "\n", "run python scripts/screenshots.py"


@pytest.mark.xdist_group("page")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_an_explanation_fits_a_phone_and_is_of_one_colour(browser, tmp_path, scheme):
    path = tmp_path / "flow.html"
    attemper.explain(TEXT, heads=8).write(path)
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    heights = page.locator(".flow svg text").evaluate_all(
        "texts => texts.map(one => one.getBoundingClientRect().height)"
    )
    assert min(heights) > 9  # the picture is wider than a phone: it is moved sideways, not made small
    ground = "node => getComputedStyle(node).backgroundColor"
    assert page.locator("html").evaluate(ground) == page.locator(".attemper-explain").evaluate(ground)
    page.close()
