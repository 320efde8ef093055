"""calls: short and unusual calls: a few tokens, decode on short and long caches, bands, other memory layouts.

A band on a long cache, or documents in one sequence, should cost as much as the visible keys. Each call is measured as `sdpa()`
(with a window or documents, as `attention(signs=())`), with all signs, and as torch's SDPA, in the same rounds. host.py
measures what a call takes before its kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attemper import attention, sdpa
from attemper.extension.calls import band

from ..timing import Times, interleave
from . import BenchRow

ROUNDS, BUDGET = 40, 3.0
BATCH = 1e-3
"""The least seconds of a timed step: a small call is repeated within it."""


@dataclass(frozen=True)
class Scene:
    """One call to measure: `rows` queries of `heads` heads on `keys` keys, (B, G, L, E)."""

    name: str
    keys: tuple[int, int, int, int]
    rows: int
    heads: int = 0  # of the query; 0: as many as the keys have
    causal: bool | str = False
    window: int | None = None
    transposed: bool = False  # keys are stored (B, G, E, L)
    documents: int = 0  # in one sequence, each longer than the one before it

    @property
    def visible(self) -> slice | None:
        """The keys that are visible to some row; None if all are."""
        length = self.keys[2]
        left, right = band(self.causal, self.window, self.rows, length)
        first = 0 if left is None else max(0, -left)
        last = length if right is None else min(length, self.rows + right)
        return None if (first, last) == (0, length) else slice(first, last)

    @property
    def offsets(self) -> list[int]:
        return [round(self.rows * (i / self.documents) ** 1.5) for i in range(self.documents + 1)]


SCENES = (
    *(Scene(f"{n} tokens", (1, 8, n, 64), n) for n in (16, 32)),
    *(Scene(f"decode, {n} keys", (1, 8, n, 64), 1) for n in (16, 128, 512)),
    Scene("decode, 12 heads on 1, 128 keys", (1, 1, 128, 64), 1, heads=12),
    Scene("decode, 16 keys, B·H = 16,384", (1024, 16, 16, 64), 1),
    Scene("decode, 2,048 keys stored (B, H, E, L)", (1, 16, 2048, 64), 1, transposed=True),
    Scene("1,024 rows on one key", (1, 8, 1, 64), 1024),
    Scene("64 rows on 32,768 keys, causal", (1, 8, 32768, 64), 64, causal=True),
    Scene("16 rows on 131,072 keys, the last 512", (1, 4, 131072, 64), 16, causal="lower_right", window=512),
    Scene("4,096 tokens, 16 documents, causal", (1, 8, 4096, 64), 4096, causal=True, documents=16),
)


def rows(*, quick: bool, kernel: str, dtype: str = "float32", note: Callable[[str], None]) -> list[BenchRow]:
    """Measure every scene; one row each."""
    measured = []
    for scene in SCENES[:1] if quick else SCENES:
        note(f"time: {scene.name}, {dtype}")
        measured.append(measure(scene, kernel, dtype, rounds=5 if quick else ROUNDS, budget=1.0 if quick else BUDGET))
    return measured


def measure(scene: Scene, kernel: str, dtype: str, *, rounds: int, budget: float, host: bool = False) -> BenchRow:
    """Time attemper against torch, and against itself on the visible keys only; ``host`` as in :func:`interleave`."""
    inputs = _inputs(scene, getattr(torch, dtype))
    calls = {
        "attemper": _ours(scene, inputs, kernel, "all"),
        "sdpa": _ours(scene, inputs, kernel, ()),
        "torch": _torch(scene, inputs),
    }
    if scene.visible is not None:
        query, key, value = inputs
        calls["sliced"] = _ours(scene, (query, key[:, :, scene.visible], value[:, :, scene.visible]), kernel, ())
    if scene.documents:
        calls["sliced"] = _one_by_one(scene, inputs, kernel)
    times = timed({name: without_grad(call) for name, call in calls.items()}, rounds=rounds, budget=budget, host=host)
    return {
        "name": scene.name,
        "keys": list(scene.keys),
        "rows": scene.rows,
        "dtype": dtype,
        "us": {name: round(1e6 * times.spread(name).median, 2) for name in calls},
        "sdpa_over_torch": times.speed("torch", "sdpa").to_dict(),
        "signs_over_torch": times.speed("torch", "attemper").to_dict(),
        "sdpa_over_sliced": times.speed("sliced", "sdpa").to_dict() if "sliced" in calls else None,
    }


def _inputs(scene: Scene, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch, groups, length, dim = scene.keys

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu").normal_(generator=generator)

    query = normal(batch, scene.heads or groups, scene.rows, dim)
    key = normal(batch, groups, dim, length).mT if scene.transposed else normal(*scene.keys)
    return query, key, normal(*scene.keys)


def _ours(scene: Scene, inputs: tuple[Tensor, ...], kernel: str, signs: Any) -> Callable[[], Tensor]:
    query, key, value = inputs
    grouped = query.shape[1] != key.shape[1]
    if signs == () and kernel == "auto" and scene.window is None and not scene.documents:
        causal = bool(scene.causal)
        return lambda: sdpa(query, key, value, is_causal=causal, enable_gqa=grouped)
    options: dict[str, Any] = {"causal": scene.causal, "window": scene.window, "kernel": kernel, "signs": signs}
    if scene.documents:
        options["documents"] = torch.tensor(scene.offsets, device="cpu")
    return lambda: attention(query, key, value, **options).output


def _one_by_one(scene: Scene, inputs: tuple[Tensor, ...], kernel: str) -> Callable[[], Tensor]:
    """Call attention on each document, and join the outputs."""
    parts = [[tensor[:, :, first:last] for tensor in inputs] for first, last in pairwise(scene.offsets)]
    alone = replace(scene, documents=0)
    return lambda: torch.cat([_ours(alone, tuple(part), kernel, ())() for part in parts], 2)


def _torch(scene: Scene, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    query, key, value = inputs
    grouped = query.shape[1] != key.shape[1]
    if scene.window is None and not scene.documents:
        causal = bool(scene.causal)
        return lambda: scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)
    # torch has no window, and documents only in jagged tensors: a mask, made once
    keys, rows = (torch.arange(n, device="cpu") for n in (key.shape[2], scene.rows))
    behind = key.shape[2] - scene.rows + rows[:, None] - keys
    if scene.documents:
        number = torch.bucketize(keys, torch.tensor(scene.offsets[1:], device="cpu"), right=True)
        mask = (behind >= 0) & (number[:, None] == number)
    else:
        mask = (behind >= 0) & (behind < (scene.window or 0))
    return lambda: scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


def without_grad(call: Callable[[], object]) -> Callable[[], object]:
    """The call under torch.no_grad()."""

    def run() -> object:
        with torch.no_grad():
            return call()

    return run


def timed(
    runs: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    budget: float,
    batch: float | None = None,
    device: str = "cpu",
    host: bool = False,
) -> Times:
    """Seconds per call of each candidate. A timed step has as many calls as the fastest makes in `batch` (or BATCH) seconds."""
    repeats = max(_repeats(run, BATCH if batch is None else batch) for run in runs.values())
    many = {name: _many(run, repeats) for name, run in runs.items()}
    times = interleave(many, rounds=rounds, budget=budget, device=device, host=host)
    return Times({name: [seconds / repeats for seconds in times_of] for name, times_of in times.seconds.items()})


def _repeats(run: Callable[[], object], batch: float) -> int:
    """How many calls fill `batch` seconds."""
    run()
    start = time.perf_counter()
    for _ in range(3):
        run()
    return max(1, round(batch / ((time.perf_counter() - start) / 3)))


def _many(run: Callable[[], object], times: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(times):
            run()

    return repeated
