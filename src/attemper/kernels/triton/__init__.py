"""triton: attention on NVIDIA GPUs from Ampere on, with every sign from the same pass.

arguments.py     what a launch gets, and what it is compiled for
blocks.py        the size of tiles
tile.py          logits of one tile: scale, softcap, bias, band, mask; dropout
frozen.py        the fast pass over the keys: one reference for the whole row
online.py        the careful pass: running maximum, every kind of logit
forward.py       fast pass, careful pass where that is not enough, output and signs
decode.py        few rows on many keys: split over programs, and joined
store.py         signs and output of a row, written
row_terms.py     what the gradient needs of each row
backward.py      two kernels: over keys (dq, d(gain), d(mask)) and over rows (dk, dv)
summary.py       rows to heads, for all calls of a step in one launch
__init__.py      forward() and backward(): the launches in order
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..contract import ARGMAX_BIT, OUTPUT_LOW_BIT, Gradients, NeedsGrad, Problem, Results, Upstream, empty_results
from . import backward as _backward
from . import decode as _decode
from . import forward as _forward
from . import row_terms as _rows
from . import summary as summary  # the watch folds rows by it
from .arguments import (
    MOST_PLANS,
    PLANS,
    Launch,
    compiled_for,
    descriptors,
    inputs,
    is_added,
    is_fast,
    is_small,
    keeps_weights,
    numbers,
    padded,
    plan_key,
    readable,
    remember,
    repeating,
    splits_of,
    steps,
    widest,
    with_unit_stride,
)
from .blocks import decode_block, forward_block, keys_block, rows_block


def forward(problem: Problem, sign_bits: int) -> Results:
    problem = readable(problem)
    results = empty_results(problem, sign_bits)
    if results.lse.numel():
        with torch.cuda.device_of(problem.query):  # Triton launches on the current device
            _launch_forward(problem, results, sign_bits)
    return results


def _launch_forward(problem: Problem, results: Results, sign_bits: int) -> None:
    key = plan_key(problem, sign_bits)
    plan = PLANS.get(key)
    if plan is not None:
        plan.run(problem, results)
        return
    splits = splits_of(problem)
    if splits > 1:
        for launch in decode_launches(problem, results, sign_bits, splits):
            launch.run()
        return
    launch = forward_launch(problem, results, sign_bits)
    launch.run()
    if len(PLANS) < MOST_PLANS:
        remember(key, launch)


def forward_launch(problem: Problem, results: Results, sign_bits: int, hopper: bool | None = None) -> Launch:
    """`hopper` is whether the hardware copies whole tiles, and more; None asks the device."""
    query, key, value = problem.query, problem.key, problem.value
    batch, heads, rows, _ = query.shape
    sign_bits = _written(sign_bits, results)
    fast = is_fast(problem, sign_bits) and bool(problem.value is not None or sign_bits & ~ARGMAX_BIT)
    if fast:
        sign_bits &= ~ARGMAX_BIT  # see _argmax
    hopper = is_hopper(query.device) if hopper is None else hopper
    block = forward_block(widest(problem), query.dtype, value is not None, fast, sign_bits > 0, hopper)
    tiles = None
    if fast and hopper:
        tiles = descriptors(key, key if value is None else value, rows=block["BN"])
    constants = _forward_constants(problem, sign_bits) | {"FAST": fast, "TMA": tiles is not None}
    args = (*inputs(problem), *(tiles or (key, key)), *results, *steps(problem), *numbers(problem))
    grid = (triton.cdiv(rows, block["BM"]), batch * heads)
    return Launch(_forward.forward_kernel, grid, args, constants | _tile_of(block), _options_of(block))


def decode_launches(problem: Problem, results: Results, sign_bits: int, splits: int) -> list[Launch]:
    query, key, value = problem.query, problem.key, problem.value
    n_rows, keys, groups = results.lse.numel(), key.shape[2], key.shape[1]
    sign_bits = _written(sign_bits, results)
    block = decode_block(padded(query.shape[3]), query.dtype, query.shape[1] // groups * query.shape[2])
    chunk = triton.cdiv(triton.cdiv(keys, splits), block["BN"]) * block["BN"]
    splits = triton.cdiv(keys, chunk)
    parts = query.new_empty((_decode.N_PARTS, splits, n_rows), dtype=torch.float32)
    sums = parts if value is None else query.new_empty((splits, n_rows, value.shape[3]), dtype=torch.float32)
    constants = _forward_constants(problem, sign_bits)
    args = (*inputs(problem), parts, sums, *steps(problem), *numbers(problem), chunk, n_rows)
    grid = (splits, query.shape[0] * groups)
    split = Launch(_decode.decode_kernel, grid, args, constants | _tile_of(block), _options_of(block))
    join = {name: constants[name] for name in ("EV", "BEV", "VALUES", "BITS")} | {
        "SPLITS": triton.next_power_of_2(splits)
    }
    return [
        split,
        Launch(_decode.join_kernel, (n_rows, 1), (parts, sums, *results, n_rows, splits), join, {"num_warps": 4}),
    ]


def _written(sign_bits: int, results: Results) -> int:
    """The bits of what is there to be written: a float32 output has no low part."""
    return sign_bits if results.output_low.numel() else sign_bits & ~OUTPUT_LOW_BIT


def _forward_constants(problem: Problem, sign_bits: int) -> dict[str, Any]:
    asked = {"VALUES": problem.value is not None, "EXACT": keeps_weights(problem, sign_bits), "BITS": sign_bits}
    return compiled_for(problem) | asked


def backward(problem: Problem, saved: Results, upstream: Upstream, needs_grad: NeedsGrad) -> Gradients:
    with torch.cuda.device_of(problem.query):
        return _launch_backward(problem, saved, upstream, needs_grad)


def _launch_backward(problem: Problem, saved: Results, upstream: Upstream, needs_grad: NeedsGrad) -> Gradients:
    asked, problem = problem.mask, readable(problem)
    query, key, value, _, gain = problem[:5]
    batch, heads, rows, _ = query.shape
    groups, keys = key.shape[1:3]
    nothing = query.new_empty(0)
    empty = not batch * heads * rows * keys
    make = torch.zeros if empty else torch.empty

    def like(tensor: Tensor | None, needed: bool) -> Tensor:
        return nothing if tensor is None or not needed else make(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    found = Gradients(*(like(tensor, needed) for tensor, needed in zip(problem[:6], needs_grad, strict=True)))
    if empty:
        return found
    g_output = None if value is None or upstream.output is None else with_unit_stride(upstream.output)
    if g_output is None and needs_grad.value and value is not None:
        found.value.zero_()
    terms, arrived = row_terms(saved, upstream._replace(output=g_output))
    g_tensor, g_steps = (nothing, (0, 0, 0)) if g_output is None else (g_output, g_output.stride()[:3])
    argmax = saved.argmax if upstream.peak is None else _argmax(problem, saved)
    sizes = widest(problem), query.dtype, is_hopper(query.device)
    lift = _lift(problem, g_output, arrived)
    common = (*inputs(problem), g_tensor, terms, argmax, nothing if lift is None else lift)
    constants = compiled_for(problem) | {"ARRIVED": arrived}
    constants |= {"LIFT": lift is not None, "SPLIT": is_small(problem)}
    exact = query.dtype == torch.float32 or is_added(problem.mask) or is_small(problem)
    constants["LEAN"] = not exact and problem.softcap is None
    dmask, dmask_steps, shared = _mask_gradient(problem, needs_grad)
    if needs_grad.query or needs_grad.gain or needs_grad.mask:
        asks = {"DQ": needs_grad.query, "DGAIN": needs_grad.gain and gain is not None}
        asks |= {"DMASK": dmask.numel() > 0, "SHARED": shared}
        asks["EVEN"] = problem.softcap is None and (query.dtype != torch.float32 or needs_grad.gain)
        args = (*common, found.query, found.gain, dmask, *steps(problem), *g_steps, *dmask_steps, *numbers(problem))
        block = rows_block(*sizes)
        grid = (triton.cdiv(rows, block["BM"]), batch * heads)
        Launch(_backward.rows_kernel, grid, args, constants | asks | _tile_of(block), _options_of(block)).run()
    if needs_grad.key or (needs_grad.value and g_output is not None):
        asks = {"DK": needs_grad.key, "DV": needs_grad.value and g_output is not None}
        args = (*common, found.key, found.value, *steps(problem), *g_steps, *numbers(problem))
        block = keys_block(*sizes)
        grid = (triton.cdiv(keys, block["BN"]), batch * groups)
        Launch(_backward.keys_kernel, grid, args, constants | asks | _tile_of(block), _options_of(block)).run()
    return found._replace(mask=dmask.to(asked.dtype) if dmask.numel() and asked is not None else nothing)


def row_terms(saved: Results, upstream: Upstream) -> tuple[Tensor, int]:
    """Nine numbers for each row, (9, B, H, Lq), and which gradients arrived; that of the output with unit stride."""
    lse = saved.lse
    terms = lse.new_empty((_rows.N_TERMS, *lse.shape))
    bits = {"output": _rows.G_OUTPUT, "lse": _rows.G_LSE, "entropy": _rows.G_ENTROPY, "p2": _rows.G_P2}
    bits |= {"mean": _rows.G_MEAN, "variance": _rows.G_VARIANCE, "peak": _rows.G_PEAK}
    arrived = sum(bit.value for name, bit in bits.items() if getattr(upstream, name) is not None)

    def pointer(tensor: Tensor | None) -> Tensor:
        return lse if tensor is None else tensor.contiguous()

    g = lse if upstream.output is None else upstream.output
    value_dim = saved.output.shape[-1] if saved.output.dim() == 4 else 1
    args = (
        terms, saved.output, saved.output_low, saved.lse_low, saved.visible, saved.mean, lse, saved.entropy, saved.p2,
        g, *(pointer(t) for t in upstream[1:]), *g.stride()[:3], lse.shape[1], lse.shape[2], lse.numel(),
    )  # fmt: skip
    constants: dict[str, Any] = {"EV": value_dim, "BEV": padded(value_dim), "BM": 32}
    constants |= {"ARRIVED": arrived, "WHOLE": saved.output_low.numel() > 0}
    Launch(_rows.row_terms_kernel, (triton.cdiv(lse.numel(), 32), 1), args, constants, {"num_warps": 4}).run()
    return terms, arrived


def _lift(problem: Problem, g_output: Tensor | None, arrived: int) -> Tensor | None:
    """For float16: two powers of 2, on the device, by which dz and dz times scale are multiplied before they are rounded.

    So small ones keep their digits. |dz| <= |g · v| + |g · output| <= 2 max|g| max|v|, as long as gradients arrive at the
    output alone.
    """
    if problem.query.dtype != torch.float16 or g_output is None or arrived != _rows.G_OUTPUT.value:
        return None
    assert problem.value is not None
    most = (
        2
        * g_output.float().norm(dim=-1).amax()
        * problem.value.float().norm(dim=-1).amax()
        / max(1 - problem.dropout, 1e-3)
    )
    gain = 1.0 if problem.gain is None else problem.gain.abs().amax() * abs(problem.scale)
    lifts = torch.exp2((15 - torch.stack([most, most * gain]).log2()).floor().clamp(-24, 24))
    return torch.where(lifts.isfinite(), lifts, 1.0)


def _argmax(problem: Problem, saved: Results) -> Tensor:
    """The arg-max of each row; the fast pass does not look for it, since it is needed only where a gradient of `peak` arrives."""
    if splits_of(problem) > 1 or not is_fast(problem, OUTPUT_LOW_BIT if saved.output_low.numel() else 0):
        return saved.argmax
    alone = problem._replace(value=None)
    found = empty_results(alone, ARGMAX_BIT)
    forward_launch(alone, found, ARGMAX_BIT).run()
    return found.argmax


def _mask_gradient(problem: Problem, needs_grad: NeedsGrad) -> tuple[Tensor, tuple[int, ...], bool]:
    """Zeros for the gradient of a mask, float32; its steps; whether many rows, keys or heads add to one entry."""
    mask = problem.mask
    if mask is None or not needs_grad.mask:
        return problem.query.new_empty(0), (0, 0, 0, 0), False
    full = (*problem.query.shape[:3], problem.key.shape[2])
    dmask = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return dmask, repeating(dmask), dmask.shape != full


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _tile_of(block: dict[str, int]) -> dict[str, int]:
    return {"BM": block["BM"], "BN": block["BN"]}


def _options_of(block: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in block.items() if name not in ("BM", "BN")}
