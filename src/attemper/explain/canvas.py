"""Canvas: the marks of the picture of an explanation, one scale of type, one colour each for Q, K, V and the lanes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

SMALL, TEXT, BIG = 12, 14, 20
"""The sizes of type: numbers and remarks, names, the title."""

SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'Liberation Mono', monospace"

INK, DIM, PAPER, LINE, CARD, CHIP = range(6)
LIGHT = ("#1d2433", "#5b6577", "#ffffff", "#c9d1de", "#fbfcfe", "#eef2f8")
DARK = ("#e4e8f0", "#98a2b5", "#12161f", "#39435a", "#171d29", "#232b3b")
COLOURS = {
    "Q": ("#1d4fd7", "#8fb3ff"),
    "K": ("#b91c1c", "#ff9c9c"),
    "V": ("#15703a", "#7fdba3"),
    "chosen": ("#0b6b5d", "#5fd6c0"),
    "other": ("#9a3412", "#ffab7a"),
}
"""On light and on dark paper; the steps of the explanation have the same."""
TINTS = {"Q": ("#e9effd", "#1c2a4a"), "K": ("#fdecec", "#41212a"), "V": ("#e8f5ed", "#173528")}
COLD, HOT = (0xED, 0xF2, 0xF9), (0x24, 0x57, 0xA6)
"""A weight of 0 and of 1."""
HEAD = 6.5  # the length of an arrow's head
TURN = 0.55  # from this weight on, the number in a cell is light


class Canvas:
    """Marks in the order they were drawn."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = TEXT,
        style: str = "",
        bold: bool = False,
        middle: bool = False,
    ) -> None:
        names = " ".join(filter(None, (f"t{size}", style, "bold" if bold else "", "middle" if middle else "")))
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{names}">{_shifted(words)}</text>')

    def symbol(self, x: float, y: float, name: str, rest: str, style: str, middle: bool = True) -> None:
        """A name like W_Q, with its index lowered, and its shape."""
        first, bar, index = name.partition("_")
        lowered = f'<tspan dy="3" class="t{SMALL}">{escape(index)}</tspan>' if bar else ""
        names = f"t{TEXT} bold {style}{' middle' if middle else ''}"
        up = -3 if bar else 0
        shape = f'<tspan dx="6" dy="{up}" class="t{SMALL} plainweight">{escape(rest)}</tspan>'
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{names}">{escape(first)}{lowered}{shape}</text>')

    def number(self, x: float, y: float, words: str, weight: float | None, middle: bool) -> None:
        """A number of a matrix: right-aligned, or in the middle of its cell."""
        style = "middle" if middle else "end"
        ink, words = "" if weight is None else " on" if weight > TURN else " off", words.replace("-", "−")
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="t{SMALL} mono {style}{ink}">{escape(words)}</text>')

    def box(self, x: float, y: float, wide: float, tall: float, style: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" rx="7" class="{style}"/>'
        )

    def heat(self, x: float, y: float, wide: float, tall: float, weight: float) -> None:
        """The cell of a weight."""
        shade = "".join(
            f"{round(a + (b - a) * min(1.0, max(0.0, weight))):02x}" for a, b in zip(COLD, HOT, strict=True)
        )
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" rx="3" fill="#{shade}"/>'
        )

    def arrow(self, points: Sequence[tuple[float, float]], style: str = "plain") -> None:
        """A line through points, with rounded corners and a head."""
        way, turn = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"], 8.0
        for before, at, after in zip(points, points[1:], points[2:], strict=False):
            first, second = _towards(at, before, turn), _towards(at, after, turn)
            way.append(f"L{first[0]:.1f} {first[1]:.1f}Q{at[0]:.1f} {at[1]:.1f} {second[0]:.1f} {second[1]:.1f}")
        (x, y), (a, b) = points[-1], points[-2]
        end = _towards((x, y), (a, b), HEAD)
        way.append(f"L{end[0]:.1f} {end[1]:.1f}")
        side = ((y - end[1]) * 0.62, (end[0] - x) * 0.62)
        tip = f"{x:.1f},{y:.1f} {end[0] + side[0]:.1f},{end[1] + side[1]:.1f} {end[0] - side[0]:.1f},{end[1] - side[1]:.1f}"
        self.parts.append(
            f'<path d="{"".join(way)}" class="line {style}"/><polygon points="{tip}" class="head {style}"/>'
        )

    def svg(self, height: float, title: str, dark: bool, inline: bool) -> str:
        """The whole picture; ``inline``: for a page, which knows what an svg is."""
        space = "" if inline else 'xmlns="http://www.w3.org/2000/svg" '
        return (
            f'<svg {space}class="attemper-flow" viewBox="0 0 {self.width:g} {height:.0f}" '
            f'width="{self.width:g}" height="{height:.0f}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
            f"<style>{_style(LIGHT, 0)}{_dark() if dark else ''}</style>"
            f'<rect width="{self.width:g}" height="{height:.0f}" rx="12" class="paper"/>{"".join(self.parts)}</svg>'
        )


SHIFTED = {"ᵀ": ("T", -4), "₁": ("1", 3)}
"""Letters that not every font has: a plain one, and how far it is moved down."""


def _shifted(words: str) -> str:
    """Escaped words; letters above and below the line are drawn from those that every font has."""
    for letter, (plain, by) in SHIFTED.items():
        before, found, after = words.partition(letter)
        if found:
            rest = f'<tspan dy="{-by}">{escape(after)}</tspan>' if after else ""
            return f'{escape(before)}<tspan dy="{by}">{plain}</tspan>{rest}'
    return escape(words)


def _towards(at: tuple[float, float], other: tuple[float, float], by: float) -> tuple[float, float]:
    """A point this far from one towards another, at most half of the way."""
    long = ((other[0] - at[0]) ** 2 + (other[1] - at[1]) ** 2) ** 0.5
    share = min(by, long / 2) / long if long else 0.0
    return at[0] + (other[0] - at[0]) * share, at[1] + (other[1] - at[1]) * share


def _dark() -> str:
    """The colours of dark pages: as the system is set, or as the notebook is."""
    dark = _style(DARK, 1, "")
    return "@media (prefers-color-scheme: dark) {" + dark + "}"


def _style(paper: tuple[str, ...], side: int, sizes: str | None = None) -> str:
    rules = {
        "text": f"fill: {paper[INK]}; font-family: {SANS}",
        ".dim": f"fill: {paper[DIM]}",
        ".paper": f"fill: {paper[PAPER]}; stroke: {paper[LINE]}",
        ".chip": f"fill: {paper[CHIP]}; stroke: {paper[LINE]}",
        ".card": f"fill: {paper[CARD]}; stroke: {paper[LINE]}",
        ".line": f"fill: none; stroke: {paper[DIM]}; stroke-width: 1.8",
        ".head": f"fill: {paper[DIM]}",
    }
    for name, colours in COLOURS.items():
        rules[f"text.{name}"] = f"fill: {colours[side]}"
        rules[f".card.{name}"] = f"stroke: {colours[side]}"
        rules[f".line.{name}"] = f"stroke: {colours[side]}"
        rules[f".head.{name}"] = f"fill: {colours[side]}"
    for name, tints in TINTS.items():
        rules[f".fill{name}"] = f"fill: {tints[side]}; stroke: {COLOURS[name][side]}"
    if sizes is None:
        rules |= {f".t{size}": f"font-size: {size}px" for size in (SMALL, TEXT, BIG)}
        rules |= {
            ".bold": "font-weight: 600",
            ".plainweight": "font-weight: 400",
            ".middle": "text-anchor: middle",
            ".end": "text-anchor: end",
            ".mono": f"font-family: {MONO}",
            "text.on": "fill: #ffffff",
            "text.off": f"fill: {LIGHT[INK]}",
        }
    return "".join(f".attemper-flow {name} {{{rule}}}" for name, rule in rules.items())
