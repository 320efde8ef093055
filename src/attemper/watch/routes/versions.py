"""Where the versions of transformers differ: how a model finds its attention function, and whether it can be switched."""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from typing import Any

from ..._files import version_of
from ...errors import InputError
from ..attach.running import running

SWITCHABLE = (4, 54)
"""The oldest version whose models can be switched to another attention function."""

Attend = Callable[..., Any]


def modeling() -> Any | None:
    """``transformers.modeling_utils`` if it is loaded; there is no model of transformers otherwise."""
    return sys.modules.get("transformers.modeling_utils")


def check_switchable(caller: str, otherwise: str) -> None:
    """Raise if models of the loaded version cannot be switched to another attention function."""
    library = sys.modules["transformers"]
    if version_of(library) < SWITCHABLE:
        raise InputError(
            f"{caller} needs transformers {'.'.join(map(str, SWITCHABLE))} or newer, whose models can be switched to another "
            f"attention function; {library.__version__} is installed. Type pip install -U 'attemper[hf]'. {otherwise}"
        )


def hand_out(wrap: Callable[[Attend, str | None], Attend], failed: Callable[[Exception], None]) -> Callable[[], None]:
    """Wrap the functions that models get from the attention interface; returns what undoes it.

    From 5.1 on models ask ``get_interface``, for eager too; what they get in a watched pass is wrapped. Before that they read
    the table of functions, which has no eager one: that is recognised by its ops, as any hand-written attention is. Before 4.48
    there is no table.
    """
    library = modeling()
    interface = getattr(library, "AttentionInterface", None)
    original = getattr(interface, "get_interface", None)
    if original is None:
        return _wrap_tables(getattr(library, "ALL_ATTENTION_FUNCTIONS", {}), wrap)

    def get_interface(table: Any, implementation: str | None, default: Attend) -> Attend:
        function = original(table, implementation, default)
        try:
            return function if running.current is None else wrap(function, implementation)
        except Exception as error:
            failed(error)
            return function

    def undo() -> None:
        interface.get_interface = original  # type: ignore[union-attr]

    interface.get_interface = get_interface  # type: ignore[union-attr]
    return undo


def _wrap_tables(table: Any, wrap: Callable[[Attend, str | None], Attend]) -> Callable[[], None]:
    """Put wrapped functions into the table itself: models have imported it by its name."""
    tables: list[MutableMapping[str, Attend]] = (
        [table] if isinstance(table, dict) else [table._global_mapping, table._local_mapping]  # a class since 4.51
    )
    changed = [
        (mapping, name, function, wrap(function, name)) for mapping in tables for name, function in mapping.items()
    ]
    for mapping, name, _, wrapped in changed:
        mapping[name] = wrapped

    def undo() -> None:
        for mapping, name, function, wrapped in changed:
            if mapping.get(name) is wrapped:  # not if another was registered meanwhile
                mapping[name] = function

    return undo
