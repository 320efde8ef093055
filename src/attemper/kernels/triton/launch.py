"""Launches: a kernel is started with what Triton compiled for an equal launch before.

Triton's own way to a compiled kernel looks at every argument, which takes longer than a small kernel runs. A plan is found by
the shapes of a call, and only the addresses of tensors are new. The native library then calls the driver; where it is not built,
or Triton is not the one that it knows, Triton's own launcher does.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from functools import cache
from threading import Timer
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from ... import kernels
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
        args = [_specialised(arg, index in changing) for index, arg in enumerate(self.args)]
        return (torch.cuda.current_device() if ON_GPU else -1, self.kernel, *how, *args)

    def run(self) -> Any:
        """Launch, and return what was compiled for it; None in Triton's interpreter."""
        key = self.key()
        compiled = COMPILED.get(key)
        if compiled is None:
            with saying_so():
                ahead = AHEAD.pop(key, None)
                if ahead is not None:
                    ahead.exception()  # wait for it; an error comes again in the next line
                compiled = COMPILED[key] = self._compile()
        else:
            _start(compiled, self.programs, [*_addresses(self.args), *self.constants_in_order()])
        return compiled

    def is_compiled(self) -> bool:
        return self.key() in COMPILED

    def compile_ahead(self) -> None:
        """Begin to compile it in a thread, for such a launch to come. Only the dtypes and the alignment of tensors matter."""
        key = self.key()
        if key not in COMPILED and key not in AHEAD and not knobs.runtime.interpret:
            AHEAD[key] = _compilers().submit(self._warm_up, key[0])

    def _warm_up(self, device: int) -> None:
        with torch.cuda.device(device):
            self.kernel.warmup(*self.args, grid=self.programs, **self.constants, **self.options)

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
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "attemper compiles")


@contextmanager
def saying_so() -> Iterator[None]:
    """Log, once in a process, that a kernel is being compiled, if that takes long enough for someone to wonder."""
    waits = Timer(WONDERS, _say_once)
    waits.daemon = True
    if not knobs.runtime.interpret:
        waits.start()
    try:
        yield
    finally:
        waits.cancel()


@cache
def _say_once() -> None:
    logging.getLogger("attemper").warning(
        "attemper compiles a GPU kernel for the first call of its kind. Triton keeps it in %s for later runs.",
        knobs.cache.dir,
    )


WONDERS = 0.5
"""Seconds after which it says so: kernels that are read from disk take less."""


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


def launcher_of(compiled: Any, tiles: Sequence[TensorDescriptor]) -> Any:
    """What starts this kernel without Triton, with descriptors of such `tiles`; None where it is not as Triton 3.6 has it."""
    library, driven = kernels.extension(), driver_functions()
    nvidia: Any = sys.modules.get("triton.backends.nvidia.driver")
    launcher, packed, source = compiled.run, compiled.packed_metadata, compiled.src
    if library is None or driven is None or not KNOWN or type(launcher) is not getattr(nvidia, "CudaLauncher", None):
        return None
    has, metas = vars(launcher), getattr(compiled.metadata, "tensordesc_meta", None) or ()
    if has.keys() != LAUNCHER_HAS or any(has[name] for name in UNUSED) or len(metas) != len(tiles):
        return None
    if not (isinstance(packed, tuple) and len(packed) == 3 and packed[1] == has["num_ctas"] == 1):
        return None
    kinds = [_kind(kind) for kind in source.signature.values()]
    described = [
        _described(tile, meta, nvidia.TMA_DTYPE_DEVICE_TO_HOST) for tile, meta in zip(tiles, metas, strict=True)
    ]
    if None in kinds or None in described or kinds.count("t") != len(tiles):
        return None
    warps, _, shared = packed
    active = driver.active
    states = (active.get_current_device, active.get_current_stream)
    return library.Launcher(driven, compiled.function, 32 * warps, shared, "".join(kinds), tuple(described), *states)  # type: ignore[arg-type]


LAUNCHER_HAS = {f"{kind}_scratch_{what}" for kind in ("global", "profile") for what in ("size", "align")}
LAUNCHER_HAS |= {"num_ctas", "launch", "launch_cooperative_grid", "launch_pdl"}
UNUSED = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
"""What kernels may ask of their launch, and ours do not."""
_KINDS = {"constexpr": "x", "i32": "i", "i64": "l", "fp32": "f", "fp64": "d"}


def _kind(signature: Any) -> str | None:
    """How launch.c names what an argument is compiled as; None where it knows none."""
    if not isinstance(signature, str):
        return None
    return "p" if signature[:1] == "*" else "t" if signature.startswith("tensordesc<") else _KINDS.get(signature)


def _described(tile: TensorDescriptor, meta: dict[str, Any] | None, types: dict[int, int]) -> tuple[int, ...] | None:
    """A descriptor as launch.c takes it, by what Triton's compiler says of it."""
    if meta is None or meta["fp4_padded"] or not len(meta["block_size"]) == len(tile.shape) == len(tile.strides) == 4:
        return None
    kind = (meta["swizzle"], meta["elem_size"], types[meta["elem_type"]], int(tile.padding == "nan"))
    return (*kind, *meta["block_size"], *tile.shape, *tile.strides)


@cache
def driver_functions() -> tuple[int, ...] | None:
    """The addresses of the driver's functions that launch.c calls; None where there is no driver that has them."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        found = [getattr(library, name) for name in ("cuLaunchKernelEx", "cuCtxGetCurrent", "cuTensorMapEncodeTiled")]
    except (OSError, AttributeError):
        return None
    return tuple([ctypes.cast(one, ctypes.c_void_p).value or 0 for one in found])


class LaunchPlan:
    """A launch that was made before on tensors of the same shapes: a start needs only their addresses."""

    def __init__(self, launch: Launch, compiled: Any, n_tensors: int):
        self.compiled, self.programs = compiled, launch.programs
        self.numbers = (*launch.args[n_tensors:], *launch.constants_in_order())  # all but the tensors
        self.tiles = []  # of descriptors: place, the same without its tensor, whose memory it would keep
        for index, arg in enumerate(launch.args):
            if isinstance(arg, TensorDescriptor):
                self.tiles.append((index, _based(arg, None)))
        self.launcher = launcher_of(compiled, [tile for _, tile in self.tiles])

    def run(
        self, tensors: Sequence[Tensor | int | None], numbers: Sequence[Any] = (), programs: Programs | None = None
    ) -> None:
        """Start the kernel with these tensors; an int is an address, None is not read. `numbers` precede those of the plan."""
        addresses = [0 if t is None else t if type(t) is int else t.data_ptr() for t in tensors]  # type: ignore[union-attr]
        programs, args = programs or self.programs, [*addresses, *numbers, *self.numbers]
        if self.launcher is not None and not is_followed() and self.launcher.start(programs, (*args,)):
            return
        for place, tile in self.tiles:
            args[place] = _based(tile, tensors[place])
        _start(self.compiled, programs, args)


def _based(tile: TensorDescriptor, base: Any) -> TensorDescriptor:
    based = copy(tile)
    based.base = base
    return based


Plans = dict[Any, LaunchPlan]
COMPILED: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by all that Triton compiles them for. In the interpreter, None for each."""
PLANS: dict[tuple[Any, ...], Plans] = {}
"""Plans by all that their launches depend on, except the addresses of tensors, then by name."""
MOST_PLANS = 4096
AHEAD: dict[tuple[Any, ...], Future[None]] = {}
"""Launches that are compiled in threads and were not run yet, by their keys."""
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


def run_and_plan(plans: Plans | None, name: Any, n_tensors: int, launch: Launch) -> LaunchPlan | None:
    """Run a launch, and keep a plan of it; tensors and descriptors of tiles are its first arguments."""
    compiled = launch.run()
    if compiled is None or plans is None:
        return None
    plan = plans[name] = LaunchPlan(launch, compiled, n_tensors)
    return plan


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
    if not KNOWN or is_followed():
        compiled[programs](*args)
        return
    stream = driver.active.get_current_stream(driver.active.get_current_device())
    compiled.run(*programs, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def is_followed() -> bool:
    """Whether a profiler follows launches: by a function, or by one in Triton's chain of them, which is there always."""
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


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
"""Shared memory of the Ampere, Ada and Blackwell cards with the least; an A100 has 163 KiB, an H200 227."""

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
    # the interpreter keeps them in kwargs
    names = getattr(kernel, "do_not_specialize", None) or kernel.kwargs.get("do_not_specialize", ())
    return frozenset(kernel.arg_names.index(name) for name in names)
