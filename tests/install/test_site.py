"""The documentation site: built strictly; every link inside it resolves, and nothing on it comes from another host."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).parents[2]
OWN = re.search(r"^site_url: (.*)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)[
    1
]  # for search engines
BUILD = """
import sys
from mkdocs.commands.build import build
from mkdocs.config import load_config
build(load_config("mkdocs.yml", site_dir=sys.argv[1]))
"""


class Links(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.loads, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        known = dict(attributes)
        self.anchors.add(known.get("id") or known.get("name"))
        if tag == "a" and known.get("href"):
            self.links.append(known["href"])
        self.loads += [known[name] for name in ("src", "href") if tag in ("script", "img", "link") and known.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-W", "ignore", "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_links_resolve_and_nothing_comes_from_outside(site):
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 20
    wrong = []
    for path, page in pages.items():
        for load in page.loads:
            if load.startswith(("http:", "https:", "//")) and not load.startswith(OWN):
                wrong.append(f"{path.relative_to(site)} loads {load}")
        for link in page.links + page.loads:
            target, anchor = urldefrag(unquote(link))
            if ":" in target or target.startswith("//"):
                continue
            there = (path.parent / target).resolve() if target else path
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file() or (anchor and there in pages and anchor not in pages[there].anchors):
                wrong.append(f"{path.relative_to(site)} → {link}")
    assert wrong == []


def test_the_page_the_notebook_and_the_readme_are_in_it(site):
    assert "Why divide by" in (site / "why.html").read_text(encoding="utf-8")
    assert "cell by cell" in (site / "notebook" / "index.html").read_text(encoding="utf-8")
    assert "measures itself while it runs" in (site / "index.html").read_text(encoding="utf-8")
