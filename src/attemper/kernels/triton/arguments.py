"""What a launch gets: tensors whose vectors have unit stride, strides, numbers, tile descriptors, and what it is compiled for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..contract import OUTPUT_LOW_BIT, Problem, Results

COPY_BYTES = 16
"""The hardware copies whole tiles (TMA) where addresses and strides are multiples of this."""
FAR_APART = 1 << 23
"""Rows with a larger stride are copied: within a tile, kernels count in 32 bits."""
SMALL_CALL = 128 * 128
"""Rows times keys, up to which a call takes the time of its launch."""
FEW_ROWS = 8
CHUNK = 256
"""The fewest keys that a program takes when the keys of a row are split."""
PROGRAMS = 132 * 4
"""How many programs fill a card: four for each multiprocessor of an H200. More than a smaller card needs does no harm."""
MOST_SPLITS = 128


class Launch(NamedTuple):
    """One launch of a kernel, as data: so that it can also be compiled where there is no GPU."""

    kernel: Any
    grid: tuple[int, int]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]

    def key(self) -> tuple[Any, ...]:
        """All that Triton compiles it for."""
        key = (
            torch.cuda.current_device() if ON_GPU else -1,
            self.kernel,
            *self.constants.values(),
            *self.options.values(),
        )
        return key + tuple([_specialised(arg) for arg in self.args])

    def run(self) -> None:
        """Launch. Triton's own way to a compiled kernel costs more than a small kernel, so the kernel is remembered here."""
        key = self.key()
        compiled = COMPILED.get(key)
        if compiled is not None:
            compiled[(*self.grid, 1)](
                *self.args, *[self.constants[name] for name in self.kernel.arg_names[len(self.args) :]]
            )
            return
        compiled = self.kernel[self.grid](*self.args, **self.constants, **self.options)
        if compiled is not None:  # as it is in Triton's interpreter
            COMPILED[key] = compiled


class LaunchPlan(NamedTuple):
    """A launch of the forward pass that was made before on tensors of the same shapes: only their addresses are new."""

    compiled: Any
    grid: tuple[int, int]
    numbers: tuple[Any, ...]
    constants: tuple[Any, ...]
    copied_rows: int  # of a tile that the hardware copies; 0 if it does not

    def run(self, problem: Problem, results: Results) -> None:
        key, value = problem.key, problem.value
        tiles: Any = (key, key)
        if self.copied_rows:
            tiles = descriptors(key, key if value is None else value, rows=self.copied_rows)
        self.compiled[(*self.grid, 1)](*inputs(problem), *tiles, *results, *self.numbers, *self.constants)


PLANS: dict[tuple[Any, ...], LaunchPlan] = {}
MOST_PLANS = 1024


def plan_key(problem: Problem, sign_bits: int) -> tuple[Any, ...]:
    """All that a launch depends on, but the addresses of its tensors; () for a call with dropout, whose seed is new each time."""
    if problem.dropout:
        return ()
    facts = [(t.shape, t.stride(), t.dtype, t.data_ptr() % COPY_BYTES) if t is not None else None for t in problem[:5]]
    return (problem.query.device.index, *facts, problem[7:], sign_bits)


def remember(key: tuple[Any, ...], launch: Launch) -> None:
    """Keep a launch that has run as a plan."""
    compiled = COMPILED.get(launch.key())
    if not key or compiled is None:
        return
    n_tensors = 5 + 2 + len(Results._fields)
    constants = tuple(launch.constants[name] for name in launch.kernel.arg_names[len(launch.args) :])
    rows = launch.constants["BN"] if launch.constants["TMA"] else 0
    PLANS[key] = LaunchPlan(compiled, launch.grid, launch.args[n_tensors:], constants, rows)


COMPILED: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by all that Triton compiles them for."""
ON_GPU = torch.cuda.is_available()


def _specialised(arg: Any) -> Any:
    """What Triton makes of an argument: its dtype, and whether it is 1 or a multiple of 16."""
    if type(arg) is int:
        return arg == 1, arg % 16 == 0, -(2**31) <= arg < 2**31
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    return type(arg) if isinstance(arg, float) else (arg.base.dtype, *arg.block_shape)


def readable(problem: Problem) -> Problem:
    """With vectors of unit stride, and a mask of bytes or of floats."""
    value, mask = problem.value, problem.mask
    return problem._replace(
        query=with_unit_stride(problem.query),
        key=with_unit_stride(problem.key),
        value=None if value is None else with_unit_stride(value),
        mask=mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask,
    )


def with_unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 and tensor.stride(-2) < FAR_APART else tensor.contiguous()


def inputs(problem: Problem) -> tuple[Tensor, ...]:
    # a pointer that is not read: the query's
    return tuple(problem.query if tensor is None else tensor for tensor in problem[:5])


def steps(problem: Problem) -> tuple[int, ...]:
    """The strides of query, key, value, mask and gain."""
    query, key, value, mask, gain = problem[:5]
    none = (0, 0, 0)
    return (
        *query.stride()[:3],
        *key.stride()[:3],
        *(none if value is None else value.stride()[:3]),
        *((0, 0, 0, 0) if mask is None else repeating(mask)),
        *(none if gain is None else repeating(gain)),
    )


def repeating(tensor: Tensor) -> tuple[int, ...]:
    """Strides, 0 along a dimension of 1, which repeats."""
    return tuple(0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def numbers(problem: Problem) -> tuple[Any, ...]:
    query, key = problem.query, problem.key
    seed = 0 if problem.seed is None else int(problem.seed)
    return (
        problem.scale, problem.softcap or 1.0, problem.dropout, seed,
        query.shape[1], key.shape[1], query.shape[2], key.shape[2], problem.left or 0, problem.right or 0,
    )  # fmt: skip


def compiled_for(problem: Problem) -> dict[str, Any]:
    query, value, mask = problem.query, problem.value, problem.mask
    dim, value_dim = query.shape[3], query.shape[3] if value is None else value.shape[3]
    return {
        "E": dim,
        "EV": value_dim,
        "BE": padded(dim),
        "BEV": padded(value_dim),
        "MASK": 0 if mask is None else 2 if is_added(mask) else 1,
        "GAIN": problem.gain is not None,
        "LEFT": problem.left is not None,
        "RIGHT": problem.right is not None,
        "CAP": problem.softcap is not None,
        "DROP": problem.dropout > 0,
    }


def padded(dim: int) -> int:
    """A head dim as tiles have it."""
    return max(16, triton.next_power_of_2(dim))


def widest(problem: Problem) -> int:
    """The larger of the head dims of queries and values, as tiles have it."""
    dim, value = problem.query.shape[3], problem.value
    return padded(dim if value is None else max(dim, value.shape[3]))


def is_added(mask: Tensor | None) -> bool:
    """Whether a mask that is readable is added to the logits."""
    return mask is not None and mask.dtype != torch.uint8


def is_fast(problem: Problem, sign_bits: int) -> bool:
    """Whether the fast pass serves a call: logits that are the score times a number, and each row's keys begin with the first."""
    plain = problem.mask is None and problem.softcap is None and problem.left is None and not problem.dropout
    return plain and not keeps_weights(problem, sign_bits)


def splits_of(problem: Problem) -> int:
    """Over how many programs the keys of each row are split; 1 where rows fill the card, or are too many for one tile."""
    batch, heads, rows, _ = problem.query.shape
    groups, keys = problem.key.shape[1:3]
    shared = heads // groups * rows
    if rows > FEW_ROWS or shared > 64 or keys < 2 * CHUNK or problem.dropout:
        return 1
    return min(MOST_SPLITS, keys // CHUNK, max(1, PROGRAMS // (batch * groups)))


def keeps_weights(problem: Problem, sign_bits: int) -> bool:
    """Whether weights keep what rounding takes from them: for float32 gradients (gain, mask), or where it costs nothing."""
    wide = problem.gain is not None or is_added(problem.mask)
    return bool(sign_bits & OUTPUT_LOW_BIT) and (wide or is_small(problem))


def is_small(problem: Problem) -> bool:
    """Whether a half-precision call is so small that products of what rounding took cost no time."""
    return problem.query.dtype != torch.float32 and problem.query.shape[2] * problem.key.shape[2] <= SMALL_CALL


def descriptors(*tensors: Tensor, rows: int) -> list[TensorDescriptor] | None:
    """Descriptors of tiles of so many rows; None where the hardware cannot copy them."""
    if not all(_copies(t) for t in tensors):
        return None
    return [TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, rows, padded(t.shape[3])]) for t in tensors]


def _copies(tensor: Tensor) -> bool:
    size = tensor.element_size()
    aligned = all(step * size % COPY_BYTES == 0 for step in tensor.stride()[:3]) and tensor.data_ptr() % COPY_BYTES == 0
    return aligned and min(tensor.shape) > 0
