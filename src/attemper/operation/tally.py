"""Tally: an attention call adds its vitals, summed by head, to a tensor of its module, by an op that a compiled graph can hold.

The op always runs, so nothing in a graph depends on whether a watch is open: a watch reads the tensors when a step ends. A
tally is (2 kinds, 3 grades, heads, WIDTH) in float64: the sums of ``heads.COLUMNS``, the peak, how many calls were added, and
the number of the last call's description. All zeros is empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from .._torch_private import _current_graph_task_id
from ..errors import InputError
from ..heads import COLUMNS, SATURABLE_KEYS, SATURATED_WEIGHT, HeadSummary
from ..vitals import SIGNS, Vitals

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
    shape: tuple[int, ...] = ()  # (B, H, Lq)


DESCRIPTIONS: list[CallDescription] = []
_NUMBERS: dict[tuple[Any, ...], tuple[int, str]] = {}
"""By description, as a tuple: its number in the list, and self- or cross-attention."""

torch.library.define(
    "attemper::tally",
    "(Tensor(a!) tally, "
    + ", ".join(f"Tensor {name}" for name in SIGNS)
    + ", Tensor lse_low, Tensor? keep, int grade, str route, str kind, str implementation, float? declared, SymInt? window, "
    "str dtype, SymInt kv_heads, SymInt keys, SymInt head_dim, float? scale, SymInt? left, SymInt? right, float? softcap, "
    "float dropout, bool masked) -> ()",
)


@torch.library.impl("attemper::tally", "CompositeExplicitAutograd")
def _tally(tally: Tensor, *args: Any) -> None:
    (low, keep, grade), about = args[N_SIGNS : N_SIGNS + 3], args[N_SIGNS + 3 :]
    vitals = Vitals(**dict(zip(SIGNS, args, strict=False)))._with_low(low)
    add(tally, vitals, keep, grade, about)


def add(tally: Tensor, vitals: Vitals, keep: Tensor | None, grade: int, about: tuple[Any, ...]) -> None:
    """Add all signs of a call to a tally; `about` has the fields of `CallDescription` up to its shape."""
    if _current_graph_task_id() != -1:
        return  # inside a backward: a checkpoint that is recomputed, and was counted in the forward
    check(tally, vitals.lse)
    shape = tuple(vitals.lse.shape)
    number, kind = _NUMBERS.get((*about, shape)) or _numbered(about, shape)
    slot = tally[KINDS.index(kind), grade, : shape[1]]
    rows = None if keep is None else keep[:, None, :]
    if tally.is_cuda and kernels.triton_is_missing() is None:
        native = kernels.load("triton").summary
        if native.serves(vitals):
            native.add_to(slot, vitals, rows, number, SATURABLE_KEYS, SATURATED_WEIGHT)
            return
    summary = folded(vitals, rows)
    peaks = torch.maximum(slot[:, PEAK], summary.peaks)
    slot[:, PEAK] = torch.where(slot[:, CALLS] == 0, summary.peaks, peaks)
    slot[:, :N_SUMS] += summary.sums
    slot[:, CALLS] += 1
    slot[:, NUMBER] = number


def _numbered(about: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, str]:
    """The number of a call that is described for the first time, and its kind."""
    call = CallDescription._make((*about, shape))
    DESCRIPTIONS.append(call)
    found = _NUMBERS[call] = len(DESCRIPTIONS) - 1, call.kind or kind_by_lengths(shape[2], call.keys)
    return found


@torch.library.register_fake("attemper::tally")
def _fake_tally(tally: Tensor, *args: Any) -> None:
    check(tally, args[0])


def check(tally: Tensor, sign: Tensor) -> None:
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
        sums, peaks = native.by_head(vitals, rows, SATURABLE_KEYS, SATURATED_WEIGHT)
        return HeadSummary((*COLUMNS, "peak"), sums, peaks)
    return vitals.by_head(rows)


def kind_by_lengths(queries: int, keys: int) -> str:
    """Self- or cross-attention, if nothing else shows it. One query and many keys: a cache is being read."""
    return "cross" if 1 < queries != keys else "self"
