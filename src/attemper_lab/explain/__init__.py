"""explain(): attention on a sentence, step by step, with its shapes and numbers; the chosen scale compared with none.

The files, in the order in which they make an explanation:

    settings.py   the arguments, checked
    compute.py    vectors and matrices drawn, and attention computed in two lanes: the chosen rule and another
    steps.py      plain data: matrices by their corner, readings, steps
    lesson.py     the steps in words and formulas, and the conclusion
    terminal.py   the explanation as text
    canvas.py     the marks and the style of a picture
    flow.py       the flow from words to context as one picture, SVG
    html.py       the picture and the steps for a notebook
    files.py      the explanation as .svg, .png, .html or .json
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper import Rule
from attemper.extension.files import finite
from attemper.extension.tools import checked_options

from .compute import LaneInfo, compute
from .lesson import conclude, lesson
from .settings import ExplainSettings, check
from .steps import LessonStep

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, repr=False)
class Explanation:
    """What :func:`explain` returns: ``steps`` in order, the two ``lanes`` they compare, each lane's ``signs`` as means, and
    a ``conclusion`` from these numbers.

    Print it, show it in a notebook, draw it with :meth:`flow`, write it with :meth:`write`, or take the data with
    :meth:`to_dict`. A step has ``name``, ``title``, ``words``, ``formula``, and its numbers in ``matrices``, ``lanes``,
    ``readings`` and ``heads``.
    """

    settings: ExplainSettings
    lanes: tuple[LaneInfo, LaneInfo]
    signs: tuple[dict[str, float], dict[str, float]]
    steps: tuple[LessonStep, ...]
    conclusion: str

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data; ``attemper explain --json`` prints it. It has the top left corner of each matrix."""
        settings = self.settings
        return {
            "text": settings.text,
            "words": list(settings.words),
            "settings": {
                "rule": settings.rule.name,
                **{name: getattr(settings, name) for name in ("score", "heads", "d_model", "d_k", "seed", "layer")},
            },
            "lanes": [
                {**asdict(lane), "signs": finite(signs)} for lane, signs in zip(self.lanes, self.signs, strict=True)
            ],
            "steps": [step.to_dict() for step in self.steps],
            "conclusion": self.conclusion,
        }

    def __repr__(self) -> str:
        title = self.settings.title
        title = title if len(title) <= 60 else title[:59] + "…"
        return f"Explanation({title!r}, {self.lanes[0].label} and {self.lanes[1].label}; print() shows it)"

    def __str__(self) -> str:
        from .terminal import plain

        return plain(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from .terminal import render

        yield render(self, options.max_width)

    def flow(self) -> str:
        """The flow from words to context vectors as a picture with shapes and numbers: SVG, as text."""
        from .flow import render

        return render(self)

    def write(self, path: str | Path, force: bool = False) -> None:
        """Write the picture (.svg or .png), the picture and the steps (.html), or the data (.json).

        Args:
            path: the file; its suffix selects the format. A .png needs ``pip install 'attemper[lab]'``.
            force: overwrite a file that is there.
        """
        from .files import check, write

        check(Path(path), force)
        write(Path(path), self)

    def _repr_svg_(self) -> str:
        return self.flow()

    def _repr_html_(self) -> str:
        from .html import render

        return render(self)


@checked_options
def explain(
    text: str,
    *,
    rule: str | Rule | None = None,
    heads: int | None = None,
    score: str = "dot",
    d_model: int = 512,
    d_k: int | None = None,
    seed: int = 0,
    layer: int | None = None,
) -> Explanation:
    """Attention on a sentence, from words to context vectors, with every shape and number in between.

    The words get random vectors and projections of unit variance, as at the start of training, so the numbers show what the
    scale does and not what the words mean. Two lanes are computed by :func:`attention` itself: the chosen rule and ``none``
    (``sqrt_dk`` where the chosen rule is ``none``).

    Args:
        text: the sentence, split on white space; up to 20,000 words.
        rule: a name from ``attemper.RULES``; when left out, ``sqrt_dk`` for dot products and ``qk_norm`` for cosines.
        heads: how many heads share ``d_model``, each ``d_model / heads`` wide; then also concatenated and projected. When left
            out, one head of width ``d_k`` is shown.
        score: ``"dot"``, ``"additive"`` (compared with the unscaled dot product) or ``"cosine"``.
        d_model: the width of an embedding.
        d_k: the width of a query and a key; 64 when left out.
        seed: draws other vectors and matrices.
        layer: the layer's index in the model, from 0; rule ``layer`` needs it.

    Example:
        >>> explanation = attemper.explain("Love Apple phones")
        >>> [matrix.size for step in explanation.steps[:3] for matrix in step.matrices][::3]      # X, W_V, V
        ['[3×512]', '[512×64]', '[3×64]']
        >>> [round(signs["effective_keys"], 2) for signs in explanation.signs]                     # sqrt_dk, none
        [2.5, 1.22]
    """
    settings = check(text, rule, heads, score, d_model, d_k, seed, layer)
    computed = compute(settings)
    chosen, other = computed.lanes
    lanes, means = (chosen.info, other.info), (chosen.means, other.means)
    conclusion = conclude(settings.count, len(set(settings.words)), lanes, means)
    return Explanation(settings, lanes, means, lesson(settings, computed), conclusion)
