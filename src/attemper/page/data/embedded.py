"""embedded: the embedded MiniLM on the page's two sentences, for a page that has no server behind it."""

from __future__ import annotations

from functools import cache
from typing import Any

from ...demo import SENTENCE
from ...errors import MissingExtra
from ...scan.input.model import Loaded, load
from .flow import read_flow
from .heads import read_heads

TEXTS = (SENTENCE, "Love Apple phones")
HEAD = (4, 3)
"""The layer and head whose flow is drawn: of all heads its "it" looks at "ball" most, and more than its other words do."""


def heads() -> dict[str, Any]:
    """Both sentences with the logits of all heads; ``missing`` says why where the model is not installed."""
    try:
        model = _model()
    except MissingExtra as error:
        return {"texts": [], "missing": str(error)}
    return {"texts": [read_heads(model, text).document() for text in TEXTS], "missing": None}


def flow() -> dict[str, Any]:
    """The first sentence through one head; ``missing`` says why where the model is not installed."""
    try:
        model = _model()
    except MissingExtra as error:
        return {"texts": [], "missing": str(error)}
    return {"texts": [read_flow(model, TEXTS[0], *HEAD)], "missing": None}


@cache
def _model() -> Loaded:
    return load(None)
