"""Run a Gluon kernel of this folder on a CPU, from its own source: Gluon has no interpreter of its own.

Each warp partition is a thread. Copies arrive when they are waited for, in any order; products are computed then, or when they
are started, by chance; a store reads shared memory as late as it may. So a tile that is read before it is full, or that is
overwritten while it is needed, gives wrong numbers. A barrier that nobody reaches, or that is reached once too often, raises.

What it cannot show: how the memory of a GPU orders writes (fences are ignored), layouts, and what the compiler makes of it.
"""

from __future__ import annotations

import random
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PATIENCE = 20.0  # seconds after which a wait is a deadlock
_local = threading.local()


class Stuck(Exception):
    """A thread waited in vain, or a barrier was reached once too often."""


class Value:
    """A tensor with the methods of Gluon's."""

    def __init__(self, data: Any) -> None:
        self.data: Tensor = data if isinstance(data, Tensor) else torch.as_tensor(data)
        self.type = types.SimpleNamespace(layout=None)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        return Value(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def reshape(self, shape: Sequence[int]) -> Value:
        return Value(self.data.reshape([int(n) for n in shape]))

    def __getitem__(self, which: Any) -> Value:
        return Value(self.data[which])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    __int__ = __index__

    def __neg__(self) -> Value:
        return Value(-self.data)


def _binary(name: str) -> None:
    operator = getattr(torch.Tensor, name)

    def method(self: Value, other: Any) -> Value:
        return Value(operator(self.data, _raw(other, self.data)))

    setattr(Value, name, method)


def _raw(thing: Any, like: Tensor | None = None) -> Any:
    return thing.data if isinstance(thing, Value) else thing


_TWO_SIDED = ("add", "sub", "mul", "truediv", "and", "or", "xor")
for _name in (*_TWO_SIDED, *[f"r{_name}" for _name in _TWO_SIDED if _name != "xor"], "lshift", "rshift"):
    _binary(f"__{_name}__")
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "floordiv", "mod"):
    _binary(f"__{_name}__")


def _rlshift(self: Value, other: Any) -> Value:
    return Value(_raw(other) << self.data)


Value.__rlshift__ = _rlshift  # type: ignore[attr-defined]
Value.__hash__ = None  # type: ignore[assignment]


class Pointer:
    """An address in a flat tensor; adding moves it."""

    def __init__(self, flat: Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.flat, _raw(more) + self.offset)


class Barrier:
    """An mbarrier: a phase ends when so many threads have arrived and all announced bytes are there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.phase = self.bytes = self.arrived = self.count = 0
        self.copies: list[Callable[[], None]] = []

    def _settle(self) -> None:
        if self.arrived > self.count:
            raise Stuck("a barrier was reached more often than it counts")
        if self.arrived == self.count and self.bytes == 0:
            self.phase, self.arrived = self.phase ^ 1, 0
            self.changed.notify_all()

    def arrive(self, count: int) -> None:
        with self.changed:
            self.arrived += count
            self._settle()

    def expect(self, bytes_: int) -> None:
        with self.changed:
            self.bytes += bytes_
            self.arrived += 1
            self._settle()

    def complete(self, bytes_: int) -> None:
        with self.changed:
            self.bytes -= bytes_
            self._settle()

    def copy(self, copy: Callable[[], None]) -> None:
        with self.changed:
            self.copies.append(copy)
            self.changed.notify_all()

    def wait(self, phase: int) -> None:
        """Until the phase of this parity is over; that before the first one has parity 1. Copies arrive here, no earlier."""
        until = time.monotonic() + PATIENCE
        with self.changed:
            while self.phase == phase:
                if self.copies:
                    self.copies.pop(random.randrange(len(self.copies)))()
                elif not self.changed.wait(min(1.0, PATIENCE)) and (_local.run.failed or time.monotonic() > until):
                    raise Stuck("a barrier was not reached")


class Memory:
    """Shared memory: tiles, or barriers. Uninitialised, it is NaN."""

    def __init__(self, data: Any, dtype: Any) -> None:
        self.data, self.dtype = data, dtype

    def index(self, place: Any) -> Any:
        return self.data[int(place)] if isinstance(self.data, list) else Memory(self.data[int(place)], self.dtype)

    def reshape(self, shape: Sequence[int]) -> Memory:
        return Memory(self.data.view([int(n) for n in shape]), self.dtype)

    def permute(self, order: Sequence[int]) -> Memory:
        return Memory(self.data.permute(*order), self.dtype)

    def store(self, value: Value) -> None:
        self.data.copy_(value.data)

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())


class Tiles:
    """A descriptor of tiles: what lies beyond the tensor reads as 0, and is not written."""

    def __init__(self, tensor: Tensor, block: Sequence[int]) -> None:
        self.tensor, self.block, self.dtype, self.layout = tensor, block, tensor.dtype, None
        size = tensor.element_size()
        for n in block:
            size *= n
        self.block_type = types.SimpleNamespace(nbytes=size)

    def _windows(self, at: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        first = [int(i) for i in at]
        inside = [max(0, min(n, i + b) - i) for i, b, n in zip(first, self.block, self.tensor.shape, strict=True)]
        here = tuple(slice(i, i + n) for i, n in zip(first, inside, strict=True))
        return here, tuple(slice(0, n) for n in inside)

    def load(self, at: Sequence[Any], into: Memory) -> None:
        here, there = self._windows(at)
        tile = torch.zeros(self.block, dtype=self.dtype)
        tile[there] = self.tensor[here]
        into.data.copy_(tile.view(into.data.shape))

    def store(self, at: Sequence[Any], source: Memory) -> None:
        here, there = self._windows(at)
        self.tensor[here] = source.data.view(self.block)[there]


class Product:
    """A product of the matrix unit under way."""

    def __init__(self, compute: Callable[[], Value]) -> None:
        self.compute, self.value = compute, None
        if random.random() < 0.5:
            self.finish()

    def finish(self) -> Value:
        if self.value is None:
            self.value = self.compute()  # type: ignore[assignment]
        return self.value  # type: ignore[return-value]


class Run:
    """One program: its threads, and whose turn it is."""

    def __init__(self) -> None:
        self.failed: list[BaseException] = []
        self.turns = [threading.Semaphore(0), threading.Semaphore(0)]

    def partitions(
        self, functions: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], program: tuple[int, int]
    ) -> None:
        def work(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
            _local.run, _local.program, _local.stores, _local.products = self, program, [], []
            try:
                function(*args)
                _flush_stores()
            except BaseException as error:
                self.failed.append(error)

        threads = [threading.Thread(target=work, args=one) for one in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]


def _flush_stores() -> None:
    for store in _local.stores:
        store()
    _local.stores = []


def _wait_for_turn(token: Any, group: int) -> Any:
    if not _local.run.turns[group].acquire(timeout=PATIENCE):
        raise Stuck("a turn did not come")
    return token


def _give_turn(token: Any, to: int) -> Any:
    turn = _local.run.turns[to]
    turn.release()
    if turn._value > 1:
        raise Stuck("a turn was given twice")
    return token


class _Mbarrier:
    @staticmethod
    def MBarrierLayout() -> None:  # noqa: N802
        return None

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = count

    @staticmethod
    def wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
        if bool(_raw(pred)):
            barrier.wait(int(phase))

    @staticmethod
    def arrive(barrier: Barrier, count: int = 1) -> None:
        barrier.arrive(count)

    @staticmethod
    def expect(barrier: Barrier, bytes_: int, pred: Any = True) -> None:
        if bool(_raw(pred)):
            barrier.expect(bytes_)


class _Tma:
    @staticmethod
    def async_copy_global_to_shared(
        tiles: Tiles, at: Sequence[Any], barrier: Barrier, into: Memory, pred: Any = True
    ) -> None:
        if not bool(_raw(pred)):
            return
        place = [int(i) for i in at]

        def copy() -> None:
            tiles.load(place, into)
            barrier.complete(tiles.block_type.nbytes)

        barrier.copy(copy)

    @staticmethod
    def async_copy_shared_to_global(tiles: Tiles, at: Sequence[Any], source: Memory) -> None:
        place = [int(i) for i in at]
        _local.stores.append(lambda: tiles.store(place, source))

    @staticmethod
    def store_wait(pendings: int) -> None:
        assert pendings == 0
        _flush_stores()


def _warpgroup_mma(a: Any, b: Memory, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    assert not isinstance(acc, Product), "a product under way is no summand"

    def compute() -> Value:
        found = a.data.float() @ b.data.float()
        return Value(found + acc.data if use_acc else found)

    _local.products.append(Product(compute))
    return _local.products[-1]


def _warpgroup_mma_wait(left: int, deps: Sequence[Any]) -> Value:
    done = _local.products[: len(_local.products) - left]
    for product in done:
        product.finish()
    _local.products = _local.products[len(done) :]
    (product,) = deps
    if isinstance(product, Value):
        return product
    assert product in done, "the product may still be under way"
    return product.value


def _largest(x: Tensor, axis: int) -> Tensor:
    """Of the numbers: NaN only where there is nothing else, as on a GPU."""
    if not x.is_floating_point():
        return x.amax(axis)
    found = x.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")).amax(axis)
    return torch.where(x.isnan().all(axis), float("nan"), found)


class _Language:
    """What stands for triton.experimental.gluon.language."""

    float32, float16, int32, int16, int64 = torch.float32, torch.float16, torch.int32, torch.int16, torch.int64

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *args, **named: None
        raise AttributeError(name)

    static_range = range

    def to_tensor(self, value: Any) -> Value:
        return Value(torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else torch.int32))

    def program_id(self, axis: int) -> Value:
        return self.to_tensor(int(_local.program[0]))

    def num_programs(self, axis: int) -> int:
        return int(_local.program[1])

    def arange(self, first: int, stop: int, layout: Any = None) -> Value:
        return Value(torch.arange(int(first), int(stop), dtype=torch.int32))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, layout: Any = None) -> Value:
        return Value(torch.zeros([int(n) for n in shape], dtype=dtype))

    def full(self, shape: Sequence[int], value: Any, dtype: torch.dtype, layout: Any = None) -> Value:
        return Value(torch.full([int(n) for n in shape], value, dtype=dtype))

    def sum(self, x: Value, axis: int) -> Value:
        return Value(x.data.sum(axis, dtype=x.dtype))

    def max(self, x: Value, axis: int) -> Value:
        return Value(_largest(x.data, axis))

    def reduce(self, x: Value, axis: int, combine: Any) -> Value:
        return Value(_largest(x.data, axis))

    def maximum(self, a: Any, b: Any) -> Any:
        if not isinstance(a, Value) and not isinstance(b, Value):
            return max(a, b)
        a, b = (one if isinstance(one, Value) else Value(torch.as_tensor(one, dtype=_of(a, b))) for one in (a, b))
        return Value(torch.fmax(a.data, b.data) if a.data.is_floating_point() else torch.maximum(a.data, b.data))

    def minimum(self, a: Any, b: Any) -> Any:
        if not isinstance(a, Value) and not isinstance(b, Value):
            return min(a, b)
        a, b = (one if isinstance(one, Value) else Value(torch.as_tensor(one, dtype=_of(a, b))) for one in (a, b))
        return Value(torch.fmin(a.data, b.data) if a.data.is_floating_point() else torch.minimum(a.data, b.data))

    def where(self, condition: Any, a: Any, b: Any) -> Value:
        if not isinstance(condition, Value):
            return a if condition else b
        return Value(torch.where(condition.data, _raw(a), _raw(b)))

    def exp2(self, x: Value) -> Value:
        return Value(torch.exp2(x.data))

    def log(self, x: Value) -> Value:
        return Value(torch.log(x.data))

    def abs(self, x: Value) -> Value:
        return Value(x.data.abs())

    def fma(self, a: Any, b: Any, c: Any) -> Value:
        return Value((_double(a) * _double(b) + _double(c)).float())

    def convert_layout(self, x: Value, layout: Any, assert_trivial: bool = False) -> Value:
        return x

    def allocate_shared_memory(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
        if dtype == torch.int64 and len(shape) == 1:
            return Barrier()
        if dtype == torch.int64:
            return Memory([Barrier() for _ in range(int(shape[0]))], dtype)
        return Memory(torch.full([int(n) for n in shape], float("nan"), dtype=dtype), dtype)

    def load(self, pointer: Pointer, mask: Value | None = None, other: Any = 0, volatile: bool = False) -> Value:
        where = torch.as_tensor(_raw(pointer.offset))
        if mask is None:
            return Value(pointer.flat[where])
        return Value(torch.where(mask.data, pointer.flat[where.clamp(0, max(len(pointer.flat) - 1, 0))], other))

    def store(self, pointer: Pointer, value: Any, mask: Value | None = None) -> None:
        where = torch.as_tensor(_raw(pointer.offset))
        data = torch.as_tensor(_raw(value)).expand(where.shape).to(pointer.flat.dtype)
        if mask is None:
            pointer.flat[where] = data
        else:
            chosen = mask.data.expand(where.shape)
            pointer.flat[where[chosen]] = data[chosen]

    def thread_barrier(self) -> None:
        pass

    def warp_specialize(self, functions: Any, warps: Any, registers: Any) -> None:
        Run().partitions(functions, _local.program)


def _of(a: Any, b: Any) -> torch.dtype:
    return next(one.dtype for one in (a, b) if isinstance(one, Value))


def _double(x: Any) -> Any:
    return x.data.double() if isinstance(x, Value) else x


class _Fields:
    """An aggregate: the names of its fields, in the order of its constructor."""

    def __init__(self, *given: Any) -> None:
        for name, value in zip(self.names, given, strict=True):  # type: ignore[attr-defined]
            setattr(self, name, value)


def interpreted(*modules: types.ModuleType) -> dict[str, Callable[..., Any]]:
    """The functions of these modules, which may use one another, as plain Python on a CPU."""
    language = _Language()
    scope: dict[str, Any] = {"__builtins__": __builtins__}
    stands_for = {
        "gl": language, "mbarrier": _Mbarrier, "tma": _Tma, "warpgroup_mma": _warpgroup_mma,
        "warpgroup_mma_wait": _warpgroup_mma_wait, "fence_async_shared": lambda: None,
        "held": lambda x: x, "wait_for_turn": _wait_for_turn, "give_turn": _give_turn,
    }  # fmt: skip
    for module in modules:
        for name, thing in vars(module).items():
            if name in stands_for:
                scope[name] = stands_for[name]
            elif hasattr(thing, "fn") and isinstance(thing.fn, types.FunctionType):
                scope[name] = types.FunctionType(thing.fn.__code__, scope, name, thing.fn.__defaults__)
            elif type(thing).__name__ == "constexpr":
                scope[name] = thing.value
            elif getattr(thing, "__triton_aggregate__", False):
                names = list(
                    thing.hash_attrs[0].fn.__code__.co_varnames[1 : thing.hash_attrs[0].fn.__code__.co_argcount]
                )
                scope[name] = type(name, (_Fields,), {"names": names})
    return {name: thing for name, thing in scope.items() if isinstance(thing, types.FunctionType)}


def launch(kernel: Callable[..., Any], programs: int, args: Sequence[Any], **constants: Any) -> None:
    """Run a kernel's programs one after the other, on tensors as `forward_arguments` gives them."""
    given = [
        Pointer(arg.as_strided((arg.numel(),), (1,))) if isinstance(arg, Tensor)
        else Value(torch.tensor(arg, dtype=torch.int32)) if type(arg) is int else arg
        for arg in args
    ]  # fmt: skip
    for program in range(programs):
        _local.program = (program, programs)
        kernel(*given, **constants)
