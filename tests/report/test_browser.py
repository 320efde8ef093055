"""The report in a real Chromium: no request, no console message, exact numbers, by mouse and by keyboard."""

import io
import json
import re
import statistics

import pytest
import torch
from PIL import Image

from attemper import report
from close import printed
from report.documents import TOKENS, asked, dense, finding, lane, made, top
from report.opened import address, cell, in_time, opened, token
from report.test_report import HOSTILE


def shown_weights(page, side):
    return [float(text) for text in page.locator(f"button.token.{side} .weight").all_text_contents()]


def test_the_map_shows_the_document_whatever_the_sign(browser, tmp_path):
    document, _ = made()
    with opened(browser, document, tmp_path) as page:
        offered = page.locator("section[aria-label='Map of all heads'] option").evaluate_all(
            "all => all.map((one) => one.value)"
        )
        assert {
            "peak",
            "entropy",
            "effective_keys",
            "evenness",
            "top_weight",
            "saturated",
            "variance",
            "sink_weight",
        } <= set(offered)
        assert "text_distance" not in offered  # nobody measured it
        for sign in offered:
            page.get_by_label("shaded by").select_option(sign)
            for row in document["heads"]:
                layer = int(row["layer"].split(".")[2])
                label = cell(page, layer, row["head"]).get_attribute("aria-label")
                number = float(re.search(r": [^:]+? (−?[\d.]+(?:e[+-]\d+)?)(?: nats)?$", label)[1].replace("−", "-"))
                expected = row[sign] ** 0.5 if sign == "variance" else row[sign]
                assert number == pytest.approx(expected, rel=6e-4, abs=6e-5), label
        assert page.locator("button.cell").count() == len(document["heads"])


def test_a_cell_says_its_number_to_pointer_and_keyboard(browser, tmp_path):
    document, _ = made()
    with opened(browser, document, tmp_path, at="#sign=peak&head=0.0") as page:
        pointed = page.locator(".pointed")
        cell(page, 2, 3).hover()
        assert pointed.text_content() == f"layer 2, head 3: peak logit {document['heads'][11]['peak']:.2f}"
        page.mouse.move(0, 0)
        cell(page, 0, 0).focus()
        for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
            page.keyboard.press(key)
        assert pointed.text_content().startswith("layer 1, head 2: peak logit ")
        page.keyboard.press("Enter")
        assert cell(page, 1, 2).get_attribute("aria-pressed") == "true"
        assert page.get_by_role("heading", name="Layer 1, head 2").is_visible()
        assert address(page, "head=1.2")


def test_the_depths_of_a_shared_layer_are_counted(browser, tmp_path):
    document, _ = made(layers=3)
    first = document["layers"][0]["layer"]
    names = {
        layer["layer"]: first + ("" if at == 0 else f" (call {at + 1})") for at, layer in enumerate(document["layers"])
    }
    for part in ("layers", "heads", "attention", "findings"):
        for one in document[part]:
            one["layer"] = names[one["layer"]]
    with opened(browser, document, tmp_path, at="#sign=peak&head=0.0") as page:
        labels = [cell(page, layer, 0).get_attribute("aria-label") for layer in range(3)]
    assert [label.split(",")[0] for label in labels] == ["layer 1", "layer 2", "layer 3"]


@pytest.mark.parametrize("bits", [8, 16])
def test_hover_shows_where_a_token_looks(browser, tmp_path, bits):
    document, kept = made()
    for entry, weights in zip(document["attention"], kept.values(), strict=True):
        entry.update(dense(weights, bits))
    digits = 3 if bits == 16 else 2
    with opened(browser, document, tmp_path, at="#head=1.2") as page:
        rest = kept[1, 0][2].mean(0).tolist()
        assert shown_weights(page, "key") == printed(rest, digits, bits)
        token(page, "query", 7).hover()
        row = [float(weight) for weight in kept[1, 0][2, 7]]
        assert shown_weights(page, "key") == printed(row, digits, bits)
        best = max(range(len(row)), key=row.__getitem__)
        words = page.locator(".reading").text_content()
        assert words.startswith(f"it attends to {TOKENS[best]}")
        assert f"{row[best]:.2f}" in words
        assert page.locator(".ribbons path").count() == sum(weight >= 0.002 for weight in row)
        token(page, "key", 3).hover()  # and the other way: which queries attend to this key
        column = [float(weight) for weight in kept[1, 0][2, :, 3]]
        assert shown_weights(page, "query") == printed(column, digits, bits)


def test_a_click_locks_and_escape_unlocks(browser, tmp_path):
    document, _ = made()
    with opened(browser, document, tmp_path) as page:
        reading = page.locator(".reading")
        token(page, "query", 7).click()
        assert token(page, "query", 7).get_attribute("aria-pressed") == "true"
        locked = reading.text_content()
        assert locked.endswith("Locked; Esc unlocks.")
        token(page, "query", 2).hover()
        assert reading.text_content() == locked
        assert address(page, "token=query.7")
        page.keyboard.press("Escape")
        assert address(page, "token=none")
        assert reading.text_content().startswith("dog attends to")
        token(page, "query", 2).click()
        token(page, "query", 3).click()  # the lock moves
        assert reading.text_content().startswith("chased attends to")
        token(page, "query", 3).click()  # and a second click opens it
        assert "Locked" not in reading.text_content()


def test_tokens_by_keyboard_alone(browser, tmp_path):
    document, _ = made()
    with opened(browser, document, tmp_path) as page:
        reading = page.locator(".reading")
        token(page, "query", 0).focus()
        assert reading.text_content().startswith("[CLS] attends to")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        assert reading.text_content().startswith("dog attends to")
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")  # one stop per column
        assert page.evaluate("document.activeElement.dataset.side") == "key"
        page.keyboard.press("Shift+Tab")  # back to the token that had the focus
        assert page.evaluate("document.activeElement.dataset.at") == "2"
        page.keyboard.press("Tab")
        assert reading.text_content().endswith("Locked; Esc unlocks.")
        page.keyboard.press("Escape")
        assert reading.text_content().startswith("[CLS] is attended to by")


def test_everything_can_be_reached_with_tab(browser, tmp_path):
    document, kept = made()
    finding(document, 1, 2)
    lane(document, "none", 4)
    asked(document, kept, 7)
    with opened(browser, document, tmp_path) as page:
        seen = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            seen.add(page.evaluate("document.activeElement.className || document.activeElement.tagName"))
        assert {"tab", "link", "SELECT", "cell shaded", "token query", "token key", "INPUT", "chip", "scroll"} <= {
            name.replace(" special", "").replace(" focus", "") for name in seen
        }


def test_special_tokens_can_be_hidden_and_their_share_is_said(browser, tmp_path):
    document, kept = made()
    with opened(browser, document, tmp_path, at="#head=0.1") as page:
        page.get_by_label("hide 2 special tokens").check()
        assert page.locator("button.token").count() == 2 * (len(TOKENS) - 2)
        token(page, "query", 7).hover()
        row = kept[0, 0][1, 7]
        share = round(100 * float(row[0] + row[11]))
        assert f"{share} % is on 2 hidden special tokens." in page.locator(".reading").text_content()
        # what is left keeps its weight: nothing is renormalised
        assert shown_weights(page, "key") == printed([float(w) for w in row[1:11]], 3, bits=16)
        assert address(page, "hide=1")


def test_an_address_brings_back_what_was_chosen(browser, tmp_path):
    document, _ = made(texts=2)
    with opened(browser, document, tmp_path, at="#sign=entropy&head=2.3&text=1&token=key.4&hide=1&view=text") as page:
        assert page.get_by_label("shaded by").input_value() == "entropy"
        assert cell(page, 2, 3).get_attribute("aria-pressed") == "true"
        assert page.get_by_label("Which text").input_value() == "1"
        assert page.get_by_label("hide 2 special tokens").is_checked()
        assert page.locator(".running button.token").count() == len(TOKENS) - 2
        assert page.locator(".reading").text_content().startswith("the is attended to by")
    for nonsense in (
        "#sign=%3Cimg%3E&head=99.1&text=7&token=query.999&view=x",
        "#head=__proto__.1&token=constructor.1",
        "#%%%&&==",
    ):
        with opened(browser, document, tmp_path, at=nonsense) as page:
            assert page.locator('button.cell[aria-pressed="true"]').count() == 1
            assert page.locator("button.token").count() == 2 * len(TOKENS)


def test_texts_can_be_chosen(browser, tmp_path):
    document, kept = made(texts=2)
    with opened(browser, document, tmp_path, at="#head=1.0") as page:
        page.get_by_label("Which text").select_option("1")
        token(page, "query", 5).hover()
        assert shown_weights(page, "key") == printed([float(w) for w in kept[1, 1][0, 5]], 3, bits=16)


POINT = """
() => [...document.querySelectorAll("button.token")].slice(0, 20).map((one) => {
  const began = performance.now();
  one.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  document.body.getBoundingClientRect();
  return performance.now() - began;
})
"""


def test_long_inputs_are_quick(browser, tmp_path):
    words = ["[CLS]", *(f"word{number}" for number in range(510)), "[SEP]"]
    document, kept = made(words, layers=2, heads=12, form="top")
    with opened(browser, document, tmp_path, at="#head=1.3") as page:
        page.locator("button.token").last.wait_for()
        # the time to load the page with its script; then from pointing at a token until its weights are laid out
        loaded = page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
        assert in_time(page, loaded, 2000)
        assert page.locator(".running button.token").count() == 512
        assert in_time(page, statistics.median(page.evaluate(POINT)), 100)
        token(page, "query", 8).hover()
        row = kept[1, 0][3, 8]
        best = int(row.argmax())
        words_said = page.locator(".reading").text_content()
        assert words_said.startswith(f"word7 attends to {words[best]} {float(row[best]):.3f}")
        rest = 1 - float(row.topk(8).values.sum())
        assert f"{round(100 * rest)} % is on keys beyond the 8 that were kept." in words_said
        assert page.locator(".running button.shaded").count() == 8
        page.get_by_role("button", name="columns", exact=True).click()
        assert page.locator(".columns button.token").count() == 1024


def test_rows_that_were_not_kept_say_so(browser, tmp_path):
    document, kept = made(layers=1, heads=2)
    document["attention"][0] = {
        **{name: document["attention"][0][name] for name in ("layer", "kind", "input", "heads", "queries", "keys")},
        **top(kept[0, 0], k=3, rows=[0, 5, 11], kind="<u4"),
    }
    with opened(browser, document, tmp_path, at="#head=0.1") as page:
        assert page.locator("button.token.unkept").count() == 9
        token(page, "query", 4).hover()
        assert page.locator(".reading").text_content() == "the: the weights of this row were not kept."
        token(page, "query", 5).hover()
        values, indices = kept[0, 0][1, 5].topk(3)
        expected = {int(key): float(value) for key, value in zip(indices, values, strict=True)}
        texts = page.locator("button.token.key .weight").all_text_contents()
        assert {at: float(text) for at, text in enumerate(texts) if text} == printed(expected, 3, bits=16)


def test_a_crowd_of_findings_is_folded(browser, tmp_path):
    document, _ = made(layers=3, heads=24)
    for layer in range(3):
        for head in range(24):
            finding(document, layer, head)
    with opened(browser, document, tmp_path) as page:
        chips = page.locator("section[aria-label=Findings] button.chip")
        assert chips.count() == 60
        page.get_by_role("button", name="and 12 more").click()
        assert chips.count() == 72
        # every head has its number, for screen readers too
        assert page.locator("table.map thead th").all_text_contents()[1:] == [str(head) for head in range(24)]


def test_findings_are_grouped_marked_and_lead_to_their_head(browser, tmp_path):
    document, _ = made()
    for head in (3, 1):
        finding(document, 2, head, level="warn")
    finding(document, 1, None, "scale", "error")
    finding(document, 0, 0, "sink", "healthy")
    with opened(browser, document, tmp_path, at="#head=0.0&sign=entropy") as page:
        groups = page.locator("section[aria-label=Findings] > ol > li")
        assert groups.count() == 2
        assert groups.first.locator("h3").text_content() == "▲ warnLarge logits in 2 heads"
        assert groups.first.locator("button").all_text_contents() == [
            f"2 · {head}{document['heads'][8 + head]['peak']:.1f}" for head in (3, 1)
        ]
        assert cell(page, 2, 3).locator(".shape").text_content() == "▲"
        assert cell(page, 0, 0).locator(".shape").count() == 0  # healthy, and not about this sign
        assert page.locator("table.map tbody tr").nth(1).locator("th .shape").text_content() == "◆"
        assert "warn: peak" in cell(page, 2, 1).get_attribute("aria-label")
        groups.first.locator("button").nth(1).click()
        assert cell(page, 2, 1).get_attribute("aria-pressed") == "true"
        assert page.get_by_label("shaded by").input_value() == "peak"
        assert page.evaluate("document.activeElement.dataset.head") == "2.1"
        assert page.locator(".head .found").all_text_contents() == [f"▲ warn {document['findings'][1]['message']}"]


@pytest.mark.parametrize("level", ["error", "warn"])
def test_a_layer_with_a_fault_is_where_a_reader_starts(browser, tmp_path, level):
    document, _ = made()
    finding(document, 2, None, "scale", level)
    document["findings"][0] |= {"fault": "twice", "title": "scaled twice", "value": 0.0625}
    finding(document, 0, 3, "sink", "healthy")
    with opened(browser, document, tmp_path) as page:
        assert cell(page, 2, 0).get_attribute("aria-pressed") == "true"
        assert page.get_by_label("shaded by").input_value() == "variance"
        group = page.locator("section[aria-label=Findings] > ol > li")
        assert group.locator("h3").text_content().endswith("Scaled twice in 1 layer")
        assert group.locator("button.chip").text_content() == "layer 2applies 0.0625"
        assert page.locator(".worst button").text_content() == "Scaled twice in 1 layer"


@pytest.mark.parametrize(("width", "fine", "n"), [(1280, 1, 500), (1280, 2, 12), (390, 3, 500), (390, 3, 12)])
def test_a_diagonal_stays_a_diagonal_however_small_it_is_shown(browser, tmp_path, width, fine, n):
    document, _ = made([f"w{i}" for i in range(n)], layers=1, heads=1, form="top")
    document["attention"][0].update(top(torch.eye(n)[None]))
    options = {"viewport": {"width": width, "height": 800}, "device_scale_factor": fine, "color_scheme": "light"}
    with opened(browser, document, tmp_path, **options) as page:
        seen = Image.open(io.BytesIO(page.locator("canvas.matrix").screenshot())).convert("L")
    across, down = seen.size
    for row in range(6, down - 6):  # without the frame
        darkest = min(range(2, across - 2), key=lambda column: seen.getpixel((column, row)))
        assert seen.getpixel((darkest, row)) < 128, row
        assert abs(darkest / across - row / down) < 0.02 + 1 / min(n, across), row


def test_what_if_lanes_share_their_axis(browser, tmp_path):
    document, _ = made()
    lane(document, "none", 4)
    lane(document, "dk", 0.25)
    with opened(browser, document, tmp_path, at="#sign=peak") as page:
        rows = page.locator("table.lanes tbody tr")
        assert rows.locator("th").all_text_contents() == ["as it is", "no scalenone", "1/d_kdk"]
        highest = max(row["peak"] for row in document["what_if"][0]["heads"])
        assert rows.nth(1).locator("td.num").all_text_contents() == ["7 / 12", "1.3", f"{highest:.1f}", "9.50"]
        own = [row["peak"] for row in document["heads"]]
        assert rows.nth(0).locator("td.num").nth(2).text_content() == f"{max(own):.1f}"
        for index, lane_rows in enumerate([document["heads"], *(one["heads"] for one in document["what_if"])]):
            strokes = (
                rows.nth(index)
                .locator("line.tick")
                .evaluate_all("all => all.map((one) => Number(one.getAttribute('x1')))")
            )
            assert strokes == printed([1 + 298 * row["peak"] / highest for row in lane_rows], 2)
        page.get_by_label("shaded by").select_option("sink_weight")  # lanes have no sinks: they fall back
        assert page.locator("table.lanes thead th").nth(2).text_content() == "effective keys"


def test_the_token_asked_for_stands_beside_the_others_and_other_scales(browser, tmp_path):
    document, kept = made()
    token_asked = asked(document, kept, 7)
    lane(document, "none", 4)
    best = token_asked["best"]
    best["others"] = 0.125
    document["what_if"][0]["token"] = {
        **token_asked,
        "heads": [{**row, "weights": [0.5] * 12} for row in token_asked["heads"]],
    }
    with opened(browser, document, tmp_path) as page:
        said = page.locator(".asked").text_content()
        assert said.endswith(" Other tokens give it 0.13 on average. Other scales: no scale 0.50.")


def test_the_token_asked_for_is_shown_first(browser, tmp_path):
    document, kept = made()
    token_asked = asked(document, kept, 7)
    best = token_asked["best"]
    layer = int(best["layer"].split(".")[2])
    with opened(browser, document, tmp_path) as page:
        assert page.locator(".asked").text_content() == (
            f"Special tokens and neighbours left out, “it” has its largest weight on “{best['token']}”: {best['weight']:.2f}, "
            f"in layer {layer}, head {best['head']}."
        )
        assert cell(page, layer, best["head"]).get_attribute("aria-pressed") == "true"
        assert token(page, "query", 7).get_attribute("aria-pressed") == "true"
        assert page.get_by_label("shaded by").input_value() == "token"
        for row in token_asked["heads"]:
            label = cell(page, int(row["layer"].split(".")[2]), row["head"]).get_attribute("aria-label")
            shown = float(re.search(r"” ([\d.e+-]+)$", label)[1])
            assert shown == pytest.approx(row["weights"][best["position"]], rel=0.06, abs=6e-5)
        cell(page, 0, 0).click()
        page.locator(".asked button").click()
        assert cell(page, layer, best["head"]).get_attribute("aria-pressed") == "true"


def test_the_audit_says_what_is_declared_and_applied(browser, tmp_path):
    document, _ = made()
    document["layers"][1]["scale"] |= {
        "applied": 0.03125,
        "rule": None,
        "verdict": "fault",
        "predicted_std": None,
        "message": "It applies 1/d_k where it declares 1/√d_k.",
    }
    document["layers"][1]["kv_heads"] = 2
    with opened(browser, document, tmp_path) as page:
        rows = page.locator("table.audit tbody tr")
        std = f"{document['layers'][1]['scale']['logit_std']:.2f}"
        assert rows.nth(1).locator("th, td").all_text_contents() == [
            *("◆ 1", "4 / 2", "16", "0.2500", "0.0313", "none by name", "–", std),
            "It applies 1/d_k where it declares 1/√d_k.",
        ]
        assert rows.nth(0).locator("td").nth(4).text_content() == "1/√d_k"


def test_what_changed_since_a_baseline(browser, tmp_path):
    document, _ = made()
    finding(document, 1, 2)
    moved = {
        "layer": "encoder.layer.2.attention",
        "kind": "self",
        "head": 1,
        "sign": "peak",
        "before": 3.5,
        "after": 7.0,
        "times": 2.0,
    }
    document["baseline"] = {
        "file": HOSTILE[0],
        "created": "2026-01-01",
        "differences": ["the weights have changed since."],
    }
    document["baseline"] |= {"new": [], "gone": [], "scales": [], "factor": 1.5, "moved": [moved]}
    document["baseline"]["worse"] = document["findings"]  # there before at a lower level, so worse but not new
    with opened(browser, document, tmp_path) as page:
        section = page.locator("section[aria-label='What changed']")
        assert section.locator("h2").text_content() == f"What changed since {HOSTILE[0]}"
        assert section.locator(".changes li").all_text_contents() == [
            "the weights have changed since.",
            "layer 2 · head 1 peak 3.500 → 7.000",
        ]
        assert section.locator(".findings > li").count() == 1
        section.locator(".changes button").click()
        assert cell(page, 2, 1).get_attribute("aria-pressed") == "true"


def test_a_cross_attention_has_other_queries(browser, tmp_path):
    document, kept = made(layers=2, heads=2)
    for row in (document["heads"][2], document["heads"][3], document["attention"][1], document["layers"][1]):
        row["kind"] = "cross"
    weights = kept[1, 0][:, :5]
    document["attention"][1] |= {"queries": 5, **dense(weights)}
    with opened(browser, document, tmp_path, at="#head=1.1") as page:
        assert page.locator("button.token.query bdi").all_text_contents() == ["#0", "#1", "#2", "#3", "#4"]
        assert page.locator("button.token.key bdi").all_text_contents() == TOKENS
        token(page, "query", 4).hover()
        assert shown_weights(page, "key") == printed([float(w) for w in weights[1, 4]], 3, bits=16)
        page.get_by_role("button", name="text", exact=True).click()
        token(page, "query", 2).hover()
        assert page.locator(".running.key button.shaded").count() == int((weights[1, 2] > 0.0005).sum())


TWICE = """<!doctype html><meta charset="utf-8"><style>{style}</style>
<div id="a"></div><div id="b"></div><script type="module">{script}
const {{ render }} = needed["report/views/heads.js"];
const same = JSON.parse({data});
window.stop = ["a", "b"].map((id) => render(document.getElementById(id), same));
</script>"""


def test_two_reports_on_one_page_keep_to_themselves(browser, tmp_path):
    """What a notebook does: the module renders into elements it is given, leaves the address alone, and stops when asked."""
    document, _ = made(layers=1, heads=2)
    data = json.dumps(report.encoded(document)).replace("</", "<\\/")
    path = tmp_path / "twice.html"
    path.write_text(
        TWICE.format(style=report.style(), script=report.script("views/heads.js"), data=data), encoding="utf-8"
    )
    page = browser.new_page()
    said = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(path.as_uri())
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    # the report leaves the rest of the page alone
    assert page.evaluate("getComputedStyle(document.body).margin") == "8px"
    assert len(ids) == 4
    assert len(set(ids)) == 4
    chosen = 'button.cell[aria-pressed="true"]'
    page.locator("#a button.cell").nth(1).click()
    assert page.locator(f"#a {chosen}").get_attribute("data-head") == "0.1"
    assert page.locator(f"#b {chosen}").get_attribute("data-head") == "0.0"
    assert "#" not in page.url
    page.locator("#a button.token").nth(2).click()
    page.evaluate("window.stop[0]()")
    page.keyboard.press("Escape")  # its key handler is gone
    assert page.locator('#a button.token[aria-pressed="true"]').count() == 1
    assert said == []
    page.close()
