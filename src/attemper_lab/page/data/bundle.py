"""bundle(): the one document that all panels read, a key for each. Offline it is inside the file; the server sends it once."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import Any

from ... import stored as lab

COLUMNS = ("loss", "effective_keys", "top_weight", "grad_q_median", "grad_q_rms")


@functools.cache
def stored(name: str) -> dict[str, Any]:
    """A document that comes with the package; `python -m research.page_data` writes it.

    "claims": the claims with their verdicts, conditions, numbers and figures. "training": recorded runs of recall and of the
    language model; at each logged step the median over seeds, the least and the most. "heads": those of the embedded model.
    """
    return dict(json.loads((files(__package__) / f"{name}.json").read_text(encoding="utf-8")))


def _bench() -> dict[str, Any]:
    """The recorded runs of the small language model: one for each rule, learning rate and seed, with a list for each column."""
    rows = lab.rows()
    runs: dict[tuple[str, float, int], dict[str, Any]] = {}
    for row in rows:
        name = (row["rule"], row["lr"], row["seed"])
        run = runs.setdefault(name, {"rule": row["rule"], "lr": row["lr"], "step": [], **{key: [] for key in COLUMNS}})
        for key in ("step", *COLUMNS):
            run[key].append(row[key])
    first = rows[0]
    return {
        "d_k": first["d_model"] // first["heads"],
        "layers": first["layers"],
        "steps": first["steps"],
        "lrs": sorted({row["lr"] for row in rows}),
        "runs": list(runs.values()),
    }


def _embedded(part: str) -> Any:
    from . import embedded  # loads torch, which a server's own process does without

    return getattr(embedded, part)()


PARTS: dict[str, Callable[[], Any]] = {
    "bench": _bench,
    "claims": functools.partial(stored, "claims"),
    "flow": functools.partial(_embedded, "flow"),
    "heads": functools.partial(stored, "heads"),
    "training": functools.partial(stored, "training"),
}
"""What makes the part of each panel; a part is plain data, as JSON has it."""
STORED = ("bench", "claims", "heads", "training")
"""The parts that are read from files: a served page gets these at once, and asks for the other when it needs it."""


def bundle(names: Iterable[str] = tuple(PARTS)) -> dict[str, Any]:
    """Every part of the document, or those named."""
    return {name: PARTS[name]() for name in names}
