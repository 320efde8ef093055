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
replay.py        a forward like an earlier one, by its launch; its signs in one tensor
tune.py          tiles that are chosen by time
summary.py       rows to heads, for all calls of a step in one launch
__init__.py      forward() and backward(): the launches in order
"""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import (
    ARGMAX_BIT,
    OUTPUT_LOW_BIT,
    PACKED,
    Gradients,
    NeedsGrad,
    Problem,
    Results,
    Upstream,
    bare_results,
    empty_results,
    empty_vectors,
    is_by_token,
    packed_size,
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
    complete,
    computes_ahead,
    copies,
    descriptors,
    forward_block,
    forward_constants,
    inputs,
    is_added,
    is_fast,
    is_small,
    is_there,
    is_usual,
    keys_block,
    nothing_like,
    numbers,
    options_of,
    readable,
    repeating,
    rows_block,
    splits_of,
    steps,
    tensor_key,
    tile_of,
    widest,
    with_unit_stride,
    written,
)
from .launch import Block, Launch, LaunchPlan, Plans, all_aligned, is_hopper, on_its_device, plans_of, room
from .launch import current_stream as current_stream  # for a watch
from .replay import Replay, Signs, plan_key, replayed, sign_tensors
from .replay import SignRows as SignRows  # of a call, for a tally
from .replay import packed_rows as packed_rows  # for a tally
from .replay import replay_signs as replay_signs  # for a watch
from .tune import is_choosing, tuned


def forward(problem: Problem, sign_bits: int, saved: bool = False) -> tuple[Tensor | None, Results | Signs]:
    previous = replayed(problem, sign_bits)
    if previous is not None:
        output, low, memory, layout = previous
        return output, Signs(memory, layout, low, saved)
    given, problem = problem, readable(problem)
    query, value = problem.query, problem.value
    results = bare_results(query, None if value is None else value.shape[3], sign_bits, saved=True, as_query=True)
    if sign_bits & ARGMAX_BIT and splits_of(problem) == 1 and _takes_fast_pass(problem, written(sign_bits, results)):
        results = results._replace(argmax=None)  # type: ignore[arg-type] # see _argmax
    if results.lse.numel():
        plan = on_its_device(query, _launch_forward, problem, results, sign_bits)
        if plan is not None and all(map(operator.is_, problem[:3], given[:3])):
            bits = sign_bits if results.argmax is not None else sign_bits & ~ARGMAX_BIT
            Replay.of(plan, given, bits, results.output_low is not None).keep(given, sign_bits)
    return results.output, results._replace(output=None)  # type: ignore[arg-type]


def forward_packed(problem: Problem, sign_bits: int) -> tuple[Results, Tensor]:
    """`forward` with values and all signs; of these, all but `lse` are in the tensor, as `packed_rows` reads it."""
    problem = readable(problem)
    results = empty_results(problem, sign_bits & OUTPUT_LOW_BIT, as_query=True)
    packed = results.lse.new_empty(len(PACKED) * packed_size(results.lse.numel()))
    if results.lse.numel():
        rows = packed_rows(results.lse, results.lse_low, packed)
        *signs, _ = rows.addresses if _forward_plan(problem, sign_bits) is not None else sign_tensors(rows)
        whole = Results(*results[: len(Results._fields) - len(signs)], *signs)
        on_its_device(problem.query, _launch_forward, problem, whole, sign_bits)
    return results, packed


def _forward_plan(problem: Problem, sign_bits: int) -> LaunchPlan | None:
    """The launch plan of an earlier problem that equals this readable one, if any; it takes addresses in place of tensors."""
    return None if splits_of(problem) > 1 else (plans_of(plan_key(problem, sign_bits)) or {}).get("forward")


def _launch_forward(problem: Problem, results: Results, sign_bits: int) -> LaunchPlan | None:
    """Launch the forward of a readable problem; fields of `results` may be None. Returns the launch's plan, if it is fixed."""
    splits = splits_of(problem)
    if splits > 1:
        _decode.launch_decode(problem, results, sign_bits, splits)
        return None
    plan, key, value = _forward_plan(problem, sign_bits), problem.key, problem.value
    if plan is not None:
        plan.run((*inputs(problem), key, key if value is None else value, *results))
        return plan
    launch = forward_launch(problem, complete(results, problem.query), sign_bits)
    if sign_bits & OUTPUT_LOW_BIT and results.output is not None and not launch.is_compiled():
        with suppress(Exception):  # it only saves time: what is wrong is raised where the backward itself needs it
            _compile_backward(problem, results.output)
    return _launch.run_and_plan(plans_of(plan_key(problem, sign_bits)), "forward", N_FORWARD, launch)


N_FORWARD = 5 + 2 + len(Results._fields)
"""Tensors and descriptors that the kernel of the forward gets."""


def forward_launch(problem: Problem, results: Results, sign_bits: int, hopper: bool | None = None) -> Launch:
    """`hopper` is whether the card is of that generation or newer, whose hardware copies whole tiles; None asks the device."""
    query, key, value = problem.query, problem.key, problem.value
    batch, heads, rows, _ = query.shape
    sign_bits = written(sign_bits, results)
    fast = _takes_fast_pass(problem, sign_bits)
    if fast:
        sign_bits &= ~ARGMAX_BIT  # see _argmax
    hopper = is_hopper(query.device) if hopper is None else hopper
    block = forward_block(problem, fast, hopper)
    constants = forward_constants(problem, sign_bits) | {"FAST": fast, "BY_TOKEN": is_by_token(query)}

    def make(block: Block) -> Launch:
        vectors = (key, key if value is None else value)
        tma = fast and hopper and copies(*vectors)
        tiles = descriptors(*vectors, rows=block["BN"]) if tma else vectors
        args = (*inputs(problem), *tiles, *results, *steps(problem), *numbers(problem))
        grid = (cdiv(rows, block["BM"]), batch * heads)
        how = constants | {"TMA": tma, "AHEAD": tma and computes_ahead(problem, sign_bits)} | tile_of(block)
        return Launch(_forward.forward_kernel, grid, args, how, options_of(block))

    return tuned(block, make)


def backward(problem: Problem, saved: Results, upstream: Upstream, needs_grad: NeedsGrad) -> Gradients:
    """The gradients that are needed, of what `forward` saved; None for the others."""
    return on_its_device(problem.query, _launch_backward, problem, saved, upstream, needs_grad)


def _launch_backward(problem: Problem, saved: Results, upstream: Upstream, needs_grad: NeedsGrad) -> Gradients:
    """Fields of `saved` may be None."""
    asked, problem, saved = problem.mask, readable(problem), as_written(saved)
    query, key, value, mask = problem[:4]
    gradients: Any = _gradient_memory(problem, needs_grad)
    if not query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]:
        return Gradients(*[grad if grad is None else grad.zero_() for grad in gradients])  # type: ignore[arg-type]
    g_output = None if value is None or upstream.output is None else with_unit_stride(upstream.output)
    if g_output is None and gradients.value is not None:
        gradients.value.zero_()
    if g_output is not upstream.output:
        upstream = upstream._replace(output=g_output)
    arrived = sum([bit for bit, grad in zip(_ARRIVED, upstream, strict=True) if grad is not None])
    plans = _backward_plans(problem, saved, upstream, arrived, needs_grad)
    usual = arrived == _ARRIVED[0] and is_usual(problem) and is_hopper(query.device)
    appends = usual and query.dtype == APPENDED_DTYPE and abs(problem.scale) > 1e-6  # columns hold lse / scale
    terms, columns = _rows.row_terms(saved, upstream, arrived, plans, problem.scale if appends else None)
    lift = _rows.lift(problem, g_output, arrived, terms)
    argmax = nothing_like(query).argmax if upstream.peak is None else _argmax(problem, saved)
    # the query's address stands for a tensor that is not read
    common = (*inputs(problem), query if g_output is None else g_output, terms, argmax, query if lift is None else lift)

    def launches() -> _BackwardLaunches:
        return _BackwardLaunches(problem, g_output, arrived, lift is not None, usual, appends)

    both = gradients.key, gradients.value if g_output is not None else None
    rows_vectors = query, query if g_output is None else g_output
    asks_both = any(grad is not None for grad in both)

    def over_rows() -> Launch:
        return launches().over_rows((*common, columns), rows_vectors, both)

    if needs_grad.query or needs_grad.gain or needs_grad.mask:
        dmask = None if mask is None or not needs_grad.mask else torch.zeros_like(mask, dtype=_sum_dtype(problem))
        grads = (gradients.query, gradients.gain, dmask)
        vectors = (key, key if value is None else value)
        tensors = (*common, *vectors, *_or_else(query, grads))

        def over_keys() -> Launch:
            if asks_both and not is_choosing():
                over_rows().compile_ahead()
            return launches().over_keys(common, vectors, grads)

        _launch.run(plans, "rows", tensors, over_keys)
        if dmask is not None and asked is not None:
            gradients = gradients._replace(mask=dmask.to(asked.dtype))
    if asks_both:
        tensors = (*common, columns, *rows_vectors, *_or_else(query, both))
        _launch.run(plans, "keys", tensors, over_rows)
    return gradients


def _sum_dtype(problem: Problem) -> torch.dtype:
    """The dtype in which a mask's gradient is summed: many rows, keys or heads may add to one entry, in any order."""
    mask = problem.mask
    assert mask is not None
    return torch.float64 if _is_shared(mask, problem) and mask.numel() <= MOST_WIDE else torch.float32


def _is_shared(mask: Tensor, problem: Problem) -> bool:
    """Whether some of its entries, or those of its gradient, belong to several scores."""
    return mask.shape != (*problem.query.shape[:3], problem.key.shape[2])


MOST_WIDE = 1 << 23
"""Entries of a shared mask (64 MiB) up to which its gradient is summed in float64. In float32 the mean's gradient at a scalar
mask erred too much in 3 % of 9,000 random orders; a larger mask has fewer summands for each entry."""
APPENDED_DTYPE = torch.bfloat16
"""The dtype of appended columns. Three columns of float16 would not hold all digits of a small number."""


def _or_else(other: Tensor, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    return tuple(other if tensor is None else tensor for tensor in tensors)


def _gradient_memory(problem: Problem, needs_grad: NeedsGrad) -> Gradients:
    """Uninitialised memory for the gradients that are needed, of vectors as these lie; None for the others."""
    query, key, value, mask, gain = problem[:5]
    tensors: Any = (
        empty_vectors(query) if needs_grad.query else None,
        empty_vectors(key) if needs_grad.key else None,
        empty_vectors(value) if needs_grad.value and value is not None else None,
        mask.new_empty(mask.shape) if needs_grad.mask and mask is not None else None,
        gain.new_empty(gain.shape) if needs_grad.gain and gain is not None else None,
        None,
    )
    return Gradients(*tensors)


def _backward_plans(
    problem: Problem, saved: Results, upstream: Upstream, arrived: int, needs_grad: NeedsGrad
) -> Plans | None:
    """The plans of a backward; None where it can have none."""
    key = plan_key(problem, -1)
    if not key or not all_aligned(*saved, *upstream[1:]):
        return None  # the key says nothing of these: they are new memory, unless a hook or a view replaced them
    return plans_of(
        (*key, tensor_key(upstream.output), arrived, is_there(saved.output_low), problem.sink is None, needs_grad)
    )


def _compile_backward(problem: Problem, output: Tensor) -> None:
    """Begin to compile what a gradient of the output alone needs: it comes next, and the forward is compiled meanwhile."""
    query, key, value, _mask, gain = problem[:5]
    needs = NeedsGrad(*[tensor is not None and tensor.requires_grad for tensor in problem[:5]])
    if needs.mask or is_choosing():
        return
    usual, nothing = is_usual(problem) and is_hopper(query.device), nothing_like(query)
    appends = usual and query.dtype == APPENDED_DTYPE and abs(problem.scale) > 1e-6
    launches = _BackwardLaunches(problem, output, _ARRIVED[0], query.dtype == torch.float16, usual, appends)
    # only the dtypes of these matter
    common = (*inputs(problem), output, nothing.lse, nothing.argmax, nothing.lse if launches.lifts else query)
    vectors = (key, key if value is None else value)
    if needs.key or needs.value:
        columns = nothing.output if appends else nothing.lse
        both = (key if needs.key else None, value if needs.value else None)
        launches.over_rows((*common, columns), (query, output), both).compile_ahead()
    if needs.query or needs.gain:
        grads = (query if needs.query else None, gain if needs.gain else None, None)
        launches.over_keys(common, vectors, grads).compile_ahead()


class _BackwardLaunches(NamedTuple):
    """The two launches of a backward, made where there is no plan of them yet."""

    problem: Problem
    g_output: Tensor | None
    arrived: int
    lifts: bool
    usual: bool  # on Hopper: tiles are copied by the hardware, if it can
    appends: bool

    def over_keys(
        self, common: tuple[Tensor, ...], vectors: tuple[Tensor, Tensor], grads: tuple[Tensor | None, ...]
    ) -> Launch:
        """dq, d(gain) and d(mask); tiles are of keys and values."""
        problem, query = self.problem, self.problem.query
        dq, dgain, dmask = grads
        asks = {"DQ": dq is not None, "DGAIN": dgain is not None, "DMASK": dmask is not None}
        asks["SHARED"] = dmask is not None and _is_shared(dmask, problem)
        asks["BY_TOKEN"] = is_by_token(query)
        # with a sink, the gradients of a row's logits do not add up to what arrives at its signs
        adds_up = problem.softcap is None and problem.sink is None
        asks["EVEN"] = adds_up and (query.dtype != torch.float32 or dgain is not None)
        asks["TMA"] = self.usual and copies(*vectors)
        # the mean's gradient is the same for all keys of a row, so that what rounding takes from it adds up
        asks["SPLIT"] = is_small(problem) or bool(self.arrived & _rows.G_MEAN.value)
        numbers_after = (*self._steps(), *((0, 0, 0, 0) if dmask is None else repeating(dmask)), *numbers(problem))

        def make(block: Block) -> Launch:
            tiles = descriptors(*vectors, rows=block["BN"]) if asks["TMA"] else vectors
            args = (*common, *tiles, *_or_else(query, grads), *numbers_after)
            grid = (cdiv(query.shape[2], block["BM"]), query.shape[0] * query.shape[1])
            how = self._constants() | asks | tile_of(block)
            return Launch(_backward.rows_kernel, grid, args, how, options_of(block))

        hopper, space = is_hopper(query.device), room(query.device)
        block = rows_block(widest(problem), query.dtype, hopper, space, asks["TMA"])
        return make(block) if asks["SHARED"] else tuned(block, make)  # running it twice would add twice

    def over_rows(
        self, common: tuple[Tensor, ...], vectors: tuple[Tensor, Tensor], grads: tuple[Tensor | None, ...]
    ) -> Launch:
        """dk and dv; tiles are of queries and of what arrives at the output."""
        problem, query, key = self.problem, self.problem.query, self.problem.key
        asks = {"DK": grads[0] is not None, "DV": grads[1] is not None, "KEYS_BY_TOKEN": is_by_token(key)}
        asks["VALUES_BY_TOKEN"] = problem.value is not None and is_by_token(problem.value)
        asks["APPENDED"], asks["TMA"] = self.appends, self.usual and copies(*vectors)
        asks["SPLIT"] = is_small(problem)
        numbers_after = (*self._steps(), *numbers(problem))

        def make(block: Block) -> Launch:
            tiles = descriptors(*vectors, rows=block["BM"]) if asks["TMA"] else vectors
            args = (*common, *tiles, *_or_else(query, grads), *numbers_after)
            grid = (cdiv(key.shape[2], block["BN"]), key.shape[0] * key.shape[1])
            how = self._constants() | asks | tile_of(block)
            return Launch(_backward.keys_kernel, grid, args, how, options_of(block))

        hopper, space, lean = is_hopper(key.device), room(key.device), self.appends and asks["TMA"]
        of_signs = self.arrived != _rows.G_OUTPUT.value
        return tuned(keys_block(widest(problem), key.dtype, hopper, space, lean, of_signs, query.shape[2]), make)

    def _steps(self) -> tuple[int, ...]:
        return (*steps(self.problem), *((0, 0, 0) if self.g_output is None else self.g_output.stride()[:3]))

    def _constants(self) -> dict[str, Any]:
        problem = self.problem
        small = is_small(problem)
        exact = problem.query.dtype == torch.float32 or is_added(problem.mask) or small
        how = {"ARRIVED": self.arrived, "LIFT": self.lifts}
        return compiled_for(problem) | how | {"LEAN": not exact and problem.softcap is None}


_ARRIVED = tuple(
    bit.value
    for bit in (_rows.G_OUTPUT, _rows.G_MEAN, _rows.G_VARIANCE, _rows.G_PEAK, _rows.G_LSE, _rows.G_ENTROPY, _rows.G_P2)
)
"""The bit of each gradient of `Upstream`, in its order."""


def _argmax(problem: Problem, saved: Results) -> Tensor:
    """The arg-max of each row; the fast pass does not look for it, since it is needed only where a gradient of `peak` arrives."""
    if splits_of(problem) > 1 or not is_fast(problem, OUTPUT_LOW_BIT if is_there(saved.output_low) else 0):
        return saved.argmax
    alone = problem._replace(value=None)
    results = empty_results(alone, ARGMAX_BIT)
    forward_launch(alone, results, ARGMAX_BIT).run()
    return results.argmax


def _takes_fast_pass(problem: Problem, sign_bits: int) -> bool:
    """The fast pass looks for no arg-max, so a call that asks for that alone is not for it."""
    return is_fast(problem, sign_bits) and bool(problem.value is not None or sign_bits & ~ARGMAX_BIT)
