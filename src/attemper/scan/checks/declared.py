"""Declared: what a model says of itself by its config, class and attributes: a decoder, a direction, masks that differ."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from ...watch.examine import AttentionCall

BACKWARD = re.compile(r"backward|reverse|right_to_left|direction|bidirectional", re.IGNORECASE)
AHEAD = re.compile(r"look_?ahead|right_(context|window)|chunk|future", re.IGNORECASE)
DIFFERS = re.compile(
    r"layer_types|attention_types|attn_types|window|span|dilat|pattern|local|global|causal|stride|block_size|direction",
    re.IGNORECASE,
)
EXPERTS = re.compile(r"router|expert|moe|gating", re.IGNORECASE)


def says(modules: Iterable[nn.Module], pattern: re.Pattern[str]) -> str | None:
    """The name of an attribute or a setting that matches and is set, of a module or its config."""
    for module in modules:
        for holder in (module, getattr(module, "config", None)):
            for name, value in _attributes(holder):
                if pattern.search(name) and value not in (None, False, 0, "", ()) and not callable(value):
                    return f"{type(module).__name__}.{name}"
    return None


def is_decoder(model: nn.Module) -> str | None:
    """What declares that a model, or its decoder, is causal: its class or its config; None: nothing does."""
    config = getattr(model, "config", None)
    for name in ("is_decoder", "is_causal"):
        if getattr(config, name, False) is True and not getattr(config, "is_encoder_decoder", False):
            return f"config.{name}"
    name = type(model).__name__
    if re.search(r"CausalLM|LMHead", name):
        return name
    return None


def is_causal_module(call: AttentionCall) -> bool | None:
    """What the attention module itself says, if it has an attribute for it."""
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
    """Whether a module is part of a library of published models: its masks are those of a paper."""
    return type(module).__module__.split(".")[0] in ("transformers", "timm", "diffusers", "torchvision")


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    found = getattr(holder, "__dict__", {})
    return [(name, value) for name, value in found.items() if isinstance(name, str) and _plain(value)]


def _plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str, tuple, list))
