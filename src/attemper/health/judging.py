"""findings() from the rows of a scan, check() of a record, and verdict(): the worst finding in one line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from .._display import plural
from ..errors import InputError, checked_options
from .finding import Finding, HeadRow, listed
from .logits import coarse, high
from .patterns import TELL, patterns
from .thresholds import CROWD, DRAWN, FAULTS, LEVELS, NAMES

if TYPE_CHECKING:
    from ..watch import Record


class Audited(Protocol):
    """The result of the scale audit for a layer."""

    layer: str
    kind: str
    fault: str | None
    says: str
    todo: str
    applied: float | None


def findings(
    heads: Iterable[HeadRow],
    layers: Iterable[HeadRow] = (),
    audit: Iterable[Audited] = (),
    order: Sequence[tuple[str, str]] | None = None,
    drawn: Sequence[str] = (),
    others: Iterable[Finding] = (),
) -> list[Finding]:
    """Findings about the heads of a model, the worst first, then in the order the layers run.

    Args:
        heads: a row per layer and head, as a scan's document or ``Record.to_dicts()`` has them. A sign that is missing
            or None was not measured, and there is no finding about it.
        layers: a row per layer: ``layer``, ``kind``, ``route``, ``dtype``, ``softcap``, ``scale``, as a scan's document has them.
        audit: the result of the scale audit for each layer.
        order: (layer, kind) in the order they ran; None: as the rows come.
        drawn: names of weights of embeddings and attention that were not loaded but initialised at random.
        others: findings that were made elsewhere, to be put in order with the rest.
    """
    facts = {(row["layer"], row["kind"]): row for row in layers}
    grouped: dict[tuple[str, str], list[HeadRow]] = {place: [] for place in order or ()}
    for row in heads:
        grouped.setdefault((row["layer"], row["kind"]), []).append(row)
    grouped = {place: rows for place, rows in grouped.items() if rows}
    found = _not_a_number(grouped) + _drawn(drawn, list(grouped))
    for place, rows in grouped.items():
        sound = [row for row in rows if not _broken(row)]
        about = [(row, patterns(row)) for row in sound]
        counts = Counter(_ALIKE.get(name, name) for _, names in about for name in names)
        for row, names in about:
            crowd = {name for name in names if counts[_ALIKE.get(name, name)] >= CROWD.value * len(rows)}
            sizes = [say(row, facts.get(place, {}), names) for say in (high, coarse)]
            found += [one for one in sizes if one is not None] + [TELL[name](row, name in crowd) for name in names]
    found += [*others, *(_of_scale(one) for one in audit if one.fault is not None)]
    places = {place: number for number, place in enumerate(grouped)}

    def rank(one: Finding) -> tuple[int, int, int, int]:
        place = places.get((one.layer, one.kind), -1)
        return -LEVELS.index(one.level), NAMES.index(one.name), place, -1 if one.head is None else one.head

    return sorted(found, key=rank)


def verdict(findings: Sequence[Finding], heads: int | None = None) -> tuple[str, str]:
    """The level of the worst finding, and one line about it in plain words.

    Args:
        findings: the worst first, as :func:`findings` gives them.
        heads: how many heads there are; None: not known.
    """
    worst = [one for one in findings if one.level == findings[0].level]
    if not worst or worst[0].level == "healthy":
        return "ok", "Healthy: no problem was found."
    first, level = worst[0], worst[0].level
    if first.name == "weights":
        number = int(first.value or 0)
        verb = "was" if number == 1 else "were"
        return level, f"Not the trained model: {plural(number, 'weight')} {verb} initialised at random."
    if level == "note":
        remarks = ", ".join(plural(times, _COUNTED[name]) for name, times in Counter(one.name for one in worst).items())
        return level, f"Healthy, with remarks ({remarks})."
    same = [one for one in worst if (one.name, one.fault) == (first.name, first.fault)]
    serious = sum(LEVELS.index(one.level) >= LEVELS.index("warn") for one in findings)
    more = f" ({plural(serious - len(same), 'other finding')})" if serious > len(same) else ""
    return level, f"{_OPENINGS[level]}: {_subject(same, heads)}{more}."


@checked_options
def check(record: Record, step: int | None = None) -> list[Finding]:
    """Findings from the record of a watch alone, the worst first.

    A record has no tokens, so a sink or a positional head cannot be distinguished from a collapsed one: a scan finds more.
    A NaN is reported where it first appears, in any step.

    Args:
        record: ``watch.record``, or one that was read from a file.
        step: the step to judge; None is the last one watched.

    Example:
        >>> model = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
        >>> x = torch.randn(1, 9, 16)
        >>> with attemper.watch(model) as watch:
        ...     _ = model(x * 40, x * 40, x * 40)
        >>> attemper.health.check(watch.record)[0].level
        'critical'
    """
    steps = record.steps
    if step is not None and step not in steps:
        raise InputError(f"check(): `step` must be one that was watched; got {step!r}. There are: {listed(steps)}.")
    rows = record.to_dicts()
    last = max(steps, default=0) if step is None else step
    layers = [{"layer": layer, **facts.to_dict()} for (layer, _), facts in record.facts.items()]
    found = findings([row for row in rows if row["step"] == last], layers)
    broken = [row["step"] for row in rows if row["step"] <= last and _broken(row)]
    if broken:
        first = findings(row for row in rows if row["step"] == min(broken))
        found = [one for one in first if one.name == "nan"] + [one for one in found if one.name != "nan"]
    return found


_COUNTED = {
    "attention": "difference in precision",
    "scale": "unusual scale",
    "peak": "high logit",
    "overflow": "coarse score",
    "collapsed": "collapsed head",
    "saturated": "saturated head",
    "flat": "flat head",
    "dead": "text-blind head",
}
_VERBS = {
    "peak": ("has logits up to {}", "have logits up to {}"),
    "overflow": ("has scores too coarse for its dtype", "have scores too coarse for their dtype"),
    "collapsed": ("has collapsed", "have collapsed"),
    "saturated": ("is saturated", "are saturated"),
    "flat": ("is flat", "are flat"),
    "dead": ("ignores the text", "ignore the text"),
}
_ALIKE = {"collapsed": "sharp", "saturated": "sharp"}  # together they make a crowd
_OPENINGS = {"warn": "Worth a look", "act": "Needs work", "critical": "In danger", "diverging": "Broken"}


def _of_scale(one: Audited) -> Finding:
    level, source, _ = FAULTS[str(one.fault)]
    return Finding("scale", level, one.layer, one.kind, None, one.applied, None, source, one.says, one.todo, one.fault)


def _not_a_number(grouped: Mapping[tuple[str, str], list[HeadRow]]) -> list[Finding]:
    """One finding for the first layer whose numbers are not finite: later layers may have them from there."""
    broken = {place: [row for row in rows if _broken(row)] for place, rows in grouped.items()}
    spoiled = [place for place, rows in broken.items() if rows]
    if not spoiled:
        return []
    first, rows = spoiled[0], broken[spoiled[0]]
    heads = [row["head"] for row in rows]
    alone = len(heads) == 1 and len(grouped[first]) > 1
    who = f"head {heads[0]}" if alone else f"heads {listed(heads)}" if len(rows) < len(grouped[first]) else "all heads"
    step = f" at step {rows[0]['step']}" if rows[0].get("step") is not None else ""
    after = (
        f" {plural(len(spoiled) - 1, 'later layer')} may have inherited them from this layer."
        if len(spoiled) > 1
        else ""
    )
    says = f"NaN or infinity appears here first{step}, in {who}.{after}"
    todo = "Look at this layer's weights and at what runs just before it; in float16 or bfloat16, try float32."
    return [Finding("nan", "diverging", *first, heads[0] if alone else None, None, None, "IEEE 754", says, todo, None)]


def _drawn(names: Sequence[str], places: Sequence[tuple[str, str]]) -> list[Finding]:
    """One finding for all weights that were not loaded, at the first layer that has one of them."""
    if not names:
        return []
    own = (place for place in places if any(name.startswith(f"{place[0]}.") for name in names))
    first = next(own, places[0] if places else ("", "self"))
    which = f"{plural(len(names), 'weight')} of its embeddings and attention layers"
    verb = "is not in the files and was" if len(names) == 1 else "are not in the files and were"
    which_names = f"{names[0]}{', …' if len(names) > 1 else ''}"
    says = f"{which} {verb} initialised at random ({which_names}): the numbers here are not those of the trained model."
    todo = "Save the whole model again with save_pretrained(), or correct the layers in config.json."
    number = float(len(names))
    return [Finding("weights", DRAWN.level, *first, None, number, DRAWN.value, DRAWN.source, says, todo, None)]


def _broken(row: HeadRow) -> bool:
    """Whether a head that has rows has a sign that is not a number."""
    if not row.get("rows"):
        return False
    signs = [row[name] for name in ("peak", "mean", "variance", "entropy") if name in row]
    return any(sign is None or not math.isfinite(sign) for sign in signs)


def _where(one: Finding) -> str:
    return f"{one.layer or 'the model'}" + ("" if one.head is None else f" head {one.head}")


def _subject(same: Sequence[Finding], heads: int | None) -> str:
    """Findings of one name in a few words: which heads, and what was found."""
    first, many = same[0], len(same) > 1
    if first.head is None or first.name not in _VERBS:
        return f"{first.title} in {plural(len(same), 'layer') if many else _where(first)}"
    who = f"{len(same)}{'' if heads is None else f' of {heads}'} heads" if many else _where(first)
    reach = max((one.value for one in same if one.value is not None), default=0.0)
    return f"{who} {_VERBS[first.name][many].format(f'{reach:.3g}' if reach < 1000 else f'{reach:,.0f}')}"
