"""Fills in what the documents' blocks print: a `text` block that follows a `python` block or one command holds its output.

`python scripts/blocks.py` writes; `python scripts/blocks.py --check` only compares. The blocks of a page share one namespace.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ["README.md"] + [
    f"docs/{name}.md" for name in ("attention", "audit", "notes", "scan", "treat", "vitals", "watch")
]
WITH_OUTPUT = re.compile(r"^```(python|sh)\n((?:(?!^```).)*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def filled(text: str) -> str:
    """A page with the output of its blocks."""
    namespace: dict[str, object] = {}
    outputs = {block.start(): block for block in WITH_OUTPUT.finditer(text)}
    pieces, end = [], 0
    for start in sorted({*outputs, *(block.start() for block in CODE.finditer(text))}):
        block = outputs.get(start)
        if block is None:
            match = CODE.match(text, start)
            assert match
            printed("python", match[1], namespace)
            continue
        pieces += [text[end : block.start(3)], printed(block[1], block[2], namespace)]
        end = block.end(3)
    return "".join([*pieces, text[end:]])


def printed(language: str, code: str, namespace: dict[str, object]) -> str:
    """What a block prints."""
    if language == "python":
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, namespace)
        return out.getvalue()
    from typer.testing import CliRunner

    from attemper.cli.commands import app

    program, *arguments = shlex.split(code, comments=True)
    assert program == "attemper", code
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"


def stale() -> list[str]:
    """The pages whose blocks print something else."""
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    return [page for page, text in texts.items() if filled(text) != text]


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        found = stale()
        if found:
            print(f"{', '.join(found)}: the output of a block has changed. Run make docs.", file=sys.stderr)
        return bool(found)
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
