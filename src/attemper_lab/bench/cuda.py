"""cuda: forward, backward, signs alone and decode on a GPU, compared with torch's SDPA by each backend it has.

Every round runs each candidate several times between two CUDA events, in an order that rotates; the GPU is kept busy before
the first, so that all calls wait in its queue and their Python is not timed. Work is 16,384 tokens of
width 2,048 in bfloat16. TFLOP/s count the operations that no method avoids, so that signs alone are given as a share of
SDPA's time.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attemper import attention, measure
from attemper.errors import InputError
from attemper.extension.calls import SIGNS

from ..timing import median_interval
from . import BenchRow, eager
from .calls import without_grad

TOKENS, WIDTH = 16384, 2048
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
GRID = tuple(itertools.product((64, 128), (1024, 4096, 16384), (False, True)))
QUICK_GRID = ((64, 1024, True), (128, 4096, False))
DECODE = ((1, 32, 32, 32768, 128), (8, 32, 8, 8192, 128), (64, 16, 16, 2048, 64))
"""Batch, heads, key/value heads, keys, head dim; one query each."""
EAGER_MOST = 4096
FLEX_LENGTH = 4096
"""The one length at which flex attention is compared: it is compiled anew for each case."""
INNER = 4
BUSY = 8192
"""A product of two such matrices takes about 1.5 ms: longer than the Python of INNER calls."""

OPTIONAL = (*BACKENDS, "flex", "flex_max", "eager_statistics")
GpuCall = Callable[[], object]


def rows(*, quick: bool, rounds: int, note: Callable[[str], None]) -> list[BenchRow]:
    """One row for each candidate of each case."""
    if not torch.cuda.is_available():
        raise InputError("bench cuda: no CUDA device was found. Type attemper env to see what is there.")
    all_rows = []
    for head_dim, length, causal in QUICK_GRID if quick else GRID:
        case = {"head_dim": head_dim, "length": length, "causal": causal}
        for direction, candidates in (("forward", forward), ("backward", backward)):
            note(f"{direction}: d {head_dim}, n {length}, {'causal' if causal else 'full'}")
            calls, flops = candidates(head_dim, length, causal)
            measured = _rows(calls, rounds, flops, note)
            note("  " + ", ".join(f"{row['candidate']} {row['ms']} ms" for row in measured))  # a kill loses nothing
            all_rows += [{"direction": direction, **case, **row} for row in measured]
            del calls
            torch.cuda.empty_cache()
    for sizes in DECODE[:1] if quick else DECODE:
        note(f"decode: {sizes}")
        calls, moved = decode(*sizes)
        named = dict(zip(("batch", "heads", "kv_heads", "length", "head_dim"), sizes, strict=True))
        for row in _rows(calls, rounds, 0.0, note):
            all_rows.append({"direction": "decode", **named, **row, "tb_per_s": round(moved / row["ms"] / 1e9, 3)})
    note("each sign: d 64, n 4096, causal")
    calls, flops = signs(64, 4096)
    signs_of: BenchRow = {"direction": "signs", "head_dim": 64, "length": 4096, "causal": True}
    return all_rows + [{**signs_of, **row} for row in _rows(calls, rounds, flops, note)]


def forward(head_dim: int, length: int, causal: bool) -> tuple[dict[str, GpuCall], float]:
    query, key, value = _tensors(head_dim, length)

    def by_torch() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=causal)

    calls: dict[str, GpuCall] = {"sdpa": by_torch}
    calls |= {name: sdpa_kernel(backend)(by_torch) for name, backend in BACKENDS.items()}
    calls |= {
        "attemper_bare": lambda: attention(query, key, value, causal=causal, signs=()),
        "attemper": lambda: attention(query, key, value, causal=causal),
        "measure": lambda: measure(query, key, causal=causal),
    }
    if length <= EAGER_MOST:
        calls["eager_statistics"] = lambda: eager.with_statistics(query, key, value, causal=causal)
    if length == FLEX_LENGTH and not causal:
        calls |= _flex(query, key, value)
    return {name: without_grad(call) for name, call in calls.items()}, _flops(length, causal)


def _flex(query: Tensor, key: Tensor, value: Tensor) -> dict[str, GpuCall]:
    """torch's flex attention, compiled: bare, and with the largest logit of each row, the one sign it can give beside lse."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    return {
        "flex": lambda: compiled(query, key, value),
        "flex_max": lambda: compiled(query, key, value, return_aux=AuxRequest(lse=True, max_scores=True)),  # type: ignore[arg-type]
    }


def backward(head_dim: int, length: int, causal: bool) -> tuple[dict[str, GpuCall], float]:
    leaves = [t.requires_grad_() for t in _tensors(head_dim, length)]
    query, key, value = leaves
    g = torch.randn_like(query)

    def by_torch() -> GpuCall:
        return _gradient([scaled_dot_product_attention(query, key, value, is_causal=causal)], leaves, [g])

    calls: dict[str, GpuCall] = {"sdpa": by_torch()}
    for name, backend in BACKENDS.items():
        with suppress(RuntimeError), sdpa_kernel(backend):  # what a card refuses was noted by the forward
            calls[name] = by_torch()
    bare = attention(query, key, value, causal=causal, signs=()).output
    calls["attemper_bare"] = _gradient([bare], leaves, [g])
    attended = attention(query, key, value, causal=causal)
    wanted = [name for name in SIGNS if name not in ("visible", "peak")]
    ends = [attended.output, *(getattr(attended.vitals, name) for name in wanted)]
    calls["attemper"] = _gradient(ends, leaves, [g, *(torch.full_like(end, 0.01) for end in ends[1:])])
    return calls, 2.5 * _flops(length, causal)


def decode(batch: int, heads: int, kv_heads: int, length: int, head_dim: int) -> tuple[dict[str, GpuCall], float]:
    query = torch.randn(batch, heads, 1, head_dim, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(batch, kv_heads, length, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    cache = torch.randn(key.numel(), device="cuda", dtype=torch.float32)  # as many bytes as both
    grouped = heads != kv_heads
    calls: dict[str, GpuCall] = {
        "read": lambda: cache.sum(),
        "sdpa": lambda: scaled_dot_product_attention(query, key, value, enable_gqa=grouped),
        "attemper_bare": lambda: attention(query, key, value, signs=()),
        "attemper": lambda: attention(query, key, value),
    }
    return {name: without_grad(call) for name, call in calls.items()}, 4.0 * key.numel()


def signs(head_dim: int, length: int) -> tuple[dict[str, GpuCall], float]:
    """What each sign costs: signs alone without values, all, none but lse, and each beside lse."""
    query, key, _ = _tensors(head_dim, length)

    def only(*names: str) -> GpuCall:
        return without_grad(lambda: measure(query, key, causal=True, signs=names))

    calls = {"lse": only("lse"), "all": only(*SIGNS)}
    calls |= {f"lse, {name}": only("lse", name) for name in SIGNS if name != "lse"}
    return calls, _flops(length, True)


def _rows(calls: dict[str, GpuCall], rounds: int, flops: float, note: Callable[[str], None]) -> list[dict[str, Any]]:
    times, measured = _interleave(calls, rounds, note), []
    first = next(iter(calls))
    for name, ms in times.items():
        middle = statistics.median(ms)
        ratio = median_interval([own / base for own, base in zip(ms, times[first], strict=True)])
        rate = {"tflops": round(flops / middle / 1e9, 1)} if flops else {}
        measured.append({"candidate": name, "ms": round(middle, 4), f"time_vs_{first}": ratio.to_dict(), **rate})
    return measured


def _interleave(calls: dict[str, GpuCall], rounds: int, note: Callable[[str], None]) -> dict[str, list[float]]:
    """Milliseconds of each call, by round; one of OPTIONAL that this card or this torch refuses is left out, with a note."""
    working = {}
    for name, call in calls.items():
        try:
            call()
            working[name] = call
        except Exception as error:  # torch.compile raises errors of many types
            if name not in OPTIONAL:
                raise
            note(f"  {name} is left out: {next(iter(str(error).splitlines()), type(error).__name__)}")
    torch.cuda.synchronize()
    busy = torch.zeros(BUSY, BUSY, dtype=torch.bfloat16, device="cuda")
    names = list(working)
    milliseconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(2):
                busy @ busy
            begin.record()
            for _ in range(INNER):
                working[name]()
            end.record()
            torch.cuda.synchronize()
            milliseconds[name].append(begin.elapsed_time(end) / INNER)
    return milliseconds


def _tensors(head_dim: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = (max(1, TOKENS // length), WIDTH // head_dim, length, head_dim)
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return query, key, value


def _flops(length: int, causal: bool) -> float:
    return 4.0 * max(TOKENS, length) * length * WIDTH / (2 if causal else 1)


def _gradient(ends: list[Tensor], leaves: list[Tensor], upstream: list[Tensor]) -> GpuCall:
    return lambda: torch.autograd.grad(ends, leaves, upstream, retain_graph=True)
