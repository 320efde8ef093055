"""Registered: what transformers calls for ``attn_implementation="attemper"``: attention on attemper's kernels, and its masks.

One name in two tables for all models. Without the second, the mask table, transformers would silently pass no mask. A model
gets the name from its owner, or from a watch with ``replace=True``, ``floor()`` or ``instrument()``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import weights
from ...errors import AttemperError, InputError, internal_error
from ...operation.call_hooks import TALLY, target_of
from ...operation.run import Execution
from ...operation.run import attend as attend_by_attemper
from ...operation.tally import FAILED
from ..attach.attachment import attachment
from ..attach.running import running
from .packed import LENGTHS, offsets_of, within_documents
from .transformers import is_causal, refusal, with_bias
from .versions import check_switchable

REPLACED = "attemper"
"""The name."""
CALLER, FLOOR, INSTRUMENT = "watch(): replace=True", "floor()", "instrument()"
CHOSEN = f"attn_implementation={REPLACED!r}"
OTHERWISE = {
    CALLER: "Leave replace out: the model's own attention is then measured.",
    FLOOR: "Use attemper.qk_clip() instead, which changes no attention function.",
    INSTRUMENT: "Leave instrument out: attemper.watch(model) then runs watched steps eagerly.",
    CHOSEN: "Use attn_implementation='sdpa': attemper.watch(model) measures that too.",
}

ATTENDING: dict[int, list[Callable[..., Any]]] = {}
"""What computes the attention of a model in the place of `compute`, by the id of a config; the last of each is used."""


def register(caller: str = CHOSEN) -> None:
    """Make the name known to transformers, which must be loaded, and new enough to switch models to it."""
    check_switchable(caller, OTHERWISE[caller])
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(REPLACED, attend)
    AttentionMaskInterface.register(REPLACED, mask)


def read_arguments(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    options: dict[str, Any],
    caller: str,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys, values and the options of ``attention()``, from what transformers gives to an attention function."""
    reason = refusal(attention_mask, options)
    if query.shape[0] > 1 and options.get(LENGTHS[0]) is not None:
        reason = f"{LENGTHS[0]} over the items of a batch"
    if reason is not None:
        raise InputError(f"{caller} cannot compute {type(module).__name__} with {reason}. {OTHERWISE[caller]}")
    causal: bool | str = attention_mask is None and is_causal(module, query, options)
    documents, bias = offsets_of(options, query, key), options.get("position_bias")
    if documents is not None and torch.compiler.is_compiling() and query.is_cuda:
        # reading offsets waits for their device, which no CUDA graph may
        attention_mask, causal = within_documents(attention_mask, options, query, key, bool(causal)), False
        documents = None
    elif documents is not None:
        causal = "lower_right" if causal else False
    elif attention_mask is None and causal and key.shape[2] > query.shape[2]:
        # a static cache that is being filled: the keys after the queries are not computed yet
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        bias = None if bias is None else bias[..., : query.shape[2]]
    asked = {"mask": with_bias(attention_mask, bias), "causal": causal, "scale": scaling, "dropout": dropout}
    return (
        key,
        value,
        {**asked, "softcap": options.get("softcap"), "documents": documents, "sink": options.get("s_aux")},
    )


def weights_asked(query: Tensor, key: Tensor, keys: int, asked: dict[str, Any], options: dict[str, Any]) -> Any:
    """The weights on so many keys that ``output_attentions=True`` asks for, before dropout; None if it does not."""
    if not options.get("output_attentions"):
        return None
    matrices = weights(query, key, **{name: value for name, value in asked.items() if name != "dropout"})
    return torch.nn.functional.pad(matrices, (0, keys - matrices.shape[-1])).to(query.dtype)


def compute(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention on attemper's kernels, with its vitals added to the tally of the module, if it has one."""
    keys = key.shape[2]
    known: dict[str, Any] = {"implementation": REPLACED, "declared": scaling, "window": options.get("sliding_window")}
    target = target_of(module, "replaced", **known)
    caller = CHOSEN if target is None else INSTRUMENT
    key, value, asked = read_arguments(module, query, key, value, attention_mask, dropout, scaling, options, caller)
    output = attend_by_attemper("attention", query, key, value, (), Execution(tally=target), **asked).output
    return output.transpose(1, 2).contiguous(), weights_asked(query, key, keys, asked, options)


def _by(module: nn.Module) -> Callable[..., Any]:
    return ATTENDING.get(id(getattr(module, "config", None)), [compute])[-1]


def _failed(error: Exception, module: nn.Module) -> None:
    if running.current is not None:
        attachment.give_up(error, module)
        return
    if hasattr(module, TALLY):
        FAILED.add(f"{type(module).__name__}: {internal_error(error)}")
        return
    with suppress(Warning):
        warnings.warn(
            f"{type(module).__name__}: {internal_error(error)}. transformers' own attention runs.", stacklevel=3
        )


def attend_by_transformers(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Any:
    """transformers' own attention, on the mask that it makes for SDPA: by SDPA or, which alone has softcaps and sinks, eager."""
    causal = attention_mask is None and is_causal(module, query, options)
    within = within_documents(attention_mask, options, query, key, causal)  # neither reads offsets
    attention_mask = attention_mask if within is None else within
    if options.get("softcap") is None and options.get("s_aux") is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if attention_mask is None and is_causal(module, query, options):
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = query.new_zeros(()).masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    eager = next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))
    return eager(module, query, key, value, attention_mask, **options)


def attend(module: nn.Module, *args: Any, **options: Any) -> Any:
    """What transformers calls. After an error in attemper its own attention runs, but for errors that a trace raises."""
    if torch.compiler.is_compiling():
        return _by(module)(module, *args, **options)
    try:
        return _by(module)(module, *args, **options)
    except AttemperError:
        raise  # it says what to do
    except Exception as error:
        _failed(error, module)
    return attend_by_transformers(module, *args, **options)


def measures_itself(module: nn.Module) -> bool:
    """Whether what computes the attention of a module also measures it."""
    return _by(module) is not compute


attend.measures_itself = measures_itself  # type: ignore[attr-defined]


def mask(**options: Any) -> Tensor | None:
    """transformers' mask for SDPA; None if it would be causal and nothing else, also while a graph is traced.

    There transformers makes the whole matrix, since ``torch.compile`` may be an export to a file.
    """
    from transformers.masking_utils import sdpa_mask

    queries, keys, local = options.get("q_length"), options.get("kv_length"), options.get("local_size")
    plain = options.get("attention_mask") is None and options.get("allow_is_causal_skip") and queries is not None
    if plain and queries == keys and (local is None or (keys is not None and keys < local)):
        return None
    made: Tensor | None = sdpa_mask(**options)
    return made
