"""Interface: what an instrumented Hugging Face model calls for attention and for its masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...attention import attention, attention_into
from ...errors import AttemperError, internal_error
from ...operation.listen import target_of
from ...operation.tally import FAILED
from ..routes.replace import REPLACED, attend_by_transformers, read_arguments

NAME = "attemper_instrumented"


def attend(module: nn.Module, *args: Any, **options: Any) -> Any:
    """Attention on attemper's kernels; transformers' own after an error in attemper."""
    if torch.compiler.is_compiling():
        return _attend(module, *args, **options)
    try:
        return _attend(module, *args, **options)
    except AttemperError:
        raise  # it says what attemper's kernels cannot compute
    except Exception as error:
        FAILED.add(f"{type(module).__name__}: {internal_error(error)}")
        return attend_by_transformers(module, *args, **options)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention on attemper's kernels, with its vitals added to the tally of the module, if it has one."""
    key, value, asked = read_arguments(module, query, key, value, attention_mask, dropout, scaling, options)
    known: dict[str, Any] = {"implementation": REPLACED, "declared": scaling, "window": options.get("sliding_window")}
    target = target_of(module, "replaced", **known)
    if target is None:
        output = attention(query, key, value, signs=(), **asked).output
    else:
        output = attention_into(target, query, key, value, **asked).output
    return output.transpose(1, 2).contiguous(), None


def mask(**options: Any) -> Tensor | None:
    """transformers' mask for SDPA; None if it would be causal and nothing else, also while a graph is traced.

    There transformers makes the whole matrix, since ``torch.compile`` may be an export to a file.
    """
    from transformers.masking_utils import sdpa_mask

    queries, keys, local = options.get("q_length"), options.get("kv_length"), options.get("local_size")
    plain = options.get("attention_mask") is None and options.get("allow_is_causal_skip") and queries is not None
    if plain and queries == keys and (local is None or (keys is not None and keys < local)):
        return None
    found: Tensor | None = sdpa_mask(**options)
    return found
