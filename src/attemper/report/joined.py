"""Finds ES modules by their imports, and joins them into one script, each in its own scope.

A module's name is its folder's name and its path in the folder: `report/views/dom.js`. attemper_lab's page adds its own folder.
Each module becomes a function, so that two modules may use the same name for different things.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from ..errors import InputError

REPORT: Mapping[str, Traversable] = {"report": files(__package__)}
IMPORT = re.compile(r'^import \{([^}]*)\} from "(\.[\w./-]+\.js)";\n', flags=re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:const|let|class|function\*?|async function) (\w+))", flags=re.MULTILINE)
COMMENT = re.compile(r"^ *(?://.*|/\*\*(?:[^*]|\*(?!/))*\*/)\n", flags=re.MULTILINE)


def modules(*entries: str, folders: Mapping[str, Traversable] = REPORT) -> dict[str, str]:
    """Name → text of every module that ``entries`` need, in an order in which each comes after those that it imports."""
    texts: dict[str, str] = {}
    for entry in entries:
        _visit(entry, texts, (), folders)
    return texts


def script(*entries: str, folders: Mapping[str, Traversable] = REPORT) -> str:
    """All modules as one script. It exports nothing; ``needed["report/views/dom.js"]`` has what that module exports."""
    texts = modules(*entries, folders=folders)
    return "const needed = {};\n" + "".join(_scoped(name, text) for name, text in texts.items())


def resolved(name: str, target: str) -> str:
    """The name of the module that ``name`` imports as ``target``."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), target))


def _visit(name: str, texts: dict[str, str], path: tuple[str, ...], folders: Mapping[str, Traversable]) -> None:
    if name in texts:
        return
    if name in path:
        raise InputError(f"the page's modules import one another in a circle: {' → '.join((*path, name))}.")
    part, _, rest = name.partition("/")
    text = folders[part].joinpath(rest).read_text(encoding="utf-8")
    for _, target in IMPORT.findall(text):
        _visit(resolved(name, target), texts, (*path, name), folders)
    texts[name] = text


def _scoped(name: str, text: str) -> str:
    """A module, without its comments, as a function that is called once; ``import { a as b }`` becomes ``const { a: b }``."""

    def bound(imported: re.Match[str]) -> str:
        names = re.sub(r"\s+as\s+", ": ", imported[1].strip())
        return f'const {{ {names} }} = needed["{resolved(name, imported[2])}"];\n'

    exported = ", ".join(dict.fromkeys(EXPORT.findall(text)))
    inner = COMMENT.sub("", EXPORT.sub("", IMPORT.sub(bound, text)))
    return f'needed["{name}"] = (() => {{\n{inner}\nreturn {{ {exported} }};\n}})();\n'
