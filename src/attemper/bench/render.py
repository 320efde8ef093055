"""render: the bench's document as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .._display import plural, print_table
from . import watch, watch_compiled
from .candidates import CANDIDATES, DIRECTIONS
from .cpu import geometric_mean

WIDE = 100
"""From this many columns on, ratios are printed with their intervals."""


def show(document: dict[str, Any], console: Console) -> None:
    wide = console.width >= WIDE
    console.print(_headline(document["environment"], document["load"]))
    parts: dict[str, tuple[Callable[[list[dict[str, Any]]], Iterable[Table]], str]] = {
        "speed": (lambda rows: _speed(rows, wide), SPEED_LEGEND),
        "calls": (lambda rows: [_calls(rows)], CALLS_LEGEND),
        "cpu": (lambda rows: _cpu(rows, wide), CPU_LEGEND),
        "memory": (lambda rows: [_memory(rows)], MEMORY_LEGEND),
        "cuda": (_cuda, CUDA_LEGEND),
        "watch": (_watch, WATCH_LEGEND),
    }
    for part, (tables, legend) in parts.items():
        for table in tables(document[part]) if document[part] else ():
            console.print()
            print_table(console, table)
        if document[part]:
            console.print("\n" + legend, style="dim")


SPEED_LEGEND = (
    "Medians of interleaved rounds, with quartiles. ×: how many times faster than the other, the median of the ratios "
    "within each round (95 % interval). Of GEMM: the time its matrix products would take at torch.mm's rate, as "
    "a share of the time it took."
)
MEMORY_LEGEND = (
    "B = H = 1, E = 64 (on a GPU 128), causal, each in a fresh process. MiB: at the peak, beyond inputs, outputs, signs "
    "and gradients (the last three are results). Backward with an entropy in the loss. Growth: from the length above; "
    "where lengths double, 2 is linear and 4 quadratic."
)
WATCH_LEGEND = (
    "Forward passes, or training steps without an optimizer; random weights. Medians of interleaved rounds, with quartiles. "
    "Cost: the time over the unwatched pass of the same round, the median (95 % interval); attaching and detaching included."
)


CUDA_LEGEND = (
    "bfloat16, 16,384 tokens of width 2,048; medians of interleaved rounds between CUDA events. ÷: the time over that of the "
    "first row in the same round (95 % interval; below 1 is faster). TFLOP/s: of the operations of a forward or a backward; "
    "signs alone do half of them."
)
CPU_LEGEND = (
    "ms: all vitals, median of interleaved rounds. × SDPA: all vitals against torch's SDPA, which measures nothing; the "
    "median of the ratios within each round, with its 95 % interval. Vitals: their cost over the same kernel without. "
    "× eager: against eager attention with the same statistics. GF/s, GB/s: of the products, or of keys and values read; "
    "machine: torch.mm, or a plain read, in the same rounds. Growth: of the time since "
    "the length above; where lengths double, 4 is quadratic."
)


CALLS_LEGEND = (
    "µs: of sdpa(), or of attention(signs=()) where there is a window; median of interleaved rounds. ÷ torch: its time over "
    "that of torch's SDPA (below 1 is faster), the median of the ratios within each round; all signs: that of attention() with "
    "all of them. ÷ sliced: its time over that of the same call on the visible keys alone."
)


def _headline(found: dict[str, Any], load: dict[str, float | None]) -> str:
    cpu = found["cpu"]
    machine = [
        f"{cpu['model']}, {cpu['simd']}",
        f"{plural(cpu['threads'], 'thread')} on {plural(cpu['cores'], 'core')}",
    ]
    machine += [gpu["name"] for gpu in found["gpus"]]
    if load["before"] is not None:
        machine.append(f"load {load['before']} → {load['after']}")
    return f"attemper {found['attemper']} · torch {found['torch']}\n{' · '.join(machine)}"


def _speed(rows: list[dict[str, Any]], wide: bool) -> Iterator[Table]:
    for (shape, causal, direction), group in groupby(rows, lambda row: (row["shape"], row["causal"], row["direction"])):
        cells = list(group)
        first = cells[0]
        mask = "causal" if causal else "full"
        names = ("ms", "quartiles", "× SDPA", "× eager+stats", "of GEMM")
        table = _table(f"({', '.join(map(str, shape))}) {mask}, {DIRECTIONS[direction]}, {first['dtype']}", names)
        for row in cells:
            table.add_row(
                CANDIDATES[row["candidate"]],
                _number(row["ms"]["median"]),
                f"{_number(row['ms']['low'])}–{_number(row['ms']['high'])}",
                _ratio(row.get("speed_vs_sdpa"), wide),
                _ratio(row.get("speed_vs_eager_statistics"), wide),
                f"{100 * row['of_gemm']['median']:.0f} %",
            )
        rate = _number(first["gemm_gflops"])
        table.caption = f"kernel {first['kernel']}; {first['rounds']} rounds; torch.mm at {rate} GFLOP/s"
        yield table


def _cpu(rows: list[dict[str, Any]], wide: bool) -> Iterator[Table]:
    for title, group in groupby(rows, lambda row: row["table"]):
        cells = list(group)
        unit = "GB/s" if title == "decode" else "GF/s"
        names = ("ms", "× SDPA", "vitals", "× eager", unit, "machine", "growth")
        table = _table(f"{title}, {cells[0]['dtype']}, kernel {cells[0]['kernel']}", names)
        for row in cells:
            eager = row["speed_vs_eager_statistics"]
            table.add_row(
                f"({', '.join(map(str, row['shape']))})",
                _number(row["ms"]["median"]),
                _ratio(row["speed_vs_sdpa"], wide),
                f"{100 * row['vitals_cost']:.0f} %",
                "–" if eager is None else f"{eager['median']:.1f}",
                _number(row["rate"]),
                _number(row["machine_rate"]),
                "" if row["growth"] is None else f"×{row['growth']:.2f}",
            )
        table.caption = f"geometric mean {geometric_mean(cells):.2f} × SDPA"
        yield table


def _cuda(rows: list[dict[str, Any]]) -> Iterator[Table]:
    def case(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(
            row.get(name) for name in ("direction", "head_dim", "length", "causal", "batch", "heads", "kv_heads")
        )

    for (direction, head_dim, length, causal, batch, heads, kv_heads), group in groupby(rows, case):
        cells = list(group)
        base = cells[0]["candidate"]
        decode = direction == "decode"
        sizes = f"{batch} × {heads} heads on {kv_heads}" if decode else "causal" if causal else "full"
        table = _table(
            f"{direction}: d {head_dim}, n {length}, {sizes}", ("ms", f"÷ {base}", "TB/s" if decode else "TFLOP/s")
        )
        for row in cells:
            rate = row["tb_per_s"] if decode else row["tflops"]
            table.add_row(
                CUDA_NAMES.get(row["candidate"], row["candidate"]),
                _number(row["ms"]),
                _ratio(row[f"time_vs_{base}"], True),
                _number(rate),
            )
        yield table


CUDA_NAMES = {
    "sdpa": "torch SDPA, its default",
    "cudnn": "torch SDPA, cuDNN",
    "flash": "torch SDPA, FlashAttention-2",
    "attemper_bare": "attemper, no vitals",
    "attemper": "attemper, all vitals",
    "measure": "attemper, signs alone",
    "eager_statistics": "eager, same statistics",
    "read": "a plain read of the cache",
}


def _calls(rows: list[dict[str, Any]]) -> Table:
    names = ("µs", "÷ torch", "all signs", "÷ sliced")
    table = _table(f"small calls, bands and layouts, {rows[0]['dtype']}", names)
    for row in rows:
        over = (row["sdpa_over_torch"], row["signs_over_torch"], row["sdpa_over_sliced"])
        table.add_row(row["name"], _number(row["us"]["sdpa"]), *(_ratio(spread, wide=False) for spread in over))
    return table


def _memory(rows: list[dict[str, Any]]) -> Table:
    table = _table(f"Peak memory, kernel {rows[0]['kernel']}", ("length", "MiB", "growth", "results"), labels=2)
    for _, group in groupby(rows, lambda row: (row["candidate"], row["direction"])):
        for place, row in enumerate(group):
            labels = (CANDIDATES[row["candidate"]], DIRECTIONS[row["direction"]]) if place == 0 else ("", "")
            growth = "" if row["growth"] is None else f"×{row['growth']:.2f}"
            table.add_row(*labels, str(row["length"]), f"{row['beyond_mib']:.1f}", growth, f"{row['results_mib']:.1f}")
    return table


WATCHED = {**watch.CANDIDATES, **watch_compiled.CANDIDATES}


def _watch(rows: list[dict[str, Any]]) -> Iterator[Table]:
    def case(row: dict[str, Any]) -> tuple[Any, ...]:
        return (
            row.get("model", "MiniLM-sized encoder"),
            row["batch"],
            row["length"],
            row["padded"],
            row.get("training", False),
            row.get("mode"),
        )

    timed = [row for row in rows if "ms" in row]
    for (model, batch, length, padded, training, mode), group in groupby(timed, case):
        cells = list(group)
        names = ("ms", "quartiles", "cost")
        more = (
            f"{', padded' if padded else ''}{', training step' if training else ''}{f', mode {mode}' if mode else ''}"
        )
        table = _table(f"{model}, {batch} × {length} tokens{more}", names)
        for row in cells:
            spread = f"{_number(row['ms']['low'])}–{_number(row['ms']['high'])}"
            cost = "–" if row["candidate"] in ("unwatched", "compiled") else _ratio(row["cost"], wide=True)
            table.add_row(WATCHED[row["candidate"]], _number(row["ms"]["median"]), spread, cost)
        table.caption = f"{cells[0]['rounds']} rounds on {cells[0]['device']}"
        yield table


def _table(title: str, names: Sequence[str], labels: int = 1) -> Table:
    """A table with columns for labels, without names, and then one for each name, for numbers."""
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    table.title_style = "bold"
    for _ in range(labels):
        table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _ratio(spread: dict[str, float] | None, wide: bool) -> str:
    if spread is None:
        return "–"
    middle = f"{spread['median']:.2f}"
    return f"{middle} ({spread['low']:.2f}–{spread['high']:.2f})" if wide else middle


def _number(value: float) -> str:
    """Three digits are what a timing on a shared machine can carry."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
