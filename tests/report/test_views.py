"""What is seen of many heads, of long words and of images: legible, beside what was clicked, right, by keyboard too."""

import base64
import itertools

import pytest
import torch

from attemper import report
from close import printed
from report.documents import TOKENS, asked, dense, finding, made, packed, top
from report.opened import address, cell, opened, settled, token

WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 800}
LONG = [
    "[CLS]",
    "internationalization",
    "of",
    "Donaudampfschifffahrtsgesellschaft",
    "is",
    "counterrevolutionary",
    "[SEP]",
]


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_long_words_leave_the_weights_their_column(browser, tmp_path, viewport):
    document, kept = made(LONG)
    asked(document, kept, 3)
    with opened(browser, document, tmp_path, viewport=viewport) as page:
        lines = page.locator("button.token.key").evaluate_all(
            """all => all.map((one) => [one, one.querySelector("bdi"), one.lastChild].map((part) => {
              const { left, right, height } = part.getBoundingClientRect();
              return [left, right, height];
            }))"""
        )
        assert len(lines) == len(LONG)
        for button, word, weight in lines:
            assert weight[2] <= 20  # one line
            assert word[1] <= weight[0]
            assert weight[1] <= button[1]
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]


@pytest.fixture(scope="module")
def many():
    """48 layers of 64 heads, with a finding far down, and the attention of the first layers alone."""
    document, kept = made(layers=48, heads=64, width=2)
    document["attention"] = document["attention"][:2]
    finding(document, 45, 60, level="warn")
    return document, kept


GAPS = """
() => {
  const box = (layer, head) => document.querySelector(`[data-head="${layer}.${head}"]`).getBoundingClientRect();
  const [here, right, below] = [box(20, 30), box(20, 31), box(21, 30)];
  return { across: right.left - here.right, down: below.top - here.bottom, width: here.width, height: here.height };
}
"""
INSIDE = """
(nodes) => nodes.map((node) => {
  const { top, bottom } = node.getBoundingClientRect();
  return top >= 0 && bottom <= window.innerHeight;
})
"""


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_many_heads_stay_cells_and_their_details_are_in_view(browser, tmp_path, many, viewport):
    document, _ = many
    with opened(browser, document, tmp_path, viewport=viewport) as page:
        seen = page.evaluate(GAPS)
        assert seen["across"] >= 1
        assert seen["down"] >= 1
        assert min(seen["width"], seen["height"]) >= 7
        box = page.locator(".cells-of-heads")
        inside, outside = box.evaluate("e => [e.scrollWidth, e.clientWidth]")
        assert (inside <= outside) == (viewport is WIDE)
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
        # where a reader starts is in view within the map, and below the names that stay
        assert box.evaluate("e => e.scrollTop") > 0 or viewport is WIDE
        cell(page, 45, 60).scroll_into_view_if_needed()
        cell(page, 40, 60).click()
        settled(page)
        there = page.locator("h2", has_text="Layer 40, head 60")
        assert there.evaluate_all(INSIDE) == [True]
        assert cell(page, 40, 60).evaluate_all(INSIDE) == [True]
        if viewport is WIDE:
            assert page.locator(".head dl").evaluate_all(INSIDE) == [True]
        assert page.locator(".head .name").text_content().endswith("head 60")
        cell(page, 0, 3).focus()
        for key in ("ArrowDown", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        assert page.get_by_role("heading", name="Layer 1, head 4").is_visible()
        assert page.locator("button.token").count() == 2 * len(TOKENS)


GREEN = """
(canvas) => {
  const { width, height } = canvas, { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  return [width, height, [...data].filter((_, i) => i % 4 === 1)];
}
"""


def pixels(page, layer, head):
    """The width and height of a thumbnail, and the green of its pixels, row by row: the less, the darker."""
    return cell(page, layer, head).locator("canvas").evaluate(GREEN)


def test_every_head_has_a_thumbnail_that_selects_it(browser, tmp_path):
    document, kept = made()
    n, shares = 200, torch.eye(200)[None].expand(2, -1, -1).clone()
    shares[1] = 1 / n
    small = torch.stack([torch.eye(16), torch.full((16, 16), 1 / 16)])
    document["attention"][1] |= {"heads": 4, **dense(kept[1, 0])}
    facts = {name: document["attention"][2][name] for name in ("layer", "kind", "input")}
    thumbnail = {"rows": 16, "columns": 16, "data": packed((small * 255).round(), "u1")}
    document["attention"][2] = {**facts, "heads": 2, "queries": n, "keys": n, **top(shares), "thumbnail": thumbnail}
    with opened(browser, document, tmp_path, color_scheme="light") as page:
        assert page.locator("button.cell canvas").count() == 0
        page.get_by_role("button", name="thumbnails").click()
        assert page.locator("button.cell canvas").count() == len(document["heads"])
        across, down, drawn = pixels(page, 1, 2)
        assert (across, down) == (len(TOKENS), len(TOKENS))
        weights = kept[1, 0][2].flatten()
        order = sorted(range(len(drawn)), key=drawn.__getitem__, reverse=True)  # the more weight, the darker
        ranked = weights[order].tolist()
        assert all(late >= early - 2 / 255 for early, late in itertools.pairwise(ranked))
        across, down, drawn = pixels(page, 2, 0)
        assert (across, down) == (16, 16)
        dark = {index for index, light in enumerate(drawn) if light < 100}
        assert dark == {17 * line for line in range(16)}
        assert len(set(pixels(page, 2, 1)[2])) == 1  # a flat head is flat, though its largest weights are a few places
        cell(page, 1, 3).click()
        assert page.get_by_role("heading", name="Layer 1, head 3").is_visible()
        assert address(page, "map=thumbnails")
    with opened(browser, document, tmp_path, at="#map=thumbnails&head=0.2") as page:
        assert page.locator("button.cell canvas").count() == len(document["heads"])
        page.get_by_role("button", name="numbers").click()
        assert page.locator("button.cell canvas").count() == 0
    with opened(browser, document | {"attention": []}, tmp_path) as page:
        assert page.get_by_role("button", name="thumbnails").count() == 0


def seeing(rows=2, columns=3, first=1):
    """A model that sees: weights over patches behind a token of its own, on an image of 6 × 4 pixels."""
    count = rows * columns + first
    document, kept = made([f"t{i}" for i in range(count)], layers=2, heads=2)
    document["inputs"][0] |= {"modality": "image", "text": None, "tokens": None, "special": None, "length": None}
    for entry in document["attention"]:
        entry["patches"] = {"rows": rows, "columns": columns, "first": first}
    data = base64.b64encode(bytes(range(72))).decode()
    return document | {"images": [{"input": 0, "width": 6, "height": 4, "data": data}]}, kept


def test_patches_are_shown_on_their_image(browser, tmp_path):
    document, kept = seeing()
    with opened(browser, document, tmp_path, at="#head=1.1") as page:
        assert page.locator("img").count() == 0  # it is drawn, so the policy need not allow any image
        photo = page.locator(".board.key canvas.photo")
        assert photo.evaluate("c => [...c.getContext('2d').getImageData(1, 0, 1, 1).data]") == [3, 4, 5, 255]
        assert page.locator(".board.query button.patch").count() == 6
        assert page.locator(".board.query button:not(.patch)").text_content() == "[class]"
        token(page, "query", 3).hover()
        row = kept[1, 0][1, 3]
        best = max(range(7), key=lambda key: float(row[key]))
        named = "[class]" if best == 0 else f"patch {(best - 1) // 3},{(best - 1) % 3}"
        assert (
            page.locator(".reading").text_content().startswith(f"patch 0,2 attends to {named} {float(row[best]):.3f}")
        )
        assert page.locator(".board.key .front .weight").text_content() == f"{float(row[0]):.3f}"
        veils = page.locator(".board.key button.patch").evaluate_all(
            "all => all.map((one) => Number(one.style.getPropertyValue('--veil')))"
        )
        shares = row[1:] / row[1:].max()
        assert veils == printed([1 - float(share) ** 0.5 for share in shares], 2)
        page.get_by_role("button", name="columns", exact=True).click()
        assert page.locator("button.token.key bdi").all_text_contents()[:3] == ["[class]", "patch 0,0", "patch 0,1"]


@pytest.mark.parametrize("image", [None, "AAAA"], ids=["none", "too short"])
def test_patches_by_keyboard_and_without_an_image(browser, tmp_path, image):
    document, _ = seeing()
    if image is None:
        del document["images"]
    else:
        document["images"][0]["data"] = image
    with opened(browser, document, tmp_path, viewport=NARROW) as page:
        assert page.locator("canvas.photo").count() == 0
        token(page, "query", 0).focus()
        for key, at in (
            ("ArrowDown", 1),
            ("ArrowRight", 2),
            ("ArrowDown", 5),
            ("ArrowDown", 5),
            ("ArrowUp", 2),
            ("ArrowUp", 0),
        ):
            page.keyboard.press(key)
            assert page.evaluate("document.activeElement.dataset.at") == str(at)
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        assert page.locator(".reading").text_content().endswith("Locked; Esc unlocks.")
        page.get_by_label("hide 1 special token").check()
        assert page.locator(".board button:not(.patch)").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_every_sign_can_be_read_about(browser, tmp_path):
    document, _ = made()
    with opened(browser, document, tmp_path, at="#sign=peak&head=1.1") as page:
        offered = page.locator("select").first.evaluate(
            "e => [...e.options].map((one) => [one.value, one.textContent])"
        )
        explained = page.locator(".explained")
        page.locator("button.term[aria-pressed=true]").focus()
        told = {}
        for index, (key, label) in enumerate(offered):
            if index:
                page.keyboard.press("ArrowDown")
            assert page.evaluate("document.activeElement.dataset.sign") == key
            told[label] = explained.text_content().removeprefix(f"{label}: ")
            assert len(told[label]) > 20
        page.keyboard.press("Enter")  # the last shades the map, and stays where it was
        assert page.get_by_label("shaded by").input_value() == offered[-1][0]
        assert page.evaluate("document.activeElement.dataset.sign") == offered[-1][0]
        page.locator("button.term").first.hover()
        assert explained.text_content().startswith(f"{offered[0][1]}: ")
        summary = page.locator(".glossary summary")
        summary.focus()
        page.keyboard.press("Enter")
        names, words = (page.locator(f".glossary {tag}").all_text_contents() for tag in ("dt", "dd"))
        written = dict(zip(names, words, strict=True))
        assert all(written[label].startswith(message) for label, message in told.items())
        assert {"audit: declared", "audit: applied", "audit: std predicted", "audit: std measured"} <= set(written)


def test_what_turns_a_line_round_is_shown_wherever_text_is():
    document, _ = made(layers=1, heads=1)
    document["model"]["name"] = document["verdict"]["line"] = "a\u202eb\x1b"
    around = report.html(document).split('<script type="application/json"')[0]
    assert around.count("a\ufffdb\ufffd") == 3
    assert not set(around) & set("\u202e\x1b")


def test_nothing_turns_the_page_round(browser, tmp_path):
    wicked = "\u202eevil\u2066\u200f"
    document, kept = made(["[CLS]", wicked, "dog", "\u200d", "[SEP]"])
    asked(document, kept, 1)
    finding(document, 1, 2)
    document["model"]["name"] = document["inputs"][0]["text"] = document["verdict"]["line"] = document["notes"][0] = (
        wicked
    )
    document["findings"][0]["message"] = document["findings"][0]["advice"] = document["heads"][0]["sink_token"] = wicked
    document["baseline"] = {
        "file": wicked,
        "created": wicked,
        "differences": [wicked],
        "new": [],
        "gone": [],
        "scales": [],
    }
    with opened(browser, document, tmp_path, at="#head=0.0") as page:
        left = page.evaluate(
            """() => {
              const all = [...document.querySelectorAll(".attemper, .attemper *")];
              const said = all.flatMap((node) => [...node.attributes].map((one) => one.value));
              said.push(document.querySelector(".attemper").textContent);
              return said.filter((text) => /[\\u202a-\\u202e\\u2066\\u200f]/.test(text));
            }"""
        )
        assert left == []
        assert page.locator("button.token.query bdi").all_text_contents()[1] == "⟨U+202E⟩evil⟨U+2066⟩⟨U+200F⟩"
        assert page.locator("button.token.query bdi").all_text_contents()[3] == "⟨U+200D⟩"
