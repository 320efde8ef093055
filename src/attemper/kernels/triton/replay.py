"""Replay: a forward with the shapes, strides and options of an earlier one is started by the compiled launch of that.

The native library keeps the plans, compares calls with them and starts them (cpu/c/launch.c).
Where it is not built, `Replay` does the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import kernels
from ...vitals import SIGNS
from ..contract import (
    ALL_SIGNS,
    ARGMAX_BIT,
    BIT,
    N_TENSORS,
    PACKED,
    Problem,
    Results,
    Upstream,
    empty_vectors,
    packed_signs,
    packed_size,
)
from .arguments import inputs, tensor_key
from .launch import LaunchPlan, is_followed, on_its_device, plans_of


def plan_key(problem: Problem, sign_bits: int) -> tuple[Any, ...]:
    """All that a launch of the forward depends on; () for a call with dropout, whose seed is new each time."""
    if problem.dropout:
        return ()
    query, key, value, mask, gain = problem[:5]
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)  # as `readable` has it
    tensors = (tensor_key(query), tensor_key(key), tensor_key(value), tensor_key(mask), tensor_key(gain))
    return (query.get_device(), tensors, problem[N_TENSORS:], sign_bits)


class Layout(NamedTuple):
    """How the signs of a call lie in one tensor of float32, each at a multiple of 16 bytes."""

    shape: tuple[int, int, int]  # batch, heads, rows
    places: dict[str, int]  # where each begins, counted in float32
    size: int
    offsets: tuple[int, ...] | None  # of all signs and of `lse_low`, in bytes; None where some were not asked for

    @classmethod
    def of(cls, shape: tuple[int, int, int], sign_bits: int) -> Layout:
        """The layout of the signs that these bits ask for, with `lse` and `lse_low`, which are always there."""
        asked = [name for name in SIGNS if sign_bits & BIT[name]]
        names = dict.fromkeys((*asked, "lse", "lse_low", *(("argmax",) if sign_bits & ARGMAX_BIT else ())))
        each, places, size = packed_size(math.prod(shape)), {}, 0
        for name in names:
            places[name], size = size, size + each * (2 if name == "argmax" else 1)
        whole = all(name in places for name in SIGNS)
        return cls(shape, places, size, tuple(4 * places[name] for name in (*SIGNS, "lse_low")) if whole else None)

    def addresses(self, memory: Tensor) -> tuple[int, ...] | None:
        """Where all signs and `lse_low` are in the memory of a call; None where some were not asked for."""
        first = memory.data_ptr()
        return None if self.offsets is None else tuple([first + offset for offset in self.offsets])

    def read(self, memory: Tensor, name: str) -> Tensor | None:
        """A sign as it lies in the memory of a call; None if it was not measured."""
        begin, (_, heads, rows), dtype = self.places.get(name), self.shape, _DTYPES.get(name, torch.float32)
        if begin is None:
            return None
        typed = memory if dtype is torch.float32 else memory.view(dtype)
        return typed.as_strided(self.shape, (heads * rows, rows, 1), begin * 4 // dtype.itemsize)

    def part(self, memory: Tensor, name: str) -> Tensor:
        """A copy of a sign with a derivative, or of its gradient: a write into it changes nothing that a backward reads."""
        begin = self.places[name]
        return memory[begin : begin + math.prod(self.shape)].view(self.shape).clone()

    def results(self, kept: tuple[Tensor | None, ...], output: Tensor | None, upstream: Upstream) -> Results:
        """What a backward reads of what was kept: the memory, and the low part of the output. Each tensor takes its time."""
        memory, low = kept
        names: Iterable[str] = ("lse", "lse_low")
        if any(gradient is not None for gradient in upstream[1:]):
            names = [name for name in self.places if name != "argmax" or upstream.peak is not None]
        found: Any = {name: self.read(memory, name) for name in names}  # type: ignore[arg-type]
        low = None if low is None else low.view(torch.int16)
        return Results(*[found.get(name) for name in Results._fields])._replace(output=output, output_low=low)  # type: ignore[arg-type]


_DTYPES = {"visible": torch.int32, "argmax": torch.int64}


class Signs:
    """The signs of a call in one block of memory: a tensor by each name, made when it is read; None if not measured.

    A tensor shares the memory, so that `record_stream` of it holds, but not its version counter: writing into one looks to
    autograd as if nothing else had changed. If a backward will read the block, a tensor is a copy.
    """

    def __init__(self, memory: Tensor, layout: Layout, low: Tensor | None, saved: bool) -> None:
        self.memory, self.shape, self._layout, self._low, self._saved = (memory,), layout.shape, layout, low, saved

    def __getattr__(self, name: str) -> Tensor | None:
        if name not in Results._fields:
            raise AttributeError(name)
        found = self.as_written(name)
        return found.clone() if self._saved and found is not None else found

    def as_written(self, name: str) -> Tensor | None:
        """A field of `Results`, not as a copy."""
        if name == "output_low":
            return None if self._low is None else self._low.view(torch.int16)
        (memory,) = self.memory
        found = self._layout.read(memory.detach() if memory.requires_grad else memory, name)
        return None if found is None else found.data

    @property
    def addresses(self) -> tuple[int, ...] | None:
        return self._layout.addresses(self.memory[0])

    @property
    def packed(self) -> Tensor:
        """One tensor with all signs, of which `part` reads one."""
        return self.memory[0]

    def part(self, packed: Tensor, name: str) -> Tensor:
        return self._layout.part(packed, name)

    def saved(self) -> tuple[Layout, Tensor, Tensor | None]:
        """What autograd keeps: how the signs lie in the memory, and the tensors that `Layout.results` reads."""
        return self._layout, self.memory[0], self._low


Found = tuple[Tensor | None, Tensor | None, Tensor, Layout]
"""What a replayed forward gives: the output, memory for its low part, the memory of the signs, and their layout."""


class Replay(NamedTuple):
    """The forward of an earlier call, to be started on the tensors of one like it."""

    plan: LaunchPlan
    output: Any  # None, True (as the query lies), or sizes and strides
    low: bool
    layout: Layout

    @classmethod
    def of(cls, plan: LaunchPlan, problem: Problem, sign_bits: int, low: bool) -> Replay:
        """`sign_bits` are those that are written, `low` says whether the low part of the output is."""
        query, value = problem.query, problem.value
        batch, heads, rows, dim = query.shape
        layout, output = Layout.of((batch, heads, rows), sign_bits), None
        if value is not None:
            shape = torch.empty_strided(query.shape, query.stride(), dtype=query.dtype, device="meta")
            wanted = empty_vectors(shape, value.shape[3])
            as_query = value.shape[3] == dim and torch.empty_like(shape).stride() == wanted.stride()
            output = as_query or (tuple(wanted.shape), wanted.stride())
        return cls(plan, output, low, layout)

    def start(self, problem: Problem) -> Found:
        query, key, value = problem[:3]
        output = None
        if self.output is not None:
            output = torch.empty_like(query) if self.output is True else query.new_empty_strided(*self.output)
        low = torch.empty_like(output) if output is not None and self.low else None
        memory = query.new_empty_strided((self.layout.size,), (1,), **_TYPED)
        first, places = memory.data_ptr(), self.layout.places
        signs = [first + 4 * places[name] if name in places else None for name in Results._fields[2:]]
        tensors = (*inputs(problem), key, key if value is None else value, output, low, *signs)
        on_its_device(query, self.plan.run, tensors)
        return output, low, memory, self.layout

    def keep(self, problem: Problem, sign_bits: int) -> None:
        """Let the native library start calls like this one; without it, let `replayed` find this."""
        library, plan = kernels.extension(), self.plan
        if library is not None and plan.launcher is not None:
            value, mask, gain = problem[2:5]
            places = self.layout.places
            given = (0, 1, 0 if value is None else 2, 0 if mask is None else 3, 0 if gain is None else 4)
            signs = [(_MEMORY, 4 * places[name]) if name in places else (_NOTHING, 0) for name in Results._fields[2:]]
            origins = [*given, 1, 1 if value is None else 2, _NOTHING if value is None else _OUTPUT]
            addresses = (*[(one, 0) for one in origins], (_LOW if self.low else _NOTHING, 0), *signs)
            values = (*[0] * len(addresses), *plan.numbers)
            how = (plan.launcher, plan.programs, values, addresses, is_followed)
            made = (((self.layout.size,), (1,)), _TYPED, self.output, self.low, self.layout)
            library.plan(*_checked(problem, sign_bits), *how, *made)
        else:
            plans = plans_of(plan_key(problem, sign_bits))
            if plans is not None:
                plans["replay"] = self  # type: ignore[assignment]


_TYPED: dict[str, Any] = {"dtype": torch.float32}
_OUTPUT, _LOW, _MEMORY, _NOTHING = 5, 6, 7, 8
"""From what launch.c counts an address, after query, key, value, mask and gain."""


def _checked(problem: Problem, sign_bits: int) -> tuple[Any, ...]:
    """A problem as the native library takes it: five tensors, six numbers, and the bits of signs."""
    numbers = (problem.seed, problem.left, problem.right, problem.scale, problem.softcap, problem.dropout)
    return (*problem[:5], *numbers, sign_bits)


def replayed(problem: Problem, sign_bits: int) -> Found | None:
    """A forward like an earlier one, started by the launch of that; None if there was none, or it must be started by Python."""
    library = kernels.extension()
    if library is not None:
        launched: Found | None = library.replay_checked(*_checked(problem, sign_bits))
        return launched
    replay: Any = (plans_of(plan_key(problem, sign_bits)) or {}).get("replay")
    return None if replay is None else replay.start(problem)


def replay_signs(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool | str, scale: float | None
) -> SignRows | None:
    """All signs of a call of SDPA like an earlier one, without a gradient, for a watch; None if it is not plain."""
    library = kernels.extension()
    if library is None or not library.guard(query, key, None, mask, None):
        return None
    replayed = library.replay(query, key, None, mask, None, causal, None, scale, None, ALL_SIGNS, True)
    if replayed is None:
        return None
    _, _, memory, layout = replayed
    return SignRows(layout.addresses(memory), layout.shape, (memory,))


class SignRows(NamedTuple):
    """All signs of a call, as addresses, for a tally."""

    addresses: tuple[int, ...]  # of all signs and of `lse_low`
    shape: tuple[int, int, int]  # batch, heads, rows
    memory: tuple[Tensor, ...]  # the signs but for lse, lse, and lse_low


def packed_rows(lse: Tensor, lse_low: Tensor, packed: Tensor) -> SignRows:
    """The addresses of a call's signs: `lse` by itself, all others packed in one tensor."""
    batch, heads, rows = lse.shape
    each, first = 4 * packed_size(batch * heads * rows), packed.data_ptr()
    visible, mean, variance, peak, entropy, sum_p2 = [first + index * each for index in range(len(PACKED))]
    addresses = (visible, mean, variance, peak, lse.data_ptr(), entropy, sum_p2, lse_low.data_ptr())
    return SignRows(addresses, (batch, heads, rows), (packed, lse, lse_low))


def sign_tensors(rows: SignRows) -> list[Tensor]:
    """The signs and `lse_low` of `packed_rows` as tensors."""
    packed, lse, lse_low = rows.memory
    signs = {"lse": lse, **packed_signs(packed, rows.shape)}
    return [*[signs[name] for name in SIGNS], lse_low]
