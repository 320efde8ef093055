"""Alerts: findings of a step that are new, or worse than when they were last reported, as a few short texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .. import health
from ..errors import checked_options
from ..health import LEVELS, Finding
from ..health.judging import check_step, is_formed
from ..watch import Record
from .numbers import of_step

LEAST = LEVELS.index("warn")
ERRORS = LEVELS.index("error")
NAMED = 6  # heads that a text names
FORMING = "formed"

Alerted = dict[str, str]
"""What was reported: ``name|layer|kind|head`` → level. Plain text, so that a trainer can store it in a checkpoint."""


@dataclass(frozen=True)
class Alert:
    """What a person should know now: ``title`` has fewer than 64 characters, ``severity`` is "warning" or "error"."""

    title: str
    text: str
    severity: str
    level: str
    findings: tuple[Finding, ...]


@checked_options
def alerts(record: Record, step: int | None = None, alerted: Alerted | None = None) -> list[Alert]:
    """The findings of a step from the level "warn" on that are new, grouped by name and level, the worst first.

    Args:
        record: of a watch.
        step: one of its steps; None is the last one.
        alerted: what earlier calls reported. It is updated: each finding is reported once, and again when its level rises. A flat
            head is then reported only after it once had an evenness below 0.9, since training begins with flat heads.

    Example:
        >>> model = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
        >>> x = torch.randn(1, 9, 16) * 40
        >>> with attemper.watch(model) as watch:
        ...     _ = model(x, x, x)
        >>> alerted = {}
        >>> len(attemper.integrations.alerts(watch.record, alerted=alerted)) > 0
        True
        >>> attemper.integrations.alerts(watch.record, alerted=alerted)
        []
    """
    rows = of_step("alerts", record, step)
    findings = health.check(rows) if alerted is None else check_formed(rows, alerted)
    return grouped(new_findings(findings, {} if alerted is None else alerted), rows.steps[0])


def check_formed(record: Record, alerted: Alerted) -> list[Finding]:
    """The findings of a step without heads that have been flat since the start: an untrained head is flat."""
    for row in record.to_dicts():
        if is_formed(row):
            alerted[_key(FORMING, row["layer"], row["kind"], row["head"])] = "ok"
    findings = check_step(record, formed=any(key.startswith(FORMING) for key in alerted))
    return [
        finding
        for finding in findings
        if finding.name != "flat" or _key(FORMING, finding.layer, finding.kind, finding.head) in alerted
    ]


def new_findings(findings: Iterable[Finding], alerted: Alerted) -> list[Finding]:
    """The findings not yet reported at their level; they are added to ``alerted``."""
    new = []
    for finding in findings:
        key = _key(finding.name, finding.layer, finding.kind, finding.head)
        level, before = LEVELS.index(finding.level), alerted.get(key)
        if level >= LEAST and (before is None or LEVELS.index(before) < level):
            alerted[key] = finding.level
            new.append(finding)
    return new


def _key(name: str, layer: str, kind: str, head: int | None) -> str:
    return f"{name}|{layer}|{kind}|{'' if head is None else head}"


def grouped(findings: Iterable[Finding], step: int) -> list[Alert]:
    """One alert for all findings with the same name and level: a thousand heads are one text."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.level, finding.name), []).append(finding)
    alerts_by_cause = []
    for (level, _), group in groups.items():
        first = group[0]
        many = f" in {len(group)} heads" if len(group) > 1 else ""
        title = f"attemper {level}: {first.title}{many}, step {step}"[:63]
        heads = ", ".join(finding.where for finding in group[:NAMED])
        more = f" and {len(group) - NAMED} more" if len(group) > NAMED else ""
        text = f"Step {step}, {heads}{more}. {first.message} {first.advice}"
        severity = "error" if LEVELS.index(level) >= ERRORS else "warning"
        alerts_by_cause.append(Alert(title, text, severity, level, tuple(group)))
    return alerts_by_cause
