"""The calls that every kernel is tested on: a grid of features, its pairwise cover, and the tensors of one case."""

import itertools
import random
import zlib
from dataclasses import dataclass

import torch

from serving import SEED

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
LENGTHS = [(1, 1), (2, 2), (63, 63), (111, 111), (257, 257), (1, 257), (111, 63), (63, 257)]

GRID = {
    "dtype": list(DTYPES),
    "mask": ["none", "bool", "padding", "additive", "bias_row"],
    "causal": [False, True, "lower_right"],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "window": [None, 5],
    "softcap": [None, 3.0],
    "scale": ["default", "per_head"],
    "lengths": LENGTHS,
    "dim": [(8, 8), (60, 60), (64, 24), (80, 80), (128, 128)],
}


@dataclass(frozen=True)
class Case:
    dtype: str
    mask: str
    causal: bool | str
    heads: tuple[int, int]
    window: int | None
    softcap: float | None
    scale: str
    lengths: tuple[int, int]
    dim: tuple[int, int]

    def __str__(self) -> str:
        causal = {False: "full", True: "causal", "lower_right": "lower_right"}[self.causal]
        parts = [self.dtype, self.mask, causal, f"H{self.heads[0]}-G{self.heads[1]}"]
        parts += [f"L{self.lengths[0]}x{self.lengths[1]}", f"E{self.dim[0]}x{self.dim[1]}"]
        parts += [f"w{self.window}"] * bool(self.window) + [f"cap{self.softcap}"] * bool(self.softcap)
        return "-".join(parts + [self.scale] * (self.scale != "default"))

    def tensors(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """query, key, value and, where the case has them, mask and scale; the same ones each time."""
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()) + SEED)
        dtype = DTYPES[self.dtype]
        (heads, groups), (rows, keys), (dim, value_dim) = self.heads, self.lengths, self.dim

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        tensors = {
            # strides of a (B, L, H, E) model on purpose
            "query": draw(2, rows, heads, dim).transpose(1, 2),
            "key": draw(2, groups, keys, dim),
            "value": draw(2, groups, keys, value_dim),
        }
        if self.scale == "per_head":
            tensors["scale"] = 0.1 + 0.3 * draw(heads).abs()
        wide = torch.promote_types(dtype, torch.float32)
        tensors = {name: t.to(wide if name == "scale" else dtype) for name, t in tensors.items()}
        mask = self._mask(draw)
        if mask is not None:
            tensors["mask"] = mask if mask.dtype == torch.bool else mask.to(dtype)
        return {name: t.to(device) for name, t in tensors.items()}

    def _mask(self, draw):
        heads, (rows, keys) = self.heads[0], self.lengths
        if self.mask == "none":
            return None
        if self.mask == "bool":
            mask = draw(2, 1, rows, keys) > -0.5
            mask[0, :, 0] = False  # a row that sees nothing
            return mask
        if self.mask == "padding":
            return torch.arange(keys) < torch.tensor([keys, max(1, keys // 2)])[:, None, None, None]
        if self.mask == "bias_row":
            return draw(2, heads, 1, keys)
        mask = draw(1, heads, rows, keys)
        mask[draw(1, heads, rows, keys) > 1.5] = float("-inf")
        mask[draw(1, heads, rows, keys) > 1.5] = -3e4  # the way people write a mask that fits float16
        mask[:, 0, -1] = float("-inf")
        return mask

    def options(self) -> dict[str, object]:
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap}


def cover(grid: dict[str, list], allowed=lambda row: True, seed: int = 0) -> list[dict]:
    """Rows that hold every allowed pair of values of every two features at least once, found greedily."""
    names = list(grid)
    rng, rows = random.Random(seed), []

    def pairs(row: tuple[int, ...]) -> set:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(names)), 2)}

    def named(row: tuple[int, ...]) -> dict:
        return {name: grid[name][i] for name, i in zip(names, row, strict=True)}

    every = [row for row in itertools.product(*(range(len(grid[n])) for n in names)) if allowed(named(row))]
    open_pairs = set().union(*map(pairs, every))
    while open_pairs:
        a, x, b, y = rng.choice(sorted(open_pairs))
        tries = [row for row in rng.sample(every, min(len(every), 4000)) if (row[a], row[b]) == (x, y)]
        tries = tries or [row for row in every if (row[a], row[b]) == (x, y)]
        best = max(tries, key=lambda row: len(pairs(row) & open_pairs))
        open_pairs -= pairs(best)
        rows.append(named(best))
    return rows


def pairwise(grid: dict[str, list], seed: int = 0) -> list[Case]:
    """Cases that hold every pair of values of every two features at least once, found greedily."""
    names = list(grid)
    open_pairs = {
        (a, x, b, y) for a, b in itertools.combinations(range(len(names)), 2) for x in range(len(grid[names[a]]))
        for y in range(len(grid[names[b]]))
    }  # fmt: skip
    rng, cases = random.Random(seed), []

    def covers(row: tuple[int, ...]) -> set:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(names)), 2)} & open_pairs

    while open_pairs:
        a, x, b, y = rng.choice(sorted(open_pairs))
        tries = []
        for _ in range(60):
            row = [rng.randrange(len(grid[name])) for name in names]
            row[a], row[b] = x, y
            tries.append(tuple(row))
        best = max(tries, key=lambda row: len(covers(row)))
        open_pairs -= covers(best)
        cases.append(Case(**{name: grid[name][i] for name, i in zip(names, best, strict=True)}))
    return cases


PAIRWISE = pairwise(GRID)
