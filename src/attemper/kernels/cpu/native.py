"""native: finds and loads the compiled extension, hands torch's functions to it, and says which build of the kernel it runs.

The extension links nothing of torch. It reads torch's tensors through the table of functions that DLPack defines, and borrows
torch's threads through `torch_parallel_for`, which libtorch_cpu exports, so there is one thread pool in the process and
`torch.set_num_threads` governs both.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ... import _torch_private as private
from ...errors import InputError, KernelUnavailable, nearest
from ..contract import Results
from . import twin

CHOICE = "ATTEMPER_CPU_VARIANT"
POISON = "ATTEMPER_CPU_POISON"

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.bool: 4}
"""As call.h counts them."""
_INTEGERS = {torch.int16: -16, torch.int32: -32, torch.int64: -64}
MASK_WIDE, MASK_BY_BATCHES, MASK_BY_GROUPS = 32, 64, 128  # GRAD_MASK_… of call.h

_PROBLEM = "query, key, value, mask, gain"
_NUMBERS = "seed, left, right, scale, softcap, dropout"
_PLAN = "launcher, programs, values, addresses, followed, memory, typed, output, low, layout"
FUNCTIONS = {
    "guard": "/, *tensors",
    "forward": f"{_PROBLEM}, causal, window, scale, softcap, sign_bits, grouped, saved, /",
    "write": f"{_PROBLEM}, {_NUMBERS}, sign_bits, results, /",
    "backward": f"{_PROBLEM}, {_NUMBERS}, saved, upstream, needs, given, parts, /",
    "parts": "keys, heads, /",
    "plan": f"{_PROBLEM}, {_NUMBERS}, sign_bits, {_PLAN}, /",
    "replay_checked": f"{_PROBLEM}, {_NUMBERS}, sign_bits, /",
    "replay": f"{_PROBLEM}, causal, window, scale, softcap, sign_bits, grouped, /",
    "forget": "/",
    "fold": "signs, keep, found, first, saturable_keys, saturated_weight, /",
    "op": "name, bound, /",
    "bind": "names, /",
    "configure": "variant, poison, parallel, /",
    "find": "library, name, /",
    "best": "/",
    "variants": "/",
}
"""What the extension offers, with its parameters; module.c has the same list."""

CHANGED = (
    "attention(): a tensor that was saved for the backward has another shape or dtype now. Do not set `.data` of an "
    "input before the backward, and let saved-tensor hooks give back what they were given."
)


def read_in(inference: bool, block: Any, name: str) -> Any:
    """A sign of a block, made in inference mode or not."""
    with torch.inference_mode(inference):
        return getattr(block, name)


def names() -> dict[str, Any]:
    """What the extension needs of torch and of us, by the names of module.h."""
    return {
        "Tensor": Tensor,
        "Parameter": torch.nn.Parameter,
        "exchange_api": getattr(Tensor, "__dlpack_c_exchange_api__", None),
        "is_neg": Tensor.is_neg,
        "is_inference": Tensor.is_inference,
        "dispatch_modes": private._len_torch_dispatch_stack,
        "function_modes": private._is_torch_function_mode_enabled,
        "functorch": private.peek_interpreter_stack,
        "tracing": private._get_tracing_state,
        "profiling": private._profiler_enabled,
        "forward_ad": forward_ad,
        "grad_mode": torch.is_grad_enabled,
        "inference_mode": torch.is_inference_mode_enabled,
        "any_autocast": private._is_any_autocast_enabled,
        "autocast": torch.is_autocast_enabled,
        "autocast_dtype": torch.get_autocast_dtype,
        "threads": torch.get_num_threads,
        "graph_task": private._current_graph_task_id,
        "empty_like": torch.empty_like,
        "by_head": {"memory_format": torch.contiguous_format},
        "new_empty": Tensor.new_empty,
        "new_empty_strided": Tensor.new_empty_strided,
        "requires_grad": "requires_grad",
        "current_level": "_current_level",
        "InputError": InputError,
        "changed": CHANGED,
        "read_in": read_in,
    }


def _find() -> str:
    spec = find_spec(f"{__package__}._native")
    if (spec is None or spec.origin is None) and sys.platform == "win32":
        raise KernelUnavailable("is not built for Windows: install attemper on Linux or macOS, or in WSL")
    if spec is None or spec.origin is None:
        raise KernelUnavailable("is not built here: install attemper where there is a C compiler (gcc or clang)")
    return spec.origin


def _load(path: str) -> Any:
    name = f"{__package__}._native"
    spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
    try:
        library = module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(library)  # type: ignore[union-attr]
    except ImportError as error:
        if "PyInit" in str(error):  # a library that is no module of Python, as ours once was
            library = None
        else:
            raise KernelUnavailable(
                "does not load here: its library was built for another system; install attemper again"
            ) from None
    if not _is_ours(library):
        raise KernelUnavailable("was built from other sources: install attemper again")
    return library


def _is_ours(library: Any) -> bool:
    """Whether it offers what we call, with the same parameters, and names what we name."""
    offered = {name: getattr(getattr(library, name, None), "__text_signature__", "") for name in FUNCTIONS}
    wanted = {name: f"($module, {parameters})" for name, parameters in FUNCTIONS.items()}
    return offered == wanted and (tuple(names()), Results._fields[1:]) == (library.BOUND, library.SIGNS)


def _parallel(library: Any) -> int:
    """The address of torch's own parallel loop."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).exists() and (address := library.find(str(folder / name), "torch_parallel_for")):
            return int(address)
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


library = _load(_find())
VARIANTS: tuple[str, ...] = library.variants()
"""The builds of the kernel on this architecture, as native.c counts them. A processor that runs one runs those before it."""
_how = {"variant": _variant(library.best()), "poison": _poison(), "parallel": _parallel(library)}
variant = VARIANTS[_how["variant"]]


def configure(**changed: int) -> dict[str, int]:
    """Run calls otherwise from now on: on another variant, with poison, by another parallel loop. Returns what was so before."""
    before = dict(_how)
    _how.update(changed)
    library.configure(_how["variant"], _how["poison"], _how["parallel"])
    return before


def bind(**changed: Any) -> None:
    """Hand torch's functions to the extension."""
    global bound, offered, extension
    bound = library.bind({**names(), **changed})
    offered, extension = (library, library) if bound else (twin, None)


configure()
bound: bool
"""Whether torch has a table that the extension knows."""
offered: Any
"""`guard` and `forward`, as twin.py describes them."""
extension: Any
"""The library if it can read torch's tensors; else None."""
bind()


def readable(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Tensors as the extension reads them: as they are; where torch has no table, each by address, dtype, sizes and strides."""
    return tensors if bound else tuple(map(_described, tensors))


def _described(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    dtype = DTYPES.get(tensor.dtype, _INTEGERS.get(tensor.dtype))
    return (tensor.data_ptr(), dtype, *tensor.shape, *tensor.stride())
