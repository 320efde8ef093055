"""Launches: a kernel is started with what Triton compiled for an equal launch before.

Triton's own way to a compiled kernel looks at every argument, which takes longer than a small kernel runs. A plan is found by
the shapes of a call, and only the tensors are new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver


class Launch(NamedTuple):
    """One launch of a kernel, as data: so that it can also be compiled where there is no GPU."""

    kernel: Any
    grid: tuple[int, int]
    args: tuple[Any, ...]  # tensors and descriptors of tiles, then numbers
    constants: dict[str, Any]
    options: dict[str, int]

    def key(self) -> tuple[Any, ...]:
        """All that Triton compiles it for."""
        how = (*self.constants.values(), *self.options.values())
        return (torch.cuda.current_device() if ON_GPU else -1, self.kernel, *how, *map(_specialised, self.args))

    def run(self) -> Any:
        """Launch, and return what was compiled for it; None in Triton's interpreter."""
        key = self.key()
        compiled = COMPILED.get(key)
        if compiled is None:
            compiled = COMPILED[key] = self.kernel[self.grid](*self.args, **self.constants, **self.options)
        else:
            _start(compiled, self.grid, (*self.args, *self.constants_in_order()))
        return compiled

    def constants_in_order(self) -> list[Any]:
        return [self.constants[name] for name in self.kernel.arg_names[len(self.args) :]]


class LaunchPlan(NamedTuple):
    """A launch that was made before on tensors of the same shapes."""

    compiled: Any
    grid: tuple[int, int]
    numbers: tuple[Any, ...]  # and constants: all but the tensors
    copied_rows: int  # of a tile that the hardware copies; 0 if it does not

    def run(self, tensors: Sequence[Any]) -> None:
        _start(self.compiled, self.grid, (*tensors, *self.numbers))


COMPILED: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by all that Triton compiles them for. In the interpreter, None for each."""
PLANS: dict[tuple[Any, ...], LaunchPlan] = {}
MOST_PLANS = 4096
ON_GPU = torch.cuda.is_available()


def run(key: tuple[Any, ...], tensors: Sequence[Any], make: Callable[[], Launch]) -> None:
    """Run the launch that `make` gives, whose first arguments are `tensors`; by its plan, if one was made for this key.

    `key` says all that the launch depends on, except the addresses of tensors: the kernel, shapes, strides, alignment,
    numbers. An empty key has no plan.
    """
    plan = PLANS.get(key)
    if plan is not None:
        plan.run(tensors)
    else:
        run_and_plan(key, len(tensors), make())


def run_as(key: tuple[Any, ...], launch: Launch) -> None:
    """Run a launch by what was compiled for the last one with this key: it says all that Triton compiles a launch for."""
    plan = PLANS.get(key)
    if plan is not None:
        _start(plan.compiled, launch.grid, (*launch.args, *plan.numbers))
    else:
        run_and_plan(key, len(launch.args), launch)


def run_and_plan(key: tuple[Any, ...], n_tensors: int, launch: Launch) -> None:
    """Run a launch, and keep a plan of it; tensors and descriptors of tiles are its first arguments."""
    compiled = launch.run()
    if compiled is None or not key:
        return
    if len(PLANS) >= MOST_PLANS:
        PLANS.clear()
    numbers = (*launch.args[n_tensors:], *launch.constants_in_order())
    copied_rows = launch.constants["BN"] if launch.constants.get("TMA") else 0
    PLANS[key] = LaunchPlan(compiled, launch.grid, numbers, copied_rows)


def _start(compiled: Any, grid: tuple[int, int], args: tuple[Any, ...]) -> None:
    hooks = knobs.runtime
    if hooks.launch_enter_hook is not None or hooks.launch_exit_hook is not None:  # a profiler listens
        compiled[(*grid, 1)](*args)
        return
    stream = driver.active.get_current_stream(driver.active.get_current_device())
    compiled.run(*grid, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def facts(tensor: Tensor | None) -> Any:
    """All of a tensor that a launch depends on."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNED


ALIGNED = 16
"""Triton compiles for addresses and strides that are multiples of so many bytes; whole tiles are copied only from such."""


def _specialised(arg: Any) -> Any:
    """What Triton makes of an argument: its dtype, and whether it is 1 or a multiple of 16."""
    if type(arg) is int:
        return arg == 1, arg % 16 == 0, -(2**31) <= arg < 2**31
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % ALIGNED == 0
    return type(arg) if isinstance(arg, float) else (arg.base.dtype, *arg.block_shape)
