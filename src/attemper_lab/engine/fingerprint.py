"""fingerprint: a hash of the code that measures a cell, so that results of edited code are not taken for results of this code.

It follows the functions, classes and constants of these packages that a function names, and what those name. Comments, docstrings
and everything that only reads rows (verdicts, titles, charts) leave it as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

LAB = __name__.split(".")[0]
PACKAGES = {LAB, "attemper", "research"}
CONSTANTS = (int, float, str, bytes, bool, type(None))


def fingerprint(function: Callable[..., Any]) -> str:
    """Sixteen hexadecimal digits that change when the code behind a function does."""
    digest = hashlib.sha256()
    visited: set[int] = set()
    for part in _parts(function, visited):
        digest.update(part.encode())
    return digest.hexdigest()[:16]


def _parts(thing: Any, visited: set[int]) -> Iterator[str]:
    if isinstance(thing, CONSTANTS):
        yield repr(thing)
        return
    if id(thing) in visited:
        return
    visited.add(id(thing))
    if isinstance(thing, tuple | list | set | frozenset):
        for part in thing if isinstance(thing, tuple | list) else sorted(thing, key=repr):
            yield from _parts(part, visited)
    elif isinstance(thing, dict):
        for name, part in thing.items():
            yield from _parts(name, visited)
            yield from _parts(part, visited)
    elif isinstance(thing, type) and _ours(thing):
        for name, part in vars(thing).items():
            if isinstance(part, FunctionType):
                yield name
                yield from _parts(part, visited)
    elif (function := getattr(thing, "__wrapped__", thing)) is not thing:
        yield from _parts(function, visited)
    elif isinstance(thing, FunctionType):
        yield from _of_function(thing, visited)


def _of_function(function: FunctionType, visited: set[int]) -> Iterator[str]:
    yield from _parts(function.__defaults__, visited)
    yield from _parts(function.__kwdefaults__, visited)
    for code in _codes(function.__code__):
        yield code.co_code.hex()
        for constant in code.co_consts:
            if constant is not None and not isinstance(constant, CodeType) and constant != function.__doc__:
                yield _written(constant)
        for name in code.co_names:
            yield name
            if name in function.__globals__:
                value = function.__globals__[name]
                if isinstance(value, ModuleType) and value.__name__.split(".")[0] in PACKAGES:
                    for inner in code.co_names:  # `theory.kurtosis` names a module and one of its functions
                        yield from _parts(vars(value).get(inner), visited)
                elif _is_state(value, function):
                    continue
                elif not isinstance(value, FunctionType | type) or _ours(value):
                    yield from _parts(value, visited)


def _is_state(value: object, function: FunctionType) -> bool:
    """Whether this may change while the process runs: the lab's own tables are constants, those of the library need not be."""
    return isinstance(value, dict | list | set) and not function.__module__.startswith((LAB, "research"))


def _written(constant: object) -> str:
    """A constant as text, with sets sorted, because their order changes from process to process. `x in {"a", "b"}` compiles to a
    set, and so does what dataclasses generate from Python 3.12 on."""
    if isinstance(constant, frozenset):
        return f"frozenset({sorted(map(_written, constant))})"
    return f"({', '.join(map(_written, constant))})" if isinstance(constant, tuple) else repr(constant)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).split(".")[0] in PACKAGES
