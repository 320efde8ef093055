"""The file: its document comes back whole, nothing breaks out of its script element, and its policy fits its content."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from attemper import errors, report
from attemper.scan.result import write_file as write
from report.documents import asked, finding, lane, made

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>&amp;&lt;",
    "\u2028line\u2029paragraph",
    "\u202eright to left\u202c",
    "{{script}} {{document}}",
    "a" * 5000,
    "e\u0301\u0327 👩‍👩‍👧‍👦",
    "\x00\x1b[31m",
    "'\"`${1}\\",
]


class Elements(HTMLParser):
    """The elements of a page, and the text of its scripts and styles, as an HTML parser sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = f"{tag} {dict(attributes).get('type', '')}".strip()

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, text):
        self.texts[self._inside] = self.texts.get(self._inside, "") + text


def hostile() -> dict:
    """Every text that comes from outside, hostile."""
    document, kept = made(HOSTILE)
    asked(document, kept, 0)
    finding(document, 0, 1)
    wicked = HOSTILE[1]
    document["model"] = {name: wicked if isinstance(value, str) else value for name, value in document["model"].items()}
    document["verdict"]["line"] = document["inputs"][0]["text"] = document["findings"][0]["message"] = wicked
    document["notes"] = HOSTILE
    for row in (
        *document["heads"],
        *document["attention"],
        *document["findings"],
        *document["layers"],
        *document["token"]["heads"],
    ):
        row["layer"] = row["layer"].replace("attention", HOSTILE[0])
    document["token"]["best"]["layer"] = document["token"]["best"]["layer"].replace("attention", HOSTILE[0])
    return document


@pytest.mark.parametrize("make", [lambda: made()[0], hostile], ids=["plain", "hostile"])
def test_the_document_comes_back(make):
    document = make()
    page = Elements(report.html(document))
    assert json.loads(page.texts["script application/json"]) == document


def test_nothing_breaks_out():
    tame, wild = Elements(report.html(made()[0])), Elements(report.html(hostile()))
    assert [tag for tag, _ in wild.tags] == [tag for tag, _ in tame.tags]
    data = wild.texts["script application/json"]
    assert not set(data) & set("<>&\u2028\u2029")


def test_the_policy_is_that_of_the_content():
    page = Elements(report.html(hostile()))
    policy = next(
        a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'",
        "script-src": f"'sha256-{digest(page.texts['script module'])}'",
        "style-src": f"'sha256-{digest(page.texts['style'])}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_it_names_no_place_outside():
    page = report.html(made()[0])
    assert set(re.findall(r"https?://[^\s\"'`)]+", page)) == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert not re.search(
        r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|importScripts)\b|url\(|@import", page
    )


ENTRIES = ("report/start.js", "report/run_start.js")


def test_no_markup_is_made_from_text():
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|setHTML",
        report.joined.script(*ENTRIES),
    )


def test_every_module_is_joined_after_those_that_it_imports():
    folder, modules = Path(report.__file__).parent, report.joined.modules(*ENTRIES)
    assert {f"report/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.js")} == set(modules)
    for index, (name, text) in enumerate(modules.items()):
        assert text.startswith("// "), "open the file by saying what it is"
        assert len(text.splitlines()) <= 400
        imported = [report.joined.resolved(name, target) for target in re.findall(r'from "([^"]+)"', text)]
        assert set(imported) <= set(list(modules)[:index])
    assert not re.search(r"^\s*import\b", report.joined.script(*ENTRIES), flags=re.MULTILINE)


def test_modules_that_import_one_another_are_refused(tmp_path):
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.js").write_text(f'import {{ x }} from "./{other}.js";\nexport const y = x;\n')
    with pytest.raises(errors.InputError, match=r"in a circle: t/a\.js → t/b\.js → t/a\.js"):
        report.joined.script("t/a.js", folders={"t": tmp_path})


def test_size():
    document, kept = made(layers=6, heads=12, width=32)  # MiniLM's, on its sentence
    asked(document, kept, 7)
    assert len(report.html(document).encode()) < 300_000
    assert len(report.script().encode()) + len(report.style().encode()) < 100_000


def test_not_a_number_is_null():
    document, _ = made(layers=1, heads=1)
    document["heads"][0]["peak"] = float("nan")
    document["layers"][0]["scale"]["logit_std"] = float("inf")
    read = json.loads(Elements(report.html(document)).texts["script application/json"])
    assert read["heads"][0]["peak"] is None
    assert read["layers"][0]["scale"]["logit_std"] is None


def test_write(tmp_path):
    document, kept = made()
    lane(document, "none", 4)
    asked(document, kept, 7)
    path = tmp_path / "a.html"
    write(path, document)
    assert path.read_text(encoding="utf-8") == report.html(document)
    assert b"\r" not in path.read_bytes()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"schema": "attemper.scan/2"}, "must have the schema 'attemper.scan/1'; got 'attemper.scan/2'. Use what"),
        ({}, "must have the schema 'attemper.scan/1'; got None."),
        (
            {"schema": "attemper.scan/1", "findings": [{"says": "It is flat.", "todo": ""}]},
            "is of an older attemper, which wrote `says` and `todo` where this one writes `message` and `advice`. Scan",
        ),
        ([1], "must be a scan's document, a dict; got list. Use scan.to_dict()."),
    ],
)
def test_what_is_no_scan_is_refused(document, words):
    with pytest.raises(errors.InputError, match=re.escape(words)):
        report.html(document)


def test_the_thresholds_drawn_are_those_of_health():
    thresholds = pytest.importorskip("attemper.health.thresholds")
    source = report.files("attemper.report").joinpath("data/numbers.js").read_text(encoding="utf-8")
    entries = re.findall(r'key: "(\w+)"((?:(?!key: ").)*)', source, flags=re.DOTALL)
    found = {key: re.search(r"marks: (\[\[.*?\]\])", rest) for key, rest in entries}
    drawn = {key: json.loads(marks[1]) for key, marks in found.items() if marks}
    assert drawn == {
        "peak": [[rung.value, rung.level] for rung in reversed(thresholds.PEAK)],
        "evenness": [[thresholds.FLAT.value, "flat"]],
        "saturated": [[thresholds.SATURATED.value, "saturated"]],
        "sink_weight": [[thresholds.SINK.value, "sink"]],
        "evenness_without_sinks": [[thresholds.COLLAPSED.value, "collapsed"]],
        "neighbour_weight": [[thresholds.POSITIONAL.value, "positional"]],
        "text_distance": [[thresholds.DEAD.value, "dead"]],
    }
    block = re.search(r"export const LEVELS = (.*?);\n", source, flags=re.DOTALL)[1]
    assert re.findall(r'"(\w+)"', block) == list(thresholds.LEVELS)
