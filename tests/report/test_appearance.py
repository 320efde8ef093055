"""How the report looks in a real Chromium: readable in light and dark, at any width, whatever the text, whatever is missing."""

import re

import pytest

from report.documents import asked, finding, lane, made
from report.opened import cell, opened, settled, token
from report.test_report import HOSTILE, hostile

# what steers a line or a terminal is shown by its number
NUMBERED = {"\u202e": "⟨U+202E⟩", "\u202c": "⟨U+202C⟩", "\x00": "⟨U+0000⟩", "\x1b": "⟨U+001B⟩"}
TAMED = [text.translate(str.maketrans(NUMBERED)) for text in HOSTILE]
LIGHTNESS = """
() => {
  // through a canvas: whatever a colour is written in, it comes out as numbers
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const over = (colours) => {
    pen.clearRect(0, 0, 1, 1);
    for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const backs = (node) => (node ? [...backs(node.parentElement), getComputedStyle(node).backgroundColor] : []);
  const written = (node) => [...node.childNodes].some((one) => one.nodeType === 3 && one.textContent.trim());
  const seen = (node) => written(node) && node.checkVisibility({ visibilityProperty: true }) && !node.closest("option, .unseen");
  return [...document.querySelectorAll(".attemper *")].filter(seen).map((node) => ({
    what: node.tagName + "." + node.className, text: node.textContent.slice(0, 30), back: over(backs(node)),
    ink: over([...backs(node), getComputedStyle(node).color]),
  }));
}
"""


def contrast(a, b):
    def luminance(colour):
        r, g, b = (c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour[:3])
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_hostile_text_stays_text(browser, tmp_path):
    document = hostile()
    with opened(browser, document, tmp_path) as page:
        assert page.locator("img, iframe, object").count() == 0
        assert page.locator("script").count() == 2
        shown = page.locator("button.token.query").evaluate_all("all => all.map((one) => one.title)")
        assert shown[:4] == HOSTILE[:4]
        assert shown[4] == "⏎line⏎paragraph"
        assert shown[5] == TAMED[5]  # written, not obeyed
        assert shown[6:] == TAMED[6:]
        assert page.locator("h1").text_content() == HOSTILE[1]
        assert page.locator("ol.findings p").first.text_content() == HOSTILE[1]
        assert page.locator("section[aria-label=Notes] li").all_text_contents() == TAMED
        for at in range(len(HOSTILE)):
            token(page, "query", at).hover()
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        assert page.title() == f"attemper scan: {HOSTILE[1]}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(browser, tmp_path, scheme):
    document, kept = made()
    for level in ("diverging", "critical", "error", "warn", "note", "healthy"):
        finding(document, 1, 2, "sink" if level == "healthy" else "peak", level)
    lane(document, "none", 4)
    asked(document, kept, 7)
    with opened(browser, document, tmp_path, color_scheme=scheme) as page:
        for summary in page.locator("summary").all():
            summary.click()
        for sign in ("peak", "evenness"):
            page.get_by_label("shaded by").select_option(sign)
            settled(page)
            found = page.evaluate(LIGHTNESS)
            assert len(found) > 150
            poor = [(one["what"], one["text"]) for one in found if contrast(one["ink"], one["back"]) < 4.5]
            assert poor == []
        page.get_by_role("button", name="text", exact=True).click()
        settled(page)
        assert [one for one in page.evaluate(LIGHTNESS) if contrast(one["ink"], one["back"]) < 4.5] == []


def test_light_and_dark_differ_and_can_be_switched(browser, tmp_path):
    def colours(page):
        settled(page)
        return page.evaluate(
            "() => [document.documentElement, document.querySelector('h1'), document.querySelector('.cell.shaded')]"
            ".map((node, i) => getComputedStyle(node)[i === 1 ? 'color' : 'backgroundColor'])"
        )

    document, _ = made()
    with opened(browser, document, tmp_path, color_scheme="light") as page:
        light = colours(page)
        page.get_by_role("button", name="dark").click()
        dark = colours(page)
        assert all(a != b for a, b in zip(light, dark, strict=True))
        page.emulate_media(color_scheme="dark")
        page.get_by_role("button", name="light").click()
        assert colours(page) == light
        page.get_by_role("button", name="auto").click()
        assert colours(page) == dark
        page.emulate_media(media="print")
        assert colours(page)[1] == light[1]


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_nothing_is_wider_than_the_window(browser, tmp_path, width):
    document, kept = made(layers=4, heads=12)
    for head in range(12):
        finding(document, 1, head)
    lane(document, "none", 4)
    lane(document, "dk", 0.1)
    asked(document, kept, 7)
    document["layers"][2]["scale"] |= {"message": "Another sentence, " * 12, "verdict": "fault"}
    with opened(browser, document, tmp_path, viewport={"width": width, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.get_by_role("button", name="text", exact=True).click()
        assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_no_table_is_cut(browser, tmp_path, width):
    document, _ = made(layers=4, heads=12)
    lane(document, "none", 4)
    document["layers"][2]["scale"] |= {"message": "Another sentence, " * 12, "verdict": "fault", "rule": "sqrt_dmodel"}
    document["model"]["parameters"] = 22_713_216
    with opened(browser, document, tmp_path, viewport={"width": width, "height": 800}) as page:
        for table in ("table.audit", "table.lanes"):
            inside, outside = page.locator(f"div.scroll:has(> {table})").evaluate("e => [e.scrollWidth, e.clientWidth]")
            assert inside <= outside, table
        for way in ("numbers", "thumbnails"):  # of twelve heads every cell is seen
            page.get_by_role("button", name=way).click()
            inside, outside = page.locator(".cells-of-heads").evaluate("e => [e.scrollWidth, e.clientWidth]")
            assert inside <= outside, way
        row = page.locator(".provenance dl div", has_text="22,713,216")
        name = row.locator("dt").evaluate(
            "e => { const r = document.createRange(); r.selectNodeContents(e); return r.getBoundingClientRect().right; }"
        )
        assert row.locator("dd").bounding_box()["x"] - name >= 6


EMPTY = {"inputs": [], "layers": [], "heads": [], "findings": [], "notes": []}


@pytest.mark.parametrize(
    "change",
    [
        EMPTY,
        {"attention": []},
        {"inputs": [], "attention": []},
        {"layers": []},
        {"verdict": None, "model": None},
        {"token": {"asked": "it", "input": 0, "position": 7, "heads": [], "best": None}},
        {"what_if": []},
    ],
    ids=lambda change: ",".join(change),
)
def test_what_is_missing_is_missing_quietly(browser, tmp_path, change):
    document, _ = made(layers=1, heads=1)
    with opened(browser, document | change, tmp_path) as page:
        assert page.locator("h1").count() == 1
        text = page.locator("body").inner_text()
        assert not re.search(r"\b(undefined|null|NaN|Infinity|object Object)\b", text), text


def test_nulls_are_dashes(browser, tmp_path):
    document, _ = made(layers=2, heads=2)
    for name in ("peak", "entropy", "variance", "mean"):
        document["heads"][0][name] = None
    scale = document["layers"][0]["scale"]
    document["layers"][0]["scale"] = dict.fromkeys(scale) | {
        "factors": [],
        "verdict": "ok",
        "message": "Not known.",
    }
    with opened(browser, document, tmp_path, at="#sign=peak&head=0.0") as page:
        assert cell(page, 0, 0).get_attribute("aria-label") == "layer 0, head 0: peak logit –"
        assert "none" in cell(page, 0, 0).get_attribute("class")
        text = page.locator("body").inner_text()
        assert not re.search(r"\b(undefined|null|NaN|Infinity)\b", text)
