"""Vitals: what one pass of attention measures, row by row; the signs derived from it; exact merging of shards."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from ._torch_private import at_rest, register_pytree_node
from .errors import InputError, SignNotMeasured, checked_options, nearest
from .heads import HeadSummary

SIGNS = ("visible", "mean", "variance", "peak", "lse", "entropy", "sum_p2")
"""The stored signs, in the order every kernel returns them."""

DERIVED = {
    "top_weight": ("peak", "lse"),
    "effective_keys": ("entropy", "lse"),
    "evenness": ("visible", "entropy"),
    "jacobian_trace": ("sum_p2",),
}
"""The derived signs, and the stored signs that each is computed from."""

NEG_INF = float("-inf")
HALVES = (torch.float16, torch.bfloat16)
SMALL = torch.finfo(torch.float16).tiny


_LOW = ("_lse_low", "_output_low")


class Vitals:
    """The vital signs of one attention call: a tensor ``(..., H, Lq)`` per sign, over the keys that row may see.

    Stored: ``visible`` (int32: how many keys the row sees), ``mean`` and ``variance`` of its logits, ``peak`` (its
    largest logit), ``lse`` (log-sum-exp), ``entropy`` (nats), ``sum_p2`` (the sum of squared weights). Derived when read:
    ``top_weight``, ``effective_keys``, ``evenness``, ``jacobian_trace``. All but ``visible`` carry gradients.
    A stored sign becomes a tensor when it is first read, and may share memory with the others: ``clone()`` it to keep it alone.

    A row that sees no key has visible 0, peak and lse -inf, and every other sign 0 (evenness: NaN).

    Example:
        >>> q = torch.ones(1, 4, 8)
        >>> vitals = attemper.attention(q, q, q, causal=True).vitals
        >>> vitals.visible                    # the first token sees itself alone
        tensor([[1, 2, 3, 4]], dtype=torch.int32)
        >>> vitals.effective_keys             # equal keys share the weight: exp(ln n) = n
        tensor([[1., 2., 3., 4.]])
    """

    visible: Tensor
    mean: Tensor
    variance: Tensor
    peak: Tensor
    lse: Tensor
    entropy: Tensor
    sum_p2: Tensor
    _lse_low: Tensor | None  # the rounding error of lse (exact - stored), for merge() and top_weight
    _output_low: Tensor | None  # that of a half-precision output, for merge(): bytes, since NCCL sends no int16
    _signs: Any = None  # what the kernel returned; a sign becomes a tensor when it is first read
    _asked: tuple[str, ...] = ()  # the names of the signs in it

    def __init__(self, **signs: Tensor) -> None:
        unknown = [name for name in signs if name not in SIGNS]
        if unknown:
            raise InputError(f"Vitals(): unknown sign {unknown[0]!r}. {nearest(unknown[0], SIGNS)}")
        for name in SIGNS:
            if name in signs:
                setattr(self, name, signs[name])

    @property
    def measured(self) -> tuple[str, ...]:
        """The stored signs this call measured, in the order of ``SIGNS``."""
        fields = self.__dict__
        return tuple([name for name in SIGNS if name in fields or name in self._asked])

    def each(self, function: Callable[[Tensor], Tensor]) -> Vitals:
        """The vitals with a function applied to every stored sign: ``vitals.each(torch.Tensor.detach)``.

        Args:
            function: takes a sign's tensor and gives one back.
        """
        mapped = Vitals(**{name: function(getattr(self, name)) for name in self.measured})
        return mapped if self._lse_low is None else mapped._with_low(function(self._lse_low))

    def _with_low(self, low: Tensor | None, output_low: Tensor | None = None) -> Vitals:
        """Attach the rounding errors of lse and of the output, if lse was measured."""
        if "lse" in self.measured and low is not None:
            self._lse_low = low
            if output_low is not None:
                self._output_low = output_low.view(torch.int8)
        return self

    def to_dict(self) -> dict[str, Tensor]:
        """Every sign that can be read, stored and derived, by its name: a tensor ``(..., H, Lq)`` each, with its graph.

        For one line per head use :meth:`by_head`.
        """
        derived = [name for name, needs in DERIVED.items() if set(needs) <= set(self.measured)]
        return {name: getattr(self, name) for name in (*self.measured, *derived)}

    @property
    def top_weight(self) -> Tensor:
        """The largest attention weight of the row, ``exp(peak - lse)``."""
        empty = self.lse == NEG_INF
        below = self.peak - self.lse
        return (below if self._lse_low is None else below - self._lse_low).masked_fill(empty, NEG_INF).exp()

    @property
    def effective_keys(self) -> Tensor:
        """How many keys share the row's weight, ``exp(entropy)``."""
        return self.entropy.masked_fill(self.lse == NEG_INF, NEG_INF).exp()

    @property
    def evenness(self) -> Tensor:
        """Entropy as a share of its maximum, ``entropy / ln(visible)``; NaN where fewer than two keys are visible."""
        few = self.visible <= 1
        most = self.visible.to(self.entropy.dtype).log().masked_fill(few, 1.0)
        return (self.entropy / most).masked_fill(few, math.nan)

    @property
    def jacobian_trace(self) -> Tensor:
        """``1 - sum_p2``, the trace of the softmax's Jacobian. It is not the size of a gradient."""
        # a row with a key has sum_p2 >= 1/n, so 0 can only be a row without one
        return (1 - self.sum_p2).masked_fill(self.sum_p2 == 0, 0.0)

    def by_head(self, rows: Tensor | None = None) -> HeadSummary:
        """Summarise the rows of each head, detached, in a form that merges over calls, steps and ranks.

        Args:
            rows: boolean, broadcastable to ``(..., H, Lq)``; False leaves a row out (a padded query). For a batch
                of padded sequences, ``keep[:, None, :]`` with ``keep`` of shape ``(B, Lq)``. Rows that see no key are left
                out too, where ``visible``, ``lse``, ``peak`` or ``sum_p2`` was measured to tell them by.
        """
        return HeadSummary.of({name: sign.detach() for name, sign in self.to_dict().items()}, rows)

    def __getattr__(self, name: str) -> Tensor:
        # reached only when ordinary look-up fails
        if name in self._asked:
            tensor: Tensor = getattr(self._signs, name)
            return self._keep(name, tensor)
        if name in _LOW:
            lost = getattr(self._signs, name[1:]) if "lse" in self._asked else None
            if name == "_output_low" and lost is not None:  # an op returns an empty one for none
                lost = lost.view(torch.int8) if lost.dim() > 1 else None
            return self._keep(name, lost)  # type: ignore[arg-type]
        # a sign not measured, or a derived one that lacks its parts
        needs = DERIVED.get(name, (name,) if name in SIGNS else ())
        if not needs:
            raise AttributeError(f"Vitals has no sign {name!r}")
        missing = [sign for sign in needs if sign not in self.measured]
        raise SignNotMeasured(
            f"vitals.{name} was not measured: this call asked for signs={self.measured}. "
            f"Add {', '.join(map(repr, missing))} to signs=, or use signs='all'."
        )

    def _keep(self, name: str, sign: Tensor) -> Tensor:
        """Store a sign that is read for the first time, unless a mode or a transform may have changed it."""
        if torch.is_grad_enabled() if torch.compiler.is_compiling() else at_rest():
            self.__dict__[name] = sign
        return sign

    def __delattr__(self, name: str) -> None:
        getattr(self, name)  # raises if it was not measured
        self.__dict__["_asked"] = tuple(asked for asked in self._asked if asked != name)
        self.__dict__.pop(name, None)

    def __getstate__(self) -> dict[str, Tensor]:
        names = (*self.measured, *(name for name in _LOW if getattr(self, name) is not None))
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        if not self.measured:
            return "Vitals()"
        shape = tuple(getattr(self, self.measured[0]).shape)
        return f"Vitals({', '.join(self.measured)}; rows {shape})"


def as_returned(vitals: Vitals) -> Any:
    """What the kernel returned, if no sign has been read yet: a watch then reads memory by address and makes no tensors."""
    return vitals._signs if vitals.__dict__.keys() == {"_signs", "_asked"} else None


class Attended(NamedTuple):
    """What ``attention()`` returns: the output ``(..., H, Lq, Ev)`` and its :class:`Vitals`."""

    output: Tensor
    vitals: Vitals


def in_dtype(output: Tensor, vitals: Vitals, dtype: torch.dtype) -> Attended:
    """A result in the dtype that was asked for."""
    cast = output.to(dtype)
    if cast is not output and dtype in HALVES and cast.dim() > 1:
        vitals._with_low(vitals._lse_low, rounded_off(output.detach(), cast.detach()))
    return Attended(cast, vitals)


def in_shape(attended: Attended, shape: tuple[int, ...]) -> Attended:
    """A result with its rows, (..., H, Lq), in this shape. The output of a call without values stays empty."""
    (output, vitals), low = attended, attended.vitals._output_low
    vitals = vitals.each(lambda sign: sign.reshape(shape))
    if low is not None:
        vitals._output_low = low.reshape(*shape, low.shape[-1])
    return Attended(
        output.reshape(*shape, output.shape[-1]) if output is not None and output.dim() > 1 else output, vitals
    )


@overload
def merge(parts: Iterable[Attended]) -> Attended: ...
@overload
def merge(parts: Iterable[Vitals]) -> Vitals: ...
@checked_options
def merge(parts: Iterable[Attended] | Iterable[Vitals]) -> Attended | Vitals:
    """Join attention over shards of the keys into attention over all of them, up to the rounding of its dtype.

    Each part is one call with the same queries and its own slice of keys and values (split-KV, a ring, several
    ranks), in the order of the keys: of equal peaks, the one that is listed first has the gradient. Parts that see no key for a
    row are left out of that row. Differentiable.

    Vitals of a call also carry the rounding error of ``lse``, so that the result is exact for logits of any size. ``each()``,
    pytrees and copies keep it. To send a part to another rank, send ``torch.utils._pytree.tree_flatten(part)``. Vitals that are
    built from the signs alone do not have it: their shares are only as exact as ``lse`` itself, and meaningless at -1e9.

    In half precision, a call that may get gradients of its logits also keeps what rounding took from its output (pytrees and
    copies keep it, ``each()`` does not), and the joined output is rounded once. In other half-precision calls it is rounded
    twice. Each part's gradients are rounded, and torch adds those of a query in the query's dtype: for many parts, let
    ``wide = query.float()`` and give ``wide.to(query.dtype)`` to each.

    Args:
        parts: all :class:`Attended`, or all :class:`Vitals`. Each needs ``lse``; ``mean`` needs ``visible`` too, and
            ``variance`` both. Signs that some part lacks are left out of the result.

    Example:
        >>> q, k, v = torch.randn(3, 2, 6, 8).double()
        >>> halves = [attemper.attention(q, k[:, s], v[:, s]) for s in (slice(0, 4), slice(4, 6))]
        >>> whole = attemper.attention(q, k, v)
        >>> torch.allclose(attemper.merge(halves).vitals.entropy, whole.vitals.entropy)
        True
    """
    shards = list(parts)
    if not shards:
        raise InputError(
            "merge(): `parts` must hold at least one shard; got none. Pass what attention() returned for each."
        )
    attended = [part for part in shards if isinstance(part, Attended)]
    vitals = [part for part in shards if isinstance(part, Vitals)]
    if len(attended) == len(shards):
        return _merge_attended(attended)
    if len(vitals) == len(shards):
        return _merge(vitals)[0]
    types = ", ".join(sorted({type(part).__name__ for part in shards}))
    raise InputError(
        f"merge(): `parts` must be all Attended or all Vitals; got {types}. Pass what attention(), or measure(), returned."
    )


def _merge_attended(shards: Sequence[Attended]) -> Attended:
    first = shards[0].output.shape
    if any(
        shard.output.shape[-1:] != first[-1:] for shard in shards
    ):  # no set: traced sizes that are equal hash differently
        shapes = {tuple(shard.output.shape) for shard in shards}
        raise InputError(
            f"merge(): shards must have outputs of one width; got shapes {', '.join(map(str, sorted(shapes)))}. "
            "Call attention() with values of the same width for every shard."
        )
    merged, weights = _merge([shard.vitals for shard in shards])
    dtype = functools.reduce(torch.promote_types, [shard.output.dtype for shard in shards])
    wide = (weights.unsqueeze(-1) * torch.stack([_before_rounding(shard) for shard in shards])).sum(0)
    output = wide.to(dtype)
    if dtype in HALVES:
        merged._with_low(merged._lse_low, rounded_off(wide.detach(), output.detach()))
    return Attended(output, merged)


def _before_rounding(shard: Attended) -> Tensor:
    """The output of a shard; in half precision as it was before it was rounded, if that is known."""
    output, low = shard.output, shard.vitals._output_low
    if output.dtype not in HALVES:
        return output
    wide = output.float()
    if low is None or low.dtype != torch.int8 or low.shape != (*output.shape[:-1], 2 * output.shape[-1]):
        return wide
    exact = unrounded(output.detach(), low.contiguous().view(torch.int16))
    lost = exact - wide.detach()  # exact, and so is the sum
    known = (exact.to(output.dtype) == output.detach()) & lost.isfinite()  # not where the output was changed since
    return wide + lost.masked_fill(~known, 0.0)


def _merge(shards: Sequence[Vitals]) -> tuple[Vitals, Tensor]:
    common = [name for name in SIGNS if all(name in shard.measured for shard in shards)]
    for name in common:
        first = getattr(shards[0], name).shape
        if any(getattr(shard, name).shape != first for shard in shards):
            shapes = {tuple(getattr(shard, name).shape) for shard in shards}
            raise InputError(
                f"merge(): shards must hold the same rows; got {name} of shapes {', '.join(map(str, sorted(shapes)))}. "
                "Call attention() with the same queries for every shard."
            )
    part = {name: torch.stack([getattr(shard, name) for shard in shards]) for name in common}
    if "lse" not in part:
        raise InputError("merge(): every shard must have measured `lse`. Add 'lse' to signs=.")

    low = torch.stack([s.lse.new_zeros(s.lse.shape) if s._lse_low is None else s._lse_low for s in shards])
    empty = part["lse"] == NEG_INF
    reference = part["lse"].detach().amax(0).masked_fill(empty.all(0), 0.0)
    # lse alone is too coarse for large logits: without its rounding error the shares of the shards would be wrong
    log_share = part["lse"] - reference + low
    total = log_share.exp().sum(0).masked_fill(empty.all(0), 1.0)
    log_total = total.log()
    # a logit of +inf: inf / inf makes the weights NaN, as in a single call, but peak and lse are +inf
    infinite = reference == -NEG_INF
    signs = {"lse": (reference + log_total).masked_fill(empty.all(0), NEG_INF).masked_fill(infinite, -NEG_INF)}
    lse_low = rounding_of_sum(reference, log_total.detach()).masked_fill(infinite, 0.0)
    log_weight = (log_share - log_total).masked_fill(empty, 0.0)
    weight = log_weight.exp().masked_fill(empty, 0.0)

    if "peak" in part:
        # of equal peaks the first has the gradient: that of the lowest key, if the shards are in the order of the keys
        signs["peak"] = part["peak"].max(0).values
    if "entropy" in part:
        signs["entropy"] = (weight * (part["entropy"] - log_weight)).sum(0)
    if "sum_p2" in part:
        signs["sum_p2"] = (weight.square() * part["sum_p2"]).sum(0)
    if "visible" in part:
        signs["visible"] = part["visible"].sum(0, dtype=torch.int32)
        # Chan's formula: moments of parts weighted by how many keys each part saw
        counts = part["visible"].to(weight.dtype)
        share = counts / counts.sum(0).clamp(min=1)
        if "mean" in part:
            signs["mean"] = (share * part["mean"]).sum(0)
            if "variance" in part:
                spread = part["variance"] + (part["mean"] - signs["mean"]).square()
                signs["variance"] = (share * spread).sum(0)
    return Vitals(**signs)._with_low(lse_low), weight


def rounding_of_sum(a: Tensor, b: Tensor) -> Tensor:
    """What a + b lost to rounding, exactly (Knuth's two-sum)."""
    total = a + b
    b_part = total - a
    return (a - (total - b_part)) + (b - b_part)


def rounded_off(wide: Tensor, output: Tensor) -> Tensor:
    """The rounding error of `output`, which is float32 `wide` in half precision: int16, in units in the last place of `wide`.

    Nothing is lost: the 16 bits of a bfloat16 and these 16 are the 32 of the float32. For float16 numbers below the normal range
    the unit is 2^-40. 0 where the output is inf or NaN.
    """
    short = output.float()
    lost = wide.view(torch.int32) - short.view(torch.int32)
    if output.dtype == torch.float16:
        lost = torch.where(short.abs() < SMALL, ((wide - short) * 2.0**40).round().to(torch.int32), lost)
    return lost.clamp(-(1 << 15), (1 << 15) - 1).masked_fill(~short.isfinite(), 0).to(torch.int16)


def unrounded(output: Tensor, low: Tensor) -> Tensor:
    """The output before rounding, in float32; `low` is what `rounded_off` returned."""
    short = output.float()
    whole = (short.view(torch.int32) + low).view(torch.float32)
    return torch.where(short.abs() < SMALL, short + low * 2.0**-40, whole) if output.dtype == torch.float16 else whole


def _flatten(vitals: Vitals) -> tuple[list[Tensor], tuple[str, ...]]:
    tensors = vitals.__getstate__()
    return [*tensors.values()], tuple(tensors)


def _unflatten(tensors: Iterable[Tensor], names: tuple[str, ...]) -> Vitals:
    vitals = Vitals()
    vitals.__dict__.update(zip(names, tensors, strict=True))
    return vitals


# lets torch.func.vmap, torch.compile and torch.export carry Vitals in and out of a function
register_pytree_node(Vitals, _flatten, _unflatten, serialized_type_name="attemper.Vitals")
