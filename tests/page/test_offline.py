"""The offline page: one file within its size, a policy that fits, modules that join, a shell that keeps its state."""

import base64
import hashlib
import json
import re

import pytest

from attemper import errors
from attemper.page import joined, offline
from page.opened import GROUP, opened, text
from report.opened import address, moved, settled
from report.test_report import Elements

pytestmark = pytest.mark.xdist_group(GROUP)

WITHOUT_DATA = 400_000  # bytes of the page before any model's data


def digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def test_the_file_is_small():
    bare = len(offline.html({}).encode())
    whole = len(text().encode())
    print(f"\nthe page without data: {bare / 1000:.0f} kB; with data: {whole / 1000:.0f} kB")
    assert bare < WITHOUT_DATA
    assert whole <= offline.LARGEST


def test_the_policy_is_that_of_the_content():
    page = Elements(text())
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'",
        "script-src": f"'sha256-{digest(page.texts['script module'])}'",
        "style-src": f"'sha256-{digest(page.texts['style'])}'",
        "img-src": "blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not any(name.startswith("on") or name == "style" for _, a in page.tags for name in a)


def test_data_cannot_break_out():
    data = {"a": "</script><script>alert(1)</script>", "b": "{{script}}<!--\u2028"}
    assert json.loads(Elements(offline.html(data)).texts["script application/json"]) == data


def test_no_markup_is_made_from_text_and_no_place_outside_is_named():
    code = joined.script()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", code)
    assert not re.search(r"DOMParser|srcdoc|setHTML", code)
    assert set(re.findall(r"https?://[^\s\"'`)]+", text())) <= {"http://www.w3.org/2000/svg"}


def test_every_module_is_joined_and_says_what_it_is():
    folder = offline.Path(joined.__file__).parent / "modules"
    there = {f"page/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.js")}
    served = {name for name in there if name.endswith("served.js")}  # the served page's own entry
    assert there - served <= set(joined.modules())
    for name in there:
        lines = (folder / name.removeprefix("page/")).read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("// "), f"{name}: open the file by saying what it is"
        assert len(lines) <= 400, name
        assert max(map(len, lines)) <= 160, name
    for name, module in joined.modules().items():
        before = list(joined.modules())[: list(joined.modules()).index(name)]
        assert len(re.findall(r"^import [{*\"]", module, flags=re.MULTILINE)) == len(joined.IMPORT.findall(module)), (
            name
        )
        for wanted, target in joined.IMPORT.findall(module):
            source = joined._resolved(name, target)
            assert source in before, name
            names = {one.split(" as ")[0].strip() for one in wanted.split(",") if one.strip()}
            assert names <= set(joined.EXPORT.findall(joined.modules()[source])), (
                f"{name}: one export for each line of {source}"
            )


def test_a_file_that_is_there_is_kept(tmp_path):
    path = tmp_path / "why.html"
    assert offline.write(path) == path.stat().st_size
    with pytest.raises(errors.InputError, match="already exists"):
        offline.write(path)


def test_the_state_is_in_the_address(browser, tmp_path):
    with opened(browser, tmp_path, "#bench.d=32") as page:
        slider = page.get_by_role("slider", name="d_k").first
        assert "32" in page.locator("#panel-bench").text_content()
        slider.focus()
        page.keyboard.press("ArrowRight")
        settled(page)
        assert address(page, "bench.d=32", there=False)
        assert re.search(r"bench\.d=\d+", page.url)
        moved(page, "bench.d=oops")  # what cannot be read stays at its default
        assert address(page, "bench.d", there=False)


def test_a_teacher_hides_controls(browser, tmp_path):
    with opened(browser, tmp_path, "#hide=tools,theme") as page:
        assert not page.locator(".tools").first.is_visible()
        assert not page.locator(".theme").is_visible()
        page.get_by_text("For teachers").click()
        page.get_by_label("tools", exact=True).check()
        settled(page)
        assert page.locator(".tools").first.is_visible()
        assert address(page, "tools", there=False)
        assert page.url.endswith("#hide=theme")
