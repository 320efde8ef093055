"""Sink: one more logit for each row, learned per head, that takes weight and gives no value; added to the results of any kernel.

It is the merge of a row with a shard of one key whose logit is the sink s, whose value is 0, and whose logit is no peak. With
d = lse - s, the keys keep σ(d) of the weight and the sink takes σ(-d). A backward that recomputes its weights from `lse` needs
nothing else: with the lse and the output of all keys and the sink, its formula is the same. A sink of -inf is none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...kernels.contract import OUTPUT_LOW_BIT, Results, Upstream, measuring_dtype
from ...vitals import HALVES, rounded_off, rounding_of_sum, unrounded

NEG_INF = float("-inf")


def check_sink(where: str, sink: object, query: Tensor) -> Tensor:
    """One logit for each head as one for each row, (B, H, Lq)."""
    heads = query.shape[1]
    if not isinstance(sink, Tensor):
        raise InputError(
            f"{where}(): `sink` must be a torch.Tensor; got {type(sink).__name__}. "
            f"Use torch.zeros({heads}), a logit for each head."
        )
    if not sink.is_floating_point():
        raise InputError(f"{where}(): `sink` must be floating point; got {sink.dtype}. Use sink.float().")
    if tuple(sink.shape) != (heads,):
        way = (
            f"sink.expand({heads}) for one that all heads share"
            if sink.numel() == 1
            else f"torch.zeros({heads}) to begin with"
        )
        raise InputError(
            f"{where}(): `sink` must have shape ({heads},), a logit for each query head; got {tuple(sink.shape)}. Use {way}."
        )
    if sink.device != query.device:
        raise InputError(
            f"{where}(): `sink` must be on query's device {query.device}; got {sink.device}. Use sink.to({str(query.device)!r})."
        )
    return sink.to(measuring_dtype(query.dtype)).view(1, heads, 1).expand(query.shape[:3])


def fold(results: Results, sink: Tensor, sign_bits: int) -> Results:
    """The results with the sink. Those of half precision need `output_low`, so that the output is rounded once."""
    lse, low = results.lse, results.lse_low
    there, empty = sink != NEG_INF, lse == NEG_INF
    own = torch.where(there, sink, 0.0)
    spoilt = own * 0  # NaN for +inf, as softmax has it
    d = torch.where(empty, NEG_INF, lse - sink + low + spoilt)
    kept, taken = d.sigmoid(), torch.where(there, (-d).sigmoid() + spoilt, 0.0)
    top = torch.maximum(lse, sink)
    more = torch.where(lse >= sink, low, 0.0) + d.abs().neg().exp().log1p()
    found: dict[str, Any] = {"lse": torch.where(top.isinf(), top, top + more)}
    found["lse_low"] = rounding_of_sum(top, more).masked_fill(~top.isfinite(), 0.0)
    if results.output is not None:
        found["output"], found["output_low"] = _weighted(results, kept)
    if not sign_bits & OUTPUT_LOW_BIT:
        found["output_low"] = None
    if results.entropy is not None:
        found["entropy"] = kept * results.entropy + torch.special.entr(kept) + torch.special.entr(taken)
    if results.sum_p2 is not None:
        found["sum_p2"] = kept.square() * results.sum_p2 + taken.square()
    if results.visible is not None:
        found["visible"] = visible = results.visible + there
        share = there.to(lse.dtype) / visible.clamp(min=1)
        if results.mean is not None:
            off = torch.where(there, own - results.mean + spoilt, 0.0)
            found["mean"] = (1 - share) * results.mean + share * own
            if results.variance is not None:
                found["variance"] = (1 - share) * (results.variance + share * off.square())
    return results._replace(**found)


def _weighted(results: Results, kept: Tensor) -> tuple[Tensor, Tensor | None]:
    """The output times what the keys keep of the weight, rounded once, and what that rounding took."""
    output, low = results.output, results.output_low
    if output.dtype not in HALVES:
        return output * kept.unsqueeze(-1), None
    wide = (output.float() if low is None else unrounded(output, low)) * kept.unsqueeze(-1)
    short = torch.empty_like(output).copy_(wide)
    return short, torch.empty_like(output, dtype=torch.int16).copy_(rounded_off(wide, short))


def gradient(sink: Tensor, saved: Results, upstream: Upstream) -> Tensor:
    """The gradient of the sink in each row, (B, H, Lq), from what `fold` returned: dz of blockwise/backward.py at z = s."""
    if not sink.numel():  # an op is given no rows as None
        return torch.zeros_like(sink)
    sink = sink.masked_fill(sink == NEG_INF, float("nan"))
    log_p = sink - saved.lse - saved.lse_low
    p = log_p.exp()
    slope = torch.zeros_like(p)
    if upstream.output is not None:
        output = saved.output
        if output.dtype in HALVES:
            output = output.float() if saved.output_low is None else unrounded(output, saved.output_low)
        slope = slope - (upstream.output.to(p.dtype) * output).sum(-1)
    if upstream.lse is not None:
        slope = slope + upstream.lse
    if upstream.entropy is not None:
        slope = slope - upstream.entropy * (log_p + saved.entropy)
    if upstream.sum_p2 is not None:
        slope = slope + 2 * upstream.sum_p2 * (p - saved.sum_p2)
    slope_at_sink = p * slope
    if upstream.mean is not None:
        slope_at_sink = slope_at_sink + upstream.mean / saved.visible
    if upstream.variance is not None:
        slope_at_sink = slope_at_sink + 2 * upstream.variance * (sink - saved.mean) / saved.visible
    return torch.where(sink.isnan() & ~saved.lse.isnan(), 0.0, slope_at_sink)
