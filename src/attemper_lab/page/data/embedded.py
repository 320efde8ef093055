"""The embedded MiniLM on the page's two sentences, for a page without a server."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from attemper.errors import MissingExtra
from attemper.extension.inputs import SENTENCE, Loaded, load

from .flow import read_flow
from .heads import read_heads

TEXTS = (SENTENCE, "Love Apple phones")
HEAD = (4, 3)
"""The layer and head whose flow is drawn. In this head "it" gives "ball" more weight than in any other."""


def heads() -> dict[str, Any]:
    """Both sentences with the logits of all heads."""
    return _texts(lambda model: [read_heads(model, text).document() for text in TEXTS])


def flow() -> dict[str, Any]:
    """The first sentence through one head."""
    return _texts(lambda model: [read_flow(model, TEXTS[0], *HEAD)])


def _texts(read: Callable[[Loaded], list[dict[str, Any]]]) -> dict[str, Any]:
    """What ``read`` gives; where the model is not installed, nothing, and why in ``missing``."""
    try:
        model = _model()
    except MissingExtra as error:
        return {"texts": [], "missing": str(error)}
    return {"texts": read(model), "missing": None}


@cache
def _model() -> Loaded:
    return load(None)
