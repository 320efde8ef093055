"""render: the bench's document as tables for a terminal."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from attemper.extension.tools import plural, print_table

from . import BenchRow, host, watch_compiled
from .candidates import CANDIDATES, DIRECTIONS
from .cpu import geometric_mean

LEGENDS = tomllib.loads((files(__package__) / "legends.toml").read_text(encoding="utf-8"))
WIDE = 100
"""From this many columns on, ratios are printed with their intervals."""
Rows = list[BenchRow]


def show(document: dict[str, Any], console: Console) -> None:
    wide = console.width >= WIDE
    console.print(_headline(document["environment"], document["load"]))
    for part, tables in PARTS.items():
        for table in tables(document[part], wide) if document[part] else ():
            console.print()
            print_table(console, table)
        if document[part]:
            console.print("\n" + LEGENDS[part], style="dim")


def _headline(environment: dict[str, Any], load: dict[str, float | None]) -> str:
    cpu = environment["cpu"]
    machine = [
        f"{cpu['model']}, {cpu['simd']}",
        f"{plural(cpu['threads'], 'thread')} on {plural(cpu['cores'], 'core')}",
    ]
    machine += [gpu["name"] for gpu in environment["gpus"]]
    if load["before"] is not None:
        machine.append(f"load {load['before']} → {load['after']}")
    return f"attemper {environment['attemper']} · torch {environment['torch']}\n{' · '.join(machine)}"


def _speed(rows: Rows, wide: bool) -> Iterator[Table]:
    for (shape, causal, direction), cells in _groups(rows, "shape", "causal", "direction"):
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


def _cpu(rows: Rows, wide: bool) -> Iterator[Table]:
    for (title,), cells in _groups(rows, "table"):
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


def _cuda(rows: Rows, wide: bool) -> Iterator[Table]:
    case = ("direction", "head_dim", "length", "causal", "batch", "heads", "kv_heads")
    for (direction, head_dim, length, causal, batch, heads, kv_heads), cells in _groups(rows, *case):
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


def _calls(rows: Rows, wide: bool = True) -> Iterator[Table]:
    names = ("µs", "÷ torch", "all signs", "÷ sliced")
    table = _table(f"short calls, bands and layouts, {rows[0]['dtype']}", names)
    for row in rows:
        over = (row["sdpa_over_torch"], row["signs_over_torch"], row["sdpa_over_sliced"])
        table.add_row(row["name"], _number(row["us"]["sdpa"]), *(_ratio(spread, wide=False) for spread in over))
    yield table


def _memory(rows: Rows, wide: bool = True) -> Iterator[Table]:
    table = _table(f"Peak memory, kernel {rows[0]['kernel']}", ("length", "MiB", "growth", "results"), labels=2)
    for _, group in _groups(rows, "candidate", "direction"):
        for index, row in enumerate(group):
            labels = (CANDIDATES[row["candidate"]], DIRECTIONS[row["direction"]]) if index == 0 else ("", "")
            growth = "" if row["growth"] is None else f"×{row['growth']:.2f}"
            table.add_row(*labels, str(row["length"]), f"{row['beyond_mib']:.1f}", growth, f"{row['results_mib']:.1f}")
    yield table


WATCHED = {**host.LAYERED, **watch_compiled.CANDIDATES}


def _watch(rows: Rows, wide: bool = True) -> Iterator[Table]:
    case = ("model", "batch", "length", "padded", "training", "mode")
    for (model, batch, length, padded, training, mode), cells in _groups([row for row in rows if "ms" in row], *case):
        title = f"{model or 'MiniLM-sized encoder'}, {batch} × {length} tokens{', padded' if padded else ''}"
        title += f"{', training step' if training else ''}{f', mode {mode}' if mode else ''}"
        table = _table(title, ("ms", "quartiles", "cost"))
        for row in cells:
            spread = f"{_number(row['ms']['low'])}–{_number(row['ms']['high'])}"
            cost = "–" if row["candidate"] in ("unwatched", "compiled") else _ratio(row["cost"], wide=True)
            table.add_row(WATCHED[row["candidate"]], _number(row["ms"]["median"]), spread, cost)
        table.caption = f"{cells[0]['rounds']} rounds on {cells[0]['device']}"
        yield table


def _host(rows: Rows, wide: bool) -> Iterator[Table]:
    def part(name: str) -> Rows:
        return [row for row in rows if row["table"] == name]

    for (device, length), group in _groups(part("calls"), "device", "length"):
        cells = {(row["call"], row["mode"]): row for row in group}
        dtype, modes = group[0]["dtype"], list(host.MODES)
        table = _table(f"÷ torch's SDPA: {length} tokens, {dtype}, on {device}", list(host.MODES.values()))
        for call in host.CALLS:
            table.add_row(call, *(_ratio(cells[call, mode]["over_torch"], wide) for mode in modes))
        theirs = ", ".join(_number(cells[host.ALL_SIGNS, mode]["torch_us"]["median"]) for mode in modes)
        table.caption = f"torch's SDPA: {theirs} µs"
        yield table
    for (device, model, training), layers in _groups(part("layers"), "device", "model", "training"):
        table = _table(f"{model}, {'training step' if training else 'forward'}", ("µs/layer", "cost"))
        for row in layers[1:]:
            table.add_row(WATCHED[row["candidate"]], _number(row["us_per_layer"]["median"]), _ratio(row["cost"], wide))
        unwatched = f"{_number(layers[0]['us']['median'])} µs for {plural(layers[0]['layers'], 'layer')}"
        table.caption = f"unwatched on {device}: {unwatched}"
        yield table
    yield from _watch(part("compiled"))
    if counted := [row for row in part("compiled") if row["candidate"] == "counts"]:
        table = _table("compiled and instrumented", ("graph breaks", "compiled again"))
        for row in counted:
            name = f"{'training' if row['training'] else 'forward'} on {row['device']}"
            table.add_row(name, str(row["graph_breaks"]), str(row["recompilations"]))
        yield table


def _promises(rows: Rows, wide: bool = True) -> Iterator[Table]:
    table = _table("what the documents promise", ("÷", "from", "to"))
    for row in rows:
        table.add_row(row["name"], *(f"{row['ratio'][name]:.2f}" for name in ("median", "low", "high")))
    yield table


PARTS: dict[str, Callable[[Rows, bool], Iterator[Table]]] = {
    "speed": _speed, "calls": _calls, "cpu": _cpu, "memory": _memory, "cuda": _cuda, "watch": _watch, "host": _host,
    "promises": _promises,
}  # fmt: skip


def _groups(rows: Rows, *names: str) -> Iterator[tuple[tuple[Any, ...], Rows]]:
    """Neighbouring rows with the same values in these columns; None where a row has no such column."""
    for values, group in groupby(rows, lambda row: tuple(row.get(name) for name in names)):
        yield values, list(group)


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
