"""register_attention() and output_attentions(): ``attn_implementation="attemper"`` in transformers, and weights without eager."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _files
from ..errors import InputError, checked_options, nearest
from ..vitals import Vitals
from ..watch import Watch, watch
from ..watch.examine import REPLACED, AttentionCall, is_in, named_modules, register, weights_of_rows


def register_attention() -> str:
    """Make ``attn_implementation="attemper"`` known to transformers: attention by attemper's kernels.

    Call it once, before a model is made or switched: ``AutoModel.from_config(config, attn_implementation="attemper")``,
    ``from_pretrained`` in the same way, ``model.set_attn_implementation("attemper")``. Nothing changes in models that do not ask
    for it. Masks, windows, softcaps, sinks, packed sequences, caches and dropout are those of the model; ``watch(model)`` and
    ``instrument(model)`` read the vitals. With ``output_attentions=True`` in a call, a model that hands it on gets the whole
    matrix of weights, before dropout; :func:`output_attentions` gives some rows of some layers, of any model.

    Needs transformers 4.54 or newer.

    Returns:
        the name, ``"attemper"``.

    Example:
        >>> import transformers
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, bos_token_id=1, eos_token_id=1)
        >>> name = attemper.integrations.register_attention()
        >>> model = transformers.AutoModel.from_config(config, attn_implementation=name)
        >>> with attemper.watch(model) as watch:
        ...     output = model(torch.tensor([[3, 1, 4]]))
        >>> watch.record.info["h.0.attn", "self"].implementation
        'attemper'
    """
    _files.load("register_attention()", "transformers", "hf")
    _files.load("register_attention()", "transformers.modeling_utils", "hf")
    register()
    return REPLACED


@checked_options
def output_attentions(
    model: nn.Module, *, layers: str | Iterable[str] | None = None, rows: int | Iterable[int] | None = None
) -> OutputAttentions:
    """The attention weights of chosen rows of chosen layers, whatever computes the attention: SDPA, flash or attemper.

    ``with attemper.integrations.output_attentions(model, layers=…, rows=…) as weights:`` around calls of the model. They are
    computed a second time, for these rows alone, so the model runs as before, bit for bit, and no L × L matrix is stored unless
    all rows are asked for.

    Args:
        model: as in ``watch()``.
        layers: names of modules, as in ``model.named_modules()``; the attention calls in them count. None: all.
        rows: which queries, counted from the end if negative: ``-1`` is the last one. What a shorter call does not have is left
            out. None: all.

    Returns:
        a context manager; it gives a dict from the name of a layer to a list of its weights, one tensor ``(B, H, rows, keys)``
        for each call, in float32, before dropout, without a graph. In a packed batch, each document is a call.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> with attemper.integrations.output_attentions(model, layers="self_attn", rows=[0, -1]) as weights:
        ...     output = model(torch.randn(1, 5, 16))
        >>> weights["self_attn"][0].shape
        torch.Size([1, 2, 2, 5])
    """
    return OutputAttentions(model, layers, rows)


class OutputAttentions:
    """Collects weights; made by :func:`output_attentions`. An examiner of the watch that it opens."""

    def __init__(self, model: nn.Module, layers: str | Iterable[str] | None, rows: int | Iterable[int] | None) -> None:
        self.weights: dict[str, list[Tensor]] = {}
        self._watch: Watch = watch(model, signs="lse", passes="all", examiners=[self])
        self._names = named_modules(model)
        self._layers = [""] if layers is None else [layers] if isinstance(layers, str) else list(layers)
        for name in self._layers:
            if name not in self._names.values():
                raise InputError(
                    f"output_attentions(): `layers` must be names of modules of the model; got {name!r}. "
                    f"{nearest(name, [known for known in self._names.values() if known])}"
                )
        self._rows = None if rows is None else [rows] if isinstance(rows, int) else list(rows)
        if self._rows is not None and not all(type(row) is int for row in self._rows):
            raise InputError(
                f"output_attentions(): `rows` must be whole numbers, such as [0, -1]; got {rows!r}. Leave it out for all rows."
            )

    def __enter__(self) -> dict[str, list[Tensor]]:
        self.weights.clear()
        self._watch.__enter__()
        return self.weights

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        self._watch.__exit__(error_type, error, trace)
        missing = [name for name in self._layers if not any(is_in(measured, name) for measured in self.weights)]
        if error_type is None and missing:
            raise InputError(
                f"output_attentions(): {missing[0] or 'the model'!r} gave no weights: no attention call ran in it, or none had "
                f"the rows {self._rows}. attemper.watch(model) shows the layers that attend, and their lengths."
            )

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> Tensor | None:
        """The weights of the chosen rows; None in other layers."""
        name = next((self._names[frame.module] for frame in reversed(call.frames) if frame.module in self._names), "")
        length = call.info.queries
        chosen = range(length) if self._rows is None else self._rows
        indices = [row + length * (row < 0) for row in chosen if -length <= row < length]
        if not indices or not any(is_in(name, layer) for layer in self._layers):
            return None
        before, after = call.sink_columns
        weights = weights_of_rows(call, vitals, torch.tensor(indices, device=vitals.lse.device))
        return weights[..., before : weights.shape[-1] - after]

    def keep(self, name: str, call: AttentionCall, rows: Tensor | None) -> None:
        """Keep the weights of a call that turned out to be attention."""
        if rows is not None:
            self.weights.setdefault(name, []).append(rows)
