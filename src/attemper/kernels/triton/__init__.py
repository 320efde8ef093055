"""triton: attention on NVIDIA GPUs from Ampere on, with every sign from the same pass.

    tile.py          logits of one tile: scale, softcap, bias, band, mask; dropout
    forward.py       online softmax over tiles of keys, output and signs
    backward.py      two kernels: over keys (dq, d(gain), d(mask)) and over rows (dk, dv)
    __init__.py      what each launch gets
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..contract import (
    OUTPUT_LOW_BIT,
    Gradients,
    NeedsGrad,
    Problem,
    Results,
    Upstream,
    empty_results,
    unrounded,
)
from . import backward as _backward
from . import forward as _forward


def forward(problem: Problem, sign_bits: int) -> Results:
    problem = _readable(problem)
    results = empty_results(problem, sign_bits)
    query, key, value = problem.query, problem.key, problem.value
    batch, heads, rows, dim = query.shape
    if not (batch * heads * rows):
        return results
    if not results.output_low.numel():
        sign_bits &= ~OUTPUT_LOW_BIT
    block = _tile(dim, query.dtype, value is not None)
    grid = (triton.cdiv(rows, block["BM"]), batch * heads)
    _forward.forward_kernel[grid](
        *_inputs(problem), *results, *_steps(problem), *_numbers(problem), **_kinds(problem),
        VALUES=value is not None, EXACT=_exact(problem, sign_bits), BITS=sign_bits, **block,
    )  # fmt: skip
    return results


def backward(problem: Problem, saved: Results, upstream: Upstream, needs_grad: NeedsGrad) -> Gradients:
    asked, problem = problem.mask, _readable(problem)
    query, key, value, mask, gain = problem[:5]
    batch, heads, rows, dim = query.shape
    groups, keys = key.shape[1:3]
    nothing = query.new_empty(0)

    def room(tensor: Tensor | None, needed: bool) -> Tensor:
        return nothing if tensor is None or not needed else torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    found = Gradients(*(room(tensor, needed) for tensor, needed in zip(problem[:6], needs_grad, strict=True)))
    if not (batch * heads * rows * keys):
        return found
    numbers, arrived = coefficients(saved, upstream)
    g_output = upstream.output if upstream.output is not None and value is not None else None
    arrived |= _backward.G_OUTPUT.value if g_output is not None else 0
    g_tensor = nothing if g_output is None else g_output if g_output.stride(-1) == 1 else g_output.contiguous()
    g_steps = (0, 0, 0) if g_output is None else g_tensor.stride()[:3]
    block = _tile(dim, query.dtype, True, backward=True)
    common = (*_inputs(problem), g_tensor, numbers, saved.argmax)
    dmask, steps, shared = _mask_room(problem, needs_grad)
    if needs_grad.query or needs_grad.gain or needs_grad.mask:
        _backward.rows_kernel[(triton.cdiv(rows, block["BM"]), batch * heads)](
            *common, found.query, found.gain, dmask, *_steps(problem), *g_steps, *steps, *_numbers(problem), **_kinds(problem),
            ARRIVED=arrived, DQ=needs_grad.query, DGAIN=needs_grad.gain and gain is not None, DMASK=dmask.numel() > 0,
            SHARED=shared, **block,
        )  # fmt: skip
    if needs_grad.key or (needs_grad.value and g_output is not None):
        _backward.keys_kernel[(triton.cdiv(keys, block["BN"]), batch * groups)](
            *common, found.key, found.value, *_steps(problem), *g_steps, *_numbers(problem), **_kinds(problem),
            ARRIVED=arrived, DK=needs_grad.key, DV=needs_grad.value and g_output is not None, **block,
        )  # fmt: skip
    return found._replace(mask=dmask.to(asked.dtype) if dmask.numel() and asked is not None else nothing)


def coefficients(saved: Results, upstream: Upstream) -> tuple[Tensor, int]:
    """What the gradient of a row's logits needs, (8, B, H, Lq): see `backward.LSE` and the places after it; and which are there."""
    lse, low = saved.lse, saved.lse_low
    numbers = torch.zeros((8, *lse.shape), dtype=torch.float32, device=lse.device)
    numbers[0] = lse.masked_fill(lse == float("-inf"), float("inf"))  # a row without keys: exp(z - inf) = 0
    rest = numbers[1].copy_(low.neg().exp())
    constant, arrived = numbers[2], 0
    if upstream.output is not None and saved.output.numel():
        output = unrounded(saved.output, saved.output_low) if saved.output_low.numel() else saved.output.float()
        constant -= (upstream.output.float() * output).sum(-1)
    if upstream.lse is not None:
        constant += upstream.lse
    if upstream.entropy is not None:
        arrived |= _backward.G_ENTROPY.value
        constant -= upstream.entropy * (saved.entropy - low)
        numbers[3] = upstream.entropy * rest
    if upstream.p2 is not None:
        arrived |= _backward.G_P2.value
        constant -= 2 * upstream.p2 * saved.p2
        numbers[4] = 2 * upstream.p2 * rest.square()
    constant *= rest
    if upstream.mean is not None or upstream.variance is not None:
        arrived |= _backward.G_MOMENTS.value
        some = saved.visible.clamp(min=1)
        if upstream.mean is not None:
            numbers[5] = upstream.mean / some
        if upstream.variance is not None:
            numbers[6] = 2 * upstream.variance / some
            numbers[5] -= numbers[6] * saved.mean
    if upstream.peak is not None:
        arrived |= _backward.G_PEAK.value
        numbers[7] = upstream.peak
    return numbers, arrived


def _mask_room(problem: Problem, needs_grad: NeedsGrad) -> tuple[Tensor, tuple[int, ...], bool]:
    """Zeros for the gradient of a mask, float32; its steps; whether many rows, keys or heads add to one entry."""
    mask = problem.mask
    if mask is None or not needs_grad.mask:
        return problem.query.new_empty(0), (0, 0, 0, 0), False
    full = (*problem.query.shape[:3], problem.key.shape[2])
    dmask = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return dmask, _repeating(dmask), dmask.shape != full


def _exact(problem: Problem, sign_bits: int) -> bool:
    """Whether weights keep what rounding takes from them: float32 gradients, of a gain or a mask, are as exact as the output."""
    mask = problem.mask
    added = mask is not None and mask.dtype != torch.uint8
    return bool(sign_bits & OUTPUT_LOW_BIT) and (problem.gain is not None or added)


def _readable(problem: Problem) -> Problem:
    """With vectors whose numbers lie side by side, and a mask of bytes or of floats."""
    query, key, value = (t if t is None or t.stride(-1) == 1 else t.contiguous() for t in problem[:3])
    mask = problem.mask
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    return problem._replace(query=query, key=key, value=value, mask=mask)


def _inputs(problem: Problem) -> tuple[Tensor, ...]:
    # a pointer that is not read: the query's
    return tuple(problem.query if tensor is None else tensor for tensor in problem[:5])


def _repeating(tensor: Tensor | None) -> tuple[int, ...]:
    """Strides, 0 along a dimension of 1, which repeats."""
    return (0, 0, 0, 0) if tensor is None else tuple(0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _steps(problem: Problem) -> tuple[int, ...]:
    query, key, value, mask, gain = problem[:5]
    none = (0, 0, 0)
    return (
        *query.stride()[:3],
        *key.stride()[:3],
        *(none if value is None else value.stride()[:3]),
        *_repeating(mask),
        *(none if gain is None else _repeating(gain)),
    )


def _numbers(problem: Problem) -> tuple[Any, ...]:
    query, key = problem.query, problem.key
    seed = 0 if problem.seed is None else int(problem.seed)
    return (
        problem.scale, problem.softcap or 1.0, problem.dropout, seed,
        query.shape[1], key.shape[1], query.shape[2], key.shape[2], problem.left or 0, problem.right or 0,
    )  # fmt: skip


def _kinds(problem: Problem) -> dict[str, Any]:
    """What is compiled for."""
    query, value, mask = problem.query, problem.value, problem.mask
    dim, value_dim = query.shape[3], query.shape[3] if value is None else value.shape[3]
    return {
        "E": dim,
        "EV": value_dim,
        "BE": max(16, triton.next_power_of_2(dim)),
        "BEV": max(16, triton.next_power_of_2(value_dim)),
        "MASK": 0 if mask is None else 1 if mask.dtype == torch.uint8 else 2,
        "GAIN": problem.gain is not None,
        "LEFT": problem.left is not None,
        "RIGHT": problem.right is not None,
        "CAP": problem.softcap is not None,
        "DROP": problem.dropout > 0,
    }


def _tile(dim: int, dtype: torch.dtype, values: bool, backward: bool = False) -> dict[str, int]:
    if dtype == torch.float32:
        return {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 1}
    if backward:
        return {"BM": 64, "BN": 64, "num_warps": 4 if dim <= 64 else 8, "num_stages": 2}
    return {"BM": 128, "BN": 64, "num_warps": 4 if dim <= 64 else 8, "num_stages": 3 if dim <= 64 else 2}
