"""load_hint(): why a state dict does not fit a MultiHeadAttention, and what to build instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .multi_head import MultiHeadAttention

APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def load_hint(module: MultiHeadAttention, state_dict: Mapping[str, Tensor]) -> str | None:
    """What to add to torch's list of keys; None where that list is enough."""
    if "gain" in state_dict and module.gain is None:
        return (
            "MultiHeadAttention(): the state dict has `gain`, which a rule that learns has; this module has "
            f"rule={module.rule.name!r}, which learns nothing. "
            "Build it with the rule that was trained: 'learned', 'log_n' or 'qk_norm'."
        )
    if "in_proj_weight" in state_dict and module.in_proj_weight is None:
        return (
            "MultiHeadAttention(): the state dict has `in_proj_weight`, one matrix for query, key and value; this module has "
            f"kv_heads={module.kv_heads}, kdim={module.kdim}, vdim={module.vdim} and needs {', '.join(APART)}. "
            "Leave kv_heads, kdim and vdim out to load it."
        )
    if all(name in state_dict for name in APART) and module.in_proj_weight is not None:
        shapes = [tuple(state_dict[name].shape) for name in APART]
        return (
            f"MultiHeadAttention(): the state dict has {', '.join(APART)} of shapes {shapes}; this module has one "
            "`in_proj_weight`. Build it with "
            f"kv_heads={shapes[1][0] // module.head_dim}, kdim={shapes[1][1]}, vdim={shapes[2][1]}."
        )
    return None
