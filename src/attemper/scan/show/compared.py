"""The tables of --what-if, --token and --baseline."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..document import Json, plain
from ..what_if import summed_up
from .format import number, safe, short_names
from .since import since

HEADS, KEYS = 6, 3
"""How many are shown."""
WIDE = 64  # columns for the long titles


def compared(document: Json, width: int = 80) -> Iterator[RenderableType]:
    """The tables, each followed by an empty line."""
    for name, part in (("what_if", _what_if), ("token", _token), ("baseline", since)):
        if name in document:
            yield from part(document, width)
            yield Text()


def _grid(*titles: str) -> Table:
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for place, title in enumerate(titles):
        grid.add_column(title, justify="right" if place else "left", no_wrap=bool(place))
    return grid


def _what_if(document: Json, width: int) -> Iterator[RenderableType]:
    yield Text("What if the scale were different?", style="bold")
    wide = ("scale", "logit std", "peak", "effective keys", "saturated heads")
    grid = _grid(*(wide if width >= WIDE else ("scale", "std", "peak", "keys", "saturated")))
    for row in (plain(summed_up("as it is", document["heads"])), *document["what_if"]):
        frozen = f"{row['saturated_heads']} of {len(row['heads'])}"
        numbers = (number(row["logit_std"], 2), number(row["peak"], 1), number(row["effective_keys"], 2))
        grid.add_row(safe(row["rule"]), *numbers, frozen)
    yield grid
    yield Text("saturated heads: over half of their tokens have 99 % of their attention on one", style="dim")


def _token(document: Json, width: int) -> Iterator[RenderableType]:
    token = document["token"]
    words = document["inputs"][token["input"]]["tokens"] or []
    best = token["best"]
    if best is None:
        asked = repr(safe(token["asked"]))
        if not token["heads"]:
            yield Text(f"{asked}: no self-attention call was found over this text.")
        else:
            yield Text(
                f"{asked} attends to nothing but itself, its neighbours and special tokens. Choose another --token."
            )
        return
    names = short_names((row["layer"], row["kind"]) for row in document["heads"])
    where = f"layer {names[best['layer'], best['kind']]} head {best['head']}"
    told = f"{best['weight']:.2f} in {where}, the largest weight in {len(token['heads'])} heads on a token that is not special "
    told += "or next to it"
    if best.get("others") is not None:
        told += f"; other tokens give {safe(best['token'])} {best['others']:.2f} there on average"
    yield Text.assemble((f"{safe(token['token'])} → {safe(best['token'])}  ", "bold"), told)
    yield _token_heads(document, names, words)
    yield Text(
        "in brackets: the mean weight that other tokens give the same token; a large weight shows what a head reads, not what "
        f"{safe(token['token'])!r} refers to",
        style="dim",
    )
    if any("token" in rule for rule in document.get("what_if", ())):
        yield Text()
        yield from _token_under_rules(document, names)


def _token_heads(document: Json, names: dict[tuple[str, str], str], words: list[str]) -> Table:
    """The heads that give another token most, with what their other queries give it."""
    token = document["token"]
    grid = _grid("layer", "head", "attends to")
    grid.columns[2].justify, grid.columns[2].no_wrap = "left", False
    special = document["inputs"][token["input"]]["special"] or [False] * len(words)

    def keys(row: Json, near: bool) -> list[tuple[float, int]]:
        """Its largest weights, without special tokens and itself; to rank heads, also without the neighbours."""
        found = [
            (weight, place)
            for place, weight in enumerate(row["weights"])
            if weight and not special[place] and abs(place - token["position"]) > (0 if near else 1)
        ]
        return sorted(found, reverse=True)[:KEYS]

    def rank(row: Json) -> float:
        return max((weight for weight, _ in keys(row, near=False)), default=0.0)

    def beside(row: Json, place: int) -> str:
        others = (row.get("others") or {place: None})[place]
        return "" if others is None else f" ({others:.2f})"

    for row in sorted(token["heads"], key=rank, reverse=True)[:HEADS]:
        named = (f"{safe(words[place])} {weight:.2f}{beside(row, place)}" for weight, place in keys(row, near=True))
        grid.add_row(names[row["layer"], row["kind"]], str(row["head"]), "  ".join(named))
    return grid


def _token_under_rules(document: Json, names: dict[tuple[str, str], str]) -> Iterator[RenderableType]:
    """The same two tokens under each scale: in the head of the first table, and in the head that gives most then."""
    token, best = document["token"], document["token"]["best"]
    place, at = (best["layer"], best["kind"], best["head"]), best["position"]
    said = f"{safe(token['token'])} → {safe(best['token'])}"
    yield Text.assemble((f"{said}  ", "bold"), f"under other scales, in layer {names[place[:2]]} head {place[2]}")
    grid = _grid("scale", "weight", "others", "largest", "of head")
    grid.columns[4].justify, grid.columns[4].no_wrap, grid.columns[4].overflow = "left", False, "fold"
    lanes = [("as it is", token), *((one["rule"], one["token"]) for one in document["what_if"] if "token" in one)]
    for rule, under in lanes:
        rows = {(row["layer"], row["kind"], row["head"]): row for row in under["heads"]}
        if place in rows:
            most = max(rows, key=lambda one: rows[one]["weights"][at] or 0.0)
            numbers = (
                rows[place]["weights"][at],
                (rows[place].get("others") or {at: None})[at],
                rows[most]["weights"][at],
            )
            grid.add_row(safe(rule), *(number(one, 2) for one in numbers), f"{names[most[:2]]}.{most[2]}")
    yield grid
    yield Text("others: the mean weight of other tokens in that head; largest: of all heads", style="dim")
