"""The offline page: one file within its size, a policy that fits, modules that join, a shell that keeps its state."""

import base64
import hashlib
import json
import re

import pytest

from attemper import errors, report
from attemper_lab.page import joined, offline
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
    sources = set(re.findall(r"https?://[^\s\"'`)]+", text())) - {"http://www.w3.org/2000/svg"}
    assert {place.split("/")[2] for place in sources} == {"arxiv.org", "doi.org"}  # of papers, which a reader may open


def test_every_module_is_joined_and_says_what_it_is():
    folder = offline.Path(joined.__file__).parent / "modules"
    there = {f"page/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.js")}
    modules = report.joined.modules(
        "page/shell/served.js", folders=joined.FOLDERS
    )  # the served page's entry imports the other
    assert there <= set(modules)
    for name in there:
        lines = (folder / name.removeprefix("page/")).read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("// "), f"{name}: open the file by saying what it is"
        assert len(lines) <= 400, name
        assert max(map(len, lines)) <= 160, name
    imports, exports = report.joined.IMPORT, report.joined.EXPORT
    for i, (name, module) in enumerate(modules.items()):
        assert len(re.findall(r"^import [{*\"]", module, flags=re.MULTILINE)) == len(imports.findall(module)), name
        for wanted, target in imports.findall(module):
            source = report.joined.resolved(name, target)
            assert source in list(modules)[:i], name
            names = {one.split(" as ")[0].strip() for one in wanted.split(",") if one.strip()}
            assert names <= set(exports.findall(modules[source])), f"{name}: one export for each line of {source}"


def test_a_file_that_is_there_is_kept(tmp_path):
    path = tmp_path / "why.html"
    assert offline.write(path) == path.stat().st_size
    with pytest.raises(errors.InputError, match="already exists"):
        offline.write(path)


def test_a_published_page_has_a_preview_and_links_to_where_it_is(browser, tmp_path):
    pytest.importorskip("vl_convert", reason="needs the package vl_convert")
    path, address = tmp_path / "why.html", "https://example.org/notes/why.html"
    offline.write(path, address=address)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    given = {
        one.get("property") or one.get("name"): one["content"]
        for tag, one in Elements(path.read_text()).tags
        if tag == "meta" and "content" in one
    }
    assert given["og:image"] == "https://example.org/notes/why.png"
    assert given["og:url"] == address
    assert given["og:title"].startswith("Why divide")
    assert given["description"] == given["og:description"]
    page = browser.new_page()
    page.goto(f"{path.as_uri()}#bench.d=32")
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.locator("#panel-bench .tools").get_by_role("button", name="Copy link").click()
    page.wait_for_function("window.copied")
    assert page.evaluate("window.copied") == f"{address}#bench.d=32"
    page.close()
    with pytest.raises(errors.InputError, match="one of the web"):
        offline.write(tmp_path / "other.html", address="javascript:alert(1)")


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
