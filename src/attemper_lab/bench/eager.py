"""eager: attention with the whole n × n matrix in memory, and the same with every vital sign: what the bench compares with.

They are written as fast as eager PyTorch allows, because beating a slow one proves nothing. What helps:

- one n × n matrix, reused in place: on a CPU the page faults of a second one cost more than a softmax;
- keys centred before the product, so logits arrive centred: their variance is a plain norm, with nothing to cancel;
- causal by zeroing: a centred row has its largest logit at or above 0, so the zeros above the diagonal hide nothing;
- a softmax that divides last: exp(z - peak) @ [value, key, 1] gives the output, the mean logit under the weights (hence
  the entropy) and the normaliser in one product.

Under autograd what is saved for backward is not overwritten, and every sign can be differentiated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

from attemper import Attended, Vitals
from attemper.extension.calls import NEG_INF


def attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False) -> Tensor:
    """``softmax(query @ key^T / sqrt(E)) @ value`` for (B, H, L, E) tensors."""
    z = (query * query.shape[-1] ** -0.5) @ key.mT  # [B, H, L, L]
    if causal:
        z += _causal_mask(z)
    weights = z.softmax(-1) if z.requires_grad else torch.softmax(z, -1, out=z)
    return weights @ value


def with_statistics(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False) -> Attended:
    """Eager attention with every sign of ``attemper.attention``, in float32 for half-precision inputs."""
    dtype, wide = query.dtype, torch.promote_types(query.dtype, torch.float32)
    rows, keys = query.shape[-2], key.shape[-2]
    query, key = query.to(wide) * query.shape[-1] ** -0.5, key.to(wide)
    center = key.mean(-2, keepdim=True)  # [B, H, 1, E]
    key = key - center
    mean = (query * center).sum(-1)  # [B, H, L]
    if causal:
        visible = torch.arange(1, rows + 1, device=query.device)
        own = (query * key.cumsum(-2)).sum(-1) / visible
        mean = mean + own
        # one more column in the product takes each row's own mean away
        query = torch.cat([query, -own.unsqueeze(-1)], -1)
        key = torch.cat([key, torch.ones_like(key[..., :1])], -1)
    else:
        visible = torch.full((rows,), keys, device=query.device)
        variance = ((query @ (key.mT @ key)) * query).sum(-1) / keys
    z = (query.to(dtype) @ key.to(dtype).mT).to(wide)  # [B, H, L, L], each row's mean is 0
    if causal:
        variance = vector_norm(z.tril_(), dim=-1).square() / visible

    peak = z.amax(-1)
    reduce = _by_products if dtype == wide else _by_sums
    output, total, under_weights, norm = reduce(z, peak.detach().unsqueeze(-1), query, key, value, causal)
    lse = peak.detach() + total.log()
    return Attended(
        output,
        Vitals(
            visible=visible.to(torch.int32).expand(peak.shape),
            mean=mean,
            variance=variance,
            peak=peak + mean,
            lse=lse + mean,
            entropy=lse - under_weights,
            sum_p2=(norm / total).square(),
        ),
    )


Reduced = tuple[Tensor, Tensor, Tensor, Tensor]
"""output, Σe, Σ p z and the norm of e over each row."""


def _by_products(z: Tensor, peak: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Reduced:
    """Every sum but the norm from one matrix product: Σ e z = q · Σ e k."""
    if z.requires_grad:
        t = z - peak
        e = (t.add_(_causal_mask(t)) if causal else t).exp_()
    else:
        e = z.sub_(peak).exp_()
        e = e.tril_() if causal else e
    sums = e @ torch.cat([value, key, torch.ones_like(key[..., :1])], -1)  # [B, H, L, Ev + E + 1]
    width, total = value.shape[-1], sums[..., -1]
    under_weights = (sums[..., width : width + key.shape[-1]] * query).sum(-1) / total
    return sums[..., :width] / total.unsqueeze(-1), total, under_weights, vector_norm(e, dim=-1)


def _by_sums(z: Tensor, peak: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Reduced:
    """For half precision: sums over float32 entries, since a product in half precision would round them."""
    t = z - peak if z.requires_grad else z.sub_(peak)
    e = (t + _causal_mask(t) if causal else t).exp()
    total = e.sum(-1)
    output = (e.to(value.dtype) @ value) / total.unsqueeze(-1).to(value.dtype)
    under_weights = (t * e if z.requires_grad else t.mul_(e)).sum(-1) / total + peak.squeeze(-1)
    return output, total, under_weights, vector_norm(e, dim=-1)


def _causal_mask(z: Tensor) -> Tensor:
    """-inf above the diagonal, [L, L]."""
    return torch.full(z.shape[-2:], NEG_INF, dtype=z.dtype, device=z.device).triu_(1)
