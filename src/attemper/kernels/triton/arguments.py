"""What a launch gets: tensors whose vectors have unit stride, strides, numbers, descriptors; what it is compiled for; tiles."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..contract import ALL_SIGNS, BIT, FAR_APART, OUTPUT_LOW_BIT, Problem, Results, empty_results
from .launch import ALIGNED, Block

SMALL_CALL = 128 * 128
"""Rows times keys, up to which a call takes the time of its launch."""
FEW_ROWS = 8
CHUNK = 256
"""The fewest keys that a program takes when the keys of a row are split."""
PROGRAMS = 132 * 4
"""How many programs fill a card: four for each multiprocessor of an H200. More than a smaller card needs does no harm."""
MOST_SPLITS = 128


def readable(problem: Problem) -> Problem:
    """With vectors of unit stride, and a mask of bytes or of floats."""
    query, key, value, mask = problem[:4]
    vectors = with_unit_stride(query), with_unit_stride(key), None if value is None else with_unit_stride(value)
    bytes_ = mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask
    if vectors[0] is query and vectors[1] is key and vectors[2] is value and bytes_ is mask:
        return problem
    return Problem(*vectors, bytes_, *problem[4:])  # type: ignore[arg-type]


def with_unit_stride(tensor: Tensor) -> Tensor:
    *_, between_rows, step = tensor.stride()
    return tensor if step == 1 and between_rows < FAR_APART else tensor.contiguous()


def as_written(saved: Results) -> Results:
    """What a forward saved, as it lay in memory then: a hook of saved tensors may return it in another layout."""
    output, low, *signs = saved
    lies = output is None or output.is_contiguous() or _is_whole_by_token(output)
    if not lies or (is_there(low) and low.stride() != output.stride()):
        output, low = output.contiguous(), None if low is None else low.contiguous()
        saved = Results(output, low, *signs)
    for sign in signs:
        if sign is not None and not sign.is_contiguous():
            return Results(output, low, *[None if one is None else one.contiguous() for one in signs])
    return saved


def _is_whole_by_token(output: Tensor) -> bool:
    if output.dim() != 4:
        return False
    _, heads, rows, dim = output.shape
    usual = output.stride() == (heads * rows * dim, dim, heads * dim, 1)
    return usual or output.transpose(1, 2).is_contiguous()  # a dimension of 1 may have any stride


def is_there(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.numel() > 0


def complete(results: Results, query: Tensor) -> Results:
    """With tensors of no elements for what is None: a kernel is compiled for the dtype of each."""
    nothing = nothing_like(query)
    return Results(*[empty if tensor is None else tensor for tensor, empty in zip(results, nothing, strict=True)])


def nothing_like(query: Tensor) -> Results:
    """Results of no elements, as a call with such a query has them."""
    return _nothing(query.device, query.dtype)


@cache
def _nothing(device: torch.device, dtype: torch.dtype) -> Results:
    problem = Problem(torch.empty((1, 1, 0, 1), dtype=dtype, device=device), *[None] * (len(Problem._fields) - 1))  # type: ignore[arg-type]
    return empty_results(problem, 0)


def tensor_key(tensor: Tensor | None) -> Any:
    """All of a tensor that a launch depends on."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNED


def inputs(problem: Problem) -> tuple[Tensor, ...]:
    query, key, value, mask, gain = problem[:5]
    # a pointer that is not read: the query's
    none = query
    return (
        query,
        key,
        none if value is None else value,
        none if mask is None else mask,
        none if gain is None else gain,
    )


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


def written(sign_bits: int, results: Results) -> int:
    """The bits of what is there to be written: a float32 output has no low part."""
    return sign_bits if is_there(results.output_low) else sign_bits & ~OUTPUT_LOW_BIT


def forward_constants(problem: Problem, sign_bits: int) -> dict[str, Any]:
    asked = {"VALUES": problem.value is not None, "EXACT": keeps_weights(problem, sign_bits), "BITS": sign_bits}
    return compiled_for(problem) | asked


def cdiv(a: int, b: int) -> int:
    """Triton's own, which also serves inside of kernels, takes 10 µs."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def padded(dim: int) -> int:
    """A head dim as tiles have it."""
    return max(16, next_power_of_2(dim))


def widest(problem: Problem) -> int:
    """The larger of the head dims of queries and values, as tiles have it."""
    dim, value = problem.query.shape[3], problem.value
    return padded(dim if value is None else max(dim, value.shape[3]))


def is_added(mask: Tensor | None) -> bool:
    """Whether a mask that is readable is added to the logits."""
    return mask is not None and mask.dtype != torch.uint8


def is_fast(problem: Problem, sign_bits: int) -> bool:
    """Whether the fast pass serves a call: logits that are the score times a number, and each row's keys begin with the first.

    It takes the query as it is, which a scale that is not positive would change.
    """
    plain = problem.mask is None and problem.softcap is None and problem.left is None and not problem.dropout
    positive = problem.gain is not None or problem.scale > 0
    return plain and positive and not keeps_weights(problem, sign_bits)


def computes_ahead(problem: Problem, sign_bits: int) -> bool:
    """Whether the fast pass multiplies the next keys while it sums the signs of these.

    That takes registers, and pays where products take as long as sums. It changes no bit.
    """
    half = problem.query.dtype != torch.float32
    return half and bool(sign_bits & ALL_SIGNS & ~BIT["lse"]) and 64 < widest(problem) <= 128


def splits_of(problem: Problem) -> int:
    """Over how many programs the keys of each row are split; 1 where rows fill the card, or are too many for one tile."""
    batch, heads, rows, _ = problem.query.shape
    groups, keys = problem.key.shape[1:3]
    if rows > FEW_ROWS or not batch * groups:
        return 1
    shared = heads // groups * rows
    if shared > 64 or keys < 2 * CHUNK or problem.dropout:
        return 1
    return min(MOST_SPLITS, keys // CHUNK, max(1, PROGRAMS // (batch * groups)))


def keeps_weights(problem: Problem, sign_bits: int) -> bool:
    """Whether weights keep what rounding takes from them: for float32 gradients (gain, mask), or where it costs nothing."""
    wide = problem.gain is not None or is_added(problem.mask)
    return bool(sign_bits & OUTPUT_LOW_BIT) and (wide or is_small(problem))


def is_small(problem: Problem) -> bool:
    """Whether a half-precision call is so small that products of what rounding took cost no time."""
    return problem.query.dtype != torch.float32 and problem.query.shape[2] * problem.key.shape[2] <= SMALL_CALL


def is_usual(problem: Problem) -> bool:
    """Half precision, not small, and no mask, gain, softcap or dropout: on Hopper its backward has tiles of its own."""
    plain = problem.mask is None and problem.gain is None and problem.softcap is None and not problem.dropout
    return plain and problem.query.dtype != torch.float32 and not is_small(problem)


def descriptors(*tensors: Tensor, rows: int) -> list[TensorDescriptor]:
    """Descriptors of tiles of so many rows, of tensors that the hardware copies."""
    return [
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, padded(tensor.shape[3])])
        for tensor in tensors
    ]


def copies(*tensors: Tensor) -> bool:
    """Whether the hardware can copy tiles of these tensors."""
    return all(map(_copies, tensors))


def _copies(tensor: Tensor) -> bool:
    size, shape, strides = tensor.element_size(), tensor.shape, tensor.stride()
    aligned = all(step * size % ALIGNED == 0 for step in strides[:3]) and tensor.data_ptr() % ALIGNED == 0
    # descriptors are not defined for vectors that overlap, or are one and the same
    apart = strides[2] >= shape[3] and all(strides[:2])
    return aligned and apart and min(shape) > 0


# The size of tiles: what was fastest on an H200, by head dim, dtype and direction; before Hopper, what fits without spilling.


def forward_block(problem: Problem, fast: bool, hopper: bool) -> Block:
    """On Hopper with as few registers as let three or more programs run on a processor: they wait for products in turn.

    It does not depend on the signs that are asked for: the careful pass rounds weights tile by tile.
    """
    dim, dtype, keys = widest(problem), problem.query.dtype, problem.key.shape[2]
    if dtype == torch.float32:
        # 32 rows do not fit: the compiler then takes 32 registers, and local memory for the rest
        return _block(16, 32, 4, 1, 255)
    if dim > 128:
        return _block(64, 32, 4, 2)
    if not hopper:
        return _block(64, 64, 4, 2) if dim <= 64 else _block(64, 32, 4, 2)
    if not fast:
        return _block(64, 64, 4, 3)
    if problem.value is None:
        if dim > 64:
            return _block(64, 64, 4, 2, 128)
        # a wide tile has fewer instructions for each score, but the last keys of a causal row take longer
        narrow = problem.right is not None and keys <= 2048
        return _block(64, 64, 4, 3, 96) if narrow else _block(64, 128, 4, 2, 128)
    if dim <= 64:
        return _block(64, 64, 4, 3, 168)
    return _block(64, 32, 4, 3, 168)


@cache
def decode_block(dim: int, dtype: torch.dtype, shared: int, room: int) -> Block:
    """`shared` is how many rows read one head of keys, `room` the bytes that tiles may take together."""
    rows, size = max(16, next_power_of_2(shared)), dtype.itemsize
    keys, stages = (64, 1) if dtype == torch.float32 else (64 if dim > 128 else 128, 3)

    def bytes_of(keys: int, stages: int) -> int:
        """Shared memory: keys and values while others are loaded, queries, and weights with what rounding took from them."""
        return (2 * max(1, stages - 1) * keys * dim + rows * (dim + 2 * keys)) * size + 1024

    while bytes_of(keys, stages) > room and keys > 16:
        keys, stages = (keys, 2) if stages > 2 else (keys // 2, stages)
    return _block(rows, keys, 4, stages)


def rows_block(dim: int, dtype: torch.dtype, hopper: bool, room: int, copied: bool) -> Block:
    """The tile of the backward over keys, for dq. `copied`: the hardware copies tiles, which leaves more registers."""
    if dtype == torch.float32:
        return _block(16, _square(dim, dtype, room)["BN"], 4, 1, 255)  # as in the forward
    if dim > 128:
        return _square(dim, dtype, room)
    if not hopper:
        return _block(64, 32, 4, 2)
    if copied:
        return _block(64, 64, 4, 3, 168) if dim <= 64 else _block(64, 64, 4, 2, 168)
    return _block(64, 64, 4, 3) if dim <= 64 else _block(128, 64, 8, 3)


def keys_block(dim: int, dtype: torch.dtype, hopper: bool, room: int, lean: bool, of_signs: bool, rows: int) -> Block:
    """The tile of the backward over rows, for dk and dv.

    `lean`: the hardware copies tiles, and a row's numbers are appended to them. `of_signs`: gradients of signs arrive, for which
    a row has more numbers than registers hold in a large tile.
    """
    if dtype == torch.float32 or dim > 128:
        return _square(dim, dtype, room)
    if not hopper:
        return _block(32, 64, 4, 2)
    if lean:
        return _block(64, 64, 4, 3 if dim <= 64 and rows > 2048 else 2)
    if dim > 64:
        return _block(32, 64, 4, 3)
    return _block(32, 64, 4, 2) if of_signs else _block(64, 64, 4, 2)


def _square(dim: int, dtype: torch.dtype, room: int) -> Block:
    """As many rows as keys, of which five tiles of vectors fit into `room`: queries, keys, values and two gradients."""
    side = 32 if 5 * 32 * dim * dtype.itemsize <= room else 16
    return _block(side, side, 4, 1)


def _block(rows: int, keys: int, warps: int, stages: int, registers: int = 0) -> Block:
    """`registers` is the most that a thread may use, so that more programs run at a time; 0 leaves it to the compiler."""
    block = {"BM": rows, "BN": keys, "num_warps": warps, "num_stages": stages}
    return block | ({"maxnreg": registers} if registers else {})


def tile_of(block: Block) -> Block:
    return {"BM": block["BM"], "BN": block["BN"]}


def options_of(block: Block) -> Block:
    return {name: size for name, size in block.items() if name not in ("BM", "BN")}
