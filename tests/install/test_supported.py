"""The page of supported versions says what pyproject.toml, constraints.txt and the oldest releases say."""

import re
import tomllib
from pathlib import Path

from attemper._files import OLDEST
from attemper.kernels import OLDEST_TRITON

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/supported.md").read_text(encoding="utf-8")
ROWS = {
    name: (oldest, newest)
    for name, oldest, newest in re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|", PAGE, re.MULTILINE)
}
NAMES = {"Lightning": "pytorch-lightning"}


def pinned(name: str) -> dict[str, str]:
    """Package → version of a file of requirements."""
    return dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE))


def floors() -> dict[str, str]:
    """Package → the oldest version that pyproject.toml takes, in whichever extra it is, but for tools of development."""
    extras = PROJECT["project"]["optional-dependencies"]
    listed = [
        *PROJECT["project"]["dependencies"],
        *(one for name, extra in extras.items() if name != "dev" for one in extra),
    ]
    found: dict[str, str] = {}
    for package, version in (re.fullmatch(r"([\w-]+)>=([\d.]+)", one).groups() for one in listed if ">=" in one):
        if package not in found or tuple(map(int, version.split("."))) < tuple(map(int, found[package].split("."))):
            found[package] = version
    return found


def same(version: str, floor: str) -> bool:
    """`1.5.0` is `1.5`."""
    return version == floor or (version.startswith(f"{floor}.") and not version.removeprefix(floor).strip(".0"))


def test_the_oldest_are_those_that_pip_takes_and_make_oldest_installs():
    installed, taken = pinned("tests/install/oldest.txt"), floors()
    for name, floor in taken.items():
        assert same(ROWS[name][0], floor), name
        assert name == "torch" or installed[name] == ROWS[name][0]
    assert set(ROWS) == {*taken, "Python", "Lightning", "triton"}
    assert {"transformers": tuple(map(int, taken["transformers"].split(".")))} == OLDEST


def test_the_newest_are_those_of_the_tests():
    newest = pinned("constraints.txt")
    for name in set(ROWS) - {"Python", "triton"}:
        assert ROWS[name][1] == newest[NAMES.get(name, name)], name


def test_python_triton_and_lightning():
    pythons = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["project"]["classifiers"]), re.MULTILINE)
    assert ROWS["Python"] == (pythons[0], pythons[-1])
    assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"
    tried = dict(re.findall(r"\b(triton|pytorch-lightning)==([\d.]+)", (ROOT / "Makefile").read_text(encoding="utf-8")))
    assert ROWS["triton"] == (f"{OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}.0", tried["triton"])
    assert ROWS["Lightning"][0] == tried["pytorch-lightning"]


def test_the_page_is_found_and_says_what_nobody_tried():
    for name in ("README.md", "docs/index.md"):
        assert "supported.md)" in (ROOT / name).read_text(encoding="utf-8")
    for machine in ("ROCm", "MPS"):
        assert re.search(rf"^\| .*{machine}.*tried by nobody \|$", PAGE, re.MULTILINE)
