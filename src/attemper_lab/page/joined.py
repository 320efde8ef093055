"""The page's script, style sheet and HTML. A module is named `page/…` if it is the page's, `report/…` if it is the report's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from attemper.extension.tools import report

ENTRY = "page/shell/start.js"
HOME = files(__package__) / "modules"
FOLDERS: Mapping[str, Traversable] = {"page": HOME, **report.joined.REPORT}


@cache
def script(*entries: str) -> str:
    """The modules that ``entries`` need as one script; those of the page if none is named."""
    return report.joined.script(*(entries or (ENTRY,)), folders=FOLDERS)


@cache
def style() -> str:
    """The page's style sheet: page.css, then those of the panels, by name."""
    panels = sorted((entry for entry in (HOME / "panels").iterdir() if entry.is_dir()), key=lambda entry: entry.name)
    sheets = [sheet for panel in panels for sheet in panel.iterdir() if sheet.name.endswith(".css")]
    return "".join(sheet.read_text(encoding="utf-8") for sheet in (HOME / "page.css", *sheets))


def template() -> str:
    return (HOME / "page.html").read_text(encoding="utf-8")
