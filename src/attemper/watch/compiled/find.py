"""Find: which modules of a model attend by attemper's functions or the Hugging Face interface, as their code shows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from ...attention import attention, sdpa
from ...modules.multi_head import MultiHeadAttention
from ...scores.cosine import cosine_attention

NAMES = {"attention": attention, "sdpa": sdpa, "cosine_attention": cosine_attention}
"""attemper's functions whose calls a tally can follow."""
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
LIBRARIES = ("torch.", "transformers.modeling_utils")  # their classes hold no attention of a model
HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "heads", "nhead")
MOST_HEADS = 128
"""Heads of a module that has no attribute to tell them."""


def way_of(module: nn.Module) -> str | None:
    """How a module attends: "module" (MultiHeadAttention), "interface", "own" or "torch", which no tally can follow; or None."""
    if isinstance(module, MultiHeadAttention):
        return "module"
    if isinstance(module, nn.MultiheadAttention):
        return "torch"
    cls: Any = type(module)
    return _way_of_class(cls)


@cache
def _way_of_class(cls: Any) -> str | None:
    ways = set()
    for function in _functions(cls):
        for code in _codes(function.__code__):
            if INTERFACE in code.co_names:
                return "interface"
            if any(_is_own(name, code, function.__globals__) for name in code.co_names):
                ways.add("own")
            if "scaled_dot_product_attention" in code.co_names:
                ways.add("torch")
    return min(ways, default=None)


def _functions(cls: type[nn.Module]) -> Iterator[FunctionType]:
    for base in cls.__mro__:
        if base.__module__.startswith(LIBRARIES):
            continue
        for thing in vars(base).values():
            function = inspect.unwrap(thing) if callable(thing) else None
            if isinstance(function, FunctionType):
                yield function


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_own(name: str, code: CodeType, names: dict[str, Any]) -> bool:
    """Whether a name in a function's code is attemper's attention: the function itself, or an attribute of the package."""
    if any(names.get(name) is function for function in NAMES.values()):
        return True
    modules = [names.get(other) for other in code.co_names] if name in NAMES else []
    return any(isinstance(module, ModuleType) and module.__name__ == "attemper" for module in modules)


def heads_of(module: nn.Module) -> int:
    """The most query heads that a module may have."""
    config = getattr(module, "config", None)
    counts = [getattr(place, name, None) for place in (module, config) for name in HEADS]
    return max((number for number in counts if isinstance(number, int)), default=MOST_HEADS)
