"""An explanation for a terminal: readable at 40 columns, better at 80 and at 120, and without colour."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.text import Text

from .steps import Step
from .tables import LANES, fit, tables
from .words import clean

if TYPE_CHECKING:
    from . import Explanation

NARROWEST, WIDEST = 40, 120
INDENT = 3


def plain(explanation: Explanation, width: int = 80) -> str:
    """The whole as text without colour."""
    width = max(width, NARROWEST)
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, markup=False)
    with console.capture() as written:
        console.print(render(explanation, width))
    return "\n".join(line.rstrip() for line in written.get().splitlines())


def render(explanation: Explanation, width: int) -> RenderableType:
    """What rich prints, no wider than reads well."""
    width = min(width, WIDEST)
    return Constrain(Group(*_parts(explanation, width)), width)


def _parts(explanation: Explanation, width: int) -> Iterator[RenderableType]:
    labels = (explanation.lanes[0].label, explanation.lanes[1].label)
    yield from (_indented(line, indent=1) for line in _header(explanation, width - 1))
    for number, step in enumerate(explanation.steps, start=1):
        yield Text("")
        yield from _heading(number, step, width)
        yield _indented(Text(clean(step.words)))
        for part in tables(step, labels, width - INDENT):
            yield _indented(part)
        if step.note:
            yield _indented(Text(clean(step.note), style="dim"))
    yield Text("")
    yield _indented(Text("∴ ", style="bold").append(clean(explanation.conclusion)), indent=1)


def _header(explanation: Explanation, width: int) -> Iterator[Text]:
    """The sentence, the settings, the two lanes."""
    asked = explanation.settings
    yield Text(fit(asked.title, width - 1), style="bold")
    words = f"{asked.count:,} {'words' if asked.count > 1 else 'word'}"
    several = f" · {asked.heads} heads" if asked.heads else ""
    facts = f"{words} · d_model {asked.d_model}{several} · d_k {asked.d_k} · score {asked.score} · seed {asked.seed}"
    if "layer" in asked.rule.needs:
        facts += f" · layer {asked.layer}"
    yield Text(facts, style="dim")
    lanes = [
        Text.assemble((lane.label, style), f"  {lane.formula}")
        for lane, style in zip(explanation.lanes, LANES, strict=True)
    ]
    together = Text.assemble(lanes[0], ("   beside   ", "dim"), lanes[1])
    if together.cell_len <= width:
        yield together
    else:
        yield from lanes


def _heading(number: int, step: Step, width: int) -> Iterator[RenderableType]:
    line, formula = Text(f"{number:>2} ").append(step.title, style="bold yellow"), Text(step.formula, style="cyan")
    if line.cell_len + INDENT + formula.cell_len <= width:
        yield line.append("   ").append_text(formula)
    else:
        yield line
        # two spaces stand between formulas, never within one
        yield from map(_indented, [formula] if formula.cell_len <= width - INDENT else formula.split(",  "))


def _indented(part: RenderableType, indent: int = INDENT) -> Padding:
    return Padding(part, (0, 0, 0, indent), expand=False)
