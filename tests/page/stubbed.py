"""The page with a source that answers from Python, as a server's would: what a panel does with a typed sentence."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attemper_lab.page import joined

Answer = Callable[[Mapping[str, Any]], Any]

START = """
window.asked = [];
const stub = {
  async json(path, body) {
    window.asked.push([path, body]);
    const [right, said] = JSON.parse(await window.answer(path, JSON.stringify(body)));
    if (!right) throw new Error(said);
    return said;
  },
  async floats(path, body) { return Float32Array.from(await this.json(path, body), (number) => number ?? -Infinity); },
  events() { return () => {}; },
};
const data = JSON.parse(document.getElementById("data").textContent);
window.started = needed["page/shell/start.js"].start(document.getElementById("page"), data, { source: SOURCE });
"""


@contextlib.contextmanager
def served(
    browser: Any, data: Mapping[str, Any], answers: Mapping[str, Answer], source: str = "stub", **options: Any
) -> Iterator[Any]:
    """The page with `data` inside and `answers` by path; an answer that raises is the server's
    error. Without a `source` ("null") it is the offline page."""

    def answer(path: str, body: str) -> str:
        try:
            return json.dumps([True, answers[path](json.loads(body))])
        except ValueError as error:
            return json.dumps([False, str(error)])

    context = browser.new_context(**{"viewport": {"width": 1280, "height": 720}, "reduced_motion": "reduce", **options})
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.expose_function("answer", answer)
    page.goto("about:blank")
    data_text = json.dumps(data).replace("<", "\\u003c")
    page.set_content(
        f'<!doctype html><style>{joined.style()}</style><div id="page"></div>'
        f'<script type="application/json" id="data">{data_text}</script>'
    )
    page.add_script_tag(content=joined.script() + START.replace("SOURCE", source), type="module")
    page.wait_for_selector(".panel:not([hidden])")
    yield page
    assert said == []
    context.close()


@contextlib.contextmanager
def modules(browser: Any, *entries: str) -> Iterator[Callable[..., Any]]:
    """Calls a function in a page that has nothing but some modules: `call("(needed, given) => …", given)`."""
    page = browser.new_page()
    page.add_script_tag(content=joined.script(*entries))
    yield lambda function, given=None: page.evaluate(function, given)
    page.close()
