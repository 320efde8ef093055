"""`pip install .` with a C compiler and without one: both install, and both say which kernels are there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ["src", "setup.py", "pyproject.toml", "README.md", "LICENSE"]

TRY = """
import json, pathlib, torch, attemper
from attemper import demo, env, report
q = torch.randn(1, 2, 9, 8)
output = attemper.attention(q, q, q).output
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
print(json.dumps({
    "right": torch.allclose(output, expected, atol=1e-5),
    "cpu": env.describe()["kernels"]["cpu"],
    "taken": [v.kernel for v in attemper.kernels.why(q, q, q) if v.taken],
    "from": str(pathlib.Path(attemper.__file__).parent.parent),
    "report": report.html({"schema": "attemper.scan/1"}).count("</script>"),
    "trained": demo.named("demo:scaled")[1].parent.name,
    "sources": [p.name for p in pathlib.Path(attemper.__file__).parent.rglob("*.[ch]")],
}))
"""


def unhurried(folder: Path) -> str:
    """A PATH whose compilers do not optimize, which is most of a build's time; the tests of kernels run one that did."""
    folder.mkdir()
    for name in ("cc", "gcc", "clang"):
        if (real := shutil.which(name)) is not None:
            (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(real)} "$@" -O0\n')
            (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), os.environ["PATH"]])


def install(folder: Path, compiler: str | None) -> dict:
    """Install a copy of this tree into a folder of its own, and see what it says."""
    tree, target = folder / "tree", folder / "installed"
    tree.mkdir()
    for name in NEEDED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
        else:
            shutil.copy(source, tree / name)
    environment = {**os.environ, "PATH": unhurried(folder / "bin"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if compiler is not None:
        environment["CC"] = compiler
    environment.pop("PYTHONPATH", None)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-compile"]
    done = subprocess.run(
        [*pip, "--target", str(target), str(tree)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    environment["PYTHONPATH"] = str(target)
    ran = subprocess.run(
        [sys.executable, "-c", TRY], capture_output=True, text=True, env=environment, cwd=folder, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["from"] == str(target)
    assert found["right"]
    assert found["trained"] == "scaled"
    (metadata,) = target.glob("attemper-*.dist-info/METADATA")
    links = re.findall(r"\]\(([^)]*)\)", metadata.read_text(encoding="utf-8"))
    assert len(links) > 20
    assert [
        link for link in links if not link.startswith(("https://", "#"))
    ] == []  # PyPI has no file of the repository
    assert found["report"] == 2  # the page, its style and its scripts came along
    return found


def test_with_a_compiler(tmp_path):
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("needs a C compiler: cc or gcc")
    found = install(tmp_path, None)
    assert found["cpu"]["available"]
    assert found["cpu"]["reason"].startswith("runs on cpu, with ")
    assert found["taken"] == ["cpu"]
    assert found["sources"] == []  # a wheel holds the library, not what it is made of


def test_without_a_compiler(tmp_path):
    found = install(tmp_path, str(tmp_path / "no-such-compiler"))
    assert not found["cpu"]["available"]
    assert "is not built here" in found["cpu"]["reason"]
    assert found["taken"] == ["blockwise"]
