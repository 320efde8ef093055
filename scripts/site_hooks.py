"""What mkdocs adds to docs/: README.md as the start, CONTRIBUTING.md, CHANGELOG.md, the page, the notebook with its output."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient

from attemper_lab.page import html

ROOT = Path(__file__).parents[1]
COPIED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
NOTEBOOK = "notebooks/why-sqrt-dk.ipynb"
LINK = re.compile(r"(\]\()((?:\.\./)*)([\w./-]+)((?:#[\w-]*)?\))")


_run_notebook = False


def on_startup(command: str, dirty: bool) -> None:
    """Run the notebook for a build; while someone edits, its text is enough."""
    global _run_notebook
    _run_notebook = command == "build"


def on_config(config: Any) -> Any:
    """Offer other versions where `mike` builds one of several."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here, once for each run of mkdocs."""
    made = {"why.html": html(), "notebook.md": _notebook()}
    made |= {target: (ROOT / name).read_text(encoding="utf-8") for name, target in COPIED.items()}
    for target, content in made.items():
        if (replaced := files.get_file_from_path(target)) is not None:  # docs/index.md, whose table the navigation is
            files.remove(replaced)
        files.append(File.generated(config, target, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links out of docs/ at the pages made from those files, or else at the repository."""
    source = page.file.src_uri
    if source in COPIED.values():  # written from the repository's root
        markdown = LINK.sub(lambda link: _relinked(link, link[2] + link[3], config), markdown)
    else:
        depth = source.count("/") + 1
        markdown = LINK.sub(
            lambda link: _relinked(link, link[3], config) if link[2] == "../" * depth else link[0], markdown
        )
    return markdown


def _relinked(link: re.Match[str], target: str, config: Any) -> str:
    """A link whose target is a path from the repository's root."""
    if target.startswith("docs/"):
        where = target.removeprefix("docs/")
    elif target == NOTEBOOK:
        where = "notebook.md"
    elif target in COPIED:
        where = COPIED[target]
    else:
        where = f"{config.extra['repository']}/blob/main/{target}" if (ROOT / target).exists() else target
    return f"{link[1]}{where}{link[4]}"


def _notebook() -> str:
    """The notebook as Markdown, with its output if it is run."""
    notebook = nbformat.read(ROOT / NOTEBOOK, as_version=4)
    if _run_notebook:
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "notebooks")}}).execute()
    parts = []
    for cell in notebook.cells:
        parts.append(cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```")
        parts += [_shown(output) for output in cell.get("outputs", ())]
    return "\n\n".join(parts)


def _shown(output: Any) -> str:
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return f'<div class="output">{data["image/svg+xml"]}</div>'
    return f"```text\n{data.get('text/plain', output.get('text', '')).rstrip()}\n```"
