"""table: a scan's document for a terminal: the verdict, the scale, what was found, the layers; to be read in ten seconds."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .compared import compared
from .shown import COLOURS, count, mean, number, safe, short_names

Document = dict[str, Any]
BLOCKS = "▁▂▃▄▅▆▇█"
GROUPS, LAYERS, NOTES, TEXTS = 6, 16, 6, 3
"""How many of each are shown; what is left out is counted."""
LEGEND = (
    "effective keys: how many tokens share a token's attention, on average",
    "saturated: tokens that give one other over 99 % of it",
    "heads: ▁ one token has it all … █ all tokens share it evenly",
)


def table(document: Document) -> RenderableType:
    """Everything that a person needs first, in the order they need it."""
    parts: list[RenderableType] = [*_head(document), Text()]
    parts += [_verdict(document), *_calm(document["findings"]), Text()]
    if document["layers"]:
        parts += [*_scales(document["layers"]), Text()]
    parts += _findings(document["findings"])
    if document["heads"]:
        parts += [*_layers(document), Text()]
    parts += compared(document)
    parts += _notes(document["notes"])
    return Group(*parts)


def text(document: Document, width: int = 80) -> str:
    """The same without colours, no line ending in spaces."""
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False, markup=False, emoji=False)
    with console.capture() as held:
        console.print(table(document))
    return "\n".join(line.rstrip() for line in held.get().rstrip().splitlines())


def _head(document: Document) -> Iterator[Text]:
    model = document["model"]
    facts = ", ".join(filter(None, [f"{count(model['parameters'])} parameters", model["dtype"]]))
    name = "" if model["name"] == model["class"] else f" · {model['class']}"
    yield Text.assemble((safe(model["name"]), "bold"), f"{safe(name)} · {facts}", overflow="fold")
    for one in document["inputs"][:TEXTS]:
        what = one["text"] or ("a generated sample" if one["generated"] else f"a {one['kind']}")
        told = safe(what if len(what) <= 60 else f"{what[:59]}…")
        length = f" · {one['length']} tokens" if one["length"] is not None else ""
        cut = ", cut" if one["truncated"] else ""
        kind = (
            f" · {one['kind']}" + (", generated" if one["generated"] else "")
            if one["kind"] in ("image", "audio")
            else ""
        )
        yield Text(f"{told!r}{kind}{length}{cut}" if one["text"] else f"{told}{kind}{length}", overflow="fold")
    more = len(document["inputs"]) - TEXTS
    if more > 0:
        yield Text(f"and {more} more")


def _verdict(document: Document) -> Text:
    verdict = document["verdict"]
    return Text.assemble((verdict["level"].upper(), f"bold {COLOURS[verdict['level']]}"), "  ", safe(verdict["line"]))


def _calm(findings: Sequence[Document]) -> Iterator[Text]:
    """What looks odd on the map and is not: heads that are sharp on purpose."""
    sinks, near = (sum(one["kind"] == kind for one in findings) for kind in ("sink", "positional"))
    parts = [f"{sinks} rest{'s' if sinks == 1 else ''} on a first or special token"] if sinks else []
    parts += [f"{near} look{'s' if near == 1 else ''} at a neighbour"] if near else []
    if parts:
        yield Text(f"Heads: {', '.join(parts)}, as usual.", style="dim")


def _scales(layers: Sequence[Document]) -> Iterator[Text]:
    """One line when all layers agree; one per run of layers that do not."""

    def same(layer: Document) -> tuple[Any, ...]:
        scale = layer["scale"]
        rounded = None if scale["applied"] is None else f"{scale['applied']:.4g}"
        return rounded, scale["rule"], scale["verdict"], layer["heads"], layer["head_dim"], scale["qk_norm"]

    runs = [list(run) for _, run in itertools.groupby(layers, same)]
    if len(runs) == 1:
        number = f"{len(layers)} layers" if len(layers) > 1 else "1 layer"
        yield _scale(
            f"{number}, {layers[0]['heads']} heads of {layers[0]['head_dim']}: ", layers[0]["scale"], "all apply "
        )
        return
    for run in runs[:GROUPS]:
        first, last = safe(run[0]["layer"]), safe(run[-1]["layer"])
        where = f"{first} … {last}" if len(run) > 1 else first
        yield _scale(f"{where}, {run[0]['heads']} heads of {run[0]['head_dim']}: ", run[0]["scale"])
    if len(runs) > GROUPS:
        yield Text(f"and {len(runs) - GROUPS} more; --json has them", style="dim")


def _scale(start: str, scale: Document, verb: str = "") -> Text:
    start += "" if scale["applied"] is None else verb
    words = Text.assemble(("Scale  ", "bold"), start, _number_of(scale), overflow="fold")
    if scale["verdict"] == "fault":
        words.append(": a fault, told below", style=COLOURS["act"])
    return words


def _number_of(scale: Document) -> str:
    if scale["applied"] is None:
        return safe(scale["says"])
    formula = scale["formula"] or ""
    short = "1" + formula.removeprefix("q·k").replace(" ", "") if formula.startswith("q·k") else ""
    equal = f" = {short}" if short not in ("", "1") else ""
    norm = ", after QK-norm" if scale["qk_norm"] and scale["rule"] != "qk_norm" else ""
    why = scale["rule"] or (safe(f"as {scale['declared_by']} says") if scale["declared_by"] else "no rule by name")
    return f"{scale['applied']:.4g}{equal} ({why}){norm}"


def _findings(findings: Sequence[Document]) -> Iterator[RenderableType]:
    """The worst of each kind and level, with how many there are like it."""
    told = [one for one in findings if one["level"] != "healthy"]
    groups: dict[tuple[Any, ...], list[Document]] = {}
    for one in told:
        groups.setdefault((one["kind"], one["fault"], one["level"]), []).append(one)
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for (_, _, level), group in list(groups.items())[:GROUPS]:
        where = _where(group[0]) + (f" and {len(group) - 1} more" if len(group) > 1 else "")
        grid.add_row(Text(level, style=COLOURS[level]), Text.assemble((f"{group[0]['title']}: ", "bold"), safe(where)))
        grid.add_row("", Text(safe(group[0]["says"])))
        grid.add_row("", Text(f"→ {safe(group[0]['todo'])}", style="dim"))
    if groups:
        yield grid
    if len(groups) > GROUPS:
        yield Text(f"and {len(groups) - GROUPS} more kinds; --json has all {len(told)} findings", style="dim")
    if groups:
        yield Text()


def _where(finding: Document) -> str:
    layer = finding["layer"] or "the model"
    layer += " (cross)" if finding["layer_kind"] == "cross" else ""
    return layer if finding["head"] is None else f"{layer} head {finding['head']}"


def _layers(document: Document) -> Iterator[RenderableType]:
    """A line per layer with its heads as blocks; the worst layers where there are too many."""
    places = list(dict.fromkeys((row["layer"], row["kind"]) for row in document["heads"]))
    worst = list(dict.fromkeys((one["layer"], one["layer_kind"]) for one in document["findings"]))
    chosen = set([*[place for place in worst if place in places], *places][:LAYERS] if len(places) > LAYERS else places)
    names, pattern = short_names([layer for layer, _ in places])
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    grid.add_column("layer", overflow="fold", min_width=5)
    for title in ("logit std", "peak", "effective keys", "saturated"):
        grid.add_column(title, justify="right", no_wrap=True)
    grid.add_column("heads", overflow="fold")
    for place in (place for place in places if place in chosen):
        rows = [row for row in document["heads"] if (row["layer"], row["kind"]) == place]
        variance, keys = mean(row["variance"] for row in rows), mean(row["effective_keys"] for row in rows)
        peak = max((row["peak"] for row in rows if row["peak"] is not None), default=None)
        heads = "".join(_block(row["evenness"]) for row in rows)
        name = names[place[0]] + (" cross" if place[1] == "cross" else "")
        std = None if variance is None else variance**0.5
        frozen = mean(row["saturated"] for row in rows)
        share = "–" if frozen is None else f"{frozen:.0%}"
        grid.add_row(safe(name), number(std, 2), number(peak, 1), number(keys, 1), share, heads)
    yield grid
    left = len(places) - len(chosen)
    if left:
        yield Text(f"and {left} more layers, none of them worse; --json has them", style="dim")
    if "*" in pattern and "0" in names.values():
        yield Text(f"layer 0 is {pattern.replace('*', '0')}", style="dim")
    for line in LEGEND:
        yield Text(line, style="dim")


def _notes(notes: Sequence[str]) -> Iterator[RenderableType]:
    for note in notes[:NOTES]:
        yield Padding(Text(f"note: {safe(note)}", style="dim"), 0)
    if len(notes) > NOTES:
        yield Text(f"and {len(notes) - NOTES} more notes; --json has them", style="dim")


def _block(evenness: float | None) -> str:
    return "·" if evenness is None else BLOCKS[min(len(BLOCKS) - 1, max(0, int(evenness * len(BLOCKS))))]
