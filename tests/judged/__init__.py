"""What scripts/judge_scan.py runs the scan on: models with one fault each, and right models that look unusual.

They are written from docs/audit.md and public issue threads alone, by someone who had not read the scan: never change a model so
that the scan finds its fault. What a finding must say to name a fault is in CLASSES.

    base.py        the right models that faults are put into
    attending.py   faults of the softmax, the scale and the heads
    masking.py     faults of causal masks, windows, documents and padding, and leaks of the future
    placing.py     faults of positions, caches, and what is kept between calls
    wiring.py      parts without effect, sources ignored, batches mixed, numbers that overflow
    second.py      a second draw of all of these, in models of another hand
    third.py       a third one, with right models of its own
    fourth.py      a fourth one, with right models of its own
    innocents.py   unusual designs that are right
    foreign.py     models of other packages, which are right as far as anyone knows
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

# a class of faults, and the words that a person needs to read in a finding (its kind, fault, title and message) to know it
CLASSES = {
    "axis": r"softmax (runs )?over|over_(queries|heads|batch|keys)",
    "rows": r"add(s|ed)? up|(after|before) the softmax|after_softmax|softmax (is )?applied|softmax_twice|uneven_rows",
    "scale": r"^scale\b|√|sqrt",
    "weak": r"weak|does not hide|keeps up to",
    "future": r"future|causal mask|keys? after|masks_differ|(missing|inverted|transposed|shifted)_mask",
    "mask": r"\bmask",
    "window": r"window",
    "documents": r"document|packed|segment",
    "padding": r"pad(ding|ded|s)?\b",
    "batch": r"items? of (a|the) batch|batch_leak|over the batch|another item|(each|every) item|over_batch",
    "heads": r"heads?_(mixed|joined|tiled|order)|mix(es)? positions|position_leak|joined heads"
    r"|heads (are |were )?(joined|cut|tiled|repeated|grouped)"
    r"|(key|value|kv|grouped).{0,30}heads?.{0,60}(tiled|repeat|interleav|order|group)",
    "positions": r"rotat|rotary|rope|\bangle|order of the tokens|order_ignored|alibi|slope|distance|without positions"
    r"|i\s*[−-]\s*j|(?<!mix )positions? (that|are|is|do|does|of|has|have)",
    "cache": r"cache",
    "random": r"dropout|drop(s|ped)|random|draws|seed",
    "kept": r"kept|keeps|between calls|second (call|time)|from one call|state",
    "backend": r"two ways to compute",
    "mode": r"(training|train).{0,80}(evaluation|eval)|(evaluation|eval).{0,80}(training|train)|training mode",
    "effect": r"no effect|without effect|unused|(never|not) used|no influence|changes? no|ignor|no gradient|detach"
    r"|no part|dead|constant|do(es)? not (reach|depend|change|use)",
    "source": r"source|cross|encoder'?s? output|memory",
    "nan": r"\bnan\b|not a number|infinit|not finite|overflow",
    "dtype": r"bfloat16|float16|half precision|dtype",
    "zeros": r"zero",
    "long": r"\blong(er)?\b",
    "patches": r"patch",
    "shared": r"one projection|same numbers",
}


@dataclass(frozen=True)
class Case:
    """A model and what it is called with. `classes` are those that name its fault, `right` is its twin without it.

    `check` are the checks of docs/audit.md that would decide: a model must not be called healthy when one of them was skipped.
    """

    name: str
    group: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    classes: tuple[str, ...] = ()
    right: Callable[[], nn.Module] | None = None
    check: tuple[str, ...] = ()
    source: str = ""
    declared: tuple[str, ...] = ()  # of a right model whose design cannot be told from a fault: what its user declares

    def names(self, text: str) -> bool:
        return any(re.search(CLASSES[class_], text, re.IGNORECASE) for class_ in self.classes)


FAULTS: dict[str, Case] = {}
INNOCENTS: dict[str, Case] = {}


def load() -> None:
    """Fill FAULTS and INNOCENTS."""
    from . import attending, foreign, fourth, innocents, masking, placing, second, third, wiring  # noqa: F401
