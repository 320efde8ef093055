"""integrations: the watch inside a trainer, its numbers in a logger.

Data passes the files in this order:

    huggingface, lightning    callbacks for transformers.Trainer and for Lightning
    monitoring                the same for a loop of your own; the options and what both callbacks use
    numbers                   a step of a record as the few numbers that are logged, and as an image
    alerting                  findings that are new, as short texts
    loggers                   where numbers, alerts and images go: W&B, trackio, MLflow, TensorBoard, a file, a function

Beside them:

    implementation                   attn_implementation="attemper" in transformers, and weights of chosen rows of any model
    axolotl, torchtitan, megatron    a plugin, metrics and a hook, for these packages; each is imported by its own name

Importing this package imports no trainer and no logger. A callback imports its trainer when it is first asked for; a logger is
recognised by its methods, and never imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .alerting import Alert as Alert
    from .alerting import alerts as alerts
    from .huggingface import HuggingFaceCallback as HuggingFaceCallback
    from .implementation import output_attentions as output_attentions
    from .implementation import register_attention as register_attention
    from .lightning import LightningCallback as LightningCallback
    from .loggers import as_logger as as_logger
    from .monitoring import Monitor as Monitor
    from .monitoring import monitor as monitor
    from .numbers import picture as picture
    from .numbers import summary as summary

_MODULES = {
    "Alert": "alerting",
    "HuggingFaceCallback": "huggingface",
    "LightningCallback": "lightning",
    "Monitor": "monitoring",
    "alerts": "alerting",
    "as_logger": "loggers",
    "monitor": "monitoring",
    "output_attentions": "implementation",
    "picture": "numbers",
    "register_attention": "implementation",
    "summary": "numbers",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'attemper.integrations' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
