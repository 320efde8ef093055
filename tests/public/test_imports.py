"""The judge knows no inside: these tests, and every helper that they import, use only names that docs/reference.md has."""

import ast
from pathlib import Path

import attemper

TESTS = Path(__file__).parents[1]
REFERENCE = (TESTS.parent / "docs" / "reference.md").read_text(encoding="utf-8")
PARTS = {"errors", "health", "integrations", "kernels", "testing"}
"""Submodules that the reference has a section for."""
ALSO = {"attemper.kernels.KERNELS", "attemper.watch.examine.Examiner", "attemper.__all__"}
"""What the text of a section names."""


def files() -> dict[Path, ast.Module]:
    """The tests of this folder, and the helpers among tests/ that they import, as far as it goes."""
    found: dict[Path, ast.Module] = {}
    left = [*Path(__file__).parent.glob("*.py"), TESTS / "conftest.py"]
    while left:
        path = left.pop()
        if path in found:
            continue
        found[path] = ast.parse(path.read_text(encoding="utf-8"))
        for name in imported(found[path]):
            candidates = (TESTS.joinpath(*name.split(".")[:depth]).with_suffix(".py") for depth in (1, 2, 3))
            left += [candidate for candidate in candidates if candidate.exists()]
    return found


def imported(tree: ast.AST) -> set[str]:
    """Every name that is imported, in full."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def used(tree: ast.AST) -> set[str]:
    """Every `attemper.a.b` that is read, and every name that is imported from attemper."""
    names = {name for name in imported(tree) if name.split(".")[0] == "attemper"}
    for node in ast.walk(tree):
        chain, inner = [], node
        while isinstance(inner, ast.Attribute):
            chain.append(inner.attr)
            inner = inner.value
        if chain and isinstance(inner, ast.Name) and inner.id == "attemper":
            names.add(".".join(["attemper", *reversed(chain)]))
    return names


def is_public(name: str) -> bool:
    if name == "attemper" or name in ALSO:
        return True
    _, first, *rest = name.split(".")
    if first in PARTS:
        return not rest or f"### {first}.{rest[0]}" in REFERENCE or (first == "errors" and rest[0] in REFERENCE)
    return first in attemper.__all__ and not any(word.startswith("_") for word in rest) and f"\n## {first}" in REFERENCE


def test_no_internal_name_is_used():
    trees = files()
    assert len([path for path in trees if path.parent.name == "public"]) >= 10
    # a fixture of tests/conftest.py that these tests do not use imports the command, and what a watch touches
    internal = {
        f"{path.relative_to(TESTS)}: {name}"
        for path, tree in trees.items()
        for name in used(tree)
        if not is_public(name) and path.name not in ("conftest.py", "watched.py")
    }
    assert not internal


def test_the_check_finds_what_it_looks_for():
    inside = (
        "from attemper.kernels.contract import Problem",
        "import attemper.operation",
        "attemper.vitals.SIGNS",
        "attemper._files",
    )
    for line in inside:
        assert not all(is_public(name) for name in used(ast.parse(line))), line
    for public in (
        "import attemper",
        "attemper.Record.read",
        "from attemper.errors import InputError",
        "attemper.kernels.why",
    ):
        assert all(is_public(name) for name in used(ast.parse(public)))
