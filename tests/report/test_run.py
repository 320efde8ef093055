"""The page and the text of a training: every head over time, from a record, right to the digit and safe whatever it says."""

import json
import math
import re

import pytest
import torch

import attemper
from attemper import cli
from attemper.errors import InputError
from attemper.report import run
from attemper.report.run import text
from report.opened import WATCH, resized
from report.test_report import HOSTILE, Elements
from watched import Block


def trained(steps=30, every=1, name="layers", grow=1.15):
    """A record of a training whose first layer's logits grow, with its loss."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Sequential(Block(), Block())})
    x = torch.randn(2, 9, 16)
    with attemper.watch(model, every=every, gradients=True) as watch:
        for step in range(steps):
            model[name](x).sum().backward()
            with torch.no_grad():
                model[name][0].packed.weight.mul_(grow)
            watch.log({"loss": 3.0 - step / steps, "eval_loss": 3.2 - step / steps} if step % 2 else {"loss": 3.0})
            watch.step()
    return watch.record


@pytest.fixture(scope="module")
def grown():
    return run.document(trained(), "run.jsonl")


def test_the_document_is_the_record(grown):
    record = trained()
    assert grown["schema"] == "attemper.run/1"
    assert grown["from"] == grown["to"] == record.steps
    assert [(one["layer"], one["heads"]) for one in grown["layers"]] == [("layers.0", [0, 1]), ("layers.1", [0, 1])]
    for index, (layer, head) in enumerate((layer, head) for layer in ("layers.0", "layers.1") for head in (0, 1)):
        rows = record.filter(layers=layer, heads=head).to_dicts()
        for sign, table in grown["signs"].items():
            assert table[index] == [None if math.isnan(row[sign]) else float(f"{row[sign]:.4g}") for row in rows], sign
    assert grown["logged"]["loss"][:2] == [[0, 3.0], [1, float(f"{3 - 1 / 30:.4g}")]]
    assert len(grown["logged"]["eval_loss"]) == 15


def test_findings_have_the_step_at_which_they_began_or_rose(grown):
    record, seen = trained(), {}
    for one in grown["findings"]:
        if one["name"] == "peak":
            seen.setdefault((one["layer"], one["head"]), []).append((one["step"], one["level"]))
    peaks = {row["step"]: row["peak"] for row in record.filter(layers="layers.0", heads=0).to_dicts()}
    first = {
        level: next((step for step, peak in peaks.items() if peak > at), None)
        for level, at in (("warn", 50), ("error", 100))
    }
    assert seen["layers.0", 0][:2] == [(first["warn"], "warn"), (first["error"], "error")]
    assert grown["verdict"]["level"] == attemper.health.check(record)[0].level


def test_a_long_run_is_joined_into_columns():
    record = trained(90, grow=1.0)
    joined = run.document(record)
    assert len(joined["from"]) == 90
    run_most, run.MOST = run.MOST, 40
    try:
        joined = run.document(record)
    finally:
        run.MOST = run_most
    assert (joined["from"][:2], joined["to"][:2], len(joined["from"])) == ([0, 3], [2, 5], 30)
    rows = record.filter(layers="layers.0", heads=0, steps=[0, 1, 2]).to_dicts()
    assert joined["signs"]["peak"][0][0] == float(f"{max(row['peak'] for row in rows):.4g}")
    assert joined["signs"]["evenness"][0][0] == float(f"{sum(row['evenness'] for row in rows) / 3:.4g}")


def test_a_number_that_is_not_finite_is_a_finding_and_no_number():
    torch.manual_seed(0)
    model, x = Block(), torch.randn(1, 9, 16)
    with attemper.watch(model) as watch:
        for step in range(3):
            model(x * (math.nan if step == 1 else 1.0))
            watch.step()
    found = run.document(watch.record)
    assert [column is None for column in found["signs"]["peak"][0]] == [False, True, False]
    assert [(one["name"], one["step"]) for one in found["findings"]] == [("nan", 1)]
    assert "?" in text(found)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_text_is_one_screen(grown, width):
    shown = text(grown, width)
    assert max(map(len, shown.splitlines())) <= width
    assert len(shown.splitlines()) <= 24
    assert "error: large logits from step" in re.sub(r"\s+", " ", shown)
    assert re.search(r"^loss +[▁-█]+ +3 → 2.03", shown, re.MULTILINE)


def test_the_text_of_many_layers_is_one_screen_too(grown):
    many = {**grown, "layers": [{"layer": f"l.{i}", "kind": "self", "heads": [0]} for i in range(40)]}
    many["signs"] = {"peak": [[float(1 + i)] * 30 for i in range(40)]}
    lines = text(many).splitlines()
    assert sum(line.startswith("peak") for line in lines) == 12
    assert any(line.startswith("peak 39") for line in lines)


def test_the_file_is_alone_and_its_policy_fits(grown):
    page = Elements(run.html(grown))
    policy = next(found["content"] for tag, found in page.tags if found.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert json.loads(page.texts["script application/json"]) == grown
    assert not re.search(r"https?://(?!www\.w3\.org)", page.texts["script module"] + page.texts["style"])
    with pytest.raises(InputError, match=r"must have the schema 'attemper\.run/1'; got 'attemper\.scan/1'"):
        run.html({"schema": "attemper.scan/1"})
    with pytest.raises(InputError, match="the record has no rows"):
        run.document(attemper.Record())


def opened(browser, found, folder, **options):
    """The page of a run; what it said to the console, asked for and violated is empty."""
    path = folder / "run.html"
    path.write_text(run.html(found), encoding="utf-8")
    page = browser.new_context(viewport={"width": 1280, "height": 900}, **options).new_page()
    page.said, page.asked = [], []
    page.add_init_script(WATCH)
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(path.as_uri())
    return page


def closed(page):
    assert page.evaluate("window.violations") == []
    assert page.said == []
    assert len(page.asked) == 1
    page.context.close()


def test_pointing_at_the_map_shows_the_numbers_of_that_head_and_step(browser, grown, tmp_path):
    page = opened(browser, grown, tmp_path)
    assert page.locator("canvas.heads").count() == 2
    assert page.locator("h1").text_content() == grown["verdict"]["line"]
    box = page.locator("canvas.heads").nth(1).bounding_box()
    page.mouse.move(box["x"] + box["width"] * 12.5 / 30, box["y"] + box["height"] * 0.75)
    panel = page.locator(".one-head")
    assert panel.locator("h2").text_content() == "layer 1 · head 1 · step 12"
    shown = dict(zip(panel.locator("dt").all_text_contents(), panel.locator("dd").all_text_contents(), strict=True))
    assert float(shown["peak logit"]) == float(f"{grown['signs']['peak'][3][12]:.1f}")
    assert float(shown["evenness"]) == float(f"{grown['signs']['evenness'][3][12]:.2f}")
    closed(page)


def test_keys_signs_and_findings_lead_somewhere(browser, grown, tmp_path):
    page = opened(browser, grown, tmp_path, color_scheme="dark")
    title = page.locator(".one-head h2")
    page.locator(".timeline").first.focus()
    for _ in range(40):
        page.keyboard.press("ArrowLeft")
    for _ in range(5):
        page.keyboard.press("ArrowUp")
    assert title.text_content() == "layer 0 · head 0 · step 0"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert title.text_content() == "layer 0 · head 1 · step 1"
    before = page.locator("canvas.heads").first.evaluate("canvas => canvas.toDataURL()")
    page.get_by_label("shaded by").select_option("evenness")
    assert page.locator("canvas.heads").first.evaluate("canvas => canvas.toDataURL()") != before
    flags = page.locator(".flag")
    steps = sorted({one["step"] for one in grown["findings"]})
    assert flags.count() == len(steps)
    flags.first.click()
    assert title.text_content().endswith(f"step {steps[0]}")
    closed(page)


def test_text_from_a_record_is_only_text(browser, grown, tmp_path):
    wicked = json.loads(json.dumps(grown))
    wicked["name"] = HOSTILE[1]
    wicked["notes"] = HOSTILE
    for one in wicked["layers"]:
        one["layer"] += HOSTILE[0]
    for one in wicked["findings"]:
        one["message"] = HOSTILE[1]
        one["layer"] += HOSTILE[0]
    page = opened(browser, wicked, tmp_path)
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert HOSTILE[0] in page.locator(".timeline").first.inner_html().replace("&lt;", "<").replace("&gt;", ">")
    closed(page)


def test_a_narrow_page_does_not_scroll_sideways(browser, grown, tmp_path):
    page = opened(browser, grown, tmp_path)
    resized(page, {"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    closed(page)


def test_the_command_prints_a_screen_and_writes_the_page(tmp_path, capsys):
    path, page = tmp_path / "run.jsonl", tmp_path / "run.html"
    trained(6).write(path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(path), "-o", str(page)])
    out, errors = capsys.readouterr()
    assert ended.value.code == 0
    assert "6 watched steps, 0 to 5" in out
    assert f"{page} written; open it in a browser" in errors
    assert page.read_text().startswith("<!doctype html>")
    with pytest.raises(SystemExit):
        cli.main(["report", str(path), "--json"])
    assert json.loads(capsys.readouterr().out)["schema"] == "attemper.run/1"
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(tmp_path / "none.jsonl")])
    assert ended.value.code == 2
    assert "there is no file" in capsys.readouterr().err


def test_a_record_that_was_cut_is_a_sentence_and_no_warning_with_a_path(tmp_path, capsys, recwarn):
    path = tmp_path / "run.jsonl"
    trained(3).write(path)
    path.write_text(path.read_text() + '{"step": 3, "lay')
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(path)])
    out, errors = capsys.readouterr()
    assert ended.value.code == 0
    assert "3 watched steps, 0 to 2; " in out
    assert errors.count("Note: run.jsonl: the last line was cut short and is left out; the ") == 1
    assert "Warning" not in errors
    assert ".py" not in errors
    assert not recwarn.list


def test_one_step_is_told_as_one():
    assert "\n1 watched step, number 0; 2 layers, 4 heads.\n" in text(run.document(trained(1), "run.jsonl"))
