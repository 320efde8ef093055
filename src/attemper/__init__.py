"""attemper: scaled dot-product attention that measures itself while it runs.

attention.py → operation/ → kernels/ → vitals.py, heads.py    one call; scale.py, scores/ and modules/ come before it
watch/ → treat/                                               a model in training, and what helps it
watch/ → health/ → scan/ → report/                            a model, its record, its findings, one document
integrations/                                                 the same inside a trainer, its numbers in a logger
testing/                                                      assertions about a model's attention, for its own tests
extension/                                                    what a package beside this one may use
env.py, demo.py, cli/                                         this machine, the embedded model, the command

The package attemper_lab beside this one explains and compares: attention step by step, claims about √d_k, the page, speed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attemper_lab.explain import Explanation as Explanation
    from attemper_lab.explain import explain as explain
    from attemper_lab.page import page as page

    from . import errors as errors
    from . import health as health
    from . import integrations as integrations
    from . import kernels as kernels
    from . import testing as testing
    from .attention import attention as attention
    from .attention import measure as measure
    from .attention import sdpa as sdpa
    from .attention import weights as weights
    from .heads import HeadSummary as HeadSummary
    from .modules import AdditiveAttention as AdditiveAttention
    from .modules import MultiHeadAttention as MultiHeadAttention
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

LAB = "attemper_lab"  # the package that explains and compares
GROUPS: dict[str, dict[str, str]] = {
    "Compute": {
        "attention": "attention",
        "measure": "attention",
        "sdpa": "attention",
        "weights": "attention",
        "additive_attention": "scores",
        "cosine_attention": "scores",
        "merge": "vitals",
        "rule": "scale",
        "Attended": "vitals",
        "AdditiveAttention": "modules",
        "HeadSummary": "heads",
        "MultiHeadAttention": "modules",
        "RULES": "scale",
        "Rule": "scale",
        "Vitals": "vitals",
        "kernels": "kernels",
    },
    "Watch": {"watch": "watch", "instrument": "watch", "Record": "watch", "integrations": "integrations"},
    "Scan": {"scan": "scan", "Scan": "scan", "health": "health", "testing": "testing"},
    "Treat": {
        "qk_clip": "treat",
        "floor": "treat",
        "entropy_floor": "treat",
        "add_qk_norm": "treat",
        "add_temperature": "treat",
        "projections": "treat",
        "scale_rates": "treat",
        "Clip": "treat",
        "Projections": "treat",
    },
    "Learn": {"explain": f"{LAB}.explain", "page": f"{LAB}.page", "Explanation": f"{LAB}.explain"},
    "Errors": {"errors": "errors"},
}
"""The public names by what a person wants, each with its module, which is loaded when the name is first read: `attemper --help`
needs no torch. docs/reference.md follows this order."""
if importlib.util.find_spec(LAB) is None:  # the library alone
    del GROUPS["Learn"]

_HOMES = {name: home for names in GROUPS.values() for name, home in names.items()}
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
        missing = ": it needs attemper_lab, which is not installed here" if name in ("explain", "page") else ""
        raise AttributeError(f"module 'attemper' has no attribute {name!r}{missing}")
    home = _HOMES[name]
    module = importlib.import_module(home if home.startswith(LAB) else f".{home}", __name__)
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
