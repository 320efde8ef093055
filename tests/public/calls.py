"""The calls that the public functions are judged on: a grid of what a user may vary, its pairwise cover, and one call of it."""

import itertools
import math
import random
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import attemper
from public.definition import attend
from serving import SEED

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
GRID: dict[str, list] = {
    "entry": ["attention", "attention", "attention", "measure", "weights", "sdpa", "cosine", "additive", "merge"],
    "layout": [4, 4, 4, 2, 3, 5],
    "strides": ["plain", "heads last", "turned", "slice", "steps", "expanded"],
    "heads": [(2, 2), (4, 2), (3, 1), (1, 1)],
    "mask": ["none", "full", "padding", "keys", "empty rows", "bias", "bias row", "bias head", "bias -inf", "bias low"],
    "causal": [False, True, "lower_right"],
    "window": [None, None, 1, 5],
    "softcap": [None, None, 3.0],
    "scale": [None, "number", "negative", "one", "heads", "rows"],
    "dtype": list(DTYPES),
    "lengths": [(1, 1), (2, 3), (1, 40), (7, 7), (33, 33), (9, 50), (50, 9), (17, 70)],
    "dims": [(1, 1), (5, 7), (8, 8), (16, 24), (33, 20), (64, 64)],
    "size": [1.0, 1.0, 4.0],
    "signs": ["all", "all", ("entropy",), ("peak", "sum_p2"), ("evenness", "mean"), ("variance", "top_weight"), ()],
    "kernel": ["auto", "auto", "cpu", "blockwise", "reference"],
    "loss": ["output", "output", "mean", "variance", "peak", "lse", "entropy", "sum_p2"],
    "wanted": ["all", "all", "query", "key", "value", "mask and scale", "none"],
    "documents": ["none", "none", "shared", "each"],
    "sink": [False, False, True],
    "read": ["at once", "no_grad", "inference"],
}
LONG = {"lengths": [(111, 257), (257, 257), (300, 64), (1, 700)], "dims": [(60, 60), (128, 80), (80, 128), (24, 130)]}
"""What the exhaustive grid has besides."""


@dataclass(frozen=True)
class Call:
    """One point of the grid; `leaves` are contiguous, and `arguments` lays them out as the call has them."""

    entry: str
    layout: int
    strides: str
    heads: tuple[int, int]
    mask: str
    causal: bool | str
    window: int | None
    softcap: float | None
    scale: str | None
    dtype: str
    lengths: tuple[int, int]
    dims: tuple[int, int]
    size: float
    signs: Any
    kernel: str
    loss: str
    wanted: str
    documents: str
    sink: bool
    read: str
    seed: int = field(default=SEED)

    def __str__(self) -> str:
        parts = [
            self.entry,
            f"{self.layout}d",
            self.strides,
            self.dtype,
            "x".join(map(str, (*self.heads, *self.lengths))),
        ]
        parts += [
            f"E{self.dims[0]}-{self.dims[1]}",
            self.mask,
            str(self.causal),
            f"w{self.window}",
            f"cap{self.softcap}",
        ]
        parts += [f"scale {self.scale}", self.kernel, "+".join(self.signs) if self.signs != "all" else "all"]
        parts += [f"documents {self.documents}", *["sink"] * self.sink, *[self.read] * (self.read != "at once")]
        return " ".join([*parts, self.loss, self.wanted]).replace("[", "").replace("]", "")

    @property
    def lead(self) -> tuple[int, ...]:
        """The dimensions before the heads."""
        return {2: (), 3: (), 4: (2,), 5: (2, 2)}[self.layout]

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of a sign."""
        return (*self.lead, *self.heads[: self.layout > 2], self.lengths[0])

    def leaves(self) -> dict[str, Tensor]:
        """Everything that may have a gradient, or be a mask, in the call's dtypes; contiguous, and the same ones each time."""
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()) + self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        dtype, (dim, value_dim), (rows, keys) = DTYPES[self.dtype], self.dims, self.lengths
        found = {
            name: draw(*self.base(heads, length, width)) * size
            for name, heads, length, width, size in (
                ("query", self.heads[0], rows, dim, self.size),
                ("key", self.heads[1], keys, dim, 1.0),
                ("value", self.heads[1], keys, value_dim, 1.0),
            )
        }
        shape = {"one": (), "heads": (self.heads[0],), "rows": (*self.rows, 1)}
        if self.scale in shape:
            found["scale"] = (0.2 + draw(*shape[self.scale]).abs()) / math.sqrt(dim)
        if self.entry == "additive":
            found["weight"] = draw(*((dim,) if self.scale is None else (self.heads[0], dim)))
        if self.sink:
            found["sink"] = draw(self.heads[0])
        mask = self.drawn_mask(draw)
        if mask is not None:
            found["mask"] = mask
        wide = torch.promote_types(dtype, torch.float32)
        return {
            name: one if one.dtype == torch.bool else one.to(wide if name in ("scale", "sink") else dtype)
            for name, one in found.items()
        }

    def offsets(self) -> list[tuple[list[int], list[int]]]:
        """For each item, where its documents begin among queries and keys; the last document is empty, others may be."""

        def ends(length: int, item: int) -> list[int]:
            return sorted([0, length // 4, min(length, length // 2 + item), length, length])

        items = range(math.prod(self.lead))
        return [tuple(ends(n, item if self.documents == "each" else 0) for n in self.lengths) for item in items]

    def documents_given(self) -> Tensor | tuple[Tensor, Tensor]:
        offsets = self.offsets()
        of_rows, of_keys = (torch.tensor([one[i] for one in offsets], dtype=torch.int32) for i in (0, 1))
        shape = (*self.lead, -1) if self.documents == "each" else (-1,)
        of_rows, of_keys = (one.reshape(shape) if self.documents == "each" else one[0] for one in (of_rows, of_keys))
        return of_rows if self.lengths[0] == self.lengths[1] else (of_rows, of_keys.long())

    def base(self, heads: int, length: int, width: int) -> tuple[int, ...]:
        """The shape of the memory that a tensor is laid out from."""
        lead, own = self.lead, (heads,) * (self.layout > 2)
        if self.strides == "heads last":
            return (*lead, length, *own, width)
        if self.strides == "turned":
            return (*lead, *own, width, length)
        if self.strides == "slice":
            return (*lead, *own, length + 5, width + 3)
        if self.strides == "steps":
            return (*lead, *own, 2 * length, width)
        return (*((1,) * len(lead) if self.strides == "expanded" else lead), *own, length, width)

    def laid_out(self, one: Tensor, length: int, width: int) -> Tensor:
        if self.strides == "heads last":
            return one.transpose(-3, -2) if self.layout > 2 else one
        if self.strides == "turned":
            return one.mT
        if self.strides == "slice":
            return one[..., 2 : 2 + length, 1 : 1 + width]
        if self.strides == "steps":
            return one[..., ::2, :]
        return one.expand(*self.lead, *one.shape[len(self.lead) :]) if self.strides == "expanded" else one

    def drawn_mask(self, draw: Any) -> Tensor | None:
        (rows, keys), own = self.lengths, self.heads[: self.layout > 2]
        full, ones = (*self.rows, keys), (1,) * len(self.rows)
        if self.mask == "none":
            return None
        if self.mask == "full":
            return draw(*full) > -0.7
        if self.mask == "padding":
            return draw(*self.lead, *ones[len(self.lead) :], keys) > -0.7
        if self.mask == "keys":
            return torch.arange(keys) < max(1, keys - 3)
        if self.mask == "empty rows":
            mask = draw(*ones[:-1], rows, keys) > -0.7
            mask[..., ::3, :] = False
            return mask
        if self.mask == "bias row":
            return draw(*ones, keys)
        if self.mask == "bias head":
            return draw(*own, rows, 1).expand(*own, rows, keys).contiguous() if keys < 20 else draw(*own, rows, keys)
        mask = draw(*full) if self.mask == "bias" else draw(rows, keys)
        if self.mask in ("bias -inf", "bias low"):
            mask[draw(rows, keys) > 0.8] = -math.inf if self.mask == "bias -inf" else -3e4
            mask[0] = -math.inf if self.mask == "bias -inf" else mask[0]
        return mask

    def arguments(self, leaves: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
        """q, k and v as views of the leaves; and the options that the definition has too."""
        (rows, keys), (dim, value_dim) = self.lengths, self.dims
        sizes = {"query": (rows, dim), "key": (keys, dim), "value": (keys, value_dim)}
        options = {"mask": leaves.get("mask"), "causal": self.causal, "window": self.window}
        options |= {"sink": leaves["sink"]} if self.sink else {}
        if self.entry == "additive":
            options["weight"] = leaves["weight"]
        else:
            fixed = {"number": 0.3, "negative": -0.2}
            options["scale"] = leaves.get("scale", fixed.get(self.scale or "", 2.0 if self.entry == "cosine" else None))
            options |= {"softcap": self.softcap} if self.entry != "cosine" else {}
        return [self.laid_out(leaves[name], *size) for name, size in sizes.items()], options

    def defined(self, leaves: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
        """By the definition."""
        (q, k, v), options = self.arguments(leaves)
        score = self.entry if self.entry in ("cosine", "additive") else "dot"
        options |= {"documents": self.offsets()} if self.documents != "none" else {}
        return attend(q, k, v, score=score, **options, **more)

    def run(self, leaves: dict[str, Tensor], signs: Any) -> tuple[dict[str, Tensor], Any]:
        """By the public function: what can be read, by name, and the Vitals."""
        (q, k, v), options = self.arguments(leaves)
        if self.documents != "none" and self.entry == "sdpa":
            tensors = [jagged(one, ends) for one, ends in zip((q, k, v), self.jagged_offsets(), strict=True)]
            found = attemper.sdpa(*tensors, is_causal=self.causal, scale=options["scale"], enable_gqa=True)
            return {"output": found.values()}, None
        options |= {"documents": self.documents_given()} if self.documents != "none" else {}
        named = {"signs": signs, "kernel": self.kernel}
        if self.entry == "weights":
            return {"weights": attemper.weights(q, k, **options)}, None
        if self.entry == "sdpa":
            options = {"attn_mask": options["mask"], "is_causal": self.causal, "scale": options["scale"]}
            return {"output": attemper.sdpa(q, k, v, **options, enable_gqa=True)}, None
        if self.entry == "measure":
            vitals = self.first_read(attemper.measure(q, k, **options, **named))
            return vitals.to_dict(), vitals
        if self.entry == "cosine":
            output, vitals = attemper.cosine_attention(q, k, v, **options, **named)
        elif self.entry == "additive":
            output, vitals = attemper.additive_attention(q, k, v, options.pop("weight"), **options, signs=signs)
        elif self.entry == "merge":
            output, vitals = attemper.merge(list(self.shards(q, k, v, options, named)))
        else:
            output, vitals = attemper.attention(q, k, v, **options, **named)
        return {"output": output} | self.first_read(vitals).to_dict(), vitals

    def first_read(self, vitals: Any) -> Any:
        """The vitals, read in another mode first."""
        if self.read != "at once":
            with torch.no_grad() if self.read == "no_grad" else torch.inference_mode():
                vitals.to_dict()
        return vitals

    def jagged_offsets(self) -> list[Tensor]:
        """Of query, key and value, which say that two have the same sequences by having the same tensor."""
        of_rows, of_keys = (torch.tensor(ends) for ends in self.offsets()[0])
        return [of_rows] * 3 if self.lengths[0] == self.lengths[1] else [of_rows, of_keys, of_keys.clone()]

    def shards(self, q: Tensor, k: Tensor, v: Tensor, options: dict, named: dict) -> Any:
        """Three slices of the keys, one of them empty where there are few."""
        keys, mask = k.shape[-2], options["mask"]
        for first, last in itertools.pairwise((0, keys // 3, keys - keys // 4, keys)):
            part = mask if mask is None or mask.shape[-1] == 1 else mask[..., first:last]
            yield attemper.attention(
                q, k[..., first:last, :], v[..., first:last, :], **options | {"mask": part}, **named
            )


def jagged(one: Tensor, offsets: Tensor) -> Tensor:
    """(H, L, E) as sequences (B, H, j, E)."""
    return torch.nested.nested_tensor_from_jagged(one.transpose(0, 1), offsets).transpose(1, 2)


def sensible(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the grid as a call that may be made: what a function or a shape does not know is left out."""
    row = dict(row)
    entry = row["entry"]
    if row["layout"] == 2:
        row["heads"] = (1, 1)
        row["scale"] = "one" if row["scale"] in ("heads", "rows") else row["scale"]
    if entry in ("sdpa", "merge"):
        row["window"], row["sink"] = None, False
    if entry == "merge":
        row["documents"] = "none"
    if entry in ("sdpa", "weights"):
        row["read"] = "at once"
    if entry == "sdpa" and row["documents"] != "none":  # as jagged tensors
        row["documents"], row["layout"], row["mask"] = "shared", 3, "none"
    if entry in ("sdpa", "merge"):
        row["causal"] = row["causal"] is True and row["mask"] == "none" if entry == "sdpa" else False
    if entry == "sdpa":
        row["softcap"], row["kernel"], row["layout"] = None, "auto", max(3, row["layout"])
        row["scale"] = row["scale"] if row["scale"] in (None, "number", "negative") else None
    if entry in ("cosine", "additive"):
        row["softcap"] = None
    if entry in ("weights", "additive"):
        row["kernel"] = "auto"
    if entry == "additive":
        row["scale"] = row["scale"] if row["scale"] == "heads" else None
    if entry in ("weights", "sdpa"):
        row["signs"], row["loss"] = "all", {"weights": "weights", "sdpa": "output"}[entry]
    if entry == "measure":
        row["loss"], row["signs"] = "lse" if row["loss"] == "output" else row["loss"], row["signs"] or "all"
    if entry == "merge":
        row["signs"] = "all"
    return row


def cover(grid: dict[str, list], seed: int) -> list[Call]:
    """Calls that hold every pair of values of every two features at least once, found greedily before `sensible`."""
    names, rng = list(grid), random.Random(seed)
    sizes = [len(grid[name]) for name in names]
    columns = list(itertools.combinations(range(len(names)), 2))
    left = {(a, x, b, y) for a, b in columns for x in range(sizes[a]) for y in range(sizes[b])}
    calls = []
    while left:
        a, x, b, y = min(left) if rng.random() < 0.2 else next(iter(left))
        tries = []
        for _ in range(12):
            row = [rng.randrange(size) for size in sizes]
            row[a], row[b] = x, y
            pairs = {(i, row[i], j, row[j]) for i, j in columns} & left
            tries.append((len(pairs), row, pairs))
        _, row, pairs = max(tries, key=lambda one: one[0])
        left -= pairs
        drawn = {name: grid[name][i] for name, i in zip(names, row, strict=True)}
        calls.append(Call(**sensible(drawn), seed=SEED + seed))
    return calls
