"""measure_core_attention(): Megatron's attention in a fused kernel, measured from the kernel's arguments.

Tested with megatron-core 0.16.1: its GPTModel in one process on a CPU. Transformer Engine needs a GPU, so an opaque core
attention with the published arguments of TEDotProductAttention.forward takes its place. `make integrations`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import InputError, guarded_call
from ..watch.examine import (
    AttentionCall,
    CallInfo,
    attachment,
    kind_of,
    named_modules,
    packed_call,
    running,
    spans,
    without_autograd_and_modes,
)

OWN = "megatron.core.transformer."  # whose core attention is written in ops, which a watch follows
ROUTE = "core_attention"


def measure_core_attention(model: nn.Module) -> list[RemovableHandle]:
    """Let watches of a Megatron model measure the modules named ``core_attention`` that hand q and k to a fused kernel.

    Call it once, before ``watch(model)`` or ``monitor(model)``: a forward pre-hook on each reads q, k and their mask. Megatron's
    own DotProductAttention needs none. Nothing is computed while no watch measures.

    Args:
        model: a ``MegatronModule``; on each rank its own part.

    Returns:
        the hooks; call ``remove()`` on each to take it off.
    """
    inner = [module for module, name in named_modules(model).items() if name.rpartition(".")[2] == ROUTE]
    if not inner:
        absent = f"{type(model).__name__} has no module named {ROUTE}"
        raise InputError(f"measure_core_attention(): {absent}. Use attemper.watch(model) alone.")
    look = guarded_call(_look, attachment.give_up)
    fused = [module for module in inner if not type(module).__module__.startswith(OWN)]
    return [module.register_forward_pre_hook(look, with_kwargs=True) for module in fused]


def _look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if running.current is None:
        return
    frames = tuple(running.frames)
    names = ("query", "key", "value", "attention_mask", "attn_mask_type")
    call = _read(module, frames, dict(zip(names, args, strict=False)) | kwargs)
    if isinstance(call, str):
        attachment.unmeasured(frames, f"Megatron's core attention with {call}")
    else:
        call.take_sink(getattr(module, "softmax_offset", None))
        attachment.begin(call)(frames)


def _read(module: Any, frames: tuple[Any, ...], given: dict[str, Any]) -> AttentionCall | str:
    """The call, or the feature that cannot be measured."""
    from megatron.core.transformer.utils import is_layer_window_attention

    config, query, key = module.config, given["query"], given["key"]
    mask, kind = given.get("attention_mask"), (given.get("attn_mask_type") or module.attn_mask_type).name
    if config.context_parallel_size > 1 or given.get("attention_bias") is not None:
        return "context parallelism, whose ranks exchange keys inside the kernel, or an attention_bias"
    causal: bool | str = "lower_right" if kind == "causal_bottom_right" else "causal" in kind
    window = None
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, module.layer_number):
        window = config.window_size[0] + 1 if config.window_size[0] >= 0 else None
    # on the module itself, or on the kernel that Transformer Engine's module calls
    scales = [getattr(holder, "softmax_scale", None) for holder in (module, getattr(module, "flash_attention", None))]
    scale = next((holder for holder in scales if holder is not None), config.kv_channels**-0.5)
    if (sequences := given.get("packed_seq_params")) is not None:
        return _packed(frames, query, key, sequences, {"causal": bool(causal), "window": window, "scale": scale})
    with without_autograd_and_modes(query.device.type):
        query, key = query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3)  # from (L, B, H, E)
    mask = None if kind in ("causal", "causal_bottom_right", "no_mask") else mask
    if not isinstance(mask, Tensor | None):
        return f"a {type(mask).__name__} as its mask"
    how: dict[str, Any] = {"scale": scale, "mask": None if mask is None else ~mask, "window": window}  # True hides
    crossing = kind_of(frames, query, key, (query.shape[2], key.shape[2]))
    info = CallInfo.of(ROUTE, crossing, query, key, causal=bool(causal), **how)
    return AttentionCall(info, frames, query, key, causal=causal, **how)


def _packed(frames: Any, query: Tensor, key: Tensor, given: Any, how: dict[str, Any]) -> AttentionCall | str:
    """Packed sequences, (tokens, H, E), each of which may be followed by padding."""
    pairs = (given.cu_seqlens_q, given.cu_seqlens_q_padded), (given.cu_seqlens_kv, given.cu_seqlens_kv_padded)
    rows, keys = [(ends, None) if padded is None else (padded, ends.diff()) for ends, padded in pairs]
    packed = spans(rows[0], keys[0], (query.shape[0], key.shape[0]), (rows[1], keys[1]))
    if isinstance(packed, str):
        return packed
    return packed_call(ROUTE, frames, (query, key), packed, lambda tensor: tensor.transpose(0, 1)[None], **how)
