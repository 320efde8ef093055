"""The scale that one attention call applies, measured: the factors on q and k times the call's own factor on q·k.

A model's own logits are regressed on q·k, entry by entry, at sampled rows. The standard deviation of the logits is taken without
keys that a scaled mask hides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.contract import HIDDEN_BIAS
from ...vitals import Vitals
from ...watch.examine import AttentionCall, Factor, FactorPath, same

ROWS, KEYS = 8, 64
"""Rows per head and keys per row that are sampled: a few suffice, because a scale leaves no residual."""

CLEAN = 0.999
"""The share of variance that q·k must explain. With less, a bias explains the rest, and the traced factors are more accurate."""

LOW_PRECISION = 0.99
TINY = 1e-30


@dataclass(frozen=True)
class Slope:
    """One slope per head, and whether q·k explains the logits."""

    heads: Tensor  # (H,), float64
    clean: bool

    @property
    def number(self) -> float:
        return float(self.heads.mean())

    @property
    def spread(self) -> tuple[float, float]:
        return float(self.heads.min()), float(self.heads.max())


def slope(call: AttentionCall, cap: float | None = None) -> Slope | None:
    """Regress the logits of a hand-written call on its own q·k; None if they cannot be matched entry by entry.

    Hidden keys are left out, and each row's mean is subtracted from both, so that a shift of a whole row has no effect. A softcap
    is undone before the regression.
    """
    if call.logits is None or not call.as_product:
        return None
    left, right = (call.key, call.query) if call.flipped else (call.query, call.key)
    if right.dim() < 2:
        return None
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left, right = (part.expand(*lead, *part.shape[-2:]) for part in (left, right))
    samples = _sample(call.logits, call.rows)
    if samples is None:
        return None
    batch, head, row, key = samples
    z = call.logits[batch, head, row, key].double()  # (H, rows, keys)
    stride = call.logits.stride()
    flat = batch * stride[0] + head * stride[1] + row * stride[2] + key * stride[3]
    tall, wide = left.shape[-2], right.shape[-1]
    if int(flat.max()) >= lead.numel() * tall * wide:
        return None
    where = torch.unravel_index(flat // (tall * wide), lead) if lead else ()
    q = left[(*where, flat % (tall * wide) // wide)].double()
    k = right.mT[(*where, flat % wide)].double()
    return _fit(z, (q * k).sum(-1), cap, call.logits.dtype)


def _sample(logits: Tensor, rows: Tensor | None) -> tuple[Tensor, ...] | None:
    """Indices of entries, broadcastable to (H, rows, keys): the same in every run, and not drawn from the model's generator."""
    batch, heads, queries, keys = logits.shape
    real = torch.ones(batch, queries, dtype=torch.bool, device="cpu")
    if rows is not None and rows.shape[-1] == queries and len(rows) in (1, batch):
        real = rows.cpu().expand(batch, queries)
    places = real.nonzero()
    if not len(places) or keys < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    chosen = places[torch.randint(len(places), (heads, ROWS), generator=generator, device="cpu")]  # (H, rows, 2)
    columns = torch.stack([torch.randperm(keys, generator=generator, device="cpu")[:KEYS] for _ in range(ROWS)])
    head = torch.arange(heads, device="cpu")[:, None, None]
    indices = (chosen[..., :1], head, chosen[..., 1:], columns[None])
    return tuple(part.to(logits.device) for part in indices)


def _fit(z: Tensor, s: Tensor, cap: float | None, dtype: torch.dtype) -> Slope | None:
    visible = (z > HIDDEN_BIAS) & z.isfinite() & s.isfinite()
    if cap:
        visible = visible & (z.abs() < 0.99 * cap)
        z = cap * torch.atanh((z / cap).clamp(-0.99, 0.99))
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    z, s = ((part - part.where(visible, 0).sum(-1, keepdim=True) / count).where(visible, 0) for part in (z, s))
    power = s.square().sum((-2, -1))
    if not bool((power > TINY).all()) or not bool((z.square().sum((-2, -1)) > TINY).all()):
        return None  # equal logits show nothing
    heads = (z * s).sum((-2, -1)) / power
    left = (z - heads[:, None, None] * s).square().sum((-2, -1))
    explained = 1 - left / z.square().sum((-2, -1))
    bar = CLEAN if dtype in (torch.float32, torch.float64) else LOW_PRECISION
    return Slope(heads.cpu(), bool((explained >= bar).all()))


FAR = 400.0
"""A mask of −1e4 scaled by 1/√d_k is further below the other logits than this, up to a head width of 625."""

APART = 4.0
"""The gap must also be this many times the range of the logits on either side: without a mask no scores have such a gap."""

MOST_ROWS = 256
"""In that case, at most this many rows of a head are sampled: sorting every row of a long text would be slow."""


def logit_std(call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> tuple[float, float, float]:
    """Sums over the rows that count: their number, variances and visible keys. ``rows`` (B, Lq) is False for padding."""
    variance, visible = vitals.variance.double(), vitals.visible.double()
    step = 1
    if call.logits is not None and call.info.masked and _reaches(call.logits):
        step = -(-call.logits.shape[-2] // MOST_ROWS)
        logits = call.logits[:, :, ::step].detach().double()
        shown = _not_hidden(logits)
        visible = shown.sum(-1).double()
        mean = logits.where(shown, 0.0).sum(-1, keepdim=True) / visible.clamp(min=1).unsqueeze(-1)
        variance = (logits - mean).where(shown, 0.0).square().sum(-1) / visible.clamp(min=1)
    counted = visible > 1
    if rows is not None:
        counted = counted & rows[:, None, ::step]
    return float(counted.sum()), float(variance.where(counted, 0.0).sum()), float(visible.where(counted, 0.0).sum())


def _reaches(logits: Tensor) -> bool:
    """Whether two visible logits of a row are that far apart; one head at a time, to save memory."""
    for head in logits.detach().flatten(0, 1):
        shown = head > HIDDEN_BIAS
        reach = head.amax(-1) - head.where(shown, torch.inf).amin(-1)
        if bool((reach > FAR).any()):
            return True
    return False


def _not_hidden(logits: Tensor) -> Tensor:
    """The logits that no mask hides: all but those below a wide gap of their row in every head."""
    shown = logits > HIDDEN_BIAS
    ordered = logits.where(shown, -torch.inf).sort(-1, descending=True).values
    upper, lower = ordered[..., :-1], ordered[..., 1:]
    gap, split = (upper - lower).where(lower.isfinite(), 0.0).max(-1, keepdim=True)
    above, below = upper.gather(-1, split), lower.gather(-1, split)
    last = logits.where(shown, torch.inf).amin(-1, keepdim=True)
    wide = torch.maximum(ordered[..., :1] - above, below - last)
    hidden = (gap > FAR) & (gap > APART * wide) & (logits <= below)
    return shown & ~hidden.all(1, keepdim=True)


ARGUMENT = "scale, as given to scaled_dot_product_attention"
DEFAULT = "scaled_dot_product_attention's own 1/√d_k"


@dataclass(frozen=True)
class Applied:
    """The number in front of q·k and its factors, for q and k as their projections, or norms after them, return them.

    ``measured_by`` says how the call's own part was measured: from its "argument", by a "regression" of the softmax's input on
    q·k, or from the "numbers" between product and softmax.
    """

    number: float | None
    measured_by: str
    factors: tuple[Factor, ...]  # everything, in order: q, k, then the scores
    call: float | None  # the part that the call itself applies
    at_product: float | None  # the part that is applied after the product
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
    """Measure the scale of a call while its q, k and logits are in memory."""
    traced = call.traced
    query, key = (traced.query, traced.key) if traced is not None else (None, None)
    info = call.info
    if call.recomputed:
        query = key = FactorPath()  # attemper recomputes them from the projections, with nothing in between
    if not call.product:
        own, by = _argument(call), "argument"
    elif call.by_sdpa:
        # torch's own math puts √scale on each of q and k: that is one factor, the argument
        root = math.sqrt(info.scale or 1.0)
        query, key = _without_last(query, root), _without_last(key, root)
        own, by = (Factor(ARGUMENT, info.scale or 1.0),), "argument"
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
    known = inner is not None and (followed or not same(outer * inner, 1.0))  # 1: an earlier op may have applied it
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
    """The standard deviation that logits would have if q and k of these lengths had random directions.

    It is ``scale · |q| · |k − k̄| / √E``, as a root mean square, and exact for independent directions. k̄ is the mean key of a
    sequence and head, which shifts all logits of a row alike. A larger measured value is alignment of q and k. The mean over
    rows and keys is taken within each sequence and head, then over those, weighted by their rows.
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
        single = same(low, high, 1e-6)
        return (
            Factor(what, float(values.mean()), None if single else low, None if single else high, learned=not per_row),
        )
    if call.info.scale is None:
        return None
    if call.recomputed:
        return (Factor("the fused layer's own 1/√d_k", call.info.scale),)
    return (Factor(DEFAULT if call.scale is None and call.by_sdpa else ARGUMENT, call.info.scale),)


def _by_hand(call: AttentionCall) -> tuple[tuple[Factor, ...] | None, str]:
    """For hand-written attention: the regression if it is clean, otherwise the factors that were traced."""
    traced, info = call.traced, call.info
    scores = traced.scores if traced is not None else None
    if scores is not None and (scores.norm is not None or scores.mixed):
        return None, "numbers"  # normalised scores, or heads that are mixed
    read = None if scores is None else scores.number
    fitted = slope(call, info.softcap)
    if fitted is not None and fitted.clean:
        exact = call.logits is not None and call.logits.dtype in (torch.float32, torch.float64)
        if read is not None and scores is not None and same(read, fitted.number, 1e-3 if exact else 1e-2):
            return _uncapped(scores.factors, info.softcap), "regression"  # the same number, not rounded
        low, high = fitted.spread
        single = same(low, high, 1e-2)
        factor = Factor(
            "the softmax's input against q·k", fitted.number, None if single else low, None if single else high
        )
        return (factor,), "regression"
    if scores is not None:
        return _uncapped(scores.factors, info.softcap), "numbers"
    return (None if info.scale is None else (Factor("multiplied by a number", info.scale),)), "numbers"


def _uncapped(factors: tuple[Factor, ...], cap: float | None) -> tuple[Factor, ...]:
    """Without the division and the multiplication by a softcap, which cancel."""
    if cap is None:
        return factors
    numbers = [factor.number for factor in factors]
    ends = [[index for index, number in enumerate(numbers) if same(number, end)] for end in (1 / cap, cap)]
    if not ends[0] or not ends[1]:
        return factors
    return tuple(factor for index, factor in enumerate(factors) if index not in (ends[0][-1], ends[1][-1]))


def _without_last(path: FactorPath | None, number: float) -> FactorPath | None:
    if path is None or not path.factors or not same(path.factors[-1].number, number):
        return path
    return FactorPath(path.factors[:-1], path.norm)


def _gains(path: FactorPath) -> float:
    return math.prod(factor.number for factor in path.factors if not factor.counts)


def _visible_keys(call: AttentionCall) -> Tensor | None:
    """(B, Lk): the keys that some query sees; None if not known."""
    if call.rows is not None and call.info.kind == "self" and call.info.queries == call.info.keys:
        return call.rows
    mask = call.mask
    if mask is None or mask.dim() != 4 or mask.shape[-1] != call.info.keys:
        return None
    visible = mask if mask.dtype.is_floating_point is False else mask > HIDDEN_BIAS
    return visible[:, 0].bool().any(-2)


def _fitting(keep: Tensor | None, tensor: Tensor) -> Tensor:
    """A mask (B, L) as weights for (…, L, E), whose first dimensions are batch and heads, joined or not."""
    if keep is None or keep.shape[-1] != tensor.shape[-2]:
        return tensor.new_ones(tensor.shape[-2], 1)
    weight = keep.to(tensor.dtype)
    if len(weight) == 1 or (tensor.dim() == 4 and tensor.shape[0] in (len(weight), 1)):
        return weight.reshape(len(weight), *[1] * (tensor.dim() - 3), -1, 1) if tensor.dim() > 2 else weight[0, :, None]
    if tensor.dim() == 3 and len(tensor) % len(weight) == 0:
        return weight.repeat_interleave(len(tensor) // len(weight), 0)[..., None]
    return tensor.new_ones(tensor.shape[-2], 1)
