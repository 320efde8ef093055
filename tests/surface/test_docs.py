"""The documentation is true: doctests, the blocks of the pages, the tree, the tables, and the reference page."""

import doctest
import importlib
import importlib.util
import inspect
import io
import pkgutil
import re
import shlex
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention
from typer.testing import CliRunner

import attemper
import folders
import native
from attemper.cli.commands import app
from attemper.health import faults, thresholds
from attemper.vitals import DERIVED, SIGNS

REPO = Path(__file__).parents[2]
PACKAGE = Path(attemper.__file__).parent
README = (REPO / "README.md").read_text(encoding="utf-8")
MODULES = ["attemper"] + [
    module.name
    for module in pkgutil.walk_packages(attemper.__path__, "attemper.", onerror=lambda name: None)
    if not module.name.endswith("__main__")
    and "kernels.triton" not in module.name  # needs triton, which may be missing
    and module.name.removeprefix("attemper.integrations.") not in ("huggingface", "lightning", "axolotl", "torchtitan")
]


def fences(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a Markdown text: language, content."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


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


@native.needed
def test_the_counts_of_the_walks_are_those_of_the_code():
    """The files in order and the number of calls, for attention and a watched step; scripts/walk.py --check compares all."""
    walk = script("walk")
    written = walk.blocks(walk.PAGE.read_text(encoding="utf-8"))
    assert list(written) == list(walk.WALKS)
    assert walk.block(walk.attention_walks()) == written["attention"], "run scripts/walk.py"
    for name, step in walk.watch_walks().items():
        if "Hugging Face" not in name:
            assert f"\n{walk.text(name, step)}\n" in written["watch"], "run scripts/walk.py"


def test_the_count_of_a_walk():
    """A generator counts once, however often it resumes; comprehensions, module bodies and foreign code do not count."""
    code = compile(
        "def numbers():\n    yield 1\n    yield 2\n"
        "def never():\n    yield 3\n"
        "twice = lambda n: 2 * n\n"
        "def call():\n    never()\n    return [twice(n) for n in numbers()] + sorted(map(abs, (n for n in (1,))))\n"
        "class Local:\n    pass\n",
        str(PACKAGE / "vitals.py"),
        "exec",
    )
    names = {}
    exec(code, names)
    found = script("walk").counted(names["call"])
    assert (found.files, found.calls) == (["vitals.py"], 4)  # call, numbers, and the lambda twice
    assert script("walk").counted(lambda: exec(code, {})).calls == 0


def test_doctests():
    report = io.StringIO()
    runner = doctest.DocTestRunner()
    for name in MODULES:
        globs = {"attemper": attemper, "torch": torch}
        for test in doctest.DocTestFinder().find(importlib.import_module(name), globs=globs):
            runner.run(test, out=report.write)
    assert runner.failures == 0, report.getvalue()


def test_doctests_are_found():
    tests = doctest.DocTestFinder().find(importlib.import_module("attemper.attention"))
    assert sum(len(test.examples) for test in tests) >= 7


def test_blocks_print_what_the_pages_show():
    assert script("blocks").stale() == [], "run make docs, and read what changed"


def test_a_changed_output_is_noticed():
    page = "```python\nprint(1)\n```\n\n```text\n2\n```\n"
    assert script("blocks").filled(page) == page.replace("2", "1")


def test_every_command_of_the_readme_runs(tmp_path, monkeypatch):
    """path/to/model holds a small model here. Lines with `make` and `pip` are left to tests/install."""
    folders.save(tmp_path / "path" / "to" / "model", "bert")
    monkeypatch.chdir(tmp_path)
    lines = [line for language, body in fences(README) if language == "sh" for line in body.splitlines()]
    # `serve` does not end by itself; tests/page runs it
    lines = [line for line in lines if re.match("attemper (?!serve)", line) and "path/to/model" in line]
    for line in lines:
        _, *arguments = shlex.split(line, comments=True)
        arguments, _, file = " ".join(map(shlex.quote, arguments)).partition(" '>' ")
        done = CliRunner().invoke(app, shlex.split(arguments))
        assert done.exit_code == 0, (line, done.output)
        if file:
            Path(file).write_text(done.stdout, encoding="utf-8")
    assert len(lines) >= 4
    assert "<html" in Path("report.html").read_text(encoding="utf-8")


def test_ten_lines_are_ten():
    code = next(body for language, body in fences(README) if language == "python" and "attemper.attention(" in body)
    assert sum(bool(line.strip()) for line in code.splitlines()) == 10


def test_the_readme_has_the_gpu_times_of_the_gpu_page():
    """Both calls of the README, in milliseconds, from the table of docs/gpu.md."""
    rows = [
        [cell.strip().partition(" ")[0].strip("*") for cell in line.strip("|").split("|")]
        for line in (REPO / "docs" / "gpu.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| 128 |")
    ]
    (_, _, _, cudnn, flash, _, ours, *_), short = (
        next(row for row in rows if row[1:3] == [keys, "causal"]) for keys in ("4,096", "1,024")
    )
    words = " ".join(README.split())
    assert f"takes {ours} ms at 4,096 keys and {short[6]} ms at 1,024, with all signs" in words
    assert f"FlashAttention-2 takes {flash} and {short[4]} ms, and cuDNN" in words
    assert f"torch's default there, {cudnn} and {short[3]} ms" in words


def test_the_vitals_page_explains_every_sign():
    page = (REPO / "docs" / "vitals.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)) == {*SIGNS, *DERIVED}


def test_the_scan_page_explains_every_finding_and_fault():
    page = (REPO / "docs" / "scan.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)) == {*faults.FAULTS, *thresholds.NAMES}


def test_the_audit_page_shows_every_fault_and_check():
    page = (REPO / "docs" / "audit.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)) == set(faults.CHECKS)
    assert set(re.findall(r'^show\(.*?, "(\w+)"', page, flags=re.MULTILINE)) == set(faults.ATTENTION_FAULTS)
    sections = re.split(r"^### ", page, flags=re.MULTILINE)[1:]
    assert all(
        re.search(r"^Seen in \[[\w.-]+/[\w.-]+ #\d+\]\(https://github.com/", one, re.MULTILINE) for one in sections
    )


def test_links_lead_somewhere():
    """Links in deeper folders too, and links to headings and anchors."""
    broken = []
    for path in (*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")):
        for link, heading in re.findall(r"\]\(([^):#]*)(?:#([\w-]+))?\)", path.read_text(encoding="utf-8")):
            target = path.parent / link if link else path
            if not target.exists():
                broken.append(f"{path.name} links to {link}")
            elif heading and target.suffix == ".md":
                text = target.read_text(encoding="utf-8")
                titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
                there = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                if heading not in there | set(re.findall(r'<a id="([\w-]+)">', text)):
                    broken.append(f"{path.name} links to {link}#{heading}")
    assert broken == []


def test_the_walks_name_files_that_exist_and_return_to_none():
    page = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
    wrong = []
    for walk in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        passed: list[Path] = []
        for step in re.split(r"^\d+\. ", walk, flags=re.MULTILINE)[1:]:
            folder = PACKAGE
            for name, dispatcher in re.findall(r"`([\w./]+)`( \(dispatcher\))?", step):
                if not re.search(r"\.(py|c|h)$|/$", name):
                    continue
                path = next(
                    (
                        root / name
                        for root in (folder, PACKAGE, PACKAGE.parent, folder.parent)
                        if (root / name).exists()
                    ),
                    None,
                )
                if path is None or path in passed:
                    wrong.append(name)
                elif path.is_dir() or "/" in name:
                    folder = path if path.is_dir() else path.parent
                if path is not None and path.is_file() and not dispatcher:
                    passed.append(path)
    assert wrong == []


def test_the_design_names_what_exists():
    """`foo.py` and `bar/` in docs/design.md are paths, or called planned in the same sentence."""
    page = (REPO / "docs" / "design.md").read_text(encoding="utf-8")
    roots = (PACKAGE, PACKAGE.parent, REPO, *PACKAGE.iterdir(), PACKAGE.with_name("attemper_lab"))
    missing = []
    for part in re.split(r"(?<=[.;|])\s", page):
        names = re.findall(
            r"`([\w./]+(?:\.(?:py|c|h|js)|/))`", part.partition("lanned:")[0] if "lanned" in part else part
        )
        missing += [name for name in names if not any((root / name).exists() for root in roots)]
    assert missing == []


def test_every_page_is_in_the_index():
    index = (REPO / "docs" / "index.md").read_text(encoding="utf-8")
    assert [
        path.name for path in (REPO / "docs").glob("*.md") if path.name != "index.md" and f"({path.name})" not in index
    ] == []


def test_make_targets_in_the_documents_exist():
    targets = set(re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (REPO / name).read_text(encoding="utf-8"), flags=re.MULTILINE))
        assert named
        assert named <= targets
    table = set(re.findall(r"`make ([a-z-]+)`", (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    explained = set(re.findall(r"^([\w-]+):.*## ", (REPO / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert explained - table == set()


def test_planted_bugs_are_lines_of_the_source():
    planted = script("planted")
    for bug in planted.BUGS:
        path = next(root / bug.file for root in planted.BASES if (root / bug.file).exists())
        assert bug.right in path.read_text(encoding="utf-8"), bug.name


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


def test_docstrings_name_every_parameter():
    functions = [name for name in attemper.__all__ if inspect.isfunction(getattr(attemper, name))]
    assert {name: undocumented(getattr(attemper, name)) for name in functions} == {name: set() for name in functions}


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
