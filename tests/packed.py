"""Packed sequences: the definition, document by document in float64, and kernels that compute by it where FlashAttention would.

transformers' own code decides what its flash attention is called with. Only kernels from outside are stood in for, by ops that
no watch sees into. Each keeps what it was asked to compute.
"""

import math
from contextlib import contextmanager

import torch
import transformers
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash

SEEN: list[dict[str, list[float]]] = []  # the signs of each call that a kernel computed, per head
GRADIENTS: list[dict[str, list[float]]] = []  # of each backward


def weights_of(q: Tensor, k: Tensor, causal: bool, window: tuple[int, int], scale: float, cap: float = 0.0):
    """The logits of one document, (H, Lq, Lk), -inf where FlashAttention 2.1 hides a key, and its weights."""
    z = q @ k.repeat_interleave(len(q) // len(k), 0).mT * scale
    z = cap * (z / cap).tanh() if cap else z
    ahead = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    hidden = (ahead > 0) & causal
    hidden |= (ahead < -window[0]) & (window[0] >= 0) | (ahead > window[1]) & (window[1] >= 0)
    z = z.masked_fill(hidden, -math.inf)
    empty = hidden.all(-1, keepdim=True)
    # torch's own softmax would show itself to an intercepted pass; a kernel from outside does not
    return z, (z - z.logsumexp(-1, keepdim=True).masked_fill(empty, 0.0)).exp()


def documents(*offsets: Tensor):
    """The rows and the keys of each document, as slices."""
    for first, last, start, stop in zip(*(edge for one in offsets for edge in (one[:-1], one[1:])), strict=True):
        yield slice(int(first), int(last)), slice(int(start), int(stop))


def define(q: Tensor, k: Tensor, offsets: tuple[Tensor, Tensor], *how, used=None) -> dict[str, list[float]]:
    """The signs of a packed call on (tokens, H, E), per head: means over the rows of all documents that see a key."""
    q, k = (part.detach().double().transpose(0, 1) for part in (q, k))
    rows = []  # (H, signs, rows)
    for number, (own, keys) in enumerate(documents(*offsets)):
        keys = keys if used is None else slice(keys.start, keys.start + int(used[number]))
        if own.stop > own.start and keys.stop > keys.start:
            z, p = weights_of(q[:, own], k[:, keys], *how)
            plogp = torch.where(p > 0, p * p.log(), 0.0).sum(-1)
            visible = (z > -math.inf).sum(-1).double()
            each = torch.stack([visible, z.amax(-1), -plogp, p.square().sum(-1)], 1)
            rows.append(each[..., (visible > 0).all(0)])
    found = torch.cat(rows, -1)
    return {
        "rows": [float(found.shape[-1])] * len(q),
        "visible": found[:, 0].mean(-1).tolist(),
        "peak": found[:, 1].amax(-1).tolist(),
        "entropy": found[:, 2].mean(-1).tolist(),
        "sum_p2": found[:, 3].mean(-1).tolist(),
    }


@torch.library.custom_op("attempertest::varlen_forward", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, how: list[float]) -> Tensor:
    causal, left, right, scale, cap = how
    given = bool(causal), (int(left), int(right)), scale, cap
    SEEN.append(define(q, k, (rows, keys), *given))
    out = torch.zeros_like(q)
    for own, other in documents(rows, keys):
        _, p = weights_of(q[own].transpose(0, 1), k[other].transpose(0, 1), *given)
        out[own] = (p @ v[other].transpose(0, 1).repeat_interleave(q.shape[1] // v.shape[1], 0)).transpose(0, 1)
    return out


@torch.library.custom_op("attempertest::varlen_backward", mutates_args=())
def backward(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, how: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    causal, left, right, scale, cap = how
    assert not cap
    each = q.shape[1] // k.shape[1]
    found = dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for own, other in documents(rows, keys):
        one, two, three, up = (x.transpose(0, 1) for x in (q[own], k[other], v[other], out[own]))
        _, p = weights_of(one, two, bool(causal), (int(left), int(right)), scale)
        dp = up @ three.repeat_interleave(each, 0).mT
        dz = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dq[own] = (dz @ two.repeat_interleave(each, 0)).transpose(0, 1)
        dk[other] = (dz.mT @ one).unflatten(0, (-1, each)).sum(1).transpose(0, 1)
        dv[other] = (p.mT @ up).unflatten(0, (-1, each)).sum(1).transpose(0, 1)
    kept = [(own, other) for own, other in documents(rows, keys) if own.stop > own.start and other.stop > other.start]
    one, two = torch.cat([dq[own] for own, _ in kept]), torch.cat([dk[other] for _, other in kept])
    sizes = {"grad_q_rms": one, "grad_k_rms": two.repeat_interleave(each, 1)}
    GRADIENTS.append({name: size.square().mean((0, 2)).sqrt().tolist() for name, size in sizes.items()})
    return found


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:5])
    ctx.how = inputs[5]


def _differentiate(ctx, out):
    return *backward(out, *ctx.saved_tensors, ctx.how), None, None, None


forward.register_autograd(_differentiate, setup_context=_keep)


def varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
):
    """FlashAttention's flash_attn_varlen_func, with its own meaning of causal and window since 2.1."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return forward(q, k, v, cu_seqlens_q, cu_seqlens_k, [float(causal), *map(float, window_size), scale, softcap])


def dense(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    """flash_attn_func."""
    offsets = [torch.arange(len(x) + 1, dtype=torch.int32) * x.shape[1] for x in (q, k)]
    flat = (x.flatten(0, 1) for x in (q, k, v))
    return varlen(*flat, *offsets, 0, 0, dropout_p, softmax_scale, causal, window_size, softcap).view(q.shape)


@contextmanager
def flash_attention():
    """transformers has FlashAttention, as if its package were installed."""

    def kernels(*_, **__):
        return dense, varlen, None, flash._pad_input, flash._unpad_input

    before, flash._lazy_imports, flash._loaded_implementation = flash._lazy_imports, kernels, None
    SEEN.clear()
    GRADIENTS.clear()
    try:
        yield
    finally:
        flash._lazy_imports, flash._loaded_implementation = before, None


def with_flash(model: transformers.PreTrainedModel):
    """The model on flash attention; set_attn_implementation asks for its package."""
    model.config._attn_implementation_internal = "flash_attention_2"
    return model
