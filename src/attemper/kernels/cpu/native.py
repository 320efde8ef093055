"""native: finds and loads the compiled library, compares its structures with ours, and packs calls for it.

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
MASK_WIDE, MASK_BY_BATCHES, MASK_BY_GROUPS = 32, 64, 128  # GRAD_MASK_… of call.h
NO_MEMORY, NOT_PLAIN = 1, 4  # of call.h

_INT = ctypes.c_int64  # addresses too: every field has 8 bytes


def _ints(names: str) -> list[tuple[str, Any]]:
    return [(name, _INT) for name in names.split()]


class StridedLayout(ctypes.Structure):
    """``Strided`` of call.h: the address of a tensor and its strides."""

    _fields_ = [("at", _INT), ("step", _INT * 4)]


class RowsLayout(ctypes.Structure):
    """``Rows`` of call.h: the addresses of the results that have one number per row."""

    _fields_ = _ints("argmax lse_low visible mean variance peak lse entropy p2")


class CallLayout(ctypes.Structure):
    """``Call`` of call.h: everything that a forward or backward is given."""

    _fields_ = [
        *[(name, StridedLayout) for name in ("query", "key", "value", "mask", "gain")],
        *_ints(
            "batch heads groups rows keys dim value_dim dtype mask_dtype left right sign_bits seed output output_low"
        ),
        ("measured", RowsLayout),
        ("g_output", StridedLayout),
        ("upstream", RowsLayout),
        *_ints("needs_grad d_query d_key d_value d_gain d_mask"),
        ("d_mask_step", _INT * 4),
        *_ints("d_mask_part parts parallel threads poison"),
        *[(name, ctypes.c_double) for name in ("scale", "softcap", "dropout")],
    ]


class FoldLayout(ctypes.Structure):
    """``Fold`` of fold.c: the signs of a call, and where their sums go."""

    _fields_ = [
        *_ints("visible mean variance peak lse entropy p2 lse_low keep"),
        ("keep_step", _INT * 3),
        *_ints("batch heads rows sums peaks saturable_keys"),
        ("saturated_weight", ctypes.c_double),
    ]


class _Field(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("offset", _INT)]


def _packer(layout: type[ctypes.Structure]) -> struct.Struct:
    """Packs the numbers of a structure in order, several times faster than its fields can be set."""
    codes = ("d" if ctype is ctypes.c_double else "q" * (ctypes.sizeof(ctype) // 8) for _, ctype in layout._fields_)  # type: ignore[misc]
    return struct.Struct("=" + "".join(codes))


def _agrees(library: ctypes.CDLL, name: str, layout: type[ctypes.Structure]) -> bool:
    """Whether the library has the same structure: each field by name and offset, and the size."""
    ours: list[tuple[bytes | None, int]] = [
        (field[0].encode(), getattr(layout, field[0]).offset) for field in layout._fields_
    ]
    ours.append((None, ctypes.sizeof(layout)))
    theirs = (_Field * len(ours)).in_dll(library, f"attemper_{name}_fields")
    # one by one: if the library's list is shorter, its closing NULL differs from our name, and nothing behind it is read
    return all((field.name, field.offset) == ours[i] for i, field in enumerate(theirs))


NOWHERE = (0,) * 5  # a Strided that is not there
NO_ROWS = (0,) * len(RowsLayout._fields_)


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
        raise KernelUnavailable(
            "does not load here: its library was built for another system; install attemper again"
        ) from None
    layouts = {"call": CallLayout, "rows": RowsLayout, "fold": FoldLayout}
    names = ("back_keys", "unbound", "fold_columns", "best", "forward", "backward", "fold", "bind", "plain_forward")
    there = all(hasattr(library, f"attemper_{name}") for name in (*names, *(f"{name}_fields" for name in layouts)))
    if not there or not all(_agrees(library, name, layout) for name, layout in layouts.items()):
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
        raise KernelUnavailable(f"does not recognise {CHOICE}={asked!r}: {nearest(asked, VARIANTS)}".rstrip("."))
    if VARIANTS.index(asked) > best:
        raise KernelUnavailable(f"cannot run {CHOICE}={asked!r}: this processor has at most {VARIANTS[best]!r}")
    return VARIANTS.index(asked)


def _poison() -> int:
    """Whether workspaces are filled with NaN before they are used."""
    return int(os.environ.get(POISON, "0") not in ("", "0"))


_library = _load()
_PARALLEL = _parallel()
_VARIANT = _variant(_library.attemper_best())
_POISON = _poison()
BACK_KEYS, UNBOUND, FOLD_COLUMNS = (
    _INT.in_dll(_library, f"attemper_{name}").value for name in ("back_keys", "unbound", "fold_columns")
)
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
    except ValueError:  # the capsule has another name: another version of the table
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
    """The forward of plain.c, which reads torch tensors itself. Returns 0, or why it failed; NOT_PLAIN if it did nothing."""
    if _plain_forward is None:
        return NOT_PLAIN
    return _plain_forward(*args, *how(), _VARIANT)


def strided(tensor: Tensor) -> tuple[int, ...]:
    """The address of a tensor of up to 4 dimensions, and its strides; 0 for a dimension of size 1, which broadcasts."""
    steps = [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return (tensor.data_ptr(), *steps, *(0,) * (4 - len(steps)))


pack = _packer(CallLayout).pack
"""One call for `run`: every field of CallLayout, in order."""

pack_rows = _packer(RowsLayout).pack
_pack_fold = _packer(FoldLayout).pack


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


def fold(*fields: float) -> None:
    """Sum the signs of a call by head: every field of FoldLayout, in order."""
    _library.attemper_fold(_pack_fold(*fields))
