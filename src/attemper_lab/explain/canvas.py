"""Canvas: draws the marks of the picture in three sizes of type, and gives Q, K, V and the lanes one colour each."""

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
    "K": ("#b3261e", "#ff9c94"),
    "V": ("#15703a", "#7fdba3"),
    "chosen": ("#0b6b5d", "#5fd6c0"),
    "other": ("#c2410c", "#ff9466"),
}
"""On light and on dark paper. The steps of the explanation use the same colours."""
TINTS = {"Q": ("#e9effd", "#1c2a4a"), "K": ("#fdecec", "#41212a"), "V": ("#e8f5ed", "#173528")}
COLD, HOT = (0xED, 0xF2, 0xF9), (0x24, 0x57, 0xA6)
"""The colours of the weights 0 and 1."""
HEAD = 6.5  # the length of an arrow's head
CORNER = 8.0  # the radius of an arrow's corners
DARK_CELL = 0.55  # from this weight on, the number in a cell is light
PLAIN_LETTERS = {"ᵀ": ("T", -4), "₀": ("0", 3)}
"""Letters that not every font has, each with a plain one and how far down that is moved."""


class Canvas:
    """An SVG picture that is drawn mark by mark."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, size: int = TEXT, style: str = "", bold: bool = False, middle: bool = False
    ) -> None:  # fmt: skip
        names = " ".join(filter(None, (f"t{size}", style, "bold" if bold else "", "middle" if middle else "")))
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{names}">{_in_plain_letters(words)}</text>')

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
        ink = "" if weight is None else " on" if weight > DARK_CELL else " off"
        self.text(x, y, words.replace("-", "−"), size=SMALL, style=f"mono {'middle' if middle else 'end'}{ink}")

    def box(self, x: float, y: float, wide: float, tall: float, style: str) -> None:
        self._rect(x, y, wide, tall, f'rx="7" class="{style}"')

    def heat(self, x: float, y: float, wide: float, tall: float, weight: float) -> None:
        """The cell of a weight."""
        share = min(1.0, max(0.0, weight))
        shade = "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(COLD, HOT, strict=True))
        self._rect(x, y, wide, tall, f'rx="3" fill="#{shade}"')

    def _rect(self, x: float, y: float, wide: float, tall: float, rest: str) -> None:
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" {rest}/>')

    def arrow(self, points: Sequence[tuple[float, float]], style: str = "plain") -> None:
        """A line through points, with rounded corners and a head."""
        path = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
        for before, at, after in zip(points, points[1:], points[2:], strict=False):
            first, second = _towards(at, before, CORNER), _towards(at, after, CORNER)
            path.append(f"L{first[0]:.1f} {first[1]:.1f}Q{at[0]:.1f} {at[1]:.1f} {second[0]:.1f} {second[1]:.1f}")
        (x, y), end = points[-1], _towards(points[-1], points[-2], HEAD)
        path.append(f"L{end[0]:.1f} {end[1]:.1f}")
        side = ((y - end[1]) * 0.62, (end[0] - x) * 0.62)
        tip = f"{x:.1f},{y:.1f} {end[0] + side[0]:.1f},{end[1] + side[1]:.1f} {end[0] - side[0]:.1f},{end[1] - side[1]:.1f}"
        self.parts.append(
            f'<path d="{"".join(path)}" class="line {style}"/><polygon points="{tip}" class="head {style}"/>'
        )

    def svg(self, height: float, title: str, dark: bool, inline: bool) -> str:
        """The whole picture. HTML needs no namespace, so ``inline`` leaves it out."""
        space = "" if inline else 'xmlns="http://www.w3.org/2000/svg" '
        for_dark = f"@media (prefers-color-scheme: dark) {{{_css(_colours(DARK, 1))}}}" if dark else ""
        return (
            f'<svg {space}class="attemper-flow" viewBox="0 0 {self.width:g} {height:.0f}" '
            f'width="{self.width:g}" height="{height:.0f}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
            f"<style>{_css(_colours(LIGHT, 0) | SHAPES)}{for_dark}</style>"
            f'<rect width="{self.width:g}" height="{height:.0f}" rx="12" class="paper"/>{"".join(self.parts)}</svg>'
        )


def _in_plain_letters(words: str) -> str:
    """Escape words; draw superscripts and subscripts with letters that every font has."""
    for letter, (plain, by) in PLAIN_LETTERS.items():
        before, separator, after = words.partition(letter)
        if separator:
            rest = f'<tspan dy="{-by}">{escape(after)}</tspan>' if after else ""
            return f'{escape(before)}<tspan dy="{by}">{plain}</tspan>{rest}'
    return escape(words)


def _towards(at: tuple[float, float], other: tuple[float, float], by: float) -> tuple[float, float]:
    """The point that lies this far from one towards another, at most half of the way."""
    long = ((other[0] - at[0]) ** 2 + (other[1] - at[1]) ** 2) ** 0.5
    share = min(by, long / 2) / long if long else 0.0
    return at[0] + (other[0] - at[0]) * share, at[1] + (other[1] - at[1]) * share


SHAPES = {
    **{f".t{size}": f"font-size: {size}px" for size in (SMALL, TEXT, BIG)},
    ".bold": "font-weight: 600",
    ".plainweight": "font-weight: 400",
    ".middle": "text-anchor: middle",
    ".end": "text-anchor: end",
    ".mono": f"font-family: {MONO}",
    "text.on": "fill: #ffffff",
    "text.off": f"fill: {LIGHT[INK]}",
}
"""The rules that are the same on light and on dark paper."""


def _colours(paper: tuple[str, ...], side: int) -> dict[str, str]:
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
        for mark, paint in (("text", "fill"), (".card", "stroke"), (".line", "stroke"), (".head", "fill")):
            rules[f"{mark}.{name}"] = f"{paint}: {colours[side]}"
    for name, tints in TINTS.items():
        rules[f".fill{name}"] = f"fill: {tints[side]}; stroke: {COLOURS[name][side]}"
    return rules


def _css(rules: dict[str, str]) -> str:
    return "".join(f".attemper-flow {name} {{{rule}}}" for name, rule in rules.items())
