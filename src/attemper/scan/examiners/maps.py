"""Maps: the attention weights that a report shows, in as few bytes as it needs.

A short text is stored whole, in 8 or 16 bits a weight. A long text is stored as the eight largest weights of up to 512 rows, or
of fewer rows if there are many layers, so that a report has a few megabytes at most; an image as the 64 largest weights of
fewer rows. A thumbnail sums up the rest: for 16 × 16 blocks of queries and keys, the share of the queries' weight on the keys.
"""

from __future__ import annotations

import base64
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...vitals import Vitals
from ...watch.examine import AttentionCall, chunks, weights_of_rows
from ..document import DenseMap, Thumbnail, TopMap
from .items import CurrentInput, Item, items

WHOLE, WHOLE_IMAGE = 128, 256  # tokens; of a longer text only the largest weights are stored
FINE, COARSE = 2**18, 2**20  # with up to so many weights in all, each has 16 bits, or 8
TOP, TOP_IMAGE, ROWS = 8, 64, 512
BYTES = 3 * 2**19  # for all largest weights and their keys; 2 MiB in base64
TEXTS = 4  # inputs whose weights are stored
SIDES, SMALL = (16, 8), 2**18  # blocks along a thumbnail, the most that fit, and bytes of all thumbnails
MOST = 2**16 - 1


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """One layer and one input: the weights of some rows, all or the largest."""

    about: dict[str, Any]  # layer, kind, input, heads, queries and keys, as in the document
    top: int  # how many of the largest weights of a row are stored, if not all
    weights: Tensor  # (H, R, keys or top), 16-bit numbers in int32
    places: Tensor | None  # (H, R, top), the keys of the largest weights; None: whole
    rows: Tensor  # (R,), int64
    blocks: Tensor  # (H, blocks of queries, blocks of keys), the weight in each, summed over its rows
    counts: Tensor  # (blocks of queries,), the rows in each


Drawn = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]  # weights to counts


class AttentionMaps:
    """Examiner: set ``current`` before each pass, read ``attention()`` after the last. ``notes`` lists what is not shown."""

    def __init__(self, current: CurrentInput | None = None) -> None:
        self.current = current or CurrentInput()
        self.notes: list[str] = []
        self._maps: dict[tuple[str, str, int], AttentionMap] = {}

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> list[tuple[Item, Drawn]]:
        first: dict[int, Item] = {}
        for item in items(call, rows, self.current):
            if item.number < TEXTS and item.rows[1] > item.rows[0]:
                first.setdefault(item.number, item)  # the first item of a batch
        return [(item, _drawn(call, vitals, item, self.current.items.image)) for item in first.values()]

    def keep(self, name: str, call: AttentionCall, drawn_items: list[tuple[Item, Drawn]]) -> None:
        kind = call.info.kind
        numbers = self.current.items.inputs or (0,)
        if max(numbers) >= TEXTS:
            self._note(f"the report shows the attention weights of the first {TEXTS} inputs only")
        elif not drawn_items:
            self._note(
                f"{name or 'the model'}: its weights are not shown, because its columns are not the keys in order"
            )
        for item, drawn in drawn_items:
            place = (name, kind, item.number)
            if place in self._maps:  # weights shared by several layers
                what = (
                    "runs more than once in a pass; the weights of its first call are shown"
                    if call.document is None
                    else "its input is packed; the weights of its first document are shown"
                )
                self._note(f"{name or 'the model'}: {what}")
                continue
            queries, keys = item.rows[1] - item.rows[0], item.keys[1] - item.keys[0]
            top = min(keys, TOP_IMAGE if self.current.items.image else TOP)
            about = {"layer": name, "kind": kind, "input": item.number, "heads": len(drawn[0]), "queries": queries}
            self._maps[place] = AttentionMap({**about, "keys": keys}, top, *drawn)

    def attention(self) -> list[DenseMap | TopMap]:
        """The maps in the document's format: ``dense`` if the weights are few enough, otherwise ``top``."""
        maps = list(self._maps.values())
        whole = [picture for picture in maps if picture.places is None]
        count = sum(picture.weights.numel() for picture in whole)
        bits = 16 if count <= FINE else 8
        # 8 bits are too few for a row of hundreds of patches
        dense = whole if count <= (FINE if any(picture.top > TOP for picture in whole) else COARSE) else []
        tops = [picture for picture in maps if picture not in dense]
        left = max(BYTES // 4, BYTES - (count * bits // 8 if dense else 0))
        rows = left // max(1, sum(picture.weights.shape[0] * picture.top * _width(picture) for picture in tops))
        heads = sum(picture.weights.shape[0] for picture in tops)
        side = next((side for side in SIDES if heads * side**2 <= SMALL), 0)
        if not side:
            self._note(
                f"the thumbnails of {heads} heads are made from their largest weights, because there are so many"
            )
        return [_dense(picture, bits) if picture in dense else _top(picture, max(1, rows), side) for picture in maps]

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)


def _drawn(call: AttentionCall, vitals: Vitals, item: Item, image: bool) -> Drawn:
    """The weights of one item as 16-bit numbers, their keys if only the largest are kept, the rows, and the blocks."""
    (start, stop), (first, last) = item.rows, item.keys
    whole = max(stop - start, last - first) <= (WHOLE_IMAGE if image else WHOLE)
    top = min(TOP_IMAGE if image else TOP, last - first)
    count = stop - start
    rows = torch.linspace(0, count - 1, min(count, ROWS), device="cpu").round().long()
    drawn, places, sums = [], [], []
    for part in chunks(call, (rows + start).to(vitals.lse.device)):
        weights = weights_of_rows(call, vitals, part, item.index)[0, ..., first:last].nan_to_num_(0.0)
        sums.append(_summed(weights, -1, _sizes(torch.arange(last - first, device="cpu"), last - first)).cpu())
        if not whole:
            weights, where = weights.topk(top, -1)
            places.append(where.int().cpu())
        drawn.append((weights * MOST).round().int().cpu())
    counts = _sizes(rows, count)
    blocks = _summed(torch.cat(sums, 1), -2, counts)
    return torch.cat(drawn, 1), None if whole else torch.cat(places, 1), rows, blocks, counts


def _sizes(indices: Tensor, length: int, side: int = SIDES[0]) -> Tensor:
    """How many of these indices are in each block of a length that is cut into at most ``side`` blocks."""
    side = max(1, min(side, length))
    return torch.bincount(indices * side // max(1, length), minlength=side)


def _summed(numbers: Tensor, dim: int, sizes: Tensor) -> Tensor:
    """The sums over blocks of a dimension."""
    return torch.stack([part.sum(dim) for part in numbers.split(sizes.tolist(), dim)], dim)


def _dense(picture: AttentionMap, bits: int) -> DenseMap:
    weights = picture.weights.numpy()
    if bits == 8:
        weights = np.rint(weights * (255 / MOST))
    return DenseMap(**picture.about, bits=bits, data=_base64(weights, bits // 8))


def _top(picture: AttentionMap, most: int, side: int) -> TopMap:
    """The largest weights of at most ``most`` rows, and a thumbnail of at most ``side`` blocks a side."""
    weights, places = picture.weights, picture.places
    if places is None:
        weights, places = weights.topk(picture.top, -1)
    rows = picture.rows
    if len(rows) > most:
        chosen = torch.linspace(0, len(rows) - 1, most, device="cpu").round().long()
        rows, weights, places = rows[chosen], weights[:, chosen], places[:, chosen]
    return TopMap(
        **picture.about,
        k=weights.shape[-1],
        rows=rows.tolist(),
        indices=_base64(places.numpy(), 2 if picture.about["keys"] <= MOST else 4),
        weights=_base64(weights.numpy(), 2),
        thumbnail=_thumbnail(picture, side) if side else None,
    )


def _thumbnail(picture: AttentionMap, side: int) -> Thumbnail:
    blocks, counts = picture.blocks, picture.counts
    for dim in (-2, -1):
        length = blocks.shape[dim]
        sizes = _sizes(torch.arange(length, device="cpu"), length, side)
        blocks, counts = _summed(blocks, dim, sizes), _summed(counts, 0, sizes) if dim == -2 else counts
    shares = (blocks / counts.clamp(min=1)[:, None]).clamp(max=1.0)
    data = _base64(np.rint(shares.numpy() * 255), 1)
    return Thumbnail(rows=shares.shape[1], columns=shares.shape[2], data=data)


def _width(picture: AttentionMap) -> int:
    """The bytes of a weight and the index of its key."""
    return 4 if picture.about["keys"] <= MOST else 6


def _base64(numbers: npt.NDArray[Any], size: int) -> str:
    whole = numbers.astype({1: np.uint8, 2: np.uint16, 4: np.uint32}[size])
    return base64.b64encode((whole if sys.byteorder == "little" else whole.byteswap()).tobytes()).decode()
