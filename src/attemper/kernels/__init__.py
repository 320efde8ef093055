"""The kernels, fastest first; the choice among them, and the reasons for it.

    __init__.py    KERNELS: the table; choose() and why(): which kernel runs a call
    guard.py       whether a call may go straight to its kernel
    contract.py    what a kernel is given (Problem, sign_bits), gives back (Results, Gradients) and refuses (Capabilities)
    cpu/           C, with AMX, AVX-512, AVX2, NEON or portable vectors
    triton/        Triton, for NVIDIA GPUs from Ampere on
    blockwise/     torch operations, tile by tile: any device, O(n) memory
    reference.py   the definition, in plain PyTorch; every other kernel is tested against it

Kernels are imported when they first run, and never import one another.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch_private import mark_constant
from ..errors import InputError, KernelUnavailable, checked_options, nearest
from .contract import FLOATS, Capabilities, Request
from .guard import guard


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
    if not torch.cuda.is_available() or torch.version.cuda is None:  # ROCm calls its devices cuda too
        return "needs an NVIDIA GPU of the Ampere generation or newer"
    for number in range(torch.cuda.device_count()):
        if torch.cuda.get_device_capability(number) < (8, 0):
            old_card = f"cuda:{number} is a {torch.cuda.get_device_name(number)}, which CUDA_VISIBLE_DEVICES can hide"
            return f"needs NVIDIA GPUs of the Ampere generation or newer; {old_card}"
    try:
        version = importlib.import_module("triton").__version__
        if tuple(map(int, version.split(".")[:2])) < OLDEST_TRITON:
            return f"needs the package triton {'.'.join(map(str, OLDEST_TRITON))} or newer; found {version}"
        load("triton")
    except Exception as error:  # one that is too new may lack anything
        return f"needs the package triton, as of version {'.'.join(map(str, OLDEST_TRITON))}: {error}"
    return None


OLDEST_TRITON = (3, 6)


def triton_is_missing() -> str | None:
    """Why the GPU kernels cannot run here at all; None when they can."""
    return _why_triton_is_missing()


# Dynamo asks once, while it traces, and keeps the answer in the graph
mark_constant(cpu_is_missing)
mark_constant(triton_is_missing)

KERNELS = {
    "cpu": Capabilities(devices=("cpu",), additive=False, unavailable_reason=lambda request: cpu_is_missing()),
    "triton": Capabilities(
        devices=("cuda",),
        dtypes=FLOATS[:3],
        head_dim=256,
        additive=False,
        unavailable_reason=lambda request: triton_is_missing(),
    ),
    "blockwise": Capabilities(),
    "reference": Capabilities(additive=False),
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


@cache
def load(name: str) -> ModuleType:
    """The module of a kernel, imported when first asked for."""
    return importlib.import_module(f"{__name__}.{name}")


def slow_because(device: str) -> str | None:
    """Why calls on this kind of device run on a kernel that is several times slower than it need be; None if they do not."""
    reason = cpu_is_missing() if device == "cpu" and next(iter(KERNELS)) == "cpu" else None
    if reason is None:
        return None
    return f"kernel 'cpu' {reason}. Calls on the CPU run on 'blockwise', which is several times slower"


@cache
def warn_if_slow(device: str) -> None:
    """Say so, once in a process."""
    reason = slow_because(device)
    if reason is not None:
        warnings.warn(f"attemper: {reason}.", stacklevel=2)


@cache
def native() -> Any:
    """The module of the native library; None if it cannot run here."""
    return None if cpu_is_missing() is not None else load("cpu").native


def extension() -> Any:
    """The native library's compiled functions, where they are installed and can read torch's tensors; else None."""
    return None if (library := native()) is None else library.extension


def fast_guard() -> Callable[..., int]:
    """`guard` of guard.py, compiled if the native library is installed."""
    return guard if (library := native()) is None else library.offered.guard


def check_name(where: str, kernel: object) -> None:
    """Raise unless there is a kernel of this name, or it is ``"auto"``."""
    if kernel != "auto" and (not isinstance(kernel, str) or kernel not in KERNELS):
        raise InputError(f"{where}(): unknown kernel {kernel!r}. {nearest(kernel, ('auto', *KERNELS))}")


def choose(where: str, request: Request, kernel: str) -> str:
    """The kernel that runs a call: the one named, or the fastest that serves it."""
    if kernel == "auto":
        taken = next(name for name, serves in KERNELS.items() if serves.refusal(request) is None)
        if taken == "blockwise" and not request.additive and where != "why" and not torch.compiler.is_compiling():
            warn_if_slow(request.device)
        return taken
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
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
    sink: Tensor | None = None,
    kernel: str = "auto",
) -> KernelChoices:
    """Which kernel would run this call, and why each of the others would not.

    Nothing is computed. ``query``, ``key``, ``value``, ``mask``, ``causal``, ``scale``, ``window``, ``softcap``,
    ``dropout``, ``documents``, ``sink`` and ``kernel`` are those of ``attention()``; without a value the question is about
    ``measure()``.

    Example:
        >>> q = torch.randn(1, 4, 16, 32)
        >>> print(attemper.kernels.why(q, q, q, causal=True))
        cpu        taken: the fastest that serves this call
        triton     not taken: needs cuda tensors; got cpu
        blockwise  not taken: serves this call, but slower
        reference  not taken: serves this call, but slower
    """
    from ..operation.call import prepare

    options: dict[str, Any] = {"mask": mask, "causal": causal, "scale": scale, "window": window, "softcap": softcap}
    options |= {"documents": documents, "sink": sink}
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
