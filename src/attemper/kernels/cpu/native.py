"""native: finds and loads the compiled library, and packs one call for it.

The library is plain C with no link to Python or torch. It borrows torch's threads through `torch_parallel_for`, which
libtorch_cpu exports, so there is one thread pool in the process and `torch.set_num_threads` governs both.
"""

from __future__ import annotations

import ctypes
import os
import struct
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import KernelUnavailable, nearest

VARIANTS = ("portable", "avx2", "avx512", "amx")
"""The builds of the kernel, in the order native.c counts them. A processor that runs one runs those before it."""

CHOICE = "ATTEMPER_CPU_VARIANT"
POISON = "ATTEMPER_CPU_POISON"

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.bool: 4}
NO_MASK = 5
MASK_WIDE, MASK_BY_BATCHES, MASK_BY_GROUPS = 32, 64, 128  # WANT_MASK_… of call.h
UNBOUND = 1 << 40
NO_MEMORY, NOT_PLAIN = 1, 4  # of call.h

# the fields of Call in call.h: everything is 8 bytes
_STRIDED, _ROWS = 5, 9
_WHOLE = 5 * _STRIDED + 7 + 2 + 2 + 2 + 2 + _ROWS + _STRIDED + _ROWS + 1 + 3 + 2 + 5 + 1 + 3
LAYOUT = struct.Struct(f"={_WHOLE}q3d")
ROWS = struct.Struct(f"={_ROWS}q")  # of Rows in call.h
FOLD = struct.Struct("=18qd")  # of Fold in fold.c

NOWHERE = (0,) * _STRIDED
NO_ROWS = (0,) * _ROWS


def _find() -> Path | None:
    here = Path(__file__).parent / "c"
    places = (here / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((place for place in places if place.exists()), None)


def _load() -> ctypes.CDLL:
    path = _find()
    if path is None:
        raise KernelUnavailable("is not built here: install attemper where there is a C compiler (gcc or clang)")
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        raise KernelUnavailable("does not load here: its library was built for another system") from None
    names = ("call_size", "fold_size", "back_keys", "best", "forward", "backward", "fold", "bind", "plain_forward")
    there = all(hasattr(library, f"attemper_{name}") for name in names)
    if not there or (library.attemper_call_size(), library.attemper_fold_size()) != (LAYOUT.size, FOLD.size):
        raise KernelUnavailable("was built from other sources: install attemper again")
    return library


def _parallel() -> int:
    """The address of torch's own parallel loop."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).exists():
            function = getattr(ctypes.CDLL(str(folder / name)), "torch_parallel_for", None)
            if function is not None:
                return ctypes.cast(function, ctypes.c_void_p).value or 0
    raise KernelUnavailable("needs torch 2.10 or newer on Linux or macOS, whose threads it borrows")


def _variant(best: int) -> int:
    """The variant to run: the best that the processor has, or the one that the environment asks for."""
    asked = os.environ.get(CHOICE)
    if not asked:
        return best
    if asked not in VARIANTS:
        raise KernelUnavailable(f"knows no {CHOICE}={asked!r}: {nearest(asked, VARIANTS)}".rstrip("."))
    if VARIANTS.index(asked) > best:
        raise KernelUnavailable(f"cannot run {CHOICE}={asked!r}: this processor has at most {VARIANTS[best]!r}")
    return VARIANTS.index(asked)


_library = _load()
_PARALLEL = _parallel()
_VARIANT = _variant(_library.attemper_best())
_POISON = int(os.environ.get(POISON, "0") not in ("", "0"))
BACK_KEYS: int = _library.attemper_back_keys()
variant = VARIANTS[_VARIANT]

_RUN = {"forward": _library.attemper_forward, "backward": _library.attemper_backward}
for _function in _RUN.values():
    _function.argtypes = (ctypes.c_char_p, ctypes.c_int)
    _function.restype = ctypes.c_int
_library.attemper_fold.argtypes, _library.attemper_fold.restype = (ctypes.c_char_p,), None


def _bind() -> Any:
    """The entry of plain.c; None where this torch has no table of DLPack by which a library reads its tensors."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    find = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    lock = (ctypes.pythonapi.PyEval_SaveThread, ctypes.pythonapi.PyEval_RestoreThread)
    try:
        table = find(capsule, b"dlpack_exchange_api")
    except ValueError:  # by another name: another table
        return None
    words = [table, *(ctypes.cast(part, ctypes.c_void_p) for part in lock)]
    library = ctypes.PyDLL(_library._name)  # its functions are called with the interpreter's lock held
    library.attemper_bind.argtypes = (ctypes.c_void_p,) * 3
    if not library.attemper_bind(*words):
        return None
    tensors, numbers = (ctypes.py_object,) * 3, (ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    reals, run = (ctypes.c_double, ctypes.c_double), (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
    library.attemper_plain_forward.argtypes = (
        *tensors, ctypes.c_void_p, ctypes.c_char_p, *numbers, *reals, *run
    )  # fmt: skip
    return library.attemper_plain_forward


_plain_forward = _bind()


def plain_forward(*args: Any) -> int:
    """The forward of plain.c, which takes its tensors as they are: its failure, NOT_PLAIN where nothing was done."""
    if _plain_forward is None:
        return NOT_PLAIN
    return _plain_forward(*args, *how(), _VARIANT)


def strided(tensor: Tensor | None) -> tuple[int, ...]:
    """Where a tensor of up to 4 dimensions is, and its strides; 0 along a dimension of 1, which repeats."""
    if tensor is None:
        return NOWHERE
    steps = [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return (tensor.data_ptr(), *steps, *(0,) * (4 - len(steps)))


pack = LAYOUT.pack
"""One call for `run`: every field of Call."""


def how() -> tuple[int, int, int]:
    """How a call runs: the fields `parallel`, `threads` and `poison`."""
    return _PARALLEL, torch.get_num_threads(), _POISON


def run(name: str, packed: bytes) -> None:
    """Run a packed call, forward or backward."""
    check(name, _RUN[name](packed, _VARIANT))


def check(name: str, failed: int) -> None:
    """Raise where a pass failed."""
    if not failed:
        return
    if failed == NO_MEMORY:
        raise MemoryError(f"attention(): kernel='cpu' found no memory for its {name} pass")
    raise RuntimeError(
        f"attention(): kernel='cpu' could not run its {name} pass on torch's threads: torch_parallel_for failed. "
        "Call torch.set_num_threads(1), or choose kernel='blockwise'."
    )


def fold(integers: tuple[int, ...], weight: float) -> None:
    """Pack the signs of a call and sum them up by head; every integer of Fold, then the weight that counts as saturated."""
    _library.attemper_fold(FOLD.pack(*integers, weight))
