"""triton: attention on NVIDIA GPUs from Ampere on, with every sign from the same pass.

arguments.py     what a launch gets, what it is compiled for, the size of tiles
tile.py          logits of one tile: scale, softcap, bias, band, mask; dropout
frozen.py        the fast pass over the keys: one reference for the whole row
online.py        the careful pass: running maximum, every kind of logit
forward.py       fast pass, careful pass where that is not enough, output and signs
decode.py        few rows on many keys: split over programs, and joined
store.py         signs and output of a row, written
row_terms.py     what the gradient needs of each row
backward.py      two kernels: over keys (dq, d(gain), d(mask)) and over rows (dk, dv)
launch.py        a launch by what was compiled for an equal one before
summary.py       rows to heads, for all calls of a step in one launch
__init__.py      forward() and backward(): the launches in order; bare_forward() and bare_backward() without an op around them
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import (
    ARGMAX_BIT,
    OUTPUT_LOW_BIT,
    Gradients,
    NeedsGrad,
    Problem,
    Results,
    Upstream,
    bare_results,
    empty_results,
    empty_vectors,
    is_by_token,
)
from . import backward as _backward
from . import decode as _decode
from . import forward as _forward
from . import launch as _launch
from . import row_terms as _rows
from . import summary as summary  # the watch folds rows by it
from .arguments import (
    as_written,
    cdiv,
    compiled_for,
    decode_block,
    described,
    descriptors,
    forward_block,
    inputs,
    is_added,
    is_fast,
    is_small,
    keeps_weights,
    keys_block,
    next_power_of_2,
    numbers,
    padded,
    readable,
    repeating,
    rows_block,
    splits_of,
    steps,
    widest,
    with_unit_stride,
)
from .launch import ALIGNED, Block, Launch, all_aligned, facts, is_hopper, room, tuned


def forward(problem: Problem, sign_bits: int) -> Results:
    problem = readable(problem)
    results = empty_results(problem, sign_bits, as_query=True)
    if results.lse.numel():
        _on_its_device(problem.query, _launch_forward, problem, results, sign_bits)
    if sign_bits & ARGMAX_BIT and splits_of(problem) == 1 and _takes_fast_pass(problem, _written(sign_bits, results)):
        results.argmax.fill_(-1)  # an op returns nothing that was not written
    return results


def bare_forward(problem: Problem, sign_bits: int, saved: bool = False) -> Results:
    """`forward` for a caller that is no op: None for what was not asked for."""
    problem = readable(problem)
    query, value = problem.query, problem.value
    results = bare_results(query, None if value is None else value.shape[3], sign_bits, saved=True, as_query=True)
    if results.lse.numel():
        _on_its_device(query, _launch_forward, problem, _complete(results, query), sign_bits)
    return results


def _on_its_device(tensor: Tensor, run: Callable[..., Any], *args: Any) -> Any:
    """Triton launches on the current device."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return run(*args)
    with torch.cuda.device_of(tensor):
        return run(*args)


def _complete(results: Results, query: Tensor) -> Results:
    """With tensors of no elements for what is None: a kernel gets an address for each."""
    nothing = _nothing(query.device, query.dtype)
    return Results(*[empty if tensor is None else tensor for tensor, empty in zip(results, nothing, strict=True)])


@cache
def _nothing(device: torch.device, dtype: torch.dtype) -> Results:
    problem = Problem(torch.empty((1, 1, 0, 1), dtype=dtype, device=device), *[None] * (len(Problem._fields) - 1))  # type: ignore[arg-type]
    return empty_results(problem, 0)


def _plan_key(problem: Problem, sign_bits: int) -> tuple[Any, ...]:
    """All that a launch of the forward depends on; () for a call with dropout, whose seed is new each time."""
    if problem.dropout:
        return ()
    return (problem.query.device.index, *map(facts, problem[:5]), problem[7:], sign_bits)


def _launch_forward(problem: Problem, results: Results, sign_bits: int) -> None:
    plan_key = _plan_key(problem, sign_bits)
    plan = _launch.PLANS.get(plan_key)
    if plan is not None:
        key, value = problem.key, problem.value
        tiles = (
            described(key, key if value is None else value, rows=plan.copied_rows) if plan.copied_rows else (key, key)
        )
        plan.run((*inputs(problem), *tiles, *results))
        return
    splits = splits_of(problem)
    if splits > 1:
        _launch_decode(problem, results, sign_bits, splits)
        return
    _launch.run_and_plan(plan_key, N_FORWARD, forward_launch(problem, results, sign_bits))


N_FORWARD = 5 + 2 + len(Results._fields)
"""Tensors and descriptors that the kernel of the forward gets."""


def forward_launch(problem: Problem, results: Results, sign_bits: int, hopper: bool | None = None) -> Launch:
    """`hopper` is whether the card is of that generation or newer, whose hardware copies whole tiles; None asks the device."""
    query, key, value = problem.query, problem.key, problem.value
    batch, heads, rows, _ = query.shape
    sign_bits = _written(sign_bits, results)
    fast = _takes_fast_pass(problem, sign_bits)
    if fast:
        sign_bits &= ~ARGMAX_BIT  # see _argmax
    hopper = is_hopper(query.device) if hopper is None else hopper
    block = forward_block(problem, fast, sign_bits > 0, hopper)
    constants = _forward_constants(problem, sign_bits) | {"FAST": fast, "BY_TOKEN": is_by_token(query)}

    def make(block: Block) -> Launch:
        tiles = descriptors(key, key if value is None else value, rows=block["BN"]) if fast and hopper else None
        args = (*inputs(problem), *(tiles or (key, key)), *results, *steps(problem), *numbers(problem))
        grid = (cdiv(rows, block["BM"]), batch * heads)
        how = constants | {"TMA": tiles is not None} | _tile_of(block)
        return Launch(_forward.forward_kernel, grid, args, how, _options_of(block))

    return tuned(block, make)


def _decode_key(problem: Problem, sign_bits: int) -> tuple[Any, ...]:
    """All that the launches of a decode are compiled for. The number of keys, which grows from call to call, is not among it."""
    query, value = problem.query, problem.value
    strides = tuple([(step % 16, step == 1, step < 1 << 31) for step in steps(problem)])
    bounds = (problem.left is None, problem.right is None, problem.softcap is None)  # their values are arguments
    return (
        *(query.device.index, query.dtype, query.shape[1:], problem.key.shape[1], sign_bits, strides, bounds),
        *(is_by_token(query), keeps_weights(problem, sign_bits)),
        *(None if tensor is None else (tensor.dtype, tensor.data_ptr() % ALIGNED) for tensor in problem[:5]),
        None if value is None else value.shape[3],
    )


def _launch_decode(problem: Problem, results: Results, sign_bits: int, splits: int) -> None:
    key = _decode_key(problem, sign_bits)
    split, join = decode_launches(problem, results, sign_bits, splits)
    _launch.run_as((key, "split"), split)
    _launch.run_as((key, "join", join.constants["SPLITS"]), join)


def decode_launches(problem: Problem, results: Results, sign_bits: int, splits: int) -> list[Launch]:
    query, key, value = problem.query, problem.key, problem.value
    n_rows, keys, groups = results.lse.numel(), key.shape[2], key.shape[1]
    sign_bits = _written(sign_bits, results)
    block = decode_block(widest(problem), query.dtype, query.shape[1] // groups * query.shape[2], room(query.device))
    chunk = cdiv(cdiv(keys, splits), block["BN"]) * block["BN"]
    splits = cdiv(keys, chunk)
    device = query.device
    parts = torch.empty((_decode.N_PARTS, splits, n_rows), dtype=torch.float32, device=device)
    sums = parts
    if value is not None:
        sums = torch.empty((splits, n_rows, value.shape[3]), dtype=torch.float32, device=device)
    constants = _forward_constants(problem, sign_bits) | _tile_of(block)
    args = (*inputs(problem), parts, sums, *steps(problem), *numbers(problem), chunk, n_rows)
    split = Launch(_decode.decode_kernel, (splits, query.shape[0] * groups), args, constants, _options_of(block))
    joined = {name: constants[name] for name in ("EV", "BEV", "VALUES", "BITS")} | {"SPLITS": next_power_of_2(splits)}
    joined["BY_TOKEN"] = is_by_token(query)
    args = (parts, sums, *results, *query.shape[1:3], n_rows, splits)
    return [split, Launch(_decode.join_kernel, (n_rows, 1), args, joined, {"num_warps": 4})]


def _written(sign_bits: int, results: Results) -> int:
    """The bits of what is there to be written: a float32 output has no low part."""
    return sign_bits if results.output_low.numel() else sign_bits & ~OUTPUT_LOW_BIT


def _forward_constants(problem: Problem, sign_bits: int) -> dict[str, Any]:
    asked = {"VALUES": problem.value is not None, "EXACT": keeps_weights(problem, sign_bits), "BITS": sign_bits}
    return compiled_for(problem) | asked


def backward(problem: Problem, saved: Results, upstream: Upstream, needs_grad: NeedsGrad) -> Gradients:
    nothing = problem.query.new_empty(0)
    found = _on_its_device(problem.query, _launch_backward, problem, saved, upstream, needs_grad)
    return Gradients(*[nothing if grad is None else grad for grad in found])


def bare_backward(problem: Problem, saved: Results, upstream: Upstream, needs_grad: NeedsGrad) -> Gradients:
    """`backward` for a caller that is no op, of what `bare_forward` saved: None for what is not needed."""
    saved = _complete(saved, problem.query)
    return _on_its_device(problem.query, _launch_backward, problem, saved, upstream, needs_grad)


def _launch_backward(problem: Problem, saved: Results, upstream: Upstream, needs_grad: NeedsGrad) -> Gradients:
    asked, problem, saved = problem.mask, readable(problem), as_written(saved)
    query, key, value, mask = problem[:4]
    empty = not query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]

    def like(tensor: Tensor | None, needed: bool) -> Tensor | None:
        if tensor is None or not needed:
            return None
        if tensor is query or tensor is key or tensor is value:
            return empty_vectors(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    found = Gradients(*[like(*pair) for pair in zip(problem[:6], needs_grad, strict=True)])  # type: ignore[arg-type]
    if empty:
        return Gradients(*[grad if grad is None else grad.zero_() for grad in found])
    g_output = None if value is None or upstream.output is None else with_unit_stride(upstream.output)
    if g_output is None and found.value is not None:
        found.value.zero_()
    upstream = upstream._replace(output=g_output)
    arrived = sum(bit for bit, grad in zip(_ARRIVED, upstream, strict=True) if grad is not None)
    whole = saved.output_low.numel() > 0
    plan_key = _plan_key(problem, -1)
    plan_key = plan_key and (*plan_key, facts(g_output), arrived, whole, needs_grad)
    if plan_key and not all_aligned(*saved, *upstream[1:]):
        plan_key = ()  # of these the key says nothing: they are new memory, unless a hook or a view gave another
    terms = row_terms(saved, upstream, arrived, plan_key)
    lift = _lift(problem, g_output, arrived)
    # the query's address stands for a tensor that is not read
    common = (*inputs(problem), query if g_output is None else g_output, terms)
    common += (saved.argmax if upstream.peak is None else _argmax(problem, saved), query if lift is None else lift)
    calls = _BackwardLaunches(problem, g_output, arrived, lift is not None)
    if needs_grad.query or needs_grad.gain or needs_grad.mask:
        # many rows, keys or heads may add to one entry, in float32
        dmask = None if mask is None or not needs_grad.mask else torch.zeros_like(mask, dtype=torch.float32)
        grads = (found.query, found.gain, dmask)
        tensors = (*common, *[query if grad is None else grad for grad in grads])
        _launch.run(plan_key and (*plan_key, "rows"), tensors, lambda: calls.over_keys(tensors, grads))
        if dmask is not None and asked is not None:
            found = found._replace(mask=dmask.to(asked.dtype))
    dvalue = found.value if g_output is not None else None
    if found.key is not None or dvalue is not None:
        tensors = (*common, *[query if grad is None else grad for grad in (found.key, dvalue)])
        _launch.run(plan_key and (*plan_key, "keys"), tensors, lambda: calls.over_rows(tensors, (found.key, dvalue)))
    return found


class _BackwardLaunches(NamedTuple):
    """The two launches of a backward, made where there is no plan of them yet."""

    problem: Problem
    g_output: Tensor | None
    arrived: int
    lifts: bool

    def over_keys(self, tensors: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> Launch:
        """dq, d(gain) and d(mask)."""
        problem, query = self.problem, self.problem.query
        dq, dgain, dmask = grads
        asks = {"DQ": dq is not None, "DGAIN": dgain is not None, "DMASK": dmask is not None}
        full = (*query.shape[:3], problem.key.shape[2])
        asks["SHARED"] = dmask is not None and dmask.shape != full
        asks["BY_TOKEN"] = is_by_token(query)
        asks["EVEN"] = problem.softcap is None and (query.dtype != torch.float32 or dgain is not None)
        dmask_steps = (0, 0, 0, 0) if dmask is None else repeating(dmask)
        args = (*tensors, *self._steps(), *dmask_steps, *numbers(problem))

        def make(block: Block) -> Launch:
            grid = (cdiv(query.shape[2], block["BM"]), query.shape[0] * query.shape[1])
            how = self._constants() | asks | _tile_of(block)
            return Launch(_backward.rows_kernel, grid, args, how, _options_of(block))

        block = rows_block(widest(problem), query.dtype, is_hopper(query.device), room(query.device))
        return make(block) if asks["SHARED"] else tuned(block, make)  # running it twice would add twice

    def over_rows(self, tensors: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> Launch:
        """dk and dv."""
        problem, key = self.problem, self.problem.key
        asks = {"DK": grads[0] is not None, "DV": grads[1] is not None, "KEYS_BY_TOKEN": is_by_token(key)}
        asks["VALUES_BY_TOKEN"] = problem.value is not None and is_by_token(problem.value)
        args = (*tensors, *self._steps(), *numbers(problem))

        def make(block: Block) -> Launch:
            grid = (cdiv(key.shape[2], block["BN"]), key.shape[0] * key.shape[1])
            how = self._constants() | asks | _tile_of(block)
            return Launch(_backward.keys_kernel, grid, args, how, _options_of(block))

        return tuned(keys_block(widest(problem), key.dtype, is_hopper(key.device), room(key.device)), make)

    def _steps(self) -> tuple[int, ...]:
        return (*steps(self.problem), *((0, 0, 0) if self.g_output is None else self.g_output.stride()[:3]))

    def _constants(self) -> dict[str, Any]:
        problem = self.problem
        small = is_small(problem)
        exact = problem.query.dtype == torch.float32 or is_added(problem.mask) or small
        how = {"ARRIVED": self.arrived, "LIFT": self.lifts, "SPLIT": small}
        return compiled_for(problem) | how | {"LEAN": not exact and problem.softcap is None}


_ARRIVED = tuple(
    bit.value
    for bit in (_rows.G_OUTPUT, _rows.G_MEAN, _rows.G_VARIANCE, _rows.G_PEAK, _rows.G_LSE, _rows.G_ENTROPY, _rows.G_P2)
)
"""The bit of each gradient of `Upstream`, in its order."""


def row_terms(saved: Results, upstream: Upstream, arrived: int, plan_key: tuple[Any, ...] = ()) -> Tensor:
    """Nine numbers for each row, (9, B, H, Lq), from gradients of which that of the output has unit stride."""
    lse = saved.lse
    terms = torch.empty((_rows.N_TERMS, *lse.shape), dtype=lse.dtype, device=lse.device)
    g = lse if upstream.output is None else upstream.output
    arriving = [lse if grad is None else grad.contiguous() for grad in upstream[1:]]
    output = saved.output
    by_token = output.dim() == 4 and is_by_token(output)
    whole = output, saved.output_low, saved.lse_low, saved.visible, saved.mean, lse, saved.entropy, saved.p2
    tensors = (terms, *whole, g, *arriving)

    def launch() -> Launch:
        value_dim = output.shape[-1] if output.dim() == 4 else 1
        constants = {"EV": value_dim, "BEV": padded(value_dim), "BM": 32}
        constants |= {"ARRIVED": arrived, "WHOLE": saved.output_low.numel() > 0, "BY_TOKEN": by_token}
        args = (*tensors, *g.stride()[:3], lse.shape[1], lse.shape[2], lse.numel())
        return Launch(_rows.row_terms_kernel, (cdiv(lse.numel(), 32), 1), args, constants, {"num_warps": 4})

    _launch.run(plan_key and (*plan_key, by_token, "terms"), tensors, launch)
    return terms


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


def _takes_fast_pass(problem: Problem, sign_bits: int) -> bool:
    """The fast pass looks for no arg-max, so a call that asks for that alone is not for it."""
    return is_fast(problem, sign_bits) and bool(problem.value is not None or sign_bits & ~ARGMAX_BIT)


def _tile_of(block: dict[str, int]) -> dict[str, int]:
    return {"BM": block["BM"], "BN": block["BN"]}


def _options_of(block: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in block.items() if name not in ("BM", "BN")}
