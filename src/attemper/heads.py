"""HeadSummary: the vitals of many rows reduced to one line per head. It holds sums, counts and a maximum, which merge exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .errors import InputError, SignNotMeasured

SATURATED_WEIGHT = 0.99
SATURABLE_KEYS = 8

COLUMNS = (
    *("rows", "visible", "mean", "variance", "lse", "entropy", "sum_p2", "top_weight", "effective_keys"),
    *("evenness_rows", "evenness", "jacobian_trace", "saturable_rows", "saturated"),
)
"""The columns of ``sums``, in this order, for the signs that were measured; ``peak``, a maximum, is stored separately."""
ALL_COLUMNS = (*COLUMNS, "peak")
"""The columns if all signs were measured."""


class HeadSummary:
    """One number per head and sign: the mean over the rows counted, except ``peak``, which is the largest.

    ``rows`` is how many rows were counted (those that see a key). ``saturated`` is the share of rows whose top weight
    is above 0.99, among rows that see at least 8 keys. Summaries merge exactly with ``a.merge(b)``: over calls, over
    steps, and over ranks (all-reduce ``sums`` with SUM and ``peaks`` with MAX). ``score_peaks`` are the largest scale · q·k of
    each head, before a bias (ALiBi, T5) is added; None if they equal ``peaks``.
    """

    score_peaks: Tensor | None = None

    def __init__(
        self, columns: tuple[str, ...], sums: Tensor, peaks: Tensor, score_peaks: Tensor | None = None
    ) -> None:
        self.columns = columns
        self.sums = sums  # (H, columns), float64
        self.peaks = peaks  # (H,), float64
        self.score_peaks = score_peaks  # (H,), float64

    @classmethod
    def of(cls, signs: Mapping[str, Tensor], rows: Tensor | None = None) -> HeadSummary:
        """Fold signs of shape ``(..., H, Lq)``; a shape without heads counts as one head."""
        if not signs:
            raise InputError("by_head(): no sign was measured. Ask for some with signs=.")
        by_head = {name: _heads_first(sign) for name, sign in signs.items()}
        counted = _sees_a_key(by_head)
        if rows is not None:
            counted = counted & _heads_first(_checked_rows(rows, next(iter(signs.values()))))

        counts = {"rows": counted}
        visible, peak = by_head.pop("visible", None), by_head.pop("peak", None)
        if visible is not None:
            counts["visible"] = visible
            if "evenness" in by_head:  # NaN where a row sees fewer than two keys
                counts["evenness_rows"] = visible > 1
                by_head["evenness"] = by_head["evenness"].masked_fill(visible <= 1, 0.0)
            if "top_weight" in by_head:
                counts["saturable_rows"] = visible >= SATURABLE_KEYS
                counts["saturated"] = counts["saturable_rows"] & (by_head["top_weight"] > SATURATED_WEIGHT)
        sums = _summed(counts, counted) | _summed(by_head, counted)
        columns = tuple(name for name in COLUMNS if name in sums)

        peaks = torch.full_like(sums["rows"], float("-inf"))
        if peak is not None and peak.shape[-1]:
            peaks = peak.masked_fill(~counted, float("-inf")).amax(-1).double()
        totals = torch.stack([sums[name] for name in columns], dim=-1)
        return cls((*columns, "peak") if peak is not None else columns, totals, peaks)

    def merge(self, *others: HeadSummary) -> HeadSummary:
        """One summary of the rows of all of them."""
        merged = self
        for other in others:
            if merged.columns != other.columns or merged.sums.shape != other.sums.shape:
                raise InputError(
                    f"merge(): summaries must hold the same signs and heads; got {merged!r} and {other!r}. "
                    "Measure both with the same signs=."
                )
            peaks, scores = torch.maximum(merged.peaks, other.peaks), None
            if merged.score_peaks is not None or other.score_peaks is not None:
                scores = torch.maximum(merged.largest_scores, other.largest_scores)
            merged = HeadSummary(merged.columns, merged.sums + other.sums, peaks, scores)
        return merged

    @property
    def has_scores(self) -> bool:
        """Whether the largest scores are not the largest logits."""
        return self.score_peaks is not None and not torch.equal(self.score_peaks, self.peaks)

    @property
    def largest_scores(self) -> Tensor:
        """The largest scale · q·k of each head ``(H,)``: its peak, unless a bias is added to the scores."""
        return self.peaks if self.score_peaks is None else self.score_peaks

    @property
    def signs(self) -> tuple[str, ...]:
        """The names that can be read from this summary."""
        return tuple(name for name in self.columns if not name.endswith("_rows"))

    @property
    def n_heads(self) -> int:
        return len(self.sums)

    def tensors(self) -> list[Tensor]:
        """The tensors that hold its numbers."""
        return [self.sums, self.peaks, *([] if self.score_peaks is None else [self.score_peaks])]

    def with_tensors(self, tensors: Sequence[Tensor]) -> HeadSummary:
        """The summary with these tensors in place of its own, such as copies on another device."""
        return HeadSummary(self.columns, *tensors)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("__") or "columns" not in self.__dict__:
            raise AttributeError(name)
        if name not in self.columns:
            raise SignNotMeasured(
                f"by_head(): {name!r} was not measured. This summary has: {', '.join(self.signs)}. Add it to signs=."
            )
        if name == "peak":
            return self.peaks
        total = self.sums[:, self.columns.index(name)]
        count = count_column(name)
        # 0/0 = NaN: no row was counted
        return total / self.sums[:, self.columns.index(count)] if count else total

    def to_dicts(self) -> list[dict[str, float]]:
        """One dict per head, in head order."""
        columns = {name: getattr(self, name).tolist() for name in self.signs}
        return [{"head": head, **{n: c[head] for n, c in columns.items()}} for head in range(len(self.sums))]

    def __repr__(self) -> str:
        return f"HeadSummary({', '.join(self.signs)}; heads {len(self.sums)})"


class BlockSummary(HeadSummary):
    """A summary stored in some rows of a block, (heads of many summaries, columns and peak), that others share.

    Copying the block copies the numbers of all of them at once.
    """

    def __init__(self, columns: tuple[str, ...], block: Tensor, first: int, heads: int) -> None:
        self.columns, self.block, self.first, self.heads = columns, block, first, heads

    @property
    def sums(self) -> Tensor:  # type: ignore[override]
        return self.block[self.first : self.first + self.heads, :-1]

    @property
    def peaks(self) -> Tensor:  # type: ignore[override]
        return self.block[self.first : self.first + self.heads, -1]

    @property
    def n_heads(self) -> int:
        return self.heads

    def alone(self) -> BlockSummary:
        """A copy with its own block."""
        rows = self.block[self.first : self.first + self.heads]
        return BlockSummary(self.columns, rows.clone(), 0, self.heads)

    def tensors(self) -> list[Tensor]:
        return [self.block]

    def with_tensors(self, tensors: Sequence[Tensor]) -> BlockSummary:
        return BlockSummary(self.columns, tensors[0], self.first, self.heads)


def count_column(name: str) -> str:
    """The column by which a column of sums is divided to give its mean; "" for a column that is itself a count."""
    if name == "rows" or name.endswith("_rows"):
        return ""
    return {"evenness": "evenness_rows", "saturated": "saturable_rows"}.get(name, "rows")


def _summed(values: dict[str, Tensor], counted: Tensor) -> dict[str, Tensor]:
    """The sum of each value over the counted rows, in float64. One stacked sum: an op costs more than its work here."""
    if not values:
        return {}
    stacked = torch.stack(tuple(values.values())).masked_fill_(~counted, 0)
    return dict(zip(values, stacked.sum(-1, dtype=torch.float64).unbind(), strict=True))


def _sees_a_key(signs: Mapping[str, Tensor]) -> Tensor:
    if "visible" in signs:
        return signs["visible"] > 0
    for name in ("lse", "peak"):
        if name in signs:
            return signs[name] != float("-inf")
    if "sum_p2" in signs:
        return signs["sum_p2"] != 0
    return torch.ones_like(next(iter(signs.values())), dtype=torch.bool)


def _heads_first(sign: Tensor) -> Tensor:
    """``(..., H, Lq)`` → ``(H, rows)``."""
    if sign.dim() == 1:
        return sign.unsqueeze(0)
    return sign.movedim(-2, 0).flatten(1)


def _checked_rows(rows: Tensor, like: Tensor) -> Tensor:
    shape = tuple(like.shape)
    if not isinstance(rows, Tensor):
        raise InputError(
            f"by_head(): `rows` must be a boolean tensor; got {type(rows).__name__}. Use torch.as_tensor(rows)."
        )
    if rows.dtype != torch.bool:
        raise InputError(
            f"by_head(): `rows` must be boolean, True for a row that counts; got {rows.dtype}. Use rows.bool()."
        )
    try:
        return rows.expand(shape)
    except RuntimeError:
        raise InputError(
            f"by_head(): `rows` must broadcast to {shape}; got {tuple(rows.shape)}. "
            "For a (B, Lq) padding mask pass rows=keep[:, None, :]."
        ) from None
