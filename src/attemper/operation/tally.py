"""Tally: an attention call adds its vitals, summed by head, to a tensor of its module, by an op that a compiled graph can hold.

The op always runs, so nothing in a graph depends on whether a watch is open: a watch reads the tensors when a step ends. A
tally is (2 kinds, 3 grades, heads, WIDTH) in float64: the sums of ``heads.COLUMNS``, the peak, how many calls were added, and
the number of the last call's description. All zeros is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from .._torch_private import _current_graph_task_id
from ..errors import InputError, guarded_call, internal_error
from ..heads import ALL_COLUMNS, COLUMNS, SATURABLE_KEYS, SATURATED_WEIGHT, BlockSummary, HeadSummary
from ..kernels.contract import Problem, is_recording, packed_signs
from ..vitals import SIGNS, Vitals
from .autograd import differentiable
from .call_hooks import TallyTarget
from .ops import op_backward, packed_forward
from .padding import kept_by_mask

if TYPE_CHECKING:
    from ..kernels.triton import SignRows

KINDS = ("self", "cross")
GRADES = 3
"""Passes without gradients, with gradients in evaluation mode, and in training mode."""
N_SIGNS, N_SUMS = len(SIGNS), len(COLUMNS)
PEAK, CALLS, NUMBER, WIDTH = N_SUMS, N_SUMS + 1, N_SUMS + 2, N_SUMS + 3


class CallDescription(NamedTuple):
    """A call, apart from its vitals, as the op gets it. Only its number is stored on the device."""

    route: str
    kind: str
    implementation: str
    declared: float | None
    window: int | None
    dtype: str
    kv_heads: int
    keys: int
    head_dim: int
    scale: float | None
    left: int | None
    right: int | None
    softcap: float | None
    dropout: float
    masked: bool
    biased: bool
    shape: tuple[int, ...] = ()  # (B, H, Lq)


DESCRIPTIONS: list[CallDescription] = []
_NUMBERS: dict[tuple[Any, ...], tuple[int, str]] = {}
"""By description, as a tuple: its number in the list, and self- or cross-attention."""
_NUMBERING = Lock()

CALL_SCHEMA = (
    "Tensor? keep, int grade, str route, str kind, str implementation, float? declared, SymInt? window, str dtype, "
    "SymInt kv_heads, SymInt keys, SymInt head_dim, float? scale, SymInt? left, SymInt? right, float? softcap, float dropout, "
    "bool masked, bool biased"
)
"""Which rows of a call count, its grade, and the fields of its description but for the shape."""
torch.library.define(
    "attemper::tally",
    f"(Tensor(a!) tally, {', '.join(f'Tensor {name}' for name in SIGNS)}, Tensor lse_low, {CALL_SCHEMA}) -> ()",
)
# The signs of `forward_packed` as one tensor. It and its tally are two ops because a backward may compute the first one again,
# and must not depend on a tally, which changes in between.
torch.library.define(
    "attemper::tally_packed", f"(Tensor(a!) tally, Tensor lse, Tensor lse_low, Tensor packed, {CALL_SCHEMA}) -> ()"
)


FAILED: set[str] = set()
"""Errors of attemper's own while a tally was added to, until a watch tells of them."""


surviving = partial(guarded_call, failed=lambda error, *_: FAILED.add(internal_error(error)))
"""What adds to a tally, so that its errors do not end the model's pass."""


@torch.library.impl("attemper::tally", "CompositeExplicitAutograd")
@surviving
def _tally(tally: Tensor, *args: Any) -> None:
    if is_recomputed():
        return
    check_tally(tally, args[0])
    signs, (keep, grade), about = args[: N_SIGNS + 1], args[N_SIGNS + 1 : N_SIGNS + 3], args[N_SIGNS + 3 :]
    add_signs(tally, signs, keep, grade, (*about, tuple(args[0].shape)))


@surviving
def _tally_packed(tally: Tensor, lse: Tensor, lse_low: Tensor, packed: Tensor, *args: Any) -> None:
    if is_recomputed():
        return
    check_tally(tally, lse)
    keep, grade, about = args[0], args[1], (*args[2:], tuple(lse.shape))
    is_whole = lse.is_contiguous() and lse_low.is_contiguous() and packed.is_contiguous()
    if tally.is_cuda and is_whole and packed.dtype is torch.float32 and kernels.triton_is_missing() is None:
        add_signs(tally, kernels.load("triton").packed_rows(lse, lse_low, packed), keep, grade, about)
        return
    signs = {"lse": lse, **packed_signs(packed, tuple(lse.shape))}
    signs["visible"] = signs["visible"].to(torch.int32)
    add_signs(tally, [*[signs[name] for name in SIGNS], lse_low], keep, grade, about)


torch.library.impl("attemper::tally_packed", "CompositeExplicitAutograd", _tally_packed)


@cache
def use_native_ops() -> None:
    """From now on the extension computes plain calls of these ops on the CPU, so that a compiled graph runs no Python of ours."""
    if kernels.cpu_is_missing() is not None or not (native := kernels.load("cpu").native).bound:
        return
    adding = (_tally_packed, _NUMBERS, SATURABLE_KEYS, SATURATED_WEIGHT)
    for name, key, given in (
        ("forward_packed", "AutogradCPU", differentiable),
        ("forward_packed", "CPU", packed_forward),
        ("tally_packed", "CPU", adding),
        ("backward", "CPU", op_backward),
    ):
        torch.library.impl(f"attemper::{name}", key, native.library.op(name, given))


def is_recomputed() -> bool:
    """Whether a backward runs: a call is computed again for a checkpoint, and was counted in the forward."""
    return _current_graph_task_id() != -1


def add_signs(
    tally: Tensor, signs: Sequence[Tensor] | SignRows, keep: Tensor | None, grade: int, about: tuple[Any, ...]
) -> None:
    """Add all signs of a call, and `lse_low` after them; `about` are the fields of a `CallDescription`."""
    number, kind = _NUMBERS.get(about) or _numbered(about)
    place = (KINDS.index(kind), range(GRADES)[grade])  # a kernel gets an address: another grade must raise here
    rows = None if keep is None else keep[:, None, :]
    if tally.is_cuda and kernels.triton_is_missing() is None:
        native = kernels.load("triton").summary
        if native.serves_each(signs):
            native.add_to(tally, place, signs, rows, number, SATURABLE_KEYS, SATURATED_WEIGHT)
            return
    tensors: Any = signs  # rows of memory were added above
    slot = tally[place][: tensors[0].shape[1]]
    summary = folded(Vitals(**dict(zip(SIGNS, tensors, strict=False)))._with_low(tensors[-1]), rows)
    peaks = torch.maximum(slot[:, PEAK], summary.peaks)
    slot[:, PEAK] = torch.where(slot[:, CALLS] == 0, summary.peaks, peaks)
    slot[:, :N_SUMS] += summary.sums
    slot[:, CALLS] += 1
    slot[:, NUMBER] = number


def _numbered(about: tuple[Any, ...]) -> tuple[int, str]:
    """The number of a call that is described for the first time, and its kind."""
    call = CallDescription._make(about)
    with _NUMBERING:
        if call not in _NUMBERS:
            DESCRIPTIONS.append(call)
            _NUMBERS[call] = len(DESCRIPTIONS) - 1, call.kind or kind_by_lengths(call.shape[2], call.keys)
        return _NUMBERS[call]


@torch.library.register_fake("attemper::tally")
@torch.library.register_fake("attemper::tally_packed")
def _fake_tally(tally: Tensor, *args: Any) -> None:
    check_tally(tally, args[0])


def check_tally(tally: Tensor, sign: Tensor) -> None:
    heads = sign.shape[1]
    if heads > tally.shape[2]:
        raise InputError(
            f"instrument(): a module was found to have {tally.shape[2]} heads, but attends with {heads}. Set its attribute "
            f"`num_heads` to {heads} before attemper.instrument(model)."
        )
    if tally.device != sign.device:
        raise InputError(
            f"instrument(): the model was on {tally.device} then, and attends on {sign.device} now. Call "
            "attemper.instrument(model) again after model.to(…)."
        )


def folded(vitals: Vitals, rows: Tensor | None) -> HeadSummary:
    """``vitals.by_head(rows)``, by the native library if it is installed and serves them."""
    if kernels.cpu_is_missing() is None and (native := kernels.load("cpu").summary).serves(vitals):
        return BlockSummary(ALL_COLUMNS, *native.by_head(vitals, rows))
    return vitals.by_head(rows)


def kind_by_lengths(queries: int, keys: int) -> str:
    """Self- or cross-attention, if nothing else shows it. One query and many keys: a cache is being read."""
    return "cross" if 1 < queries != keys else "self"


def add_vitals(problem: Problem, vitals: Vitals, target: TallyTarget) -> None:
    """Add the vitals of a call to a target."""
    signs, low = [getattr(vitals, name).detach() for name in SIGNS], vitals._lse_low
    low = torch.zeros_like(signs[0], dtype=vitals.lse.dtype) if low is None else low.detach()
    torch.ops.attemper.tally(target.tally, *signs, low, *call_arguments(problem, target))


def add_packed(problem: Problem, found: Sequence[Tensor], target: TallyTarget) -> None:
    """Add the vitals that `forward_packed` returned, in a graph that is traced."""
    _, _, lse_low, lse, packed = found
    torch.ops.attemper.tally_packed(target.tally, lse, lse_low, packed, *call_arguments(problem, target))


def call_arguments(problem: Problem, target: TallyTarget) -> tuple[Any, ...]:
    """What an op gets of a call, as in CALL_SCHEMA."""
    query, key, mask = problem.query, problem.key, problem.mask
    queries, keys = query.shape[2], key.shape[2]
    keep = None
    if mask is not None and target.kind != "cross" and queries == keys and mask.shape[-1] == keys:
        keep = kept_by_mask(mask.detach())
    return (
        keep,
        (1 + target.training) * is_recording(),
        target.route,
        target.kind,
        target.implementation,
        target.declared,
        target.window,
        str(query.dtype).removeprefix("torch."),
        key.shape[1],
        keys,
        query.shape[3],
        None if problem.gain is not None else problem.scale,
        problem.left,
        problem.right,
        problem.softcap,
        problem.dropout,
        mask is not None,
        mask is not None and mask.dtype != torch.bool,
    )
