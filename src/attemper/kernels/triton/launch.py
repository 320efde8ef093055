"""Launches: a kernel is started with what Triton compiled for an equal launch before.

Triton's own way to a compiled kernel looks at every argument, which takes longer than a small kernel runs. A plan is found by
the shapes of a call. It calls the C function that Triton compiled for the kernel, and only the addresses of tensors are new.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from itertools import count
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from ...errors import KernelUnavailable

Programs = tuple[int, int, int]
MOST_ACROSS = 65_535
"""CUDA starts no more programs than this along the second and the third dimension of a grid."""


class Launch(NamedTuple):
    """One launch of a kernel, as data: so that it can also be compiled where there is no GPU."""

    kernel: Any
    grid: tuple[int, int]  # tiles, or parts, and heads
    args: tuple[Any, ...]  # tensors and descriptors of tiles, then numbers
    constants: dict[str, Any]
    options: dict[str, int]

    def key(self) -> tuple[Any, ...]:
        """All that Triton compiles it for."""
        how = (*self.constants.values(), *self.options.values())
        changing = _changing(self.kernel)
        args = [_specialised(arg, place in changing) for place, arg in enumerate(self.args)]
        return (torch.cuda.current_device() if ON_GPU else -1, self.kernel, *how, *args)

    def run(self) -> Any:
        """Launch, and return what was compiled for it; None in Triton's interpreter."""
        key = self.key()
        compiled = COMPILED.get(key)
        if compiled is None:
            compiled = COMPILED[key] = self._compile()
        else:
            _start(compiled, self.programs, [*_addresses(self.args), *self.constants_in_order()])
        return compiled

    @property
    def programs(self) -> Programs:
        """How CUDA counts them; see `program` in tile.py."""
        tiles, heads = self.grid
        return tiles, *across(heads)

    def _compile(self) -> Any:
        """Launch by Triton's own way, which compiles the kernel first."""
        try:
            return self.kernel[self.programs](*self.args, **self.constants, **self.options)
        except Exception as error:
            reason = _reason(error)
            if reason is None:
                raise
            raise KernelUnavailable(f"attention(): kernel='triton' {reason}") from error

    def constants_in_order(self) -> list[Any]:
        return [self.constants[name] for name in self.kernel.arg_names[len(self.args) :]]


@cache
def across(heads: int) -> tuple[int, int]:
    """Heads as a product of two numbers, each of which CUDA can count; the second is 1 if it can count them all."""
    for many in range(-(-heads // MOST_ACROSS), MOST_ACROSS + 1):
        if heads % many == 0:
            return heads // many, many
    raise KernelUnavailable(
        f"attention(): kernel='triton' cannot count B × H = {heads} heads: it has a prime factor above {MOST_ACROSS}. Add a "
        "sequence to the batch, or use kernel='blockwise'."
    )


def _reason(error: Exception) -> str | None:
    """Why a kernel could not be compiled or started, and what to do; None where the error itself has to say it."""
    if is_capturing():
        return "cannot be compiled while a CUDA graph is captured. Run the same call once before the capture."
    if isinstance(error, OutOfResources):
        return (
            f"needs more {error.name} than this GPU has ({error.required}, of {error.limit}). Use kernel='blockwise'."
        )
    if not KNOWN:
        return (
            f"was written for triton {WRITTEN_FOR}, and fails with {triton.__version__}: {error}. Install triton "
            f"{WRITTEN_FOR}, or use kernel='blockwise'."
        )
    return None


class CFunction(NamedTuple):
    """The C function that Triton compiled to start a kernel, which takes the same arguments at each start but for a few."""

    call: Callable[..., None]
    same: tuple[Any, ...]  # what stands between the stream and the kernel's own arguments
    tiles: tuple[dict[str, Any], ...]  # what Triton's compiler says of the descriptors, the last first
    stream_of: Callable[[int], int]
    device: int

    @classmethod
    def of(cls, compiled: Any, places: Sequence[int]) -> CFunction | None:
        """`places` are those of descriptors among the arguments. None where anything is not as Triton 3.6 has it."""
        nvidia = sys.modules.get("triton.backends.nvidia.driver")
        if not KNOWN or getattr(nvidia, "_BASE_ARGS_FORMAT", None) != BASE_ARGS:
            return None
        launcher = compiled.run
        has = vars(launcher) if type(launcher) is getattr(nvidia, "CudaLauncher", None) else {}
        if has.keys() != LAUNCHER_HAS or has["global_scratch_size"] or has["profile_scratch_size"]:
            return None
        call, tiles = has["launch"], ()
        if places:  # a function in Python expands descriptors
            code, cells = getattr(call, "__code__", None), getattr(call, "__closure__", None) or ()
            inside = dict(zip(code.co_freevars, [cell.cell_contents for cell in cells], strict=True)) if code else {}
            if inside.keys() != EXPANDER_HAS or inside["tensordesc_indices"] != {*places}:
                return None
            call, tiles = inside["launcher"], tuple(inside["tensordesc_meta"] or ())
            if len(tiles) != len(places) or None in tiles or not hasattr(nvidia, "make_tensordesc_arg"):
                return None
        if not isinstance(call, C_FUNCTION):
            return None
        scratch, hooks = (None, None), (None, None, None)  # with the argument of hooks
        how = (has["launch_cooperative_grid"], has["launch_pdl"])
        same = (compiled.function, *how, *scratch, compiled.packed_metadata, *hooks)
        active = driver.active
        return cls(call, same, tiles[::-1], active.get_current_stream, active.get_current_device())


BASE_ARGS = "iiiKKppOOOOOO"
"""Grid, stream, function, cooperative, dependent, two scratch memories, metadata of kernel and launch, two hooks."""
LAUNCHER_HAS = {f"{kind}_scratch_{what}" for kind in ("global", "profile") for what in ("size", "align")}
LAUNCHER_HAS |= {"num_ctas", "launch", "launch_cooperative_grid", "launch_pdl"}
EXPANDER_HAS = {"launcher", "tensordesc_indices", "tensordesc_meta"}
C_FUNCTION: Any = BuiltinFunctionType


class LaunchPlan:
    """A launch that was made before on tensors of the same shapes: a start needs only their addresses."""

    def __init__(self, launch: Launch, compiled: Any, n_tensors: int):
        self.compiled, self.programs = compiled, launch.programs
        self.numbers = (*launch.args[n_tensors:], *launch.constants_in_order())  # all but the tensors
        self.tiles = []  # of descriptors, the last first: place, a number for it alone, the same without its tensor
        for place, arg in reversed([*enumerate(launch.args)]):
            if isinstance(arg, TensorDescriptor):
                tile = copy(arg)
                tile.base = None
                self.tiles.append((place, next(_NUMBERS), tile))
        self.c_function = CFunction.of(compiled, [place for place, _, _ in reversed(self.tiles)])

    def run(
        self, tensors: Sequence[Tensor | int | None], numbers: Sequence[Any] = (), programs: Programs | None = None
    ) -> None:
        """Start the kernel with these tensors; an int is an address, None is not read. `numbers` precede those of the plan."""
        addresses = [0 if t is None else t if type(t) is int else t.data_ptr() for t in tensors]  # type: ignore[union-attr]
        self.run_at(addresses, tensors, numbers, programs)

    def run_at(
        self,
        addresses: Sequence[int],
        tensors: Sequence[Tensor | int | None],
        numbers: Sequence[Any] = (),
        programs: Programs | None = None,
    ) -> None:
        """`run` with the addresses of the tensors. `tensors` is read only at the places of descriptors."""
        programs, args = programs or self.programs, [*addresses]
        if self.c_function is None or _is_followed():
            for place, _, tile in self.tiles:
                args[place] = _based(tile, tensors[place])
            _start(self.compiled, programs, [*args, *numbers, *self.numbers])
            return
        call, same, metas, stream_of, device = self.c_function
        for (place, number, tile), meta in zip(self.tiles, metas, strict=True):
            found = EXPANDED.get((number, args[place]))
            if found is None:
                found = _expand(number, args[place], _based(tile, tensors[place]), meta)
            args[place : place + 1] = found
        call(*programs, stream_of(device), *same, *args, *numbers, *self.numbers)


def _based(tile: TensorDescriptor, base: Tensor | None) -> TensorDescriptor:
    based = copy(tile)
    based.base = base
    return based


def _expand(number: int, address: int, tile: TensorDescriptor, meta: dict[str, Any]) -> list[Any]:
    """What Triton passes for a descriptor: the hardware's own, which holds the address, then shape and strides."""
    if len(EXPANDED) >= MOST_EXPANDED:
        EXPANDED.clear()
    found = sys.modules["triton.backends.nvidia.driver"].make_tensordesc_arg(tile, meta)
    EXPANDED[number, address] = found
    return found


EXPANDED: dict[tuple[int, int], list[Any]] = {}
"""Descriptors as the C function takes them, by plan and address: the steps of a training get the same memory again and again."""
MOST_EXPANDED = 4096
_NUMBERS = count()
Plans = dict[Any, LaunchPlan]
COMPILED: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by all that Triton compiles them for. In the interpreter, None for each."""
PLANS: dict[tuple[Any, ...], Plans] = {}
"""Plans by all that their launches depend on, except the addresses of tensors, then by name."""
MOST_PLANS = 4096
ON_GPU = torch.cuda.is_available()
WRITTEN_FOR = "3.6"
KNOWN = triton.__version__.startswith(f"{WRITTEN_FOR}.")
"""Whether this is the Triton whose compiled kernels can be called directly. With another, Triton's own code calls them."""


def plans_of(key: tuple[Any, ...]) -> Plans | None:
    """The plans that were made with this key: device, kernel, shapes, strides, alignment, numbers. None for an empty key."""
    plans = PLANS.get(key)
    if plans is None and key:
        if len(PLANS) >= MOST_PLANS:
            PLANS.clear()
        plans = PLANS[key] = {}
    return plans


def run(
    plans: Plans | None,
    name: Any,
    tensors: Sequence[Tensor | int | None],
    make: Callable[[], Launch],
    numbers: Sequence[Any] = (),
    programs: Programs | None = None,
) -> None:
    """Run the launch that `make` gives, by its plan if there is one of this name.

    Its first arguments are `tensors`, then `numbers`: those that the plan does not fix, as it does not fix `programs`.
    """
    plan = None if plans is None else plans.get(name)
    if plan is not None:
        plan.run(tensors, numbers, programs)
    else:
        run_and_plan(plans, name, len(tensors) + len(numbers), make())


def run_and_plan(plans: Plans | None, name: Any, n_tensors: int, launch: Launch) -> None:
    """Run a launch, and keep a plan of it; tensors and descriptors of tiles are its first arguments."""
    compiled = launch.run()
    if compiled is not None and plans is not None:
        plans[name] = LaunchPlan(launch, compiled, n_tensors)


def on_its_device(tensor: Tensor, run: Callable[..., Any], *args: Any) -> Any:
    """Triton launches on the current device."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return run(*args)
    with torch.cuda.device_of(tensor):
        return run(*args)


def current_stream(device: int) -> torch.cuda.Stream:
    """`torch.cuda.current_stream` in less time: the object of a stream is made once."""
    place = (device, driver.active.get_current_stream(device))
    stream = STREAMS.get(place)
    if stream is None:
        if len(STREAMS) >= MOST_STREAMS:
            STREAMS.clear()
        stream = STREAMS[place] = torch.cuda.current_stream(device)
    return stream


STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}
"""Streams by device and address."""
MOST_STREAMS = 64


def is_capturing() -> bool:
    """Whether a CUDA graph is captured: nothing runs before it is replayed, and nothing may wait for the device."""
    return ON_GPU and torch.cuda.is_current_stream_capturing()


def _addresses(args: Sequence[Any]) -> list[Any]:
    """With the address of each tensor: of a tensor itself, Triton would ask the driver whether it lies on the device."""
    return [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]


def _start(compiled: Any, programs: Programs, args: list[Any]) -> None:
    """Start a kernel by Triton's own code."""
    if not KNOWN or _is_followed():
        compiled[programs](*args)
        return
    stream = driver.active.get_current_stream(driver.active.get_current_device())
    compiled.run(*programs, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def _is_followed() -> bool:
    """Whether a profiler follows launches: by a function, or by one in Triton's chain of them, which is there always."""
    hooks = knobs.runtime
    return _listens(hooks.launch_enter_hook) or _listens(hooks.launch_exit_hook)


def _listens(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


Block = dict[str, int]
"""BM rows and BN keys of a tile, and options of the compiler."""


@cache
def room(device: torch.device) -> int:
    """Bytes of shared memory that a program may use; where there is no GPU, those of the cards that have the least."""
    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"] if ON_GPU else LEAST_ROOM


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is of that generation or newer, and not one of the cards with the least room."""
    capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return capable and room(device) > LEAST_ROOM


LEAST_ROOM = 99 << 10
"""Of Ampere, Ada and Blackwell cards that are not made for data centres; an A100 has 163 KiB, an H200 227."""

ALIGNED = 16
"""Triton compiles for addresses and strides that are multiples of so many bytes; whole tiles are copied only from such."""


def all_aligned(*tensors: Tensor | None) -> bool:
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    return bits % ALIGNED == 0


def _specialised(arg: Any, changes: bool) -> Any:
    """What Triton makes of an argument: its dtype, and whether it is 1 or a multiple of 16; of one that changes, its width."""
    if type(arg) is int:
        small = -(2**31) <= arg < 2**31
        return small if changes else (arg == 1, arg % 16 == 0, small)
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % ALIGNED == 0
    return type(arg) if isinstance(arg, float) else (arg.base.dtype, *arg.block_shape)


@cache
def _changing(kernel: Any) -> frozenset[int]:
    """The places of numbers that change from call to call, for whose values a kernel is not compiled."""
    names = getattr(kernel, "do_not_specialize", None) or kernel.kwargs.get(
        "do_not_specialize", ()
    )  # in the interpreter
    return frozenset(kernel.arg_names.index(name) for name in names)
