"""joined: the page's ES modules, found from their imports, and joined into one module.

A module's name is the path it is served at: `page/…` for this folder's modules, `report/…` for those of the report. Joined, each
module is a function of its own, so that two modules may use the same name for different things.
"""

from __future__ import annotations

import functools
import posixpath
import re
from importlib.resources import files

from ..errors import InputError

ENTRY = "page/shell/start.js"
IMPORT = re.compile(r'^import \{([^}]*)\} from "(\.[\w./-]+\.js)";\n', flags=re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:const|let|class|function\*?|async function) (\w+))", flags=re.MULTILINE)


@functools.cache
def modules(entry: str = ENTRY) -> dict[str, str]:
    """Name → text of every module that ``entry`` needs, itself last: each stands after those that it imports."""
    found: dict[str, str] = {}
    _visit(entry, found, ())
    return found


def script(entry: str = ENTRY) -> str:
    """All modules as one, without an export: ``needed["page/shell/start.js"]`` has what ``entry`` exports."""
    return "const needed = {};\n" + "".join(_scoped(name, text) for name, text in modules(entry).items())


def style() -> str:
    """The page's style sheet: page.css, then those of the panels, by name."""
    folder = files(__package__) / "modules"
    panels = sorted((one for one in (folder / "panels").iterdir() if one.is_dir()), key=lambda one: one.name)
    sheets = [one for panel in panels for one in panel.iterdir() if one.name.endswith(".css")]
    return "".join(sheet.read_text(encoding="utf-8") for sheet in (folder / "page.css", *sheets))


def template() -> str:
    return (files(__package__) / "modules" / "page.html").read_text(encoding="utf-8")


def _visit(name: str, found: dict[str, str], path: tuple[str, ...]) -> None:
    if name in found:
        return
    if name in path:
        raise InputError(f"the page's modules import one another in a circle: {' → '.join((*path, name))}.")
    text = _text(name)
    for _, target in IMPORT.findall(text):
        _visit(_resolved(name, target), found, (*path, name))
    found[name] = text


def _resolved(name: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), target))


def _text(name: str) -> str:
    part, _, rest = name.partition("/")
    folder = {"page": files(__package__) / "modules", "report": files("attemper.report")}[part]
    return folder.joinpath(rest).read_text(encoding="utf-8")


def _scoped(name: str, text: str) -> str:
    """A module as a function that is called once; ``import { a as b }`` becomes ``const { a: b }``."""

    def bound(found: re.Match[str]) -> str:
        names = re.sub(r"\s+as\s+", ": ", found[1].strip())
        return f'const {{ {names} }} = needed["{_resolved(name, found[2])}"];\n'

    exported = ", ".join(dict.fromkeys(EXPORT.findall(text)))
    inner = EXPORT.sub("", IMPORT.sub(bound, text))
    return f'needed["{name}"] = (() => {{\n{inner}\nreturn {{ {exported} }};\n}})();\n'
