"""Telling: findings of a step that were not told before, or are worse than when they were told, as a few short texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .. import health
from ..errors import checked_options
from ..health import LEVELS, Finding
from ..watch import Record
from .numbers import of_step

LEAST = LEVELS.index("warn")
ERRORS = LEVELS.index("act")
NAMED = 6  # heads that a text names
FORMING = "formed"
FORMED = 0.9
"""A head was more than an untrained one if its evenness was ever below: ten times as far from uniform as a flat head. Of 48
heads of small language models, six were above 0.99 again after they had left it, and none that had been below 0.9."""

Told = dict[str, str]
"""What was told: ``name|layer|kind|head`` → its level. Plain text, so that a trainer can keep it in a checkpoint."""


@dataclass(frozen=True)
class Alert:
    """What a person should know now: ``title`` has fewer than 64 characters, ``severity`` is "warning" or "error"."""

    title: str
    text: str
    severity: str
    level: str
    findings: tuple[Finding, ...]


@checked_options
def alerts(record: Record, step: int | None = None, told: Told | None = None) -> list[Alert]:
    """The findings of a step from the level "warn" on that are new, grouped by name and level, the worst first.

    Args:
        record: of a watch.
        step: one of its steps; None is the last one.
        told: what earlier calls told. It is updated: each finding is told once, and again when its level rises. A flat head
            is then told only after it once had an evenness below 0.9, since training begins with flat heads.

    Example:
        >>> model = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
        >>> x = torch.randn(1, 9, 16) * 40
        >>> with attemper.watch(model) as watch:
        ...     _ = model(x, x, x)
        >>> told = {}
        >>> len(attemper.integrations.alerts(watch.record, told=told)) > 0
        True
        >>> attemper.integrations.alerts(watch.record, told=told)
        []
    """
    one = of_step("alerts", record, step)
    found = health.check(one)
    if told is not None:
        found = begun(found, one, told)
    return grouped(news(found, {} if told is None else told), one.steps[0])


def begun(findings: Iterable[Finding], record: Record, told: Told) -> list[Finding]:
    """The findings without heads that are flat because they were never anything else: an untrained head is flat."""
    for row in record.to_dicts():
        if row.get("evenness", 1.0) < FORMED:
            told[_key(FORMING, row["layer"], row["kind"], row["head"])] = "ok"
    return [one for one in findings if one.name != "flat" or _key(FORMING, one.layer, one.kind, one.head) in told]


def news(findings: Iterable[Finding], told: Told) -> list[Finding]:
    """The findings that were not told at their level; they are told now."""
    found = []
    for one in findings:
        key = _key(one.name, one.layer, one.kind, one.head)
        level, before = LEVELS.index(one.level), told.get(key)
        if level >= LEAST and (before is None or LEVELS.index(before) < level):
            told[key] = one.level
            found.append(one)
    return found


def _key(name: str, layer: str, kind: str, head: int | None) -> str:
    return f"{name}|{layer}|{kind}|{'' if head is None else head}"


def grouped(findings: Iterable[Finding], step: int) -> list[Alert]:
    """One alert for all findings with the same name and level: a thousand heads are one text."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.level, one.name), []).append(one)
    found = []
    for (level, _), group in groups.items():
        first = group[0]
        many = f" in {len(group)} heads" if len(group) > 1 else ""
        title = f"attemper {level}: {first.title}{many}, step {step}"[:63]
        heads = ", ".join(_where(one) for one in group[:NAMED])
        more = f" and {len(group) - NAMED} more" if len(group) > NAMED else ""
        text = f"Step {step}, {heads}{more}. {first.says} {first.todo}"
        severity = "error" if LEVELS.index(level) >= ERRORS else "warning"
        found.append(Alert(title, text, severity, level, tuple(group)))
    return found


def _where(one: Finding) -> str:
    return (one.layer or "the model") + ("" if one.head is None else f" head {one.head}")
