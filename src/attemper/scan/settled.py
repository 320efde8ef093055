"""What the user declares about a model, and the findings that this settles.

A design cannot always be told from a fault. ``declared`` names what is intended: ``causal``, and faults that are none here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import InputError
from ..health import Finding
from ..health.faults import ATTENTION_FAULTS, FAULTS, CheckResult
from .audit.audit import LayerScale

CAUSAL = "causal"
WORDS = {"yes": True, "true": True, "": True, "no": False, "false": False}


def check_declared(declared: Mapping[str, Any] | None, caller: str = "scan()") -> dict[str, bool]:
    """What was declared, by name; raises for a name or a value that means nothing."""
    checked = dict(declared or {})
    names = [CAUSAL, *FAULTS, *ATTENTION_FAULTS]
    for name, value in checked.items():
        if name not in names:
            near = difflib.get_close_matches(str(name), names, 1)
            known = f"Did you mean {near[0]!r}?" if near else "docs/audit.md lists them."
            raise InputError(
                f"{caller}: {name!r} cannot be declared: it is neither 'causal' nor the name of a fault. {known}"
            )
        if not isinstance(value, bool):
            raise InputError(
                f"{caller}: {name!r} must be declared True or False; got {value!r}. Pass True if it is intended."
            )
    return checked


def parsed(options: Sequence[str]) -> dict[str, bool]:
    """``--declare name`` and ``--declare name=no`` as a dict."""
    declared = {}
    for option in options:
        name, _, word = option.partition("=")
        if word.lower() not in WORDS:
            raise InputError(
                f"scan: --declare {option!r}: {word!r} is neither yes nor no. Type --declare {name} or {name}=no."
            )
        declared[name.strip()] = WORDS[word.lower()]
    return check_declared(declared, "scan: --declare")


def settled_scales(declared: Mapping[str, bool], layers: Sequence[LayerScale]) -> list[LayerScale]:
    """The layers, without the faults of their scales that are declared to be meant."""
    return [
        replace(layer, fault=None, verdict="ok", advice="", message=f"{layer.message} Declared to be meant.")
        if layer.fault is not None and declared.get(layer.fault)
        else layer
        for layer in layers
    ]


def settled(
    declared: Mapping[str, bool], findings: Sequence[Finding], checks: Sequence[CheckResult]
) -> tuple[list[Finding], list[CheckResult]]:
    """The findings without those that are declared to be meant; a check that failed for these alone has passed."""
    left = [finding for finding in findings if not (finding.fault is not None and declared.get(finding.fault))]
    gone = [str(finding.fault) for finding in findings if finding not in left]
    failing = {_check_of(finding.fault) for finding in left if finding.fault is not None}
    settled_checks = []
    for check in checks:
        meant = sorted({fault for fault in gone if _check_of(fault) == check.name})
        if check.state == "failed" and meant and check.name not in failing:
            check = replace(check, state="passed", message=f"declared to be meant: {', '.join(meant)}")
        settled_checks.append(check)
    return left, settled_checks


def _check_of(fault: str | None) -> str:
    return (FAULTS | ATTENTION_FAULTS)[str(fault)].check
