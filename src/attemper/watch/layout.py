"""Layout: which dimensions of a model's own logits are batch, heads, queries and keys.

Code by hand keeps them in any order: ``bhqk``, ``bqhk``, ``bqkh``, ``ijbn``, batch and heads folded into one. The softmax says
which are the keys; the product says how many queries there are, and by its strides where; the module says how many heads.
"""

from __future__ import annotations

from torch import Tensor, nn

from .running import Frame

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")


def named_heads(frames: tuple[Frame, ...]) -> int | None:
    """The heads that the attention module names: the innermost with parameters, not the modules around it."""
    for frame in reversed(frames):
        for attribute in HEADS:
            heads = getattr(frame.module, attribute, None)
            if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
                return heads
        if _has_parameters(frame.module):
            return None
    return None


def all_heads(frames: tuple[Frame, ...]) -> int | None:
    """The heads that the attention module says it has, by itself or in its config, however many of them run here."""
    named = named_heads(frames)
    if named is not None or not frames:
        return named
    heads = getattr(getattr(frames[-1].module, "config", None), "num_attention_heads", None)
    return heads if isinstance(heads, int) and heads > 0 else None


def heads_of(frames: tuple[Frame, ...], folded: int, rows: int) -> int | None:
    """The heads in a folded (B·H) dimension: as the module says, else by the batch it was called with; None: nothing says."""
    named = named_heads(frames)
    batch = _batch(frames, rows)
    if batch is not None and folded % batch == 0:
        each = folded // batch
        return named if named is not None and each % named == 0 else each
    if named is not None and folded % named == 0:
        return named
    return 1 if folded == 1 else None


def ordered(logits: Tensor, dim: int, rows: int, columns: int, strided: bool) -> tuple[Tensor, bool]:
    """The logits as ``(…, Lq, Lk)``, and whether the queries are the product's columns.

    Args:
        logits: what the softmax was given.
        dim: its dimension.
        rows: of the product that made them.
        columns: of that product.
        strided: whether they still lie in memory as the product left them.
    """
    matrix = logits.movedim(dim, -1)
    leading = range(matrix.dim() - 1)
    keys, step = matrix.shape[-1], matrix.stride(-1)
    if strided and rows > 1 and columns > 1 and step in (1, columns):
        flipped = step == columns
        expected = (columns, 1) if flipped else (rows, columns)
        found = [axis for axis in leading if (matrix.shape[axis], matrix.stride(axis)) == expected]
        if found and keys == (rows if flipped else columns):
            return matrix.movedim(found[-1], -2), flipped
    if matrix.shape[-2] != rows:
        found = [axis for axis in leading if matrix.shape[axis] == rows]
        if found:
            return matrix.movedim(found[-1], -2), False
    return matrix, False


def by_head(matrix: Tensor, frames: tuple[Frame, ...]) -> tuple[Tensor, bool]:
    """``(…, Lq, Lk)`` as ``(B, H, Lq, Lk)``, and whether something said what the heads are."""
    rows, keys = matrix.shape[-2:]
    known = True
    if matrix.dim() == 2:
        heads = 1
    elif matrix.dim() == 3:
        said = heads_of(frames, matrix.shape[0], rows)
        heads, known = said or 1, said is not None
    else:
        # (B, G, R, Lq, Lk) is grouped heads, (B, T, H, Lq, Lk) is not: only the module can tell
        inner, named = matrix.shape[1:-2].numel(), named_heads(frames)
        if named is not None and named not in (inner, matrix.shape[-3]):
            known = named in matrix.shape[:-2]
            matrix = matrix.movedim(matrix.shape.index(named), -3) if known else matrix
        heads = inner if named == inner else matrix.shape[-3]
    return matrix.reshape(matrix.shape[:-2].numel() // heads, heads, rows, keys), known


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _batch(frames: tuple[Frame, ...], rows: int) -> int | None:
    """The batch that the attention module was called with; sequence-first inputs are known by their length."""
    for frame in reversed(frames):
        shape = frame.shape
        if shape is not None and len(shape) > 2:
            sequence_first = len(shape) == 3 and shape[0] == rows and shape[1] != rows
            return shape[1] if sequence_first else shape[0]
        if shape is not None or _has_parameters(frame.module):
            return None
    return None
