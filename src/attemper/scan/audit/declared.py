"""The scale that the config of a model, its attention module or its rule declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...modules import MultiHeadAttention
from ...watch.examine import AttentionCall, traits

T5 = ("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop", "pix2struct")
UNSCALED = {
    "gpt_neo": "GPT-Neo divides by nothing",
    **dict.fromkeys(T5, "T5 folds the divisor into its initialisation"),
}
"""Model types without a divisor, by design, and why."""

MEANT = ("scaling", "scale", "softmax_scale", "qk_scale")
"""Attributes of attention modules that can only be a scale: one below 1 that is applied nowhere is ignored."""

ATTRIBUTES = (*MEANT, "attn_scale", "inv_norm_factor", "norm_factor", "scale_attn")
"""Attributes that attention modules use for their scale or its inverse."""


@dataclass(frozen=True)
class Declared:
    """A declared scale. `firm`: a setting or a design, which the whole path must honour; otherwise an attribute or an argument,
    which may be only a part of it."""

    number: float
    by: str
    formula: str = ""  # the formula, if the setting has one
    firm: bool = True
    rule: str | None = None  # the name of the rule, where it was named
    heeded: bool = True  # whether the code that ran uses it


def declared(call: AttentionCall, keys: Tensor | None = None) -> Declared | None:
    """The firm declaration for the layer of a call; some rules need the number of keys that each row sees."""
    info = call.info
    module = call.frames[-1].module
    if isinstance(module, MultiHeadAttention):
        return _by_rule(module, keys)
    layer = layer_index(call)
    for settings, name in _settings(call):
        for attribute, reader in CONFIG.items():
            value = _setting(settings, attribute)
            declaration = reader(value, settings, info.head_dim, layer) if value is not None else None
            if declaration is not None:
                number, by, formula = declaration
                return Declared(number, f"{name}.{by}", formula)
        model_type = getattr(settings, "model_type", None)
        if model_type in UNSCALED:
            return Declared(1.0, f"{name}.model_type", UNSCALED[model_type])
    return None


def hinted(call: AttentionCall, applied: float, factors: list[float]) -> Declared | None:
    """A weaker declaration: an attribute of the attention module that equals the applied scale or a factor of it, else the
    argument of the attention interface, else that of the call."""
    module = call.frames[-1].module
    unheeded = None
    for name in ATTRIBUTES:
        value = getattr(module, name, None)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            continue
        by = f"{type(module).__name__}.{name}"
        for number in (float(value), 1 / float(value)):
            parts = (
                (applied,) if number == 1.0 else (applied, *factors)
            )  # 1 may mean that the scale was applied earlier
            if any(abs(number - other) <= 1e-2 * abs(other) for other in parts):
                return Declared(number, by, firm=False)
        if name in MEANT and value < 1 and traits(module).attends:
            unheeded = Declared(float(value), by, firm=False, heeded=False)
    if unheeded is not None:
        return unheeded
    stated, by = call.info.declared, "scaling, as given to the attention interface"
    if stated is None and not call.product:
        stated, default = call.info.scale, "the call, which leaves the scale to its default"
        by = default if call.scale is None else "scale, the call's argument"
    if stated is None or (stated == 1.0 and abs(applied - stated) > 1e-2):
        return None
    return Declared(stated, by, firm=False)


def layer_index(call: AttentionCall) -> int | None:
    """The layer's number in the model, from 0: from its module, else the first number in its name.

    A negative number marks attention that several layers share, as in Zamba2.
    """
    for frame in reversed(call.frames):
        for name in ("layer_idx", "layer_id", "layer_index"):
            value = getattr(frame.module, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value if value >= 0 else None
    numbers = [part for part in call.frames[-1].name.split(".") if part.isdigit()]
    return int(numbers[0]) if numbers else None


def is_of_transformers(module: nn.Module) -> bool:
    """Whether a module is part of transformers, whose scales are those of papers."""
    return type(module).__module__.startswith("transformers.")


def width(call: AttentionCall) -> int | None:
    """The model's width, from a config or the attention module."""
    for settings, _ in _settings(call):
        for name in ("hidden_size", "d_model", "n_embd", "embed_dim"):
            value = _setting(settings, name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _setting(settings: Any, name: str) -> Any:
    try:
        return getattr(settings, name, None)
    except RuntimeError:  # a config with different layers has no common setting
        return None


def _settings(call: AttentionCall) -> list[tuple[Any, str]]:
    """The holders of settings: the config nearest to the call, then the attention module."""
    module = call.frames[-1].module
    configs = (getattr(frame.module, "config", None) for frame in reversed(call.frames))
    config = next((candidate for candidate in configs if candidate is not None), None)
    own = (module, type(module).__name__)
    return [own] if config is None else [(config, "config"), own]


def _by_rule(module: MultiHeadAttention, keys: Tensor | None) -> Declared | None:
    rule = module.rule
    counted = keys[keys > 0] if keys is not None else None
    if "keys" in rule.needs and (counted is None or not len(counted)):
        return None
    scale = rule.scale(
        head_dim=module.head_dim,
        heads=module.num_heads,
        layer=module.layer,
        keys=counted.double() if counted is not None else None,
        gain=float(module.gain.detach().double().mean()) if module.gain is not None else None,
    )
    number = float(scale.mean() if isinstance(scale, Tensor) else scale)
    return Declared(number, f"rule={rule.name!r}", rule.formula, rule=rule.name)


Setting = tuple[float, str, str] | None
"""The number, the setting's name, and the formula in words."""


def _gpt2(value: Any, settings: Any, head_dim: int, layer: int | None) -> Setting:
    number = head_dim**-0.5 if value else 1.0
    formula = "1/√d_k" if value else "no scale"
    if not getattr(settings, "scale_attn_by_inverse_layer_idx", False):
        return number, "scale_attn_weights", formula
    if layer is None:
        return None
    formula = f"1/({layer + 1} √d_k)" if value else f"1/{layer + 1}"
    return number / (layer + 1), "scale_attn_by_inverse_layer_idx", formula


def _multiplier(value: Any, settings: Any, head_dim: int, layer: int | None) -> Setting:
    return (float(value), "attention_multiplier", "") if _is_number(value) else None


def _pre_scalar(value: Any, settings: Any, head_dim: int, layer: int | None) -> Setting:
    return (value**-0.5, "query_pre_attn_scalar", f"1/√{value:g}") if _is_number(value) and value > 0 else None


def _keys_multiplied(value: Any, settings: Any, head_dim: int, layer: int | None) -> Setting:
    return (value * head_dim**-0.5, "key_multiplier", f"{value:g}/√d_k") if _is_number(value) else None


def _mpt(value: Any, settings: Any, head_dim: int, layer: int | None) -> Setting:
    number = getattr(value, "softmax_scale", None)
    return (float(number), "attn_config.softmax_scale", "") if isinstance(number, (int, float)) else None


def _deberta(value: Any, settings: Any, head_dim: int, layer: int | None) -> Setting:
    if not getattr(settings, "relative_attention", False) or not hasattr(value, "__iter__"):
        return None
    parts = 1 + len({"c2p", "p2c"} & set(value))
    return (parts * head_dim) ** -0.5, "pos_att_type", f"1/√({parts} d_k)"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


CONFIG: dict[str, Callable[[Any, Any, int, int | None], Setting]] = {
    "scale_attn_weights": _gpt2,  # GPT-2, ImageGPT, Decision Transformer, GPT-BigCode
    "attention_multiplier": _multiplier,  # Granite, HyperCLOVA X
    "query_pre_attn_scalar": _pre_scalar,  # Gemma 2 and 3, T5Gemma, VaultGemma
    "key_multiplier": _keys_multiplied,  # Falcon-H1
    "attn_config": _mpt,
    "pos_att_type": _deberta,
}
"""An attribute of a config → the scale it sets, as transformers 5 reads it."""
