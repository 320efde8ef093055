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

from ...errors import InputError
from ...scan.examiners.items import BatchItems, CurrentInput, items
from ...scan.input.batch import Input, call, make
from ...scan.input.model import Loaded
from ...scan.run import evaluating, run
from ...vitals import Vitals
from ...watch.examine import AttentionCall, Examiner, examine, logits_of_keys

Floats = npt.NDArray[np.float32]

MOST = 2**26
"""Logits that are kept, at most: 256 MiB of float32."""
WHOLE = 2**18
"""Logits up to which a document has those of all heads: a page then re-tempers its whole map. Otherwise it asks head by head."""
HIDDEN = -1e4
"""An added mask of this or less hides its key, as everywhere in attemper."""


@dataclass(frozen=True, eq=False)
class LayerLogits:
    """One layer on one text: the logits of its heads, -inf where a key is hidden, and whether they are scale · q·k alone."""

    layer: str
    kind: str  # "self" or "cross"
    logits: Tensor  # (H, queries, keys), float32
    plain: bool  # no softcap and no added bias: a factor on the logits is a factor on the scale


@dataclass(frozen=True, eq=False)
class TextHeads:
    """A text in a model: the scan's document, and the logits of each layer in the order they ran."""

    scan: dict[str, Any]
    layers: tuple[LayerLogits, ...]

    def document(self) -> dict[str, Any]:
        """Plain data: the scan's document, its tokens, and for each layer its sizes and the scale it applies.

        ``logits`` has those of all heads, layer by layer, as base64 of float32; None where the text is long.
        """
        applied = {(one["layer"], one["kind"]): one for one in self.scan["layers"]}
        (source,) = self.scan["inputs"]
        return {
            "text": source["text"],
            "tokens": source["tokens"],
            "special": source["special"],
            "layers": [_about(one, applied[one.layer, one.kind]) for one in self.layers],
            "logits": self._all() if self.count <= WHOLE else None,
            "scan": self.scan,
        }

    @property
    def count(self) -> int:
        """How many logits there are."""
        return sum(one.logits.numel() for one in self.layers)

    def logits(self, layer: int, head: int) -> Floats:
        """The logits of a head, queries × keys: scaled as the model scales them, -inf where a key is hidden."""
        if not 0 <= layer < len(self.layers):
            raise InputError(f"page: `layer` must be from 0 to {len(self.layers) - 1}; got {layer}.")
        found = self.layers[layer].logits
        if not 0 <= head < len(found):
            raise InputError(f"page: `head` must be from 0 to {len(found) - 1}; got {head}.")
        return np.ascontiguousarray(found[head].numpy())

    def _all(self) -> str:
        return packed(np.concatenate([one.logits.numpy().ravel() for one in self.layers]))


class KeptLogits(Examiner):
    """The examiner that keeps the logits of each layer's first call on one text."""

    def __init__(self, one: Input) -> None:
        self.layers: dict[tuple[str, str], LayerLogits] = {}
        self.count = 0
        self.current = CurrentInput(
            BatchItems(inputs=(0,), tokens=None if one.tokens is None else (tuple(one.tokens),))
        )

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> tuple[Tensor, bool] | None:
        found = items(call, rows, self.current)
        if not found:
            return None
        (start, stop), (first, last) = found[0].rows, found[0].keys
        self.count += call.facts.heads * (stop - start) * (last - first)
        if self.count > MOST:
            raise InputError(
                f"page: the text is too long: a page keeps at most {MOST:,} logits of a model, and a text of {stop - start} "
                "tokens has more. Type a shorter text."
            )
        logits = logits_of_keys(call, found[0].place, torch.arange(first, last, device=vitals.lse.device))
        logits = logits[:, start:stop].float().cpu()
        return logits.masked_fill(logits <= HIDDEN, float("-inf")), _is_plain(call)

    def keep(self, name: str, call: AttentionCall, found: tuple[Tensor, bool] | None) -> None:
        kind = call.facts.kind
        if found is not None and (name, kind) not in self.layers:  # weights shared by several layers: the first call
            self.layers[name, kind] = LayerLogits(name, kind, *found)


def read_heads(model: Loaded, text: str) -> TextHeads:
    """Run a model on a text and keep what the page shows of every head.

    Args:
        model: as :func:`attemper.scan.input.model.load` returns it; ``load(None)`` is the embedded MiniLM.
        text: what it reads. A text that is longer than its positions is refused.
    """
    (one,) = make(model, texts=[text])
    found = run(model, [one], pictures=False)
    if found.interrupted:
        raise KeyboardInterrupt
    kept = KeptLogits(one)
    with evaluating(model.model), examine(model.model, [kept], caller="page"):
        call(model.model, one.batch)
    if not kept.layers:
        raise InputError(
            f"page: no attention of {model.name} can be drawn: its columns are not the tokens in order. Name another model."
        )
    return TextHeads(found.to_dict(), tuple(kept.layers.values()))


def packed(numbers: npt.NDArray[Any] | Sequence[float]) -> str:
    """Numbers as base64 of little-endian float32."""
    return base64.b64encode(np.asarray(numbers).astype("<f4").tobytes()).decode()


def _about(one: LayerLogits, layer: dict[str, Any]) -> dict[str, Any]:
    heads, queries, keys = one.logits.shape
    scale = layer["scale"]
    return {
        "layer": one.layer,
        "kind": one.kind,
        "heads": heads,
        "queries": queries,
        "keys": keys,
        "head_dim": layer["head_dim"],
        "applied": scale["applied"],
        "rule": scale["rule"],
        "plain": one.plain,
    }


def _is_plain(call: AttentionCall) -> bool:
    """Whether a call's logits are scale · q·k and nothing else, as far as its options show."""
    if call.softcap is not None or call.facts.softcap is not None or call.logits is not None:
        return False  # of stored logits it is not known what was added
    mask = call.mask
    if mask is None or mask.dtype == torch.bool:
        return True
    return bool(((mask == 0) | (mask <= HIDDEN)).all())
