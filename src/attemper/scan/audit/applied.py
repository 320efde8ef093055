"""Applied: the measured scale of one attention call: the factors on q and k times the call's own factor on q·k."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.contract import HIDDEN_BIAS
from ...watch.examine import AttentionCall, Factor, FactorPath, same
from .slope import slope

ARGUMENT = "scale, as given to scaled_dot_product_attention"
DEFAULT = "scaled_dot_product_attention's own 1/√d_k"


@dataclass(frozen=True)
class Applied:
    """The number in front of q·k, and where it comes from. q and k are as their projections left them, or as a norm did.

    ``measured_by`` says how the call's own part was found: its "argument"; a "regression" of the softmax's input on q·k; or the
    "numbers" that were read between product and softmax.
    """

    number: float | None
    measured_by: str
    factors: tuple[Factor, ...]  # everything, in order: q, k, then the scores
    call: float | None  # the part that the call itself applies
    at_product: float | None  # the part that comes after the product: what multiplies q·k, of q and k as they met
    norms: tuple[float, float] | None  # root mean square of the entries of q and of k after their norms
    followed: bool  # whether both q and k were followed back to a projection or a norm

    @property
    def counted(self) -> list[float]:
        return [factor.number for factor in self.factors if factor.counts]

    @property
    def stretch(self) -> float:
        """The part of a rotation that also stretches (YaRN)."""
        return math.prod(factor.number for factor in self.factors if factor.stretches)

    @property
    def varies(self) -> tuple[float, float] | None:
        """The smallest and the largest number, where heads or rows differ."""
        if self.number is None or not any(factor.varies and factor.counts for factor in self.factors):
            return None
        counted = [factor for factor in self.factors if factor.counts]
        low = math.prod(factor.number if factor.low is None else factor.low for factor in counted)
        return low, math.prod(factor.number if factor.high is None else factor.high for factor in counted)

    @property
    def learned(self) -> bool:
        return any(factor.counts and factor.learned for factor in self.factors)


def applied(call: AttentionCall) -> Applied:
    """Measure the scale of a call, while its q, k and logits are there."""
    traced = call.traced
    query, key = (traced.query, traced.key) if traced is not None else (None, None)
    facts = call.facts
    if call.recomputed:
        query = key = FactorPath()  # by this package, from the projections: nothing comes between
    if not call.product:
        own, by = _argument(call), "argument"
    elif call.by_sdpa:
        # torch's own math puts √scale on each of q and k: that is one factor, the argument
        root = math.sqrt(facts.scale or 1.0)
        query, key = _without_last(query, root), _without_last(key, root)
        own, by = (Factor(ARGUMENT, facts.scale or 1.0),), "argument"
    else:
        own, by = _by_hand(call)
    ways = [("q:", query), ("k:", key)]
    before = tuple(factor.of(whose) for whose, path in ways if path is not None for factor in path.factors)
    inner = math.prod(factor.number for factor in own if factor.counts) if own is not None else None
    outer = math.prod(factor.number for factor in before if factor.counts)
    norms = None
    if query is not None and key is not None and query.norm is not None and key.norm is not None:
        norms = query.norm * _gains(query), key.norm * _gains(key)
    followed = query is not None and key is not None
    known = inner is not None and (followed or not same(outer * inner, 1.0))  # or something before it applied one
    return Applied(
        number=outer * inner if known and inner is not None else None,
        measured_by=by,
        factors=(*before, *(own or ())),
        call=inner,
        at_product=1.0 if call.product and call.by_sdpa else inner,
        norms=norms,
        followed=followed,
    )


def predicted_std(call: AttentionCall, scale: float | None) -> float | None:
    """The standard deviation of the logits that q and k of these lengths would have in random directions, times ``scale``.

    ``scale · |q| · |k − k̄| / √E``, as a root mean square. This is exact for directions that have nothing to do with one
    another; k̄ is the mean key of a sequence and head, which moves all logits of a row and spreads none. What is measured beyond
    it is alignment. The mean over rows and keys is taken within each sequence and head, then over those, by their rows.
    """
    if scale is None:
        return None
    query, key = call.query.detach().double(), call.key.detach().double()
    if call.product:
        query, key = (query.mT, key) if call.flipped else (query, key.mT)
    if query.dim() < 2 or key.dim() < 2 or query.shape[-1] != key.shape[-1]:
        return None
    rows, keys = (_fitting(keep, part) for keep, part in ((call.rows, query), (_visible_keys(call), key)))
    centre = (key * keys).sum(-2, keepdim=True) / keys.sum(-2, keepdim=True).clamp(min=1)
    lengths = (query.square() * rows).sum((-2, -1))
    apart = ((key - centre).square() * keys).sum((-2, -1)) / keys.sum((-2, -1)).clamp(min=1)
    if lengths.dim() == apart.dim() == 2 and apart.shape[1] not in (1, lengths.shape[1]):
        apart = apart.repeat_interleave(lengths.shape[1] // apart.shape[1], 1)  # a key head for several query heads
    counted = rows.sum((-2, -1)).expand_as(lengths).sum().clamp(min=1)
    return abs(scale) * float(((lengths * apart).sum() / counted / query.shape[-1]).sqrt())


def _argument(call: AttentionCall) -> tuple[Factor, ...] | None:
    if isinstance(call.scale, Tensor):
        values = call.scale.detach().double()
        low, high = float(values.min()), float(values.max())
        per_row = values.shape[-2] > 1 and not bool((values == values[..., :1, :]).all())
        what = "scale, as given to attemper, per row" if per_row else "scale, as given to attemper, per head"
        one = same(low, high, 1e-6)
        return (Factor(what, float(values.mean()), None if one else low, None if one else high, learned=not per_row),)
    if call.facts.scale is None:
        return None
    if call.recomputed:
        return (Factor("the fused layer's own 1/√d_k", call.facts.scale),)
    return (Factor(DEFAULT if call.scale is None and call.by_sdpa else ARGUMENT, call.facts.scale),)


def _by_hand(call: AttentionCall) -> tuple[tuple[Factor, ...] | None, str]:
    """For hand-written attention: the regression if it is clean, otherwise the factors that were traced."""
    traced, facts = call.traced, call.facts
    scores = traced.scores if traced is not None else None
    if scores is not None and (scores.norm is not None or scores.mixed):
        return None, "numbers"  # normalised scores, or heads that are mixed
    read = None if scores is None else scores.number
    found = slope(call, facts.softcap)
    if found is not None and found.clean:
        exact = call.logits is not None and call.logits.dtype in (torch.float32, torch.float64)
        if read is not None and scores is not None and same(read, found.number, 1e-3 if exact else 1e-2):
            return _uncapped(scores.factors, facts.softcap), "regression"  # the same number, without its rounding
        low, high = found.spread
        one = same(low, high, 1e-2)
        factor = Factor("the softmax's input against q·k", found.number, None if one else low, None if one else high)
        return (factor,), "regression"
    if scores is not None:
        return _uncapped(scores.factors, facts.softcap), "numbers"
    return (None if facts.scale is None else (Factor("multiplied by a number", facts.scale),)), "numbers"


def _uncapped(factors: tuple[Factor, ...], cap: float | None) -> tuple[Factor, ...]:
    """Without the division and the multiplication by a softcap, which cancel."""
    if cap is None:
        return factors
    numbers = [factor.number for factor in factors]
    ends = [[place for place, number in enumerate(numbers) if same(number, end)] for end in (1 / cap, cap)]
    if not ends[0] or not ends[1]:
        return factors
    return tuple(factor for place, factor in enumerate(factors) if place not in (ends[0][-1], ends[1][-1]))


def _without_last(path: FactorPath | None, number: float) -> FactorPath | None:
    if path is None or not path.factors or not same(path.factors[-1].number, number):
        return path
    return FactorPath(path.factors[:-1], path.norm)


def _gains(path: FactorPath) -> float:
    return math.prod(factor.number for factor in path.factors if not factor.counts)


def _visible_keys(call: AttentionCall) -> Tensor | None:
    """(B, Lk): the keys that some query sees; None if not known."""
    if call.rows is not None and call.facts.kind == "self" and call.facts.queries == call.facts.keys:
        return call.rows
    mask = call.mask
    if mask is None or mask.dim() != 4 or mask.shape[-1] != call.facts.keys:
        return None
    visible = mask if mask.dtype.is_floating_point is False else mask > HIDDEN_BIAS
    return visible[:, 0].bool().any(-2)


def _fitting(keep: Tensor | None, tensor: Tensor) -> Tensor:
    """(B, L) as weights for a (…, L, E) whose first dimensions are batch and heads, joined or not."""
    if keep is None or keep.shape[-1] != tensor.shape[-2]:
        return tensor.new_ones(tensor.shape[-2], 1)
    weight = keep.to(tensor.dtype)
    if len(weight) == 1 or (tensor.dim() == 4 and tensor.shape[0] in (len(weight), 1)):
        return weight.reshape(len(weight), *[1] * (tensor.dim() - 3), -1, 1) if tensor.dim() > 2 else weight[0, :, None]
    if tensor.dim() == 3 and len(tensor) % len(weight) == 0:
        return weight.repeat_interleave(len(tensor) // len(weight), 0)[..., None]
    return tensor.new_ones(tensor.shape[-2], 1)
