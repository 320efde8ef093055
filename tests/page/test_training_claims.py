"""The panels training and claims, offline, in a real Chromium: used by hand and keyboard, taken away, and without violations."""

import contextlib
import io
import json
import time
import xml.etree.ElementTree as ElementTree

import pytest

from attemper_lab.page.data.bundle import stored
from page.opened import DESK, GROUP, PHONE, opened
from page.test_bench import SHOTS, copied, saved
from report.opened import address, settled

pytestmark = pytest.mark.xdist_group(GROUP)


def printed(code):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "copied", "exec"), {})
    return out.getvalue()


def test_one_scrubber_moves_every_chart(browser, tmp_path):
    with opened(browser, tmp_path, "#tab=training&training.task=recall256&training.lr=0.001") as page:
        panel = page.locator("#panel-training")
        slider = panel.get_by_role("slider", name="Step")
        assert panel.locator("figure.chart:not([hidden])").count() == 4
        slider.focus()
        page.keyboard.press("Home")
        settled(page)
        assert slider.get_attribute("aria-valuetext") == "step 0"
        first = panel.locator(".reading").all_text_contents()
        page.keyboard.press("End")
        settled(page)
        assert panel.locator(".reading").all_text_contents() != first
        assert panel.locator("path.cursor").first.get_attribute("d") == panel.locator("path.cursor").nth(
            1
        ).get_attribute("d")
        panel.get_by_role("button", name="0.003", exact=True).click()
        settled(page)
        assert address(page, "training.lr=0.003")


def test_the_sentence_is_the_ratio_of_the_recorded_medians(browser, tmp_path):
    """The scrubber's sentence against the document itself."""
    runs = {
        run["rule"]: run for run in stored("training")["charlm"]["runs"] if (run["init"], run["lr"]) == ("unit", 0.001)
    }
    ratio = runs["none"]["median"]["grad_q_median"][-1] / runs["sqrt_dk"]["median"]["grad_q_median"][-1]
    with opened(browser, tmp_path, "#tab=training&training.lr=0.001") as page:
        words = page.locator("#panel-training .sentence").text_content()
        document = json.loads(saved(page, "training", "JSON"))
    assert ratio < 0.01
    assert f"1/{round(1 / ratio)} of" in words.replace("−", "-") or f"1/{1 / ratio:.1e}".replace("e+0", "e+") in words
    assert {run["rule"]: run["median"] for run in document["runs"]} == {
        rule: runs[rule]["median"] for rule in ("none", "sqrt_dk")
    }


def test_the_copied_code_runs_and_prints_the_recorded_numbers(browser, tmp_path):
    with opened(browser, tmp_path, "#tab=training&training.task=recall64&training.lr=0.003") as page:
        document = json.loads(saved(page, "training", "JSON"))
        found = printed(copied(page, "training"))
        words = "Training loss"
        page.locator("#panel-training .tools").get_by_role("button", name="In words").click()
        assert words in page.locator("dialog[open] pre").text_content()
    for run in document["runs"]:
        assert f"loss: {run['median']['loss']}" in found


def test_offline_there_is_no_server_and_the_page_says_so(browser, tmp_path):
    with opened(browser, tmp_path, "#tab=training&training.source=run") as page:
        assert page.get_by_role("button", name="Train with the scale and without").is_disabled()
        assert "attemper serve" in page.locator("#panel-training").text_content()
        page.get_by_role("button", name="Your own run").click()
        page.get_by_text("attemper serve --record run.jsonl").wait_for()


def test_claims_are_filtered_opened_and_taken_away(browser, tmp_path):
    document = stored("claims")
    with opened(browser, tmp_path, "#tab=claims") as page:
        panel = page.locator("#panel-claims")
        assert panel.locator("li.claim").count() == len(document["claims"])
        panel.get_by_role("button", name="false", exact=False).first.click()
        settled(page)
        shown = panel.locator("li.claim:not([hidden]) .verdict").all_text_contents()
        assert shown == ["false"] * sum(one["verdict"] == "false" for one in document["claims"])
        head = panel.get_by_role("button", name="Additive scores lie between")
        head.focus()
        page.keyboard.press("Enter")
        settled(page)
        assert head.get_attribute("aria-expanded") == "true"
        claim = next(one for one in document["claims"] if one["id"] == "C12")
        assert json.loads(saved(page, "claims", "JSON"))["claims"] == [claim]
        assert ElementTree.fromstring(saved(page, "claims", "SVG")).tag.endswith("svg")
        compile(copied(page, "claims"), "copied", "exec")
        assert address(page, "claims.open=C12")


@pytest.mark.parametrize(
    ("viewport", "scheme"), [(DESK, "light"), (PHONE, "light"), (DESK, "dark")], ids=["1280", "390", "dark"]
)
def test_both_fit_and_axe_finds_nothing_serious(browser, tmp_path, axe, viewport, scheme):
    for panel in ("training", "training&training.source=record", "claims"):
        with opened(
            browser, tmp_path, f"#tab={panel}", viewport=viewport, color_scheme=scheme, bypass_csp=True
        ) as page:
            assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
            SHOTS.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=SHOTS / f"{panel.replace('&', '-')}-{viewport['width']}-{scheme}.png", full_page=True)
            page.evaluate(axe)
            found = page.evaluate(
                "async () => (await axe.run()).violations.filter((one) => ['serious', 'critical'].includes(one.impact))"
            )
            assert [(one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in found] == []


def test_the_copied_code_of_a_claim_prints_that_claim_within_seconds(browser, tmp_path):
    with opened(browser, tmp_path, "#tab=claims") as page:
        page.get_by_role("button", name="Additive scores lie between").click()
        code = copied(page, "claims")
    begun = time.monotonic()
    found = printed(code)
    assert time.monotonic() - begun < 5
    assert found.startswith("C12 Additive scores lie between")
    assert "false | the bound is Σ|w|" in found
    assert "largest additive score reached: 10" in found
    assert "C13" not in found
