"""No test is skipped in silence: every reason says what the test would need, and the end of a run lists them."""

import ast
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

SOME = """
import pytest

@pytest.mark.parametrize("n", range(3))
@pytest.mark.skipif(True, reason="needs a GPU")
def test_a(n): ...

def test_b():
    pytest.importorskip("no_such_package")

def test_c():
    pytest.skip("does not apply: c")

def test_d(): ...
"""


def reasons(path: Path):
    """What the calls of a file give as reasons, but for names; of an f-string its beginning."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            *("pytest.skip", "pytest.importorskip", "pytest.mark.skip", "pytest.mark.skipif"),
        ):
            given = [word.value for word in node.keywords if word.arg == "reason"]
            given += node.args[:1] if ast.unparse(node.func) == "pytest.skip" else []
            for one in given:
                first = one.values[0] if isinstance(one, ast.JoinedStr) else one
                if isinstance(first, ast.Constant):
                    yield first.value
                elif isinstance(one, ast.JoinedStr):
                    yield ast.unparse(one)


def test_every_reason_says_what_is_needed():
    found = [(path.name, reason) for path in TESTS.rglob("*.py") for reason in reasons(path)]
    assert len(found) > 20
    assert [one for one in found if not one[1].startswith(("needs ", "does not apply: "))] == []


def test_the_end_of_a_run_lists_them(tmp_path):
    (tmp_path / "test_some.py").write_text(SOME)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "skipped",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
    ]
    command += ["-m", "not exhaustive", str(tmp_path)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert [line.strip() for line in done.stdout.splitlines()[-6:-1]] == [
        "3  needs a GPU (test_some.py)",
        "1  does not apply: c (test_some.py)",
        "1  needs the package no_such_package (test_some.py)",
        "the marker exhaustive was left out: make test-all runs it",
    ][-5:] or done.stdout
