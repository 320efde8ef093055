"""read_heads(): a sentence through a real model: the scan's document, and the logits of every head as the model applies them.

A page multiplies these logits by a factor and computes the softmax again: that is the head under another scale.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attemper import Vitals
from attemper.errors import InputError
from attemper.extension.calls import AttentionCall, BatchItems, CurrentInput, Examiner, examine, items, logits_of_keys
from attemper.extension.inputs import Input, Loaded, call, evaluating, make, run

Floats = npt.NDArray[np.float32]

MOST = 2**26
"""The most logits that are kept: 256 MiB of float32."""
WHOLE = 2**18
"""The most logits of which a document has all: a page then re-tempers its whole map. Of more it asks for one head at a time."""
SIDE = 16
"""Blocks along a side of a thumbnail, as in a scan."""
HIDDEN = -1e4
"""An added mask of this or less hides its key, as everywhere in attemper."""


@dataclass(frozen=True, eq=False)
class LayerLogits:
    """One layer on one text: the logits of its heads, -inf where a key is hidden, and whether they are scale · q·k alone."""

    layer: str
    kind: str  # "self" or "cross"
    logits: Tensor  # (H, queries, keys), float32
    plain: bool  # no softcap and no added bias: a factor on the logits is a factor on the scale

    def thumbnail(self) -> dict[str, Any]:
        """The share of each block of queries' weight on each block of keys: at most 16 × 16 bytes a head, as in a scan."""
        weights = self.logits.softmax(-1).nan_to_num()  # a row that sees no key has no weight
        heads, queries, keys = weights.shape
        rows, columns = min(SIDE, queries), min(SIDE, keys)
        line, place = torch.arange(queries) * rows // queries, torch.arange(keys) * columns // keys
        sums = weights.new_zeros(heads, rows, keys).index_add_(1, line, weights)
        shares = weights.new_zeros(heads, rows, columns).index_add_(2, place, sums) / line.bincount()[:, None]
        data = (255 * shares.clamp(max=1)).round().byte().numpy().tobytes()
        return {"rows": rows, "columns": columns, "data": base64.b64encode(data).decode()}

    def document(self, scanned: dict[str, Any]) -> dict[str, Any]:
        """The sizes of the layer, and the scale that the scan read of it."""
        heads, queries, keys = self.logits.shape
        return {
            "layer": self.layer,
            "kind": self.kind,
            "heads": heads,
            "queries": queries,
            "keys": keys,
            "head_dim": scanned["head_dim"],
            "applied": scanned["scale"]["applied"],
            "rule": scanned["scale"]["rule"],
            "plain": self.plain,
        }


@dataclass(frozen=True, eq=False)
class TextHeads:
    """A text in a model: the scan's document, and the logits of each layer in the order they ran."""

    scan: dict[str, Any]
    layers: tuple[LayerLogits, ...]

    def document(self) -> dict[str, Any]:
        """Plain data: the scan's document, its tokens, and for each layer its sizes and the scale it applies.

        ``logits`` has those of all heads, layer by layer, as base64 of float32; None where the text is long, and then each
        layer has a ``thumbnail`` of its heads' weights.
        """
        scanned = {(layer["layer"], layer["kind"]): layer for layer in self.scan["layers"]}
        (source,) = self.scan["inputs"]
        whole = self.count <= WHOLE
        return {
            **{name: source[name] for name in ("text", "tokens", "special")},
            "layers": [
                layer.document(scanned[layer.layer, layer.kind]) | ({} if whole else {"thumbnail": layer.thumbnail()})
                for layer in self.layers
            ],
            "logits": self._all() if whole else None,
            "scan": self.scan,
        }

    @property
    def count(self) -> int:
        """How many logits there are."""
        return sum(layer.logits.numel() for layer in self.layers)

    def logits(self, layer: int, head: int) -> Floats:
        """The logits of a head, queries × keys: scaled as the model scales them, -inf where a key is hidden."""
        checked_head(self.layers, layer, head)
        return np.ascontiguousarray(self.layers[layer].logits[head].numpy())

    def _all(self) -> str:
        return packed(np.concatenate([layer.logits.numpy().ravel() for layer in self.layers]))


def checked_head(layers: Sequence[LayerLogits], layer: int, head: int) -> None:
    """Refuse a layer or a head that the model does not have."""
    if not 0 <= layer < len(layers):
        raise InputError(f"page: `layer` must be from 0 to {len(layers) - 1}; got {layer}.")
    if not 0 <= head < len(layers[layer].logits):
        raise InputError(f"page: `head` must be from 0 to {len(layers[layer].logits) - 1}; got {head}.")


class KeptLogits(Examiner):
    """The examiner that keeps the logits of each layer's first call on one text."""

    def __init__(self, text: Input) -> None:
        self.layers: dict[tuple[str, str], LayerLogits] = {}
        self.count = 0
        tokens = None if text.tokens is None else (tuple(text.tokens),)
        self.current = CurrentInput(BatchItems(inputs=(0,), tokens=tokens))

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> tuple[Tensor, bool] | None:
        parts = items(call, rows, self.current)
        if not parts:
            return None
        (start, stop), (first, last) = parts[0].rows, parts[0].keys
        self.count += call.info.heads * (stop - start) * (last - first)
        if self.count > MOST:
            raise InputError(
                f"page: the text is too long: a page keeps at most {MOST:,} logits of a model, and a text of {stop - start} "
                "tokens has more. Type a shorter text."
            )
        logits = logits_of_keys(call, parts[0].index, torch.arange(first, last, device=vitals.lse.device))
        logits = logits[:, start:stop].float().cpu()
        return logits.masked_fill(logits <= HIDDEN, float("-inf")), _is_plain(call)

    def keep(self, name: str, call: AttentionCall, result: tuple[Tensor, bool] | None) -> None:
        kind = call.info.kind
        if (
            result is not None and (name, kind) not in self.layers
        ):  # a module that runs on several inputs: the first one
            self.layers[name, kind] = LayerLogits(name, kind, *result)


def read_heads(model: Loaded, text: str) -> TextHeads:
    """Run a model on a text and keep what the page shows of every head.

    Args:
        model: as :func:`attemper.extension.inputs.load` returns it; ``load(None)`` is the embedded MiniLM.
        text: what it reads. A text that is longer than its positions is refused.
    """
    (given,) = make(model, texts=[text])
    scan = run(model, [given], pictures=False)
    if scan.interrupted:
        raise KeyboardInterrupt
    logits_examiner = KeptLogits(given)
    with evaluating(model.model), examine(model.model, [logits_examiner], caller="page", by_call=True):
        call(model.model, given.batch)
    if not logits_examiner.layers:
        raise InputError(
            f"page: no attention of {model.name} can be drawn: its columns are not the tokens in order. Name another model."
        )
    return TextHeads(scan.to_dict(), tuple(logits_examiner.layers.values()))


def packed(numbers: npt.NDArray[Any] | Sequence[float]) -> str:
    """Numbers as base64 of little-endian float32."""
    return base64.b64encode(np.asarray(numbers).astype("<f4").tobytes()).decode()


def _is_plain(call: AttentionCall) -> bool:
    """Whether a call's logits are scale · q·k and nothing else, as far as its options show."""
    if call.softcap is not None or call.info.softcap is not None or call.logits is not None:
        return False  # of stored logits it is not known what was added
    mask = call.mask
    if mask is None or mask.dtype == torch.bool:
        return True
    return bool(((mask == 0) | (mask <= HIDDEN)).all())
