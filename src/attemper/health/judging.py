"""findings() from the rows of a scan, check() of a record, and verdict(): the worst finding in one line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from .._display import plural
from ..errors import InputError, checked_options
from .faults import FAULTS
from .finding import Finding, HeadRow, listed, number
from .patterns import TELL, coarse, high, patterns
from .thresholds import CROWD, DRAWN, FORMED, KINDS, LEVELS, NAMES

if TYPE_CHECKING:
    from ..watch import Record


class Audited(Protocol):
    """The result of the scale audit for a layer."""

    layer: str
    kind: str
    fault: str | None
    message: str
    advice: str
    applied: float | None


def findings(
    heads: Iterable[HeadRow],
    layers: Iterable[HeadRow] = (),
    audit: Iterable[Audited] = (),
    order: Sequence[tuple[str, str]] | None = None,
    drawn: Sequence[str] = (),
    others: Iterable[Finding] = (),
    finished: bool = False,
    formed: bool = False,
) -> list[Finding]:
    """Findings about the heads of a model, the worst first, then in the order the layers run.

    Args:
        heads: a row per layer and head, as a scan's document or ``Record.to_dicts()`` has them. A sign that is missing
            or None was not measured, and there is no finding about it.
        layers: a row per layer: ``layer``, ``kind``, ``route``, ``dtype``, ``softcap``, ``scale``, as a scan's document has them.
        audit: the result of the scale audit for each layer.
        order: (layer, kind) in the order they ran; None: the order of the rows.
        drawn: names of weights of embeddings and attention that were not loaded but initialised at random.
        others: further findings, which are sorted with the rest.
        finished: the model is no longer trained, as a scan takes it: a large logit is judged by what it does, and not as a
            warning of larger ones.
        formed: in an earlier step some head was far from uniform, so training has begun and flat heads are a warning. If False,
            one such head among these rows shows it too.
    """
    info = {(row["layer"], row["kind"]): row for row in layers}
    grouped: dict[tuple[str, str], list[HeadRow]] = {place: [] for place in order or ()}
    for row in heads:
        grouped.setdefault((row["layer"], row["kind"]), []).append(row)
    grouped = {place: rows for place, rows in grouped.items() if rows}
    others = list(others)
    born = any(one.name == "nan" for one in others)  # it is known where
    unsorted = ([] if born else _not_a_number(grouped)) + _drawn(drawn, list(grouped))
    formed = formed or any(is_formed(row) for rows in grouped.values() for row in rows)
    for place, rows in grouped.items():
        sound = [row for row in rows if not is_broken(row)]
        about = [(row, patterns(row)) for row in sound]
        counts = Counter(_ALIKE.get(name, name) for _, names in about for name in names)
        for row, names in about:
            crowd = {name for name in names if counts[_ALIKE.get(name, name)] >= CROWD.value * len(rows)}
            crowd -= set() if formed else {"flat"}
            about_layer = info.get(place, {})
            sizes = [high(row, about_layer, names, finished), coarse(row, about_layer, names)]
            unsorted += [size for size in sizes if size is not None]
            unsorted += [TELL[name](row, name in crowd) for name in names]
    unsorted += [*others, *(_of_scale(finding) for finding in audit if finding.fault is not None)]
    places = {place: number for number, place in enumerate(grouped)}

    def rank(finding: Finding) -> tuple[int, int, int, int]:
        place = places.get((finding.layer, finding.kind), -1)
        return (
            -LEVELS.index(finding.level),
            NAMES.index(finding.name),
            place,
            -1 if finding.head is None else finding.head,
        )

    return sorted(unsorted, key=rank)


def verdict(findings: Sequence[Finding], heads: int | None = None, unjudged: Sequence[str] = ()) -> tuple[str, str]:
    """The level of the worst finding, and one line about it in plain words.

    Args:
        findings: the worst first, as :func:`findings` gives them.
        heads: how many heads there are; None: not known.
        unjudged: what applies to the model and was not judged: with it, nothing is called healthy.
    """
    left = f". Not judged: {'; '.join(unjudged)}." if unjudged else "."
    well = "No fault found in what was judged" if unjudged else "Healthy"
    worst = [finding for finding in findings if finding.level == findings[0].level]
    if not worst or worst[0].level == "healthy":
        return ("note", well + left) if unjudged else ("ok", "Healthy: no problem was found.")
    first, level = worst[0], worst[0].level
    if first.name == "weights":
        number = int(first.value or 0)
        verb = "was" if number == 1 else "were"
        return level, f"Not the trained model: {plural(number, 'weight')} {verb} initialised at random."
    if level == "note":
        times = Counter((one.name, one.title if one.name == "attention" else "") for one in worst)
        remarks = ", ".join(title or plural(count, KINDS[name].counted) for (name, title), count in times.items())
        return level, f"{well}, with remarks ({remarks}){left}"
    same = [finding for finding in worst if (finding.name, finding.fault) == (first.name, first.fault)]
    serious = sum(LEVELS.index(finding.level) >= LEVELS.index("warn") for finding in findings)
    more = f" ({plural(serious - len(same), 'other finding')})" if serious > len(same) else ""
    return level, f"{_OPENINGS[level]}: {_subject(same, heads)}{more}."


def is_formed(row: HeadRow) -> bool:
    """Whether a head is so far from uniform that training has made it so."""
    evenness = number(row, "evenness")
    return evenness is not None and evenness < FORMED.value


@checked_options
def check(record: Record, step: int | None = None) -> list[Finding]:
    """Findings from the record of a watch alone, the worst first.

    A record is taken as one of training: large logits are a warning there, and not in a scan of a finished model.
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
    return check_step(record, step)


def check_step(record: Record, step: int | None = None, formed: bool = False) -> list[Finding]:
    """:func:`check`, of a model that an earlier record may have shown to be trained."""
    steps = record.steps
    if step is not None and step not in steps:
        known = f"There are: {listed(steps)}." if steps else "The record has none: watch one first."
        raise InputError(f"check(): `step` must be one that was watched; got {step!r}. {known}")
    rows = record.to_dicts()
    last = max(steps, default=0) if step is None else step
    layers = [{"layer": layer, **info.to_dict()} for (layer, _), info in record.info.items()]
    formed = formed or any(is_formed(row) for row in rows if row["step"] <= last)
    latest = findings([row for row in rows if row["step"] == last], layers, formed=formed)
    broken = [row["step"] for row in rows if row["step"] <= last and is_broken(row)]
    if broken:
        first = findings(row for row in rows if row["step"] == min(broken))
        latest = [finding for finding in latest if finding.name != "nan"]
        return [finding for finding in first if finding.name == "nan"] + latest
    return latest


_ALIKE = {"collapsed": "sharp", "saturated": "sharp"}  # together they make a crowd
_OPENINGS = {"warn": "Worth a look", "error": "Needs work", "critical": "In danger", "diverging": "Broken"}


def _of_scale(audited: Audited) -> Finding:
    level, source = FAULTS[str(audited.fault)][:2]
    where, said = (audited.layer, audited.kind, None), (audited.message, audited.advice, audited.fault)
    return Finding("scale", level, *where, audited.applied, None, source, *said)


def _not_a_number(grouped: Mapping[tuple[str, str], list[HeadRow]]) -> list[Finding]:
    """One finding for the first layer whose numbers are not finite: later layers may have inherited them."""
    broken = {place: [row for row in rows if is_broken(row)] for place, rows in grouped.items()}
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
    message = f"NaN or infinity appears here first{step}, in {who}.{after}"
    advice = "Look at this layer's weights and at what runs just before it; in float16 or bfloat16, try float32."
    return [
        Finding("nan", "diverging", *first, heads[0] if alone else None, None, None, "IEEE 754", message, advice, None)
    ]


def _drawn(names: Sequence[str], places: Sequence[tuple[str, str]]) -> list[Finding]:
    """One finding for all weights that were not loaded, at the first layer that has one of them."""
    if not names:
        return []
    own = (place for place in places if any(name.startswith(f"{place[0]}.") for name in names))
    first = next(own, places[0] if places else ("", "self"))
    which = f"{plural(len(names), 'weight')} of its embeddings and attention layers"
    verb = "is not in the files and was" if len(names) == 1 else "are not in the files and were"
    which_names = f"{names[0]}{', …' if len(names) > 1 else ''}"
    message = (
        f"{which} {verb} initialised at random ({which_names}): the numbers here are not those of the trained model."
    )
    advice = "Save the whole model again with save_pretrained(), or correct the layers in config.json."
    number = float(len(names))
    return [Finding("weights", DRAWN.level, *first, None, number, DRAWN.value, DRAWN.source, message, advice, None)]


def is_broken(row: HeadRow) -> bool:
    """Whether a sign of a head with rows is not a number."""
    if not row.get("rows"):
        return False
    signs = [row[name] for name in ("peak", "mean", "variance", "entropy") if name in row]
    return any(sign is None or not math.isfinite(sign) for sign in signs)


def _subject(same: Sequence[Finding], heads: int | None) -> str:
    """Findings of one name in a few words: which heads, and what they do."""
    first, many = same[0], len(same) > 1
    if first.head is None or not KINDS[first.name].one:
        return f"{first.title} in {plural(len(same), 'layer') if many else first.where}"
    who = f"{len(same)}{'' if heads is None else f' of {heads}'} heads" if many else first.where
    reach = max((finding.value for finding in same if finding.value is not None), default=0.0)
    verb = KINDS[first.name].several if many else KINDS[first.name].one
    return f"{who} {verb.format(f'{reach:.3g}' if reach < 1000 else f'{reach:,.0f}')}"
