"""The flow: its numbers are those of attemper_lab.explain and of the model, and it is used as a person uses it."""

import base64
import re
from functools import cache

import numpy as np
import pytest
import torch

from attemper.scan.input.model import Loaded
from attemper_lab.explain.compute import compute
from attemper_lab.explain.settings import check
from attemper_lab.page.data import embedded
from attemper_lab.page.data.flow import read_flow
from close import in_float32, in_float64, printed
from page.opened import DESK, GROUP, PHONE, opened
from page.stubbed import modules, served
from page.test_heads_data import Letters
from report.opened import address, settled

pytestmark = pytest.mark.xdist_group(GROUP)

DOG = "flow.text=The+dog+chased+the+ball+because+it+was+fast.&flow.way=model"


@cache
def inside() -> dict[str, object]:
    return {"flow": embedded.flow(), "heads": {"texts": [], "missing": None}}


@pytest.fixture(scope="module")
def parts(browser):
    with modules(browser, "page/panels/flow/source.js", "page/panels/flow/parts.js") as call:
        yield call


FLOW = """({text, skip, head}) => {
  const flow = needed["page/panels/flow/source.js"].lessonFlow(text, head);
  const found = needed["page/panels/flow/parts.js"].computed(flow, skip);
  return Object.fromEntries(["X", "Q", "K", "V", "S", "Z", "P", "C", "concat", "Y"].map((id) => [id, [...found[id].data]]));
}"""


@pytest.mark.parametrize("text", ["Love Apple phones", "Zwölf Boxkämpfer jagen Viktor, Viktor 🐕 sieht zu"])
@pytest.mark.parametrize("skip", [False, True])
def test_the_lesson_is_that_of_explain(parts, text, skip):
    """Vectors and matrices come from sha256, the Mersenne Twister and Box and Muller, here as in torch."""
    head = 3
    found = parts(FLOW, {"text": text, "skip": skip, "head": head})
    computed = compute(check(text, "none" if skip else "sqrt_dk", 8, "dot", 512, None, 0, None))
    logits = computed.query[head] @ computed.key[head].T * (1.0 if skip else 64**-0.5)
    expected = {
        "X": computed.embedded,
        "Q": computed.query[head],
        "K": computed.key[head],
        "V": computed.value[head],
        "S": computed.query[head] @ computed.key[head].T,
        "Z": logits,
        "P": logits.softmax(-1),
        "C": computed.lanes[0].context[head],
        "concat": computed.lanes[0].context.transpose(0, 1).flatten(1),
        "Y": computed.lanes[0].output[:, :16],
    }
    for name, part in expected.items():
        assert found[name] == in_float64(part.flatten().tolist(), size=float(part.abs().max())), name


MODEL = """(given) => {
  const flow = needed["page/panels/flow/source.js"].modelFlow(given);
  const found = needed["page/panels/flow/parts.js"].computed(flow, false);
  return { S: [...found.S.data], Z: [...found.Z.data], Y: [...found.Y.data] };
}"""


def test_the_model_s_flow_is_computed_as_the_model_does(parts):
    given = inside()["flow"]["texts"][0]
    found = parts(MODEL, given)
    logits, output = (
        torch.from_numpy(np.frombuffer(base64.b64decode(given[name]["data"]), "<f4").copy()).reshape(
            given[name]["shape"]
        )
        for name in ("logits", "Y")
    )
    own = logits[given["head"]]
    assert found["Z"] == in_float32(own.flatten().tolist(), given["d_k"], size=float(own.abs().max()))
    exact, size = output[:, :16].flatten().tolist(), float(output.abs().max())
    assert found["Y"] == in_float32(exact, given["d_model"], size=size, logit=float(logits.abs().max()))


def cell(page, part, row, column):
    """The middle of a cell, in pixels of the window, once the page stands still."""
    settled(page)
    return page.evaluate(
        """([part, row, column]) => {
          const block = document.querySelector(`.flow-picture [data-part="${part}"]`);
          block.scrollIntoView({ block: "center" });
          const cells = [...block.querySelectorAll("rect.cell")], box = (node) => node.getBoundingClientRect();
          const across = cells.filter((one) => Math.abs(box(one).top - box(cells[0]).top) < 1).length;
          const found = box(cells[row * across + column]);
          return [found.left + found.width / 2, found.top + found.height / 2];
        }""",
        [part, row, column],
    )


def marks(page, part):
    return page.locator(f'.flow-picture [data-part="{part}"] .mark').count()


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_space_walks_through_the_steps(browser, tmp_path, viewport):
    with opened(browser, tmp_path, "#tab=flow", viewport=viewport) as page:
        card, titles = page.locator(".flow-card"), []
        for _ in range(9):
            settled(page)
            titles.append(card.locator("h2").text_content())
            page.keyboard.press("Space")
        settled(page)
        assert titles[0] == card.locator("h2").text_content() == "Words"
        assert titles[4:7] == ["Scores", "Divide by √d_k", "Softmax"]
        page.keyboard.press("Shift+Space")
        settled(page)
        assert card.locator("h2").text_content() == "All 8 heads"
        assert address(page, "flow.step=9")
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")


def test_space_goes_on_after_a_click(browser, tmp_path):
    with opened(browser, tmp_path) as page:
        page.get_by_role("tab", name="The flow").click()
        for pressed in ("tab", "sentence", "checkbox"):
            if pressed == "sentence":
                page.locator(".sentence").first.click()
            if pressed == "checkbox":
                page.get_by_label("leave out the division").click()
            before = page.locator(".flow-count").text_content()
            page.keyboard.press("Space")
            settled(page)
            assert page.locator(".flow-count").text_content() != before, pressed
        assert page.get_by_label("leave out the division").is_checked()


def test_back_returns_to_the_tab_before(browser, tmp_path):
    with opened(browser, tmp_path) as page:
        first = page.title()
        page.get_by_role("tab", name="The flow").click()
        settled(page)
        assert page.title() == "From words to context · attemper"
        page.keyboard.press("Space")
        settled(page)
        page.go_back()
        settled(page)
        assert page.locator("#panel-bench").is_visible()
        assert page.title() == first
        page.go_forward()
        settled(page)
        assert page.locator(".flow-count").text_content() == "Step 2 of 9"


def test_a_long_text_says_what_is_taken(browser, tmp_path):
    with opened(browser, tmp_path, "#tab=flow") as page:
        field = page.get_by_label("Type a sentence")
        field.fill("word " * 90)
        field.press("Enter")
        settled(page)
        assert "Of these 90 words the first 64 are taken." in page.locator(".flow-note").text_content()
        field.fill("a" * 1001)
        field.press("Enter")
        settled(page)
        assert field.evaluate("node => node.validationMessage") == "At most 1000 characters; this has 1001. Shorten it."
        assert address(page, "flow.text=word")


def test_text_and_picture_point_at_each_other(browser, tmp_path):
    with opened(browser, tmp_path, "#tab=flow&flow.step=5") as page:
        page.locator(".part-word", has_text="query").hover()
        assert "named" in page.locator('.flow-picture [data-part="Q"]').get_attribute("class")
        page.mouse.move(*cell(page, "S", 1, 2))
        assert "named" in page.locator('.part-word[data-names="S"]').get_attribute("class")


def test_a_cell_shows_the_cells_that_made_it(browser, tmp_path):
    with opened(browser, tmp_path, "#tab=flow&flow.step=5") as page:
        page.mouse.move(*cell(page, "S", 1, 2))
        said = page.locator(".flow-cell").text_content()
        assert "S[Apple, phones] = −14.95" in said
        assert "64 products" in said
        assert (marks(page, "S"), marks(page, "Q"), marks(page, "K"), marks(page, "V")) == (1, 1, 1, 0)
        assert page.locator(".term").count() == 6  # the five largest products, and the rest
        page.mouse.click(*cell(page, "Z", 1, 2))
        page.mouse.move(5, 300)
        settled(page)
        assert address(page, "flow.at=Z.1.2")
        assert "−14.95 × 0.125 = −1.868" in page.locator(".flow-cell").text_content()
        page.keyboard.press("Escape")
        settled(page)
        assert address(page, "flow.at", there=False)
        assert marks(page, "S") == 0


def test_the_keyboard_alone_reaches_a_cell(browser, tmp_path):
    with opened(browser, tmp_path, "#tab=flow") as page:
        page.locator('.flow-picture [data-part="W_V"]').focus()
        for _ in range(8):  # V is next of the parts with cells
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.dataset?.part") == "P":
                break
        assert page.evaluate("document.activeElement.dataset.part") == "P"
        for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
            page.keyboard.press(key)
            settled(page)
        assert "P[Apple, Apple] = 0.592" in page.locator(".flow-cell").text_content()
        assert marks(page, "Z") == 1


@pytest.mark.parametrize("skip", [False, True])
def test_the_weights_of_both_lanes_stand_beside_each_other(browser, tmp_path, skip):
    computed = compute(check("Love Apple phones", "sqrt_dk", 8, "dot", 512, None, 0, None))
    scores = computed.query[0] @ computed.key[0].T
    bare, divided = scores.softmax(-1), (scores / 8).softmax(-1)
    with opened(browser, tmp_path, f"#tab=flow&flow.step=7&flow.skip={str(skip).lower()}") as page:
        for part, weights in (("P", bare if skip else divided), ("U", divided if skip else bare)):
            shown = page.locator(f'.flow-picture [data-part="{part}"] .number').all_text_contents()
            assert shown == [f"{one:.2f}" for one in weights.flatten().tolist()]
        boxes = [page.locator(f'.flow-picture [data-part="{part}"] .hit').bounding_box() for part in "UP"]
        assert boxes[0]["y"] == boxes[1]["y"]
        means = [f"{one.amax(-1).mean():.2f}" for one in (divided, bare)]
        says = page.locator(".flow-words").text_content()
        assert f"is {means[skip]} on average" in says
        assert f"the division it is {means[not skip]}" in says
        page.mouse.move(*cell(page, "U", 1, 1))
        other = (divided if skip else bare)[1, 1]
        assert f"P′[Apple, Apple] = {other:.3f}" in page.locator(".flow-cell").text_content()
        assert (marks(page, "U"), marks(page, "S"), marks(page, "Z")) == (1, 1, 0)


def test_every_sentence_holds_of_a_causal_model_whose_heads_share_keys(browser):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=32, vocab_size=60)
    loaded = Loaded(transformers.LlamaModel(config).eval(), "Llama", "object", tokenizer=Letters())
    with served(
        browser, inside(), {"/flow": lambda body: read_flow(loaded, "abcdef", body["layer"], body["head"])}
    ) as page:
        page.evaluate("started.shared.choose('flow')")
        for layer in (0, 1):
            given = read_flow(loaded, "abcdef", layer, 3)
            logits = torch.from_numpy(np.frombuffer(base64.b64decode(given["logits"]["data"]), "<f4").copy())
            logits = logits.reshape(given["logits"]["shape"])[3].double()
            page.evaluate(f"location.hash = 'tab=flow&flow.text=abcdef&flow.way=model&flow.layer={layer}&flow.head=3'")
            page.get_by_text(f"Llama, layer {layer}, head 3").wait_for()
            said = {}
            for _ in range(10):
                settled(page)
                said[page.locator(".flow-card h2").text_content()] = page.locator(".flow-words").text_content()
                page.locator(".flow-next").click()
            settled(page)
            assert page.locator(".flow-count").text_content() == "Step 1 of 10"
            assert said["Words"].startswith("Llama splits the sentence into tokens. Each will ask each up to itself")
            assert ("The layers before have mixed it" in said["Embeddings"]) is (layer == 1)
            every = float(
                (torch.from_numpy(floats(given["Q"])[3]) @ torch.from_numpy(floats(given["K"])[1]).T).std(correction=0)
            )
            assert f"standard deviation of {every:.2f}." in said["Scores"]
            assert said["Mask"].startswith("The model learns to say the next token")
            top = logits.softmax(-1).amax(-1).mean()
            assert f"is {top:.2f} on average" in said["Softmax"]
            assert "each with its own queries (2 heads share keys and values)" in said["All 4 heads"]


def floats(part):
    return np.frombuffer(base64.b64decode(part["data"]), "<f4").copy().reshape(part["shape"])


def opacities(page, part):
    cells = page.locator(f".flow-picture [data-part='{part}'] rect.cell")
    return cells.evaluate_all("(cells) => cells.map((one) => Number(one.getAttribute('fill-opacity')))")


@pytest.mark.parametrize("at", ["", DOG], ids=["lesson", "model"])
def test_raw_and_scaled_scores_share_one_colour_scale(browser, tmp_path, parts, at):
    """The strength of a cell is its size over that of the largest raw score, in S as in Z."""
    lesson = {"text": "Love Apple phones", "skip": False, "head": 0}
    found = parts(MODEL, inside()["flow"]["texts"][0]) if at else parts(FLOW, lesson)
    most = max(map(abs, found["S"]))
    with opened(browser, tmp_path, f"#tab=flow&flow.step=6&{at}") as page:
        for part in ("S", "Z"):
            assert opacities(page, part) == printed([0.05 + 0.95 * abs(one) / most for one in found[part]], 3)
        page.get_by_label("leave out the division").check()
        settled(page)
        assert opacities(page, "Z") == opacities(page, "S")
        assert "No division" in page.locator(".flow-card").text_content()


MADE = """({text, id, row, column}) => {
  const { computed, madeOf } = needed["page/panels/flow/parts.js"];
  const flow = needed["page/panels/flow/source.js"].lessonFlow(text, 0), parts = computed(flow, false);
  const made = madeOf(flow, parts, id, row, column, false);
  return { value: made.value, terms: made.terms.map((one) => one.product), rest: made.rest, products: made.products };
}"""


@pytest.mark.parametrize(("part", "count"), [("Q", 512), ("S", 64), ("C", 5), ("Y", 512)])
def test_the_products_of_a_cell_add_up_to_it(parts, part, count):
    made = parts(MADE, {"text": "one two three four five", "id": part, "row": 1, "column": 3})
    size = sum(map(abs, made["products"]))
    assert len(made["products"]) == count
    assert sum(made["products"]) == in_float64(made["value"], size=size)
    assert sum(made["terms"]) + made["rest"] == in_float64(made["value"], size=size)


def test_the_two_sentences_and_a_typed_one(browser, tmp_path):
    with opened(browser, tmp_path, "#tab=flow") as page:
        page.get_by_role("button", name="The dog chased").click()
        settled(page)
        assert "MiniLM-L6 (embedded), layer 4, head 3" in page.locator(".flow-controls").text_content()
        assert page.locator('.flow-picture [data-part="S"] .shape').text_content() == "12 × 12"
        page.mouse.move(*cell(page, "P", 7, 5))
        assert "P[it, ball] = 0.468" in page.locator(".flow-cell").text_content()
        page.get_by_placeholder("Type a sentence").fill('one <img src=x onerror="alert(1)"> two')
        page.keyboard.press("Enter")
        settled(page)
        note = page.locator(".flow-note").first.text_content()
        assert "random vectors" in note
        assert "attemper serve" in note
        assert page.locator('.flow-picture [data-part="X"] .token').all_text_contents()[1].startswith("<img")
        page.get_by_role("button", name="Love Apple phones").click()
        settled(page)
        assert not page.locator(".flow-note").first.is_visible()


def test_what_one_takes_away(browser, tmp_path, capsys):
    with opened(browser, tmp_path, "#tab=flow&flow.skip=true") as page:
        page.get_by_role("button", name="As Python").first.click()
        code = page.locator("dialog[open] pre").text_content()
        exec(code, {})
        assert "Apple" in capsys.readouterr().out
        page.keyboard.press("Escape")
        page.get_by_role("button", name="In words").first.click()
        words = page.locator("dialog[open] pre").text_content()
        assert "S, scores" in words
        assert "−14.95" in words
        page.keyboard.press("Escape")
        with page.expect_download() as saved:
            page.get_by_role("button", name="SVG").first.click()
        svg = saved.value.path().read_text(encoding="utf-8")
        assert svg.startswith("<svg")
        assert "var(" not in svg


def test_the_model_s_code_runs(browser, tmp_path, capsys):
    with opened(browser, tmp_path, f"#tab=flow&{DOG}") as page:
        page.get_by_role("button", name="As Python").first.click()
        exec(page.locator("dialog[open] pre").text_content(), {})
        assert "0.468" in capsys.readouterr().out  # of "it" on "ball"


def test_served_a_typed_sentence_runs_the_model(browser):
    def flow(body):
        if "too long" in body["text"]:
            raise ValueError("the text is too long")
        return read_flow(embedded._model(), body["text"], body["layer"], body["head"])

    with served(browser, inside(), {"/flow": flow}) as page:
        page.evaluate("started.shared.choose('flow')")
        page.get_by_placeholder("Type a sentence").fill("A cat sleeps")
        page.keyboard.press("Enter")
        page.get_by_text(re.compile("MiniLM-L6 .embedded., layer 4, head 0")).wait_for()
        page.get_by_label("Layer", exact=True).select_option("2")
        page.get_by_label("Head", exact=True).select_option("5")
        page.get_by_text(re.compile("layer 2, head 5")).wait_for()
        assert page.evaluate("asked.at(-1)") == ["/flow", {"text": "A cat sleeps", "layer": 2, "head": 5}]
        page.get_by_placeholder("Type a sentence").fill("too long")
        page.keyboard.press("Enter")
        page.get_by_text("The model has not read this sentence. the text is too long").wait_for()
