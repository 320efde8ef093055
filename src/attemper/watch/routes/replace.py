"""replace=True: our kernels in the place of a Hugging Face model's own attention, so that vitals cost no second pass.

One name goes into two tables. Without the second, the mask table, transformers would pass no mask at all, in silence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from ...attention import attention
from ...errors import InputError
from ..attach.running import Frame, kind_of, running
from ..call import Call, Facts, without_modes
from .transformers import is_causal, refusal, with_bias

NAME = "attemper"


class Replacement:
    """Switches a model to our kernels and back."""

    def __init__(self, model: nn.Module, attend: Callable[..., Any]) -> None:
        library = sys.modules.get("transformers.modeling_utils")
        if library is None or not isinstance(model, library.PreTrainedModel):
            raise InputError(
                "watch(): replace=True needs a Hugging Face model that uses the attention interface; "
                f"got {type(model).__name__}. Leave it out: the model's own attention is then measured beside."
            )
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        self.tables = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
        self.entries = (attend, sdpa_mask)
        self.configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
        self.model = model

    def install(self) -> None:
        self.before = [(config, config._attn_implementation_internal) for config in self.configs.values()]
        self.replaced = [table.get(NAME) for table in self.tables]
        for table, entry in zip(self.tables, self.entries, strict=True):
            table[NAME] = entry
        used = [config for config, implementation in self.before if implementation is not None]
        self.model.set_attn_implementation(NAME)
        stayed = [config for config in used if config._attn_implementation != NAME]
        if stayed:
            self.uninstall()
            raise InputError(
                f"watch(): replace=True: {type(self.model).__name__} kept attn_implementation="
                f"{stayed[0]._attn_implementation!r}; it does not take its attention from the interface. Leave replace out."
            )

    def uninstall(self) -> None:
        """The model is as it was. The name stays known, as a copy made in the meantime may carry it, but measures nothing."""
        for config, implementation in self.before:
            config._attn_implementation_internal = implementation
        for table, entry, left in zip(self.tables, self.replaced, (unwatched, self.entries[1]), strict=True):
            table[NAME] = left if entry is None else entry


def attend_with(
    watching: Callable[[], bool], signs: tuple[str, ...], hear: Callable[[Call], None]
) -> Callable[..., Any]:
    """The function that transformers calls in place of its own: attention on our kernels, vitals on watched steps."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        reason = refusal(attention_mask, options)
        if reason is not None:
            raise InputError(
                f"watch(): replace=True cannot compute {type(module).__name__} with {reason}. Leave replace out: "
                "the model's own attention is then measured beside."
            )
        causal = attention_mask is None and is_causal(module, query, attention_mask, options)
        if attention_mask is None and causal and key.shape[2] > query.shape[2]:
            # a static cache that is being filled: what lies behind the queries is not there yet
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        mask = with_bias(attention_mask, options.get("position_bias"))
        softcap = options.get("softcap")
        listening = watching() and running.current is not None
        with without_modes() if listening else nullcontext():
            output, vitals = attention(
                query,
                key,
                value,
                mask=mask,
                causal=causal,
                scale=scaling,
                softcap=softcap,
                dropout=dropout,
                signs=signs if listening else (),
            )
        if listening:
            frames = tuple(running.frames)
            facts = _facts(frames, query, key, mask, causal, scaling, softcap, dropout, options)
            call = Call(facts, frames, query, key, mask=mask, causal=causal, scale=scaling, softcap=softcap)
            call.vitals = vitals
            hear(call)
        return output.transpose(1, 2).contiguous(), None

    attend.measures_itself = True  # type: ignore[attr-defined]
    return attend


unwatched = attend_with(lambda: False, (), lambda call: None)
"""What is left under our name: attention on our kernels, and nothing held of the watch that put it there."""


def _facts(
    frames: tuple[Frame, ...],
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float | None,
    softcap: float | None,
    dropout: float,
    options: dict[str, Any],
) -> Facts:
    return Facts.of(
        "replaced",
        kind_of(frames, query, key, (query.shape[2], key.shape[2])),
        query,
        key,
        scale=scaling,
        causal=causal,
        mask=mask,
        dropout=dropout,
        softcap=softcap,
        window=options.get("sliding_window"),
        declared=scaling,
        implementation=NAME,
    )
