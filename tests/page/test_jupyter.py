"""The page in a real JupyterLab: keys, fields, the dark theme, the picture that nbconvert keeps. `make jupyter` runs it."""

import contextlib
import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from page.opened import GROUP

pytestmark = pytest.mark.xdist_group(GROUP)
JUPYTER = os.environ.get("ATTEMPER_JUPYTER", "")
PATIENCE = 300  # seconds for a server and its kernel, on a machine that may do other work
CELLS = ("import attemper\nattemper.page()", "print('kept')")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab with one notebook, and its folder."""
    if not JUPYTER:
        pytest.skip("needs JupyterLab: make jupyter, or ATTEMPER_JUPYTER=/path/to/bin")
    folder = tmp_path_factory.mktemp("lab")
    cells = [
        {"cell_type": "code", "execution_count": None, "id": f"c{i}", "metadata": {}, "outputs": [], "source": source}
        for i, source in enumerate(CELLS)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    notebook = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (folder / "page.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--IdentityProvider.token=")
    log = (folder / "log").open("w")
    home = os.environ | {"HOME": str(folder)}
    server = subprocess.Popen([f"{JUPYTER}/jupyter-lab", *options], cwd=folder, env=home, stdout=log, stderr=log)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/api"):
            break
        time.sleep(0.5)
    try:
        yield f"http://127.0.0.1:{port}", folder
    finally:
        server.terminate()
        server.wait(PATIENCE)
        log.close()


def test_the_page_in_a_cell(browser, lab):
    address, _ = lab
    context = browser.new_context(viewport={"width": 1400, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE)
    said = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{address}/lab/tree/page.ipynb")
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    page.locator(".jp-Cell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    ours = page.locator(".attemper-page")
    ours.get_by_role("tab").first.click()
    for key in "bxadzm":  # insert below, cut, insert above, delete, undo, markdown
        page.keyboard.press(key)
    page.wait_for_timeout(500)
    assert page.locator(".jp-Notebook .jp-Cell").count() == len(CELLS)
    assert page.locator(".jp-Notebook .jp-CodeCell").count() == len(CELLS)
    ours.get_by_role("tab", name="The flow").click()
    field = ours.get_by_label("Type a sentence").first
    field.fill("cats like fish")
    field.press("Enter")
    ours.locator(".flow-picture").get_by_text("cats").first.wait_for()
    assert page.locator(".jp-Notebook .jp-Cell").count() == len(CELLS)
    assert ours.get_by_role("button", name="Copy link").count() == 0  # a cell has no link
    background = "node => getComputedStyle(node).backgroundColor"
    light = ours.evaluate(background)
    page.get_by_role("menuitem", name="Settings").click()
    page.locator(".lm-Menu-itemLabel", has_text="Theme").first.hover()
    page.locator(".lm-Menu-itemLabel", has_text="JupyterLab Dark").first.click()
    page.wait_for_function("document.body.dataset.jpThemeLight === 'false'")
    dark = ours.evaluate(background)
    assert sum(map(int, re.findall(r"\d+", light)[:3])) > 700
    assert sum(map(int, re.findall(r"\d+", dark)[:3])) < 100
    assert said == []
    context.close()


def test_a_notebook_without_a_kernel_shows_a_picture(lab):
    _, folder = lab
    command = (
        f"{JUPYTER}/jupyter-nbconvert",
        "--to",
        "html",
        "--execute",
        "--ExecutePreprocessor.store_widget_state=False",
    )
    run = subprocess.run(
        [*command, "page.ipynb"], cwd=folder, env=os.environ | {"HOME": str(folder)}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    shown = Path(folder, "page.html").read_text(encoding="utf-8")
    assert re.search(r'<img[^>]* src="data:image/svg\+xml;base64,|<svg[^>]*attemper-flow', shown)
