"""The page in a notebook: one module that a host renders, twice on one page, and takes away again."""

import re
import subprocess
import sys

import pytest

from attemper import errors
from attemper_lab.page import widget
from attemper_lab.page.data.bundle import STORED, bundle
from page.opened import GROUP

pytestmark = pytest.mark.xdist_group(GROUP)

HOSTED = """async ([code, data, count]) => {
  const module = await import(URL.createObjectURL(new Blob([code], { type: "text/javascript" })));
  const model = { get: (name) => ({ data })[name] };
  window.ends = [];
  for (let i = 0; i < count; i++) {
    const el = document.createElement("div");
    document.body.append(el);
    window.ends.push(module.default.render({ model, el }));
  }
}"""


def test_a_host_shows_it_twice_and_takes_it_away(browser, tmp_path):
    page = browser.new_page()
    said = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda message: said.append(message.text))
    page.goto("about:blank")
    page.add_style_tag(content=widget.style())
    page.evaluate(HOSTED, [widget.module(), bundle(STORED), 2])
    assert page.locator("[role=tablist]").count() == 2
    first = page.locator(".attemper-page").first
    first.get_by_role("tab", name="Claims").click()
    first.get_by_role("button", name="Additive scores lie between").click()
    first.get_by_text("The bound is Σ|w|").wait_for()
    assert page.url == "about:blank"  # the address is the notebook's
    page.evaluate("window.ends.forEach((end) => end())")
    assert page.locator("[role=tablist]").count() == 0
    assert said == []
    page.close()


def test_the_widget_carries_module_style_and_data():
    pytest.importorskip("anywidget", reason="needs the package anywidget")
    shown = widget.widget({"claims": {"claims": []}})
    assert shown.data == {"claims": {"claims": []}}
    assert "export default" in shown._esm
    assert not re.search(
        r'^import .* from "', shown._esm, flags=re.MULTILINE
    )  # one file: a host resolves no neighbours
    assert ".attemper-page" in shown._css


def test_a_notebook_that_is_not_run_has_a_picture():
    pytest.importorskip("anywidget", reason="needs the package anywidget")
    shown = widget.widget({"claims": {"claims": []}})._repr_mimebundle_()
    data = shown[0] if isinstance(shown, tuple) else shown
    assert "application/vnd.jupyter.widget-view+json" in data
    assert data["image/svg+xml"].startswith("<svg")


def test_what_has_the_focus_keeps_its_keys_from_jupyterlab(browser):
    """JupyterLab asks the element with the focus first, and only then those around it."""
    page = browser.new_page()
    page.goto("about:blank")
    page.add_style_tag(content=widget.style())
    page.evaluate(HOSTED, [widget.module(), bundle(STORED), 1])
    for at in ("[role=tab]", "#opening-d", ".chip"):
        page.locator(at).first.focus()
        assert page.evaluate("document.activeElement.hasAttribute('data-lm-suppress-shortcuts')"), at
    page.close()


def test_importing_attemper_imports_no_widget():
    code = (
        "import attemper, sys; attemper.page; print({'anywidget', 'ipywidgets', 'torch', 'fastapi'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_without_anywidget_the_error_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    widget._kind.cache_clear()
    with pytest.raises(errors.MissingExtra, match=r"pip install 'attemper\[notebook\]'"):
        widget.widget({})
    widget._kind.cache_clear()


def test_an_anywidget_that_is_broken_is_named_with_its_own_error(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "anywidget":
                raise ImportError("libwidget.so.3 is missing")

    monkeypatch.delitem(sys.modules, "anywidget", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    widget._kind.cache_clear()
    with pytest.raises(
        errors.MissingExtra, match=r"cannot be imported: ImportError: libwidget.so.3 is missing. Reinstall it"
    ):
        widget.widget({})
    widget._kind.cache_clear()
