"""The kernels, fastest first; the choice among them, and the reasons for it.

    __init__.py    KERNELS: the table; choose() and why(): which kernel runs a call
    contract.py    what a kernel is given (Problem, sign_bits), gives back (Results, Gradients) and refuses (Serves)
    cpu/           C, with AMX, AVX-512, AVX2 or portable vectors
    triton/        Triton, for NVIDIA GPUs from Ampere on
    blockwise/     torch operations, tile by tile: any device, O(n) memory
    reference.py   the definition, in plain PyTorch; every other kernel is tested against it

Kernels are imported when they first run, and never import one another.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch_private import mark_constant
from ..errors import InputError, KernelUnavailable, checked_options, nearest
from .contract import FLOATS, Request, Serves


@cache
def _why_cpu_is_missing() -> str | None:
    try:
        load("cpu")
    except KernelUnavailable as reason:
        return str(reason)
    return None


def cpu_is_missing() -> str | None:
    """Why the native kernel cannot run here at all; None when it can."""
    return _why_cpu_is_missing()


@cache
def _why_triton_is_missing() -> str | None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        return "needs an NVIDIA GPU of the Ampere generation or newer"
    try:
        load("triton")
    except ImportError as error:
        return f"needs the package triton 3.6 or newer: {error}"
    return None


def triton_is_missing() -> str | None:
    """Why the GPU kernels cannot run here at all; None when they can."""
    return _why_triton_is_missing()


# a compiled graph asks once, while it is traced
mark_constant(cpu_is_missing)
mark_constant(triton_is_missing)

KERNELS = {
    "cpu": Serves(devices=("cpu",), additive=False, unless=lambda request: cpu_is_missing()),
    "triton": Serves(
        devices=("cuda",), dtypes=FLOATS[:3], head_dim=256, additive=False, unless=lambda request: triton_is_missing()
    ),
    "blockwise": Serves(),
    "reference": Serves(additive=False),
}
"""Every kernel there is and what it serves, fastest first. ``"auto"`` takes the first that serves the call."""


class KernelChoice(NamedTuple):
    """Whether a kernel is taken for a call, and why."""

    kernel: str
    taken: bool
    reason: str


class KernelChoices(tuple[KernelChoice, ...]):
    """One :class:`KernelChoice` per kernel, fastest first; prints as one line each."""

    def __str__(self) -> str:
        return "\n".join(
            f"{choice.kernel:10} {'taken' if choice.taken else 'not taken'}: {choice.reason}" for choice in self
        )

    __repr__ = __str__


def load(name: str) -> ModuleType:
    """The module of a kernel, imported when first asked for."""
    path = f"{__name__}.{name}"
    return sys.modules.get(path) or importlib.import_module(path)


def takes_plain(kernel: str, cuda: bool = False) -> str | None:
    """The native kernel that runs calls on plain tensors of this device, where this one is asked for; None if it may not.

    ``"cpu"`` serves every plain call, ``"triton"`` those whose dtype and head dims it serves.
    """
    native = "triton" if cuda else "cpu"
    if kernel != native and not (kernel == "auto" and next(iter(KERNELS)) == "cpu"):
        return None
    return native if (triton_is_missing() if cuda else cpu_is_missing()) is None else None


def check_name(where: str, kernel: object) -> None:
    """Raise unless there is a kernel of this name, or it is ``"auto"``."""
    if kernel != "auto" and (not isinstance(kernel, str) or kernel not in KERNELS):
        raise InputError(f"{where}(): unknown kernel {kernel!r}. {nearest(kernel, ('auto', *KERNELS))}")


def choose(where: str, request: Request, kernel: str) -> str:
    """The kernel that runs a call: the one named, or the fastest that serves it."""
    if kernel == "auto":
        return next(name for name, serves in KERNELS.items() if serves.refusal(request) is None)
    check_name(where, kernel)
    refusal = KERNELS[kernel].refusal(request)
    if refusal is not None:
        raise KernelUnavailable(f"{where}(): kernel={kernel!r} {refusal}. Change the inputs or use kernel='auto'.")
    return kernel


@checked_options
def why(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool | str = False,
    scale: float | Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    kernel: str = "auto",
) -> KernelChoices:
    """Which kernel would run this call, and why each of the others would not.

    Nothing is computed. ``query``, ``key``, ``value``, ``mask``, ``causal``, ``scale``, ``window``, ``softcap``,
    ``dropout`` and ``kernel`` are those of ``attention()``; without a value the question is about ``measure()``.

    Example:
        >>> q = torch.randn(1, 4, 16, 32)
        >>> print(attemper.kernels.why(q, q, q, causal=True))
        cpu        taken: the fastest that serves this call
        triton     not taken: needs cuda tensors; got cpu
        blockwise  not taken: serves this call, but slower
        reference  not taken: serves this call, but slower
    """
    from ..operation.checks import prepare

    options: dict[str, Any] = {"mask": mask, "causal": causal, "scale": scale, "window": window, "softcap": softcap}
    request = prepare("why", query, key, value, dropout=dropout, **options).request
    taken = choose("why", request, kernel)
    choices = []
    for name, serves in KERNELS.items():
        refusal = serves.refusal(request)
        if name == taken:
            reason = "the fastest that serves this call" if kernel == "auto" else "asked for by name"
        else:
            slower = "serves this call, but slower" if kernel == "auto" else f"kernel={kernel!r} was asked for"
            reason = refusal or slower
        choices.append(KernelChoice(name, name == taken, reason))
    return KernelChoices(choices)
