"""What a model and its batch declare: a decoder, a direction, masks that differ, tokens that are padding."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...watch.examine import AttentionCall

BACKWARD = re.compile(r"backward|reverse|right_to_left|direction|bidirectional", re.IGNORECASE)
AHEAD = re.compile(r"look_?ahead|right_(context|window)|chunk|future", re.IGNORECASE)
DIFFERS = re.compile(
    r"layer_types|attention_types|attn_types|window|span|dilat|pattern|local|global|causal|stride|block_size|direction",
    re.IGNORECASE,
)
EXPERTS = re.compile(r"router|expert|moe|gating", re.IGNORECASE)


def matching_setting(modules: Iterable[nn.Module], pattern: re.Pattern[str]) -> str | None:
    """The name of an attribute of a module, or a setting of its config, that matches and is set."""
    for module in modules:
        for holder in (module, getattr(module, "config", None)):
            for name, value in _attributes(holder):
                if pattern.search(name) and value not in (None, False, 0, "", ()) and not callable(value):
                    return f"{type(module).__name__}.{name}"
    return None


def is_decoder(model: nn.Module) -> str | None:
    """The class name or config setting that declares a model to be a decoder; None: nothing does."""
    config = getattr(model, "config", None)
    for name in ("is_decoder", "is_causal"):
        if getattr(config, name, False) is True and not getattr(config, "is_encoder_decoder", False):
            return f"config.{name}"
    name = type(model).__name__
    if re.search(r"CausalLM|LMHead", name):
        return name
    return None


def is_causal_module(call: AttentionCall) -> bool | None:
    """The `is_causal` or `causal` attribute of the attention module or a module around it."""
    for frame in reversed(call.frames):
        for name in ("is_causal", "causal"):
            value = getattr(frame.module, name, None)
            if isinstance(value, bool):
                return value
    return None


def has_experts(model: nn.Module) -> str | None:
    """The name of a module that routes tokens to experts."""
    return next((name for name, _ in model.named_modules() if EXPERTS.search(name.rpartition(".")[2])), None)


def is_published(module: nn.Module) -> bool:
    """Whether a module is part of a library of published models, whose masks are those of papers."""
    return type(module).__module__.split(".")[0] in ("transformers", "timm", "diffusers", "torchvision")


WINDOW = re.compile(r"^(sliding_|attention_|attn_|local_)?window(_size)?$", re.IGNORECASE)


def window_of(modules: Iterable[nn.Module]) -> tuple[str, int] | None:
    """The window that an attention module has as an attribute, and its name; None: it has none, or is published."""
    for module in modules:
        for name, value in [] if is_published(module) else _attributes(module):
            if WINDOW.search(name) and isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return f"{type(module).__name__}.{name}", value
    return None


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    """The plain attributes of a module or a config, with those that its own classes have."""
    own = [vars(one) for one in reversed(type(holder).__mro__) if one is not nn.Module and issubclass(one, nn.Module)]
    own = own if isinstance(holder, nn.Module) else []
    found = {name: value for some in own for name, value in some.items() if not name.startswith("__")}
    found |= getattr(holder, "__dict__", {})
    return [(name, value) for name, value in found.items() if isinstance(name, str) and _plain(value)]


def _plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str, tuple, list))


HIDES = re.compile(r"pad|hidden|ignore", re.IGNORECASE)  # True, 1 or −inf is padding
SHOWS = re.compile(r"^(decoder_|encoder_)?attention_mask$|keep|valid|real", re.IGNORECASE)  # 1 is a real token
# masks of tokens, not of a loss or of positions
MASK = re.compile(r"^(?!.*(loss|label|lm_|span|prompt|head|pos)).*mask$", re.IGNORECASE)


def named_arguments(model: nn.Module, batch: Any) -> dict[str, Any]:
    """The arguments of a call by name; positional ones get the names that forward() gives them."""
    if isinstance(batch, Mapping):
        return dict(batch)
    given = batch if isinstance(batch, tuple) else (batch,)
    try:
        bound = inspect.signature(model.forward).bind(*given)
    except (TypeError, ValueError):
        return {str(index): argument for index, argument in enumerate(given)}
    return dict(bound.arguments)


def real_tokens(model: nn.Module, batch: Any) -> dict[tuple[int, int], Tensor]:
    """By (B, L): which tokens are real, for every mask of the batch that marks padding. A mask that hides nothing is left out."""
    marked: dict[tuple[int, int], Tensor] = {}
    for name, value in named_arguments(model, batch).items():
        real = is_real(name, value)
        if real is None or bool(real.all()):
            continue
        shape = (real.shape[0], real.shape[1])
        if shape in marked and not torch.equal(marked[shape], real):
            return {}  # two masks of one shape: which tokens each is of is unknown
        marked[shape] = real
    return marked


def is_packed(arguments: Mapping[str, Any]) -> bool:
    """Whether a batch has several documents in a row: it has their offsets, or positions that restart."""
    if any(name.startswith("cu_seq") and value is not None for name, value in arguments.items()):
        return True
    numbered = arguments.get("attention_mask")
    if isinstance(numbered, Tensor) and numbered.dim() == 2 and numbered.numel() and not numbered.is_meta:
        several = not numbered.is_floating_point() and int(numbered.amax()) > 1
        if several and bool((numbered.diff(dim=-1) >= 0).all()):
            return True
    positions = arguments.get("position_ids")
    if not isinstance(positions, Tensor) or positions.is_meta or positions.dim() not in (1, 2):
        return False
    again = positions.diff(dim=-1) < 1
    mask = arguments.get("attention_mask")
    if mask is not None:
        real = is_real("attention_mask", mask)
        if real is None or real.shape[-1] != positions.shape[-1]:
            return False
        again = again & real[:, 1:] & real[:, :-1]  # padding may have any position
    return bool(again.any())


def is_real(name: str, value: object) -> Tensor | None:
    """Which tokens an argument marks as real, (B, L); None if it is no mask of tokens."""
    if not isinstance(value, Tensor) or value.dim() != 2 or not value.numel() or value.is_meta:
        return None
    numbers = value.detach()
    if numbers.is_floating_point():
        if bool((numbers <= -1e4).any()):
            return (numbers > -1e4) if MASK.search(name) or HIDES.search(name) else None
        if not bool(((numbers == 0) | (numbers == 1)).all()):
            return None
    marked = numbers != 0
    if not bool(((numbers == 0) | (numbers == 1)).all()):
        return None
    if SHOWS.search(name):
        return marked
    if HIDES.search(name):
        return ~marked
    if not MASK.search(name):
        return None
    for end in (0, -1):  # the first token is real, or else the last
        column = marked[:, end]
        if bool((column == column[0]).all()):
            return marked if bool(column[0]) else ~marked
    return None
