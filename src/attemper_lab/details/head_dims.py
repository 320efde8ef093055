"""head_dims: which head dims d_k do models have? The default configs of all families in transformers, counted."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch

from attemper.extension.files import load

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator
from ..figures import alt, theme

NAMED = (64, 128, 512)
"""The values that are often named as common."""
COMMON = 0.05
"""A head dim is called common where at least this share of families has it."""
WIDTHS = ("hidden_size", "d_model", "n_embd")
HEADS = ("num_attention_heads", "encoder_attention_heads", "num_heads", "n_head")


def measure(cell: Cell) -> list[Row]:
    transformers = load("run head_dims:", "transformers", "hf")
    names = sorted(transformers.CONFIG_MAPPING.keys())
    order = torch.randperm(len(names), generator=generator("cpu", "head_dims", cell["seed"]), device="cpu").tolist()
    rows = []
    with _quiet():
        for index in sorted(order[: int(cell["families"])]):
            size = head_dim(transformers.CONFIG_MAPPING, names[index])
            if size is not None:
                rows.append({"family": names[index], "head_dim": size, "transformers": transformers.__version__})
    return rows


def head_dim(mapping: Any, name: str) -> int | None:
    """The head dim of a family's default config: what it says, or its width over its heads; None where it has neither."""
    try:
        config = mapping[name]()
        said = getattr(config, "head_dim", None)
        if isinstance(said, int) and said > 0:
            return said
        widths, heads = ([getattr(config, option, None) for option in options] for options in (WIDTHS, HEADS))
    except Exception:  # a config of another package that is not installed, or one without defaults
        return None
    width, count = (
        next((size for size in sizes if isinstance(size, int) and size > 0), None) for sizes in (widths, heads)
    )
    return width // count if width is not None and count is not None and width >= count else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Configs log and warn while they are made; none of it is about head dims."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def share(rows: Rows, size: int) -> float:
    """The share of families with this head dim."""
    return fmean(row["head_dim"] == size for row in rows)


def expect(rows: Rows) -> list[Expectation]:
    """Published sizes, which the configs must give."""
    known = {
        "bert": (64, "Devlin et al. 2019: 768/12"),
        "llama": (128, "Touvron et al. 2023: 4096/32"),
        "gpt2": (64, "768/12"),
    }
    return [
        Expectation(f"head dim of {family}", size, row["head_dim"], 0.0, source, "exact")
        for row in rows
        for family, (size, source) in known.items()
        if row["family"] == family
    ]


def finding(rows: Rows) -> str:
    parts = ", ".join(f"{size} in {share(rows, size):.1%}" for size in NAMED)
    return f"Of {len(rows)} model families in transformers {rows[0]['transformers']}, d_k is {parts}"


def draw(rows: Rows, finding: str) -> Any:
    """How many families have each head dim."""
    counts = sorted(Counter(row["head_dim"] for row in rows).items())
    shown = [{"d_k": str(size), "families": count, "named": "yes" if size in NAMED else "no"} for size, count in counts]
    base = alt.Chart(theme.data(shown)).encode(
        x=alt.X("d_k:N", sort=None, title="head dim d_k", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
        y=alt.Y("families:Q", title="model families"),
    )
    colour = alt.Color(
        "named:N",
        title="often named as common",
        scale=alt.Scale(domain=["yes", "no"], range=[theme.SERIES[1], theme.BASELINE]),
    )
    bars = base.mark_bar().encode(color=colour) + base.mark_text(dy=-7, fontSize=11).encode(text="families:Q")
    note = "The default config of every family: head_dim, or the width over the number of heads."
    return theme.finish(bars.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(globals())
