"""integrations: the watch inside a trainer, its numbers in a logger.

Data passes the files in this order:

    huggingface, lightning    callbacks for transformers.Trainer and for Lightning
    monitoring                the same for a loop of your own; what both callbacks use
    options                   checks what all three are given
    numbers                   a step of a record as the few numbers that are logged
    telling                   findings that have not been told yet, as short texts
    heatmap                   a step of a record as an image: layers down, heads across
    targets                   where numbers, alerts and images go: W&B, trackio, MLflow, TensorBoard, a file, a function

Importing this package imports no trainer and no logger. A callback imports its trainer when it is first asked for; a logger is
recognised by its methods, and never imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .heatmap import picture as picture
    from .huggingface import HuggingFaceCallback as HuggingFaceCallback
    from .lightning import LightningCallback as LightningCallback
    from .monitoring import Monitor as Monitor
    from .monitoring import monitor as monitor
    from .numbers import summary as summary
    from .targets import target as target
    from .telling import Alert as Alert
    from .telling import alerts as alerts

_HOMES = {
    "Alert": "telling",
    "HuggingFaceCallback": "huggingface",
    "LightningCallback": "lightning",
    "Monitor": "monitoring",
    "alerts": "telling",
    "monitor": "monitoring",
    "picture": "heatmap",
    "summary": "numbers",
    "target": "targets",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'attemper.integrations' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
