"""Writes the file tree of docs/architecture.md: every file of src/attemper with the first line of its docstring."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "src" / "attemper", ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- tree -->\n", "<!-- /tree -->\n"


def tree(folder: Path = SOURCE, depth: int = 1) -> list[str]:
    """Lines of a folder: its files, then its folders."""
    lines = []
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir() and (path / "__init__.py").exists():
            lines += [line(path.name + "/", path / "__init__.py", depth), *tree(path, depth + 1)]
        elif path.suffix == ".py" and (path.name != "__init__.py" or depth == 1):
            lines.append(line(path.name, path, depth))
    return lines


def line(name: str, file: Path, depth: int) -> str:
    """One line: the name, and what the file says of itself, without its own name in front."""
    first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")[0]
    return f"{'  ' * depth + name:24}  {first.removeprefix(f'{file.stem}: ').removeprefix(f'{file.parent.name}: ')}"


def page() -> str:
    """docs/architecture.md with the tree of today."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    drawn = "\n".join(["```text", "src/attemper/", *tree(), "```"])
    return f"{before}{BEGIN}{drawn}\n{END}{after}"


def main(arguments: list[str]) -> int:
    if "--check" not in arguments:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page():
        return 0
    print("the tree in docs/architecture.md is stale. Run make docs.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
