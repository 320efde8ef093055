"""integrations: the watch inside a trainer, its numbers in a logger.

Data passes the files in this order:

    huggingface, lightning    callbacks for transformers.Trainer and for Lightning
    monitor                   the same for a loop of your own; what both callbacks use
    options                   checks what all three are given
    summary                   a step of a record as the few numbers that are logged
    alerts                    findings that have not been told yet, as short texts
    picture                   a step of a record as an image: layers down, heads across
    targets                   where numbers, alerts and images go: W&B, trackio, MLflow, TensorBoard, a file, a function

Importing this package imports no trainer and no logger. A callback imports its trainer when it is first asked for; a logger is
recognised by its methods, and never imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .alerts import Alert as Alert
    from .alerts import alerts as alerts
    from .huggingface import HuggingFaceCallback as HuggingFaceCallback
    from .lightning import LightningCallback as LightningCallback
    from .monitor import Monitor as Monitor
    from .monitor import monitor as monitor
    from .picture import picture as picture
    from .summary import summary as summary
    from .targets import target as target

_HOMES = {
    "Alert": "alerts",
    "HuggingFaceCallback": "huggingface",
    "LightningCallback": "lightning",
    "Monitor": "monitor",
    "alerts": "alerts",
    "monitor": "monitor",
    "picture": "picture",
    "summary": "summary",
    "target": "targets",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'attemper.integrations' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
