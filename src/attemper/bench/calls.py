"""calls: small and unusual calls: a few tokens, decode on short and long caches, bands, other memory layouts.

Most of the time of a small call is the way to its kernel; a band on a long cache should cost as much as its visible keys. Each is
measured as `sdpa()` (with a window, as `attention(signs=())`), with all signs, and as torch's SDPA, in the same rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .._timing import interleave
from ..attention import attention, sdpa
from ..operation.plain import band
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
    mode: str = "no_grad"  # or "grad", with nothing that requires one, or "backward"

    @property
    def visible(self) -> slice | None:
        """The keys that are visible to some row; None if all are."""
        length = self.keys[2]
        left, right = band(self.causal, self.window, self.rows, length)
        first = 0 if left is None else max(0, -left)
        last = length if right is None else min(length, self.rows + right)
        return None if (first, last) == (0, length) else slice(first, last)


SCENES = (
    *(Scene(f"{n} tokens", (1, 8, n, 64), n) for n in (4, 16, 32, 64)),
    Scene("4 tokens, causal", (1, 8, 4, 64), 4, causal=True),
    Scene("4 tokens in grad mode", (1, 8, 4, 64), 4, mode="grad"),
    *(Scene(f"{n} tokens, forward + backward", (1, 8, n, 64), n, mode="backward") for n in (4, 16)),
    *(Scene(f"decode, {n} keys", (1, 8, n, 64), 1) for n in (16, 128, 512)),
    Scene("decode, 12 heads on 1, 128 keys", (1, 1, 128, 64), 1, heads=12),
    Scene("decode, 16 keys, B·H = 16,384", (1024, 16, 16, 64), 1),
    Scene("decode, 2,048 keys stored (B, H, E, L)", (1, 16, 2048, 64), 1, transposed=True),
    Scene("1,024 rows on one key", (1, 8, 1, 64), 1024),
    Scene("64 rows on 32,768 keys, causal", (1, 8, 32768, 64), 64, causal=True),
    Scene("16 rows on 131,072 keys, the last 512", (1, 4, 131072, 64), 16, causal="lower_right", window=512),
)


def rows(*, quick: bool, kernel: str, dtype: str = "float32", note: Callable[[str], None]) -> list[BenchRow]:
    """Measure every scene; one row each."""
    found = []
    for scene in SCENES[:1] if quick else SCENES:
        note(f"time: {scene.name}, {dtype}")
        found.append(measure(scene, kernel, dtype, rounds=5 if quick else ROUNDS, budget=1.0 if quick else BUDGET))
    return found


def measure(scene: Scene, kernel: str, dtype: str, *, rounds: int, budget: float) -> BenchRow:
    """Time attemper against torch, and against itself on the visible keys only."""
    inputs = _inputs(scene, getattr(torch, dtype))
    calls = {
        "attemper": _ours(scene, inputs, kernel, "all"),
        "sdpa": _ours(scene, inputs, kernel, ()),
        "torch": _torch(scene, inputs),
    }
    if scene.visible is not None:
        query, key, value = inputs
        calls["sliced"] = _ours(scene, (query, key[:, :, scene.visible], value[:, :, scene.visible]), kernel, ())
    runs = {name: _in_mode(scene, inputs, call) for name, call in calls.items()}
    repeats = {name: _repeats(run) for name, run in runs.items()}
    times = interleave(
        {name: _many(run, max(repeats.values())) for name, run in runs.items()}, rounds=rounds, budget=budget
    )
    each = {name: 1e6 * times.spread(name).median / max(repeats.values()) for name in runs}
    return {
        "name": scene.name,
        "keys": list(scene.keys),
        "rows": scene.rows,
        "dtype": dtype,
        "mode": scene.mode,
        "us": {name: round(value, 2) for name, value in each.items()},
        "sdpa_over_torch": times.speed("torch", "sdpa").to_dict(),
        "signs_over_torch": times.speed("torch", "attemper").to_dict(),
        "sdpa_over_sliced": times.speed("sliced", "sdpa").to_dict() if "sliced" in runs else None,
    }


def _inputs(scene: Scene, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch, groups, length, dim = scene.keys

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu").normal_(generator=generator)

    query = normal(batch, scene.heads or groups, scene.rows, dim)
    key = normal(batch, groups, dim, length).mT if scene.transposed else normal(*scene.keys)
    tracked = scene.mode == "backward"
    return query.requires_grad_(tracked), key.requires_grad_(tracked), normal(*scene.keys).requires_grad_(tracked)


def _ours(scene: Scene, inputs: tuple[Tensor, ...], kernel: str, signs: Any) -> Callable[[], Tensor]:
    query, key, value = inputs
    grouped = query.shape[1] != key.shape[1]
    if signs == () and kernel == "auto" and scene.window is None:
        causal = bool(scene.causal)
        return lambda: sdpa(query, key, value, is_causal=causal, enable_gqa=grouped)
    options: dict[str, Any] = {"causal": scene.causal, "window": scene.window, "kernel": kernel, "signs": signs}
    return lambda: attention(query, key, value, **options).output


def _torch(scene: Scene, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    query, key, value = inputs
    grouped = query.shape[1] != key.shape[1]
    if scene.window is None:
        causal = bool(scene.causal)
        return lambda: scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)
    # torch has no window: a mask, made once
    keys, rows = (torch.arange(n, device="cpu") for n in (key.shape[2], scene.rows))
    behind = key.shape[2] - scene.rows + rows[:, None] - keys
    mask = (behind >= 0) & (behind < scene.window)
    return lambda: scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


def _in_mode(scene: Scene, inputs: tuple[Tensor, ...], call: Callable[[], Tensor]) -> Callable[[], object]:
    if scene.mode == "grad":
        return call
    if scene.mode == "backward":
        arriving = torch.ones_like(inputs[0])
        return lambda: torch.autograd.grad(call(), inputs, arriving)

    def quietly() -> Tensor:
        with torch.no_grad():
            return call()

    return quietly


def _repeats(run: Callable[[], object]) -> int:
    """How many calls take BATCH seconds."""
    run()
    start = time.perf_counter()
    for _ in range(3):
        run()
    return max(1, round(BATCH / ((time.perf_counter() - start) / 3)))


def _many(run: Callable[[], object], times: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(times):
            run()

    return repeated
