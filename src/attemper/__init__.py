"""attemper: scaled dot-product attention that measures itself while it runs.

attention.py → operation/ → kernels/ → vitals.py, heads.py    one call; scale.py, scores/ and modules/ come before it
watch/ → treat/                                               a model in training, and what helps it
watch/ → health/ → scan/ → report/                            a model, its record, its findings, one document
integrations/                                                 the same inside a trainer, its numbers in a logger
testing.py                                                    assertions about a model's attention, for its own tests
page/                                                         the page: drag the scale and see attention change
explain/, lab/                                                attention step by step; claims about √d_k, measured
bench/, env.py, demo.py, cli/                                 speed, this machine, the embedded model, the command
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors as errors
    from . import health as health
    from . import integrations as integrations
    from . import kernels as kernels
    from . import testing as testing
    from .attention import attention as attention
    from .attention import measure as measure
    from .attention import sdpa as sdpa
    from .attention import weights as weights
    from .explain import Explanation as Explanation
    from .explain import explain as explain
    from .heads import HeadSummary as HeadSummary
    from .modules import AdditiveAttention as AdditiveAttention
    from .modules import MultiHeadAttention as MultiHeadAttention
    from .page import page as page
    from .scale import RULES as RULES
    from .scale import Rule as Rule
    from .scale import rule as rule
    from .scan import Scan as Scan
    from .scan import scan as scan
    from .scores import additive_attention as additive_attention
    from .scores import cosine_attention as cosine_attention
    from .treat import Clip as Clip
    from .treat import Projections as Projections
    from .treat import add_qk_norm as add_qk_norm
    from .treat import add_temperature as add_temperature
    from .treat import entropy_floor as entropy_floor
    from .treat import floor as floor
    from .treat import projections as projections
    from .treat import qk_clip as qk_clip
    from .treat import scale_rates as scale_rates
    from .vitals import Attended as Attended
    from .vitals import Vitals as Vitals
    from .vitals import merge as merge
    from .watch import Record as Record
    from .watch import instrument as instrument
    from .watch import watch as watch

__version__ = "0.1.0"

# where each public name lives; loaded when first read, so that `attemper --help` needs no torch
_HOMES = {
    "AdditiveAttention": "modules",
    "Attended": "vitals",
    "Clip": "treat",
    "Explanation": "explain",
    "HeadSummary": "heads",
    "MultiHeadAttention": "modules",
    "Projections": "treat",
    "RULES": "scale",
    "Record": "watch",
    "Rule": "scale",
    "Scan": "scan",
    "Vitals": "vitals",
    "add_qk_norm": "treat",
    "add_temperature": "treat",
    "additive_attention": "scores",
    "attention": "attention",
    "cosine_attention": "scores",
    "entropy_floor": "treat",
    "errors": "errors",
    "explain": "explain",
    "floor": "treat",
    "health": "health",
    "instrument": "watch",
    "integrations": "integrations",
    "kernels": "kernels",
    "measure": "attention",
    "merge": "vitals",
    "page": "page",
    "projections": "treat",
    "qk_clip": "treat",
    "rule": "scale",
    "scale_rates": "treat",
    "scan": "scan",
    "sdpa": "attention",
    "testing": "testing",
    "watch": "watch",
    "weights": "attention",
}

_MODULES = {"errors", "health", "integrations", "kernels", "testing"}

__all__ = sorted(_HOMES)


class _Package(ModuleType):
    """Keeps a public function in its place when the submodule of the same name is imported (attention, …)."""

    def __setattr__(self, name: str, value: object) -> None:
        shadowed = isinstance(value, ModuleType) and name in _HOMES and name not in _MODULES
        if not shadowed:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'attemper' has no attribute {name!r}")
    module = importlib.import_module(f".{_HOMES[name]}", __name__)
    found = module if name in _MODULES else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
