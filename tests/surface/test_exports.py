"""The public names: complete, sorted, lazy, and the same whichever is read first."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import attemper

# Each order needs a process in which attemper is new; forking one that has torch already makes that cheap.
FORKED = """
import json, os, sys, torch, torch._dynamo
for statements in json.load(sys.stdin):
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            exec(statements, {})
            print(json.dumps([statements, None]))
        except BaseException as error:
            print(json.dumps([statements, repr(error)]))
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
USE = """
import torch, types
q = torch.ones(2, 4)
assert attemper.attention(q, q, q).output.shape == (2, 4)
assert attemper.sdpa(q, q, q).shape == (2, 4)
assert isinstance(attemper.kernels, types.ModuleType)
assert not isinstance(attemper.attention, types.ModuleType)
assert not isinstance(attemper.watch, types.ModuleType)
assert attemper.watch(torch.nn.MultiheadAttention(4, 2)).record is not None
"""


def run_fresh(blocks: list[str]) -> dict[str, str | None]:
    """Run each block in its own process where nothing of attemper is loaded; the error of each, or None."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        input=json.dumps(blocks),
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(found) == len(blocks), done.stderr
    return found


def test_all_is_sorted_and_what_type_checkers_see():
    assert attemper.__all__ == sorted(set(attemper.__all__))
    tree = ast.parse(Path(attemper.__file__).read_text(encoding="utf-8"))
    typed = next(node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    names = {alias.asname for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(attemper.__all__)


def test_every_name_resolves_and_is_listed():
    for name in attemper.__all__:
        assert getattr(attemper, name) is not None
    assert set(dir(attemper)) == {*attemper.__all__, "__version__"}


def test_star_import_gives_all():
    names: dict[str, object] = {}
    exec("from attemper import *", names)
    assert set(attemper.__all__) <= set(names)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        attemper.atention  # noqa: B018


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX")
def test_names_do_not_depend_on_what_is_read_first():
    # names of one home load the same module: one of them comes first, and each that a module has too
    homes = attemper._HOMES
    firsts = {homes[name]: name for name in attemper.__all__}.values()
    modules = [name for name in attemper.__all__ if importlib.util.find_spec(f"attemper.{name}") is not None]
    blocks = [
        "\nattemper.".join(["import attemper", name, *(one for one in homes if homes[one] == homes[name])]) + USE
        for name in dict.fromkeys([*firsts, *modules])
    ]
    extension = [f"extension.{path.stem}" for path in Path(attemper.__file__).parent.glob("extension/[a-z]*.py")]
    blocks += [
        f"import attemper.{module}\nimport attemper{USE}"
        for module in ("attention", "kernels", "vitals", "operation.ops", "watch", "watch.record", *extension)
    ]
    blocks += [f"from attemper import {name}\nimport attemper{USE}" for name in ("attention", "sdpa", "kernels")]
    blocks += [f"from attemper import {name}\nimport attemper.{name}{USE}" for name in ("attention", "watch")]
    failing = "import attemper\nattemper.nothing_here"
    errors = {block: error for block, error in run_fresh([*blocks, failing]).items() if error}
    assert list(errors) == [failing]
