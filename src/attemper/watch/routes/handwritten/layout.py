"""Layout: which dimensions of a model's own logits are batch, heads, queries and keys.

Hand-written code keeps them in any order: ``bhqk``, ``bqhk``, ``bqkh``, ``ijbn``, batch and heads joined into one, grouped heads
in two: ``bgrqk``, ``bqgrk``. The softmax shows which are the keys; the product shows the number of queries, and by its strides
their place; the module shows the number of heads; the batch and length that it was called with show the rest.
"""

from __future__ import annotations

import math
from itertools import combinations

from torch import Tensor, nn

from ...attach.running import Frame

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")


def named_heads(frames: tuple[Frame, ...]) -> int | None:
    """The number of heads in an attribute of the attention module: the innermost with parameters, not the modules around it."""
    for frame in reversed(frames):
        for attribute in HEADS:
            heads = getattr(frame.module, attribute, None)
            if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
                return heads
        if _has_parameters(frame.module):
            return None
    return None


def all_heads(frames: tuple[Frame, ...]) -> int | None:
    """The number of heads in an attribute or the config of the attention module, however many of them run here."""
    named = named_heads(frames)
    if named is not None or not frames:
        return named
    for frame in reversed(frames):
        heads = getattr(getattr(frame.module, "config", None), "num_attention_heads", None)
        if isinstance(heads, int) and heads > 0:
            return heads
        if _has_parameters(frame.module):
            break
    return None


def heads_of(frames: tuple[Frame, ...], joined: int, rows: int) -> int | None:
    """The heads in a joined (B·H) dimension: from the module, or from the batch it was called with; None: unknown."""
    named = named_heads(frames)
    batch = _batch(frames, rows)
    if batch is not None and joined % batch == 0:
        each = joined // batch
        return named if named is not None and each % named == 0 else each
    if named is not None and joined % named == 0:
        return named
    return 1 if joined == 1 else None


def ordered(
    logits: Tensor, dim: int, rows: int, columns: int, strides: tuple[int, int] | None, frames: tuple[Frame, ...]
) -> tuple[Tensor, bool]:
    """The logits that a softmax over ``dim`` was given as ``(…, Lq, Lk)``, and whether the queries are the product's columns.

    ``rows`` and ``columns`` are those of the product, ``strides`` theirs in memory, if they are known.
    """
    matrix = logits.movedim(dim, -1)
    leading = range(matrix.dim() - 1)
    keys, step = matrix.shape[-1], matrix.stride(-1)
    flipped = False
    if strides is not None and rows > 1 and columns > 1 and step in strides:
        down = step == strides[0]  # whether the softmax runs over the rows of the product
        flipped = down and keys == rows
        expected = (columns, strides[1]) if down else (rows, strides[0])
        axes = [axis for axis in leading if (matrix.shape[axis], matrix.stride(axis)) == expected]
        if axes and keys == (rows if down else columns):
            return matrix.movedim(axes[-1], -2), down
    queries = columns if flipped else rows
    if matrix.shape[-2] != queries:
        axes = [axis for axis in leading if matrix.shape[axis] == queries] or _group_in_rows(matrix, queries, frames)
        if axes:
            return matrix.movedim(axes[-1], -2), flipped
    return matrix, False


def softmax_over(
    logits: Tensor, dim: int, rows: int, columns: int, strides: tuple[int, int] | None, frames: tuple[Frame, ...]
) -> tuple[str, int, int | None]:
    """What a softmax over ``dim`` runs over if not over the keys; the dimension of the keys, as far as it shows; and the
    dimension over which values would then be added up.

    A softmax over the rows or the columns of the product may run over the keys: its own dimension is then taken for theirs. Over
    the heads or the batch it cannot, and the keys are the product's columns.
    """
    dim %= logits.dim()
    shapes = [(logits.shape[axis], logits.stride(axis)) for axis in range(logits.dim())]
    if logits.dim() < 3 or strides is None or rows < 2 or columns < 2 or rows * columns < 4:
        return "queries", dim, None
    keys = [axis for axis, shape in enumerate(shapes) if shape == (columns, strides[1])]
    queries = [axis for axis, shape in enumerate(shapes) if shape == (rows, strides[0])]
    if not keys or not queries:
        return "queries", dim, None
    if dim == queries[-1]:
        return "queries", dim, keys[-1]
    if dim == keys[-1]:
        return "queries", dim, queries[-1] if logits.dim() > 3 and rows == columns else None
    leading = [axis for axis in range(logits.dim()) if axis not in (keys[-1], queries[-1])]
    named, batch, size = named_heads(frames), _batch(frames, rows), logits.shape[dim]
    first = dim == leading[0] and (len(leading) > 1 or (size != named and size == batch))
    return "batch" if first else "heads", keys[-1], keys[-1]


def by_head(matrix: Tensor, frames: tuple[Frame, ...]) -> tuple[Tensor, bool]:
    """``(…, Lq, Lk)`` as ``(B, H, Lq, Lk)``, and whether the heads are known."""
    rows, keys = matrix.shape[-2:]
    known = True
    if matrix.dim() == 2:
        heads = 1
    elif matrix.dim() == 3:
        head_axis = heads_of(frames, matrix.shape[0], rows)
        heads, known = head_axis or 1, head_axis is not None
    else:
        matrix, heads, known = _by_sizes(matrix, frames)
    return matrix.reshape(matrix.shape[:-2].numel() // heads, heads, rows, keys), known


def _group_in_rows(matrix: Tensor, rows: int, frames: tuple[Frame, ...]) -> list[int]:
    """The axes that may be the queries if the rows of the product hold the heads of a group too, as einsum joins them."""
    sizes = matrix.shape[:-1]
    axes = [axis for axis, size in enumerate(sizes) if rows % size == 0]
    called, named = called_with(frames), named_heads(frames)
    long = [axis for axis in axes if called is not None and sizes[axis] == called[1]]
    if long or named is None:
        return long
    return [axis for axis in axes if sizes.numel() // sizes[axis] % named == 0]


def _by_sizes(matrix: Tensor, frames: tuple[Frame, ...]) -> tuple[Tensor, int, bool]:
    """``(…, Lq, Lk)`` with the batch before the heads, the number of heads, and whether that is known."""
    sizes, named, called = matrix.shape[:-2], named_heads(frames), called_with(frames)
    if len(sizes) > 2 and called is not None and called[1] == matrix.shape[-2] and called[0] in sizes:
        each = sizes.numel() // called[0]
        if named in (None, each):  # all but batch, queries and keys: (B, G, R, Lq, Lk), in any order
            return matrix.movedim(sizes.index(called[0]), 0), each, True
    shape, batch = _shape(frames), _batch(frames, matrix.shape[-2])
    if shape is not None and len(shape) == 4 and sizes[0] == shape[0] * shape[1] != shape[0]:
        return _split(matrix, shape[0], shape[1])  # the module was called with (B, H, L, E)
    if named is None:
        return matrix, sizes[-1], True
    # (B, G, R, Lq, Lk) is grouped heads, (B, T, H, Lq, Lk) and (B·H, T, Lq, Lk) are not: only the module shows which
    many = [axis for axis, size in enumerate(sizes) if size > 1]
    fitting = [
        axes for count in range(len(many) + 1) for axes in combinations(many, count) if _size(sizes, axes) == named
    ]
    if batch is not None and sizes[0] == batch > 1:
        fitting = [axes for axes in fitting if 0 not in axes]  # as many items as heads, in a slice of heads
    likely = [axes for axes in fitting if 0 not in axes and (sizes[0] == batch or axes == tuple(range(1, len(sizes))))]
    fitting = likely or fitting
    joined = batch is not None and batch > 1 and named > 1 and sizes[0] == batch * named
    if joined and not fitting:
        return _split(matrix, batch or 1, named)
    if len(fitting) == 1 and not joined:
        axes = fitting[0]
        return matrix.movedim(axes, tuple(range(-2 - len(axes), -2))), named, True
    return matrix, 1, False  # as many blocks as heads, for example


def _split(matrix: Tensor, batch: int, heads: int) -> tuple[Tensor, int, bool]:
    """``(B·H, …, Lq, Lk)`` with the heads before the queries."""
    return matrix.unflatten(0, (batch, heads)).movedim(1, -3), heads, True


def _size(sizes: tuple[int, ...], axes: tuple[int, ...]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _batch(frames: tuple[Frame, ...], rows: int) -> int | None:
    """The batch that the attention module was called with; sequence-first inputs are recognised by their length."""
    shape = _shape(frames)
    if shape is None or len(shape) < 3:
        return None
    sequence_first = len(shape) == 3 and shape[0] == rows and shape[1] != rows
    return shape[1] if sequence_first else shape[0]


def called_with(frames: tuple[Frame, ...]) -> tuple[int, int] | None:
    """The batch and the length of the attention module's input (B, L, D); None: another shape."""
    shape = _shape(frames)
    return (shape[0], shape[1]) if shape is not None and len(shape) == 3 else None


def _shape(frames: tuple[Frame, ...]) -> tuple[int, ...] | None:
    """The shape of the innermost module's input, up to the first module with parameters."""
    for frame in reversed(frames):
        if frame.shape is not None and len(frame.shape) > 2:
            return frame.shape
        if frame.shape is not None or _has_parameters(frame.module):
            return None
    return None
