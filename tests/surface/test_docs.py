"""What is written is true: doctests, the README's code, tree and table, the reference page, and the examples."""

import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import attemper
from attemper.vitals import DERIVED, SIGNS

REPO = Path(__file__).parents[2]
PACKAGE = Path(attemper.__file__).parent
README = (REPO / "README.md").read_text(encoding="utf-8")
MODULES = ["attemper"] + [
    found.name for found in pkgutil.walk_packages(attemper.__path__, "attemper.") if not found.name.endswith("__main__")
]
EXAMPLES = {
    "vitals.py": "Without the scale the logits spread 8.0 times as wide",
    "entropy_loss.py": "effective keys  64.0",
    "additive_and_dot.py": "which is not within 1: True",
    "from_scratch.py": "(theory: d_k = 64)",
    "swap_rule.py": "The first rule is what the model had: only rounding moved.",
    "watch_training.py": "|dq| per head",
    "scan_fault.py": "√d_model for √d_k: q·k is multiplied",
}


def fences(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a Markdown text: language, content."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def tree_on_page(text: str) -> dict[str, str]:
    """Path → purpose, from the block that draws src/attemper/ with two spaces per level."""
    block = next(body for _, body in fences(text) if body.startswith("src/attemper/"))
    paths, folders = {}, []
    for line in block.splitlines()[1:]:
        name, _, purpose = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        folders[depth:] = [name]
        paths["".join(folders)] = purpose.strip()
    return paths


def tree_on_disk(root: Path) -> set[str]:
    """Every module, and a folder for its __init__.py."""
    files = {path.relative_to(root).as_posix() for path in root.rglob("*.py")}
    inner = {name for name in files if name.endswith("/__init__.py")}
    return files - inner | {name.removesuffix("__init__.py") for name in inner}


def undocumented(function) -> set[str]:
    """The parameters that a docstring names neither itself nor through the function it points to."""
    text = inspect.getdoc(function) or ""
    if re.search(r"as in :func:`attention`|what ``attention\(\)`` takes", text):
        text += inspect.getdoc(attemper.attention)
    if "scaled_dot_product_attention``, argument for argument" in text:
        text += scaled_dot_product_attention.__doc__
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is not p.VAR_KEYWORD and not re.search(rf"\b{p.name}\b", text)}


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, REPO / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    globs = {"attemper": attemper, "torch": torch}
    report = io.StringIO()
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(importlib.import_module(name), globs=globs):
        runner.run(test, out=report.write)
    assert runner.failures == 0, report.getvalue()


def test_doctests_are_found():
    tests = doctest.DocTestFinder().find(importlib.import_module("attemper.attention"))
    assert sum(len(test.examples) for test in tests) >= 7


def test_readme_code_prints_what_readme_shows():
    blocks = fences(README)
    namespace: dict[str, object] = {}
    checked = 0
    for (language, code), (following, shown) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language != "python":
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        if following == "text":
            assert printed.getvalue() == shown
            checked += 1
    assert checked


def test_ten_lines_are_ten():
    code = next(body for language, body in fences(README) if language == "python")
    assert sum(bool(line.strip()) for line in code.splitlines()) == 10


def test_readme_tree_is_the_disk():
    page = tree_on_page(README)
    assert set(page) == tree_on_disk(PACKAGE)
    assert [name for name, purpose in page.items() if not purpose] == []


def test_the_tree_reader_reads():
    page = "```text\nsrc/attemper/\n  a.py    one\n  b/      two\n    c/    three\n      d.py  four\n  e.py\n```\n"
    assert tree_on_page(page) == {"a.py": "one", "b/": "two", "b/c/": "three", "b/c/d.py": "four", "e.py": ""}


def test_readme_explains_every_sign():
    assert set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE)) == {*SIGNS, *DERIVED}


def test_links_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (REPO / name).read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^):#]+)(?:#[\w-]+)?\)", text):
            assert (REPO / link).exists(), f"{name} links to {link}"


def test_make_targets_in_the_documents_exist():
    targets = set(re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (REPO / name).read_text(encoding="utf-8"), flags=re.MULTILINE))
        assert named
        assert named <= targets


def test_reference_page_is_fresh():
    reference = script("reference")
    assert reference.render() == reference.TARGET.read_text(encoding="utf-8"), "run make docs"


def test_reference_check_tells_a_stale_page(tmp_path, monkeypatch, capsys):
    reference = script("reference")
    monkeypatch.setattr(reference, "TARGET", tmp_path / "reference.md")
    assert reference.main(["--check"]) == 1
    assert "make docs" in capsys.readouterr().err
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0


def test_reference_page_has_every_public_name():
    page = script("reference").render()
    names = [name for name in attemper.__all__ if not re.search(rf"^## {name}\b", page, flags=re.MULTILINE)]
    assert names == []


@pytest.mark.parametrize("name", [n for n in attemper.__all__ if inspect.isfunction(getattr(attemper, n))])
def test_docstrings_name_every_parameter(name):
    assert undocumented(getattr(attemper, name)) == set()


def test_other_docstrings_name_every_parameter():
    assert undocumented(attemper.kernels.why) == set()
    assert undocumented(attemper.Vitals.by_head) - {"self"} == set()


def test_the_docstring_checker_can_fail():
    def attend(query, key):
        """Compare a query with something."""

    assert undocumented(attend) == {"key"}


def test_sdpa_has_torch_own_signature():
    written = re.search(r"scaled_dot_product_attention\((.*?)\)\s*->", scaled_dot_product_attention.__doc__, re.DOTALL)
    ours = inspect.signature(attemper.sdpa).parameters.values()
    assert [re.sub(r"\s", "", part) for part in written[1].split(",")] == [
        p.name if p.default is p.empty else f"{p.name}={p.default}" for p in ours
    ]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name):
    path = REPO / "examples" / name
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
    environment = {**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-W", "error", path],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert EXAMPLES[name] in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_every_example_is_run():
    assert set(EXAMPLES) == {path.name for path in (REPO / "examples").glob("*.py")}
