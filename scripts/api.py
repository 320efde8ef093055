"""Writes tests/surface/api.txt, the public interface of the last release: each name, its parameters, and the command's options.

Until the next release a test finds what differs from this file, and asks for an entry of CHANGELOG.md about each difference.
So type `make api` when a version is released, and never to silence that test.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import typer

import attemper
from attemper import errors, health, integrations, kernels, testing
from attemper.cli.commands import app
from attemper.extension import calls, command, files, inputs, machine, tools
from attemper.integrations.monitoring import MonitorCallback

TARGET = Path(__file__).parents[1] / "tests" / "surface" / "api.txt"
HEAD = """# The public interface of the last release, or of the first one to come: each name, and below it parameters or options.
# `make api` writes it when a version is released. tests/surface/test_api.py compares it with the sources.
"""
Interface = dict[str, list[str]]
"""Name → its parameters, options, keys or bases, in their order."""

ASIDE = {"HuggingFaceCallback": "huggingface", "LightningCallback": "lightning"}
"""Classes that are read from their source: their import loads a trainer, which may not be installed."""


def interface() -> Interface:
    """All that is public, as it is in the sources."""
    found: Interface = {}
    for name in attemper.__all__:
        if not isinstance(thing := getattr(attemper, name), ModuleType):
            found |= described(f"attemper.{name}", thing)
    modules: dict[ModuleType, list[str]] = {
        errors: [
            name for name, thing in vars(errors).items() if inspect.isclass(thing) and issubclass(thing, Exception)
        ],
        health: ["LEVELS", "NAMES", "Finding", "check", "findings", "verdict"],
        integrations: list(integrations.__all__),
        kernels: ["KERNELS", "why"],
        testing: [name for name in vars(testing) if name.startswith("assert_")],
        **{module: reexported(module) for module in (calls, command, files, inputs, machine, tools)},
    }
    for module, names in modules.items():
        for name in names:
            path = f"{module.__name__}.{name}"
            found |= from_source(path) if name in ASIDE else described(path, getattr(module, name))
    group: Any = typer.main.get_command(app)
    for name, one in {"attemper": group, **{f"attemper {name}": one for name, one in group.commands.items()}}.items():
        found[name] = [option(parameter) for parameter in one.params]
    return dict(sorted(found.items()))


def reexported(module: ModuleType) -> list[str]:
    """The names of ``from … import name as name``."""
    tree = ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return [alias.asname for node in imports for alias in node.names if alias.asname is not None]


def described(path: str, thing: Any) -> Interface:
    """A function, a class with its public methods and properties, a table with its keys; of anything else the name alone."""
    if isinstance(thing, dict | tuple):
        return {path: [str(key) for key in thing]}
    if inspect.isfunction(thing):
        return {path: parameters(thing)}
    if not inspect.isclass(thing) or not _ours(thing):
        return {path: []}
    if issubclass(thing, Exception):
        return {path: [f"({', '.join(base.__name__ for base in thing.__bases__)})"]}
    protocol = getattr(thing, "_is_protocol", False)
    found = {path: [] if protocol else [part for part in parameters(thing) if part != "-> None"]}
    for name in sorted(
        {name for base in filter(_ours, thing.__mro__) for name in vars(base) if not name.startswith("_")}
    ):
        member = inspect.getattr_static(thing, name)
        member = getattr(member, "__func__", member)  # of a class method
        if inspect.isfunction(member):
            found[f"{path}.{name}"] = parameters(member)
        elif isinstance(member, property):
            found[f"{path}.{name}"] = ["(a property)"]
    return found


def _ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] in ("attemper", "attemper_lab")


def parameters(called: Callable[..., Any]) -> list[str]:
    """A line for each parameter, with its annotation as it is written, and one for what comes back."""
    signature = inspect.signature(called)
    lines, by_name = [], False
    for each in signature.parameters.values():
        if each.name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and not by_name:
            lines.append("*")
        by_name = by_name or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        annotation = "" if each.annotation is each.empty else f": {annotated(each.annotation)}"
        default = "" if each.default is each.empty else f" = {written(each.default)}"
        lines.append(f"{star}{each.name}{annotation}{default}")
    if signature.return_annotation is not signature.empty:
        lines.append(f"-> {annotated(signature.return_annotation)}")
    return lines


def annotated(thing: Any) -> str:
    """An annotation, the same in every version of Python."""
    thing = getattr(thing, "__forward_arg__", thing)
    return thing if isinstance(thing, str) else inspect.formatannotation(thing)


def written(default: object) -> str:
    """A default value, the same in every process and on every machine."""
    text = str(default) if isinstance(default, Path) else repr(default)
    return "…" if text.startswith("<") else text


def from_source(path: str) -> Interface:
    """A class of ASIDE, with its methods."""
    name = path.rpartition(".")[2]
    file = Path(integrations.__file__ or "").with_name(f"{ASIDE[name]}.py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {path: parameters(MonitorCallback)[:-1]}  # whose __init__ both inherit
    for method in cls.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            method.decorator_list, method.body = [], [ast.Pass()]
            names: dict[str, Any] = {}
            exec(f"from __future__ import annotations\n{ast.unparse(method)}", names)
            found[f"{path}.{method.name}"] = parameters(names[method.name])
    return found


def option(parameter: Any) -> str:
    """An argument or an option of a command."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar)
    words = " / ".join(", ".join(names) for names in (parameter.opts, parameter.secondary_opts) if names)
    takes = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
    default = "" if parameter.default in (None, False) else f" = {written(parameter.default)}"
    return f"{words}{takes}{default}{', may be repeated' if parameter.multiple else ''}"


def text_of(found: Interface) -> str:
    return HEAD + "".join("\n" + "\n    ".join([name, *parts]) + "\n" for name, parts in found.items())


def parsed(text: str) -> Interface:
    """What :func:`text_of` wrote."""
    blocks = [block.split("\n") for block in text.strip().split("\n\n")[1:]]
    return {name: [part.strip() for part in parts] for name, *parts in blocks}


class Difference(NamedTuple):
    """What became of a public name, and the words that an entry of the changelog about it must have."""

    sentence: str
    words: set[str]


def differences(before: Interface, now: Interface) -> list[Difference]:
    """Between two interfaces. A class or a command that came or went counts once, not with each of its parts."""
    found, moved = [], before.keys() ^ now.keys()
    for name in sorted(before.keys() | now.keys()):
        old, new, leaf = before.get(name), now.get(name), re.split(r"[. ]", name)[-1]
        if name in moved and name.rpartition(".")[0] not in moved:
            found.append(Difference(f"{name} is {'gone' if new is None else 'new'}", {leaf}))
        elif old is not None and new is not None and old != new:
            gone, come = ([part for part in one if part not in other] for one, other in ((old, new), (new, old)))
            changed = [f"−{part}" for part in gone] + [f"+{part}" for part in come] or ["another order"]
            words = {
                leaf,
                *(
                    word
                    for part in gone + come
                    for word in re.findall(r"^\**(\w+)|^(?:--\w, )?(--?[\w-]+)", part)[:1]
                    for word in word
                ),
            }
            found.append(Difference(f"{name} changed: {'; '.join(changed)}", words - {""}))
    return found


def untold(found: list[Difference], changelog: str) -> list[str]:
    """The differences that no entry of the changelog names, and what to type."""
    entries = [
        set(re.findall(r"--?[\w-]+|\w+", entry)) for entry in re.split(r"^(?=- |\|)", changelog, flags=re.MULTILINE)
    ]
    return [
        f"{sentence}. Write an entry under [Unreleased] in CHANGELOG.md with the words {', '.join(sorted(words))}."
        for sentence, words in found
        if not any(words <= entry for entry in entries)
    ]


if __name__ == "__main__":
    TARGET.write_text(text_of(interface()), encoding="utf-8")
