"""The table for a terminal: the verdict, the scale, the findings, the layers."""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..._display import block, plural
from ...watch.examine import split_number
from ..document import Json
from .compared import compared
from .format import COLOURS, GAP, broken, count, grid_of, mean, number, safe, sentences, short_names, summary, where

GROUPS, LAYERS, NOTES, TEXTS = 6, 16, 6, 3
"""How many of each are shown; the rest is counted."""
TITLES = ("logit std", "peak", "effective keys", "saturated")
SHORT = ("std", "peak", "keys", "sat.")
"""The titles of the columns, and those for a narrow terminal."""
NARROWEST = 5  # of the layer's name
MEANINGS = (
    "standard deviation of a token's logits",
    "the largest logit",
    "how many tokens share a token's attention, on average",
    "share of tokens with over 99 % of their attention on one token",
    "▁ one token gets all attention … █ all get the same",
)
"""What the columns mean; the last is heads."""


_DOES = {
    "faulty": ("is in the findings below", "are in the findings below"),
    "sink": ("has an attention sink on a first or special token", "have an attention sink on a first or special token"),
    "positional": ("attends to a neighbouring token", "attend to a neighbouring token"),
    "mixing": ("mixes several tokens", "mix several tokens"),
    "blind": ("could attend to only one token", "could attend to only one token"),
}
"""What one head does, and several; the first that applies counts."""


def table(document: Json, width: int = 80) -> RenderableType:
    """The table, the most important first."""
    parts: list[RenderableType] = [*_head(document), Text()]
    parts += [_verdict(document, width), *_heads(document), *_checks(document, width), Text()]
    if document["layers"]:
        parts += [*_scales(document["layers"], width), *_spread(document["layers"]), Text()]
    parts += _findings(document["findings"], width)
    if document["heads"]:
        parts += [*_layers(document, width), Text()]
    parts += compared(document, width)
    parts += _notes(document["notes"], width)
    return Group(*parts)


def text(document: Json, width: int = 80) -> str:
    """The table as plain text; no line ends in spaces."""
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(table(document, width))
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def _head(document: Json) -> Iterator[Text]:
    model = document["model"]
    facts = ", ".join(filter(None, [f"{count(model['parameters'])} parameters", model["dtype"]]))
    name = "" if model["name"] == model["class"] else f" · {model['class']}"
    yield Text.assemble((safe(model["name"]), "bold"), f"{safe(name)} · {facts}", overflow="fold")
    for given in document["inputs"][:TEXTS]:
        what = given["text"] or ("a generated sample" if given["generated"] else f"a {given['modality']}")
        shown = safe(what if len(what) <= 60 else f"{what[:59]}…")
        length = f" · {plural(given['length'], 'token')}" if given["length"] is not None else ""
        cut = ", cut" if given["truncated"] else ""
        generated = ", generated" if given["generated"] else ""
        modality = f" · {given['modality']}{generated}" if given["modality"] in ("image", "audio") else ""
        yield Text(
            f"{shown!r}{modality}{length}{cut}" if given["text"] else f"{shown}{modality}{length}", overflow="fold"
        )
    more = len(document["inputs"]) - TEXTS
    if more > 0:
        yield Text(f"and {plural(more, 'more input')}")


def _verdict(document: Json, width: int) -> Text:
    verdict = document["verdict"]
    line = broken(safe(verdict["line"]), width)
    return Text.assemble((verdict["level"].upper(), f"bold {COLOURS[verdict['level']]}"), "  ", line)


def _heads(document: Json) -> Iterator[Text]:
    """What the heads do, in one line: how many have findings, and which sharp heads are normal."""
    patterns: dict[tuple[Any, ...], set[str]] = {
        (row["layer"], row["kind"], row["head"]): set() for row in document["heads"]
    }
    for finding in document["findings"]:
        head = (finding["layer"], finding["kind"], finding["head"])
        if head in patterns:
            patterns[head].add(finding["name"] if finding["level"] == "healthy" else "faulty")
    blind = {(row["layer"], row["kind"], row["head"]) for row in document["heads"] if row["evenness"] is None}
    counts = Counter(
        next((name for name in _DOES if name in names), "blind" if head in blind else "mixing")
        for head, names in patterns.items()
    )
    faulty, normal, unseeing = (
        [f"{counts[name]} {_DOES[name][counts[name] > 1]}" for name in group if counts[name]]
        for group in (("faulty",), ("sink", "positional", "mixing"), ("blind",))
    )
    line = "; ".join([*faulty, *([", ".join([*normal, "which is normal"])] if normal else []), *unseeing])
    first, _, rest = line.partition(" ")
    every = "The only head" if len(patterns) == 1 else f"All {len(patterns)} heads"
    if patterns:
        who = every if first == str(len(patterns)) else f"{first} of {len(patterns)} heads"
        yield Text(f"{who} {rest}.", style="dim")


def _checks(document: Json, width: int) -> Iterator[Text]:
    """How many checks passed, and a line for every experiment."""
    words = summary(document)
    if words is not None:
        yield Text.assemble(("Checks ", "bold"), words)
    for line in sentences(document):
        yield Text(broken(f"· {safe(line)}", width), style="dim")


def _spread(layers: Sequence[Json]) -> Iterator[Text]:
    """The logit std, compared with that of q and k of the same lengths in random directions."""
    both = [(layer["scale"]["logit_std"], layer["scale"]["predicted_std"]) for layer in layers]
    known = [(measured, measured / predicted) for measured, predicted in both if measured and predicted]
    if not known:
        return
    stds, times = ([f"{end([pair[at] for pair in known]):.3g}" for end in (min, max)] for at in (0, 1))
    shown = [ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}" for ends in (stds, times)]
    expected = "that of q and k with the same lengths in random directions"
    words = f"std {shown[0]}: {shown[1]} times {expected} (above 1: q and k are aligned)"
    yield Text.assemble(("Logits ", "bold"), words)


def _scales(layers: Sequence[Json], width: int) -> Iterator[Text]:
    """One line when all layers agree; one per run of layers that do not."""

    def same(layer: Json) -> tuple[Any, ...]:
        scale = layer["scale"]
        rounded = None if scale["applied"] is None else f"{scale['applied']:.4g}"
        return rounded, scale["rule"], scale["verdict"], layer["heads"], layer["head_dim"], scale["qk_norm"]

    runs = [list(run) for _, run in itertools.groupby(layers, same)]
    if len(runs) == 1:
        start = f"{plural(len(layers), 'layer')}, {plural(layers[0]['heads'], 'head')} of {layers[0]['head_dim']}: "
        yield _scale(start, layers[0]["scale"], "all apply " if len(layers) > 1 else "applies ")
        return
    for run in runs[:GROUPS]:
        first, last = safe(run[0]["layer"]), safe(run[-1]["layer"])
        place = broken(f"{first} … {last}" if len(run) > 1 else first, width)
        yield _scale(f"{place}, {plural(run[0]['heads'], 'head')} of {run[0]['head_dim']}: ", run[0]["scale"])
    if len(runs) > GROUPS:
        yield Text(f"and {len(runs) - GROUPS} more; --json has them", style="dim")


def _scale(start: str, scale: Json, verb: str = "") -> Text:
    start += "" if scale["applied"] is None else verb
    words = Text.assemble(("Scale  ", "bold"), start, _number_of(scale), overflow="fold")
    if scale["verdict"] == "fault":
        words.append(": a fault, see below", style=COLOURS["error"])
    return words


def _number_of(scale: Json) -> str:
    if scale["applied"] is None:
        return safe(scale["message"])
    formula = scale["formula"] or ""
    short = "1" + formula.removeprefix("q·k").replace(" ", "") if formula.startswith("q·k") else ""
    equal = f" = {short}" if short not in ("", "1") else ""
    norm = ", after QK-norm" if scale["qk_norm"] and scale["rule"] != "qk_norm" else ""
    why = scale["rule"] or (safe(f"as {scale['declared_by']} says") if scale["declared_by"] else "no named rule")
    return f"{scale['applied']:.4g}{equal} ({why}){norm}"


def _findings(findings: Sequence[Json], width: int) -> Iterator[RenderableType]:
    """The worst finding of each name and level, with how many there are."""
    faults = [finding for finding in findings if finding["level"] != "healthy"]
    groups: dict[tuple[Any, ...], list[Json]] = {}
    for fault in faults:
        groups.setdefault((fault["name"], fault["fault"], fault["level"]), []).append(fault)
    grid = Table(box=None, show_header=False, padding=(0, GAP, 0, 0), pad_edge=False)
    width -= GAP + max((len(level) for _, _, level in list(groups)[:GROUPS]), default=0)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for (_, _, level), group in list(groups.items())[:GROUPS]:
        place = where(group[0]["layer"], group[0]["kind"], [group[0]["head"]])
        place += f" and {plural(len(group) - 1, 'more place')}" if len(group) > 1 else ""
        grid.add_row(
            Text(level, style=COLOURS[level]),
            Text.assemble((f"{group[0]['title']}: ", "bold"), broken(place, width)),
        )
        grid.add_row("", Text(broken(safe(group[0]["message"]), width)))
        grid.add_row("", Text(broken(f"→ {safe(group[0]['advice'])}", width), style="dim"))
    if groups:
        yield grid
    if len(groups) > GROUPS:
        yield Text(
            f"and {plural(len(groups) - GROUPS, 'more group')}; --json has all {len(faults)} findings", style="dim"
        )
    if groups:
        yield Text()


def _layers(document: Json, width: int) -> Iterator[RenderableType]:
    """A line per layer with its heads as blocks, which are below the numbers in a narrow terminal; of many layers the worst."""
    places = list(dict.fromkeys((row["layer"], row["kind"]) for row in document["heads"]))
    faults = [finding for finding in document["findings"] if finding["level"] != "healthy"]
    worst = dict.fromkeys((fault["layer"], fault["kind"]) for fault in faults)
    chosen = [place for place in worst if place in places][:LAYERS]
    others = [place for place in places if place not in chosen]
    room = min(LAYERS - len(chosen), len(others))
    chosen += [others[number * (len(others) - 1) // max(room - 1, 1)] for number in range(room)]
    names = short_names(places)
    lines = [(names[place], *_signs(document, place)) for place in places if place in chosen]
    titles = next((some for some in (TITLES, SHORT) if _needs(lines, some) <= width), None)
    space = width - _needs([("", *line[1:]) for line in lines], titles or SHORT, blocks=titles is not None) + NARROWEST
    grid = grid_of("layer", *(titles or SHORT), *(["heads"] if titles else []), folded=("layer", "heads"))
    blocks = grid_of("layer", "heads", folded=("layer", "heads"))
    for line in lines:
        name = broken(line[0], space)
        grid.add_row(name, *(line[1:] if titles else line[1:-1]))
        blocks.add_row(broken(line[0], width // 2), line[-1])
    yield grid
    if titles is None:
        yield Text()
        yield blocks
    left = len(places) - len(chosen)
    if left:
        without = "without worse findings" if worst else "between them"
        yield Text(f"and {plural(left, 'more layer')} {without}; --json has them", style="dim")
    if names[places[0]] != places[0][0]:
        repeated = any(split_number(layer)[1] > 1 for layer, _ in places)
        counted = "; the last number counts its calls in a pass" if repeated else ""
        yield Text(broken(f"layer {names[places[0]]} is {safe(places[0][0])}{counted}", width), style="dim")
    yield from _legend(titles or SHORT)


def _legend(titles: Sequence[str]) -> Iterator[Text]:
    """What each column means, in the order in which they are shown."""
    for title, whole, meaning in zip((*titles, "heads"), (*TITLES, "heads"), MEANINGS, strict=True):
        called = title if title == whole else f"{title} ({whole})"
        yield Text(f"{called}: {meaning}", style="dim")


def _needs(lines: Sequence[tuple[str, ...]], titles: Sequence[str], blocks: bool = True) -> int:
    """How wide a table of these lines is; names over 24 and blocks over 16 columns may continue on the next line."""
    name, *columns, heads = (max((cell_len(line[at]) for line in lines), default=0) for at in range(len(titles) + 2))
    inner = sum(max(width, len(title)) for width, title in zip(columns, titles, strict=True)) + GAP * len(titles)
    return min(max(name, NARROWEST), 24) + inner + (GAP + min(max(heads, 5), 16) if blocks else 0)


def _signs(document: Json, place: tuple[str, str]) -> tuple[str, ...]:
    """A layer's numbers, as they are shown, and its heads as blocks."""
    rows = [row for row in document["heads"] if (row["layer"], row["kind"]) == place]
    variance, keys = mean(row["variance"] for row in rows), mean(row["effective_keys"] for row in rows)
    peak = max((row["peak"] for row in rows if row["peak"] is not None), default=None)
    frozen = mean(row["saturated"] for row in rows)
    share = "–" if frozen is None else f"{frozen:.0%}"
    heads = "".join(block(row["evenness"], "·") for row in rows)
    return number(None if variance is None else variance**0.5, 2), number(peak, 1), number(keys, 1), share, heads


def _notes(notes: Sequence[str], width: int) -> Iterator[RenderableType]:
    for note in notes[:NOTES]:
        yield Padding(Text(broken(f"note: {safe(note)}", width), style="dim"), 0)
    if len(notes) > NOTES:
        yield Text(f"and {plural(len(notes) - NOTES, 'more note')}; --json has them", style="dim")
