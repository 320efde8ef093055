"""The rules: nine ways to choose the one number in front of q·k, what each needs, who uses it, and where that is written.

The table is data that needs no torch. Modules, commands, the lab, the report and the docs all read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from .errors import InputError, checked_options, nearest

if TYPE_CHECKING:
    from torch import Tensor

FACTS = {
    "head_dim": "the width of one head, d_k",
    "heads": "how many query heads there are",
    "layer": "the layer's index in the model, from 0",
    "keys": "how many keys the row sees",
}
"""The facts that a rule may need."""

_EXAMPLE = {"head_dim": 64, "heads": 8, "layer": 0, "keys": 1024}


@dataclass(frozen=True)
class Rule:
    """One way to choose the scale; read one from the table with :func:`rule`.

    ``formula`` is the whole logit, ``description`` one sentence about it. ``needs`` names the arguments of :meth:`scale`.
    ``gain`` is the initial value of a number learned per head (None: nothing is learned), ``unit`` says that q and k
    are first scaled to length 1, ``softcap`` bounds the logits.
    """

    name: str
    formula: str
    description: str
    used_by: str
    source: str
    factor: Callable[..., Any] = field(repr=False, compare=False)
    needs: tuple[str, ...] = ("head_dim",)
    gain: float | None = None
    unit: bool = False
    softcap: float | None = None

    def scale(
        self,
        *,
        head_dim: int | None = None,
        heads: int | None = None,
        layer: int | None = None,
        keys: int | Tensor | None = None,
        gain: float | Tensor | None = None,
    ) -> Any:
        """The factor on q·k: a number, or a tensor if ``keys`` or ``gain`` is a tensor.

        Give everything you know; the rule ignores what it does not need.

        Args:
            head_dim: the width of one head, d_k.
            heads: how many query heads there are.
            layer: the layer's index in the model, from 0.
            keys: how many keys a row sees: a number, or a tensor with a number per row.
            gain: the learned number; left out, its initial value.

        Example:
            >>> attemper.rule("sqrt_dk").scale(head_dim=64)
            0.125
            >>> attemper.rule("layer").scale(head_dim=64, layer=3)     # 1/(4·8)
            0.03125
        """
        given = {"head_dim": head_dim, "heads": heads, "layer": layer, "keys": keys}
        number = self.factor(*(self._fact(name, given[name]) for name in self.needs))
        if self.gain is None:
            return number
        gain = self.gain if gain is None else gain
        if isinstance(gain, bool) or not (isinstance(gain, Real) or hasattr(gain, "clamp")):
            raise InputError(
                f"rule({self.name!r}).scale(): `gain` must be a number or a tensor; got {gain!r}. "
                f"Leave it out for {self.gain}."
            )
        return number * gain

    def __reduce__(self) -> tuple[Any, ...]:
        # a name is enough to find it again, so a model that holds one can be saved and sent to another process
        return (rule, (self.name,)) if RULES.get(self.name) is self else (Rule, tuple(self.__dict__.values()))

    def require(self, where: str, facts: Mapping[str, object]) -> None:
        """Raise if a needed fact is missing, before any tensor arrives. `where` is the call, as a user writes it."""
        for name in self.needs:
            if name in facts and facts[name] is None:
                raise InputError(
                    f"{where}: rule {self.name!r} ({self.formula}) needs `{name}`, {FACTS[name]}. "
                    f"Add {name}={_EXAMPLE[name]}."
                )

    def _fact(self, name: str, value: Any) -> Any:
        least = 0 if name == "layer" else 1
        if name == "keys" and hasattr(value, "clamp"):
            return value
        if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least:
            return int(value)
        call = ", ".join(f"{need}={_EXAMPLE[need]}" for need in self.needs)
        raise InputError(
            f"rule({self.name!r}).scale(): `{name}`, {FACTS[name]}, must be a whole number, at least {least}; "
            f"got {value!r}. For example: rule({self.name!r}).scale({call})."
        )


def _log(keys: Any) -> Any:
    """ln of a number or a tensor of counts; a row that sees no key counts as one with a single key."""
    return keys.clamp(min=1).log() if hasattr(keys, "clamp") else math.log(keys)


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            name="sqrt_dk",
            formula="q·k / √d_k",
            description="Independent entries of variance 1 give q·k the variance d_k; this brings it back to 1.",
            used_by="the Transformer, and nearly every model since",
            source="Vaswani et al. 2017, arXiv:1706.03762 §3.2.1",
            factor=lambda head_dim: head_dim**-0.5,
        ),
        Rule(
            name="none",
            formula="q·k",
            description="No divisor; the initialisation or a norm has to keep the logits small.",
            used_by="T5 (divisor folded into the initialisation), GPT-Neo, Gemma 4 (after QK-norm)",
            source="Raffel et al. 2020, arXiv:1910.10683; Luong et al. 2015, arXiv:1508.04025",
            factor=lambda: 1.0,
            needs=(),
        ),
        Rule(
            name="dk",
            formula="q·k / d_k",
            description="For trained q and k, which are correlated: their product grows like d_k, not √d_k. Flat at the start.",
            used_by="µP (maximal update parametrisation), Granite's attention_multiplier",
            source="Yang et al. 2022, arXiv:2203.03466",
            factor=lambda head_dim: 1.0 / head_dim,
        ),
        Rule(
            name="sqrt_dmodel",
            formula="q·k / √d_model",
            description="The model's width, not the head's: logits √heads too small, attention too flat. Usually a mistake.",
            used_by="no known model by design",
            source="a common error: the dot product runs over d_k numbers, not over d_model",
            factor=lambda head_dim, heads: (head_dim * heads) ** -0.5,
            needs=("head_dim", "heads"),
        ),
        Rule(
            name="layer",
            formula="q·k / ((layer + 1) √d_k)",
            description="Deeper layers get smaller logits. Megatron-LM also divides by the layer, but undoes it before softmax.",
            used_by="GPT-2 models trained by Stanford CRFM (Mistral): the flag scale_attn_by_inverse_layer_idx",
            source="transformers, GPT2Config.scale_attn_by_inverse_layer_idx",
            factor=lambda head_dim, layer: head_dim**-0.5 / (layer + 1),
            needs=("head_dim", "layer"),
        ),
        Rule(
            name="log_n",
            formula="s ln(n) q·k / √d_k",
            description="Grows with the number of keys a row sees, so attention stays sharp as n grows; s is learned per head.",
            used_by="Scalable-Softmax (SSMax); relatives in Ministral 3, Mistral Large 4 and Inkling",
            source="Nakanishi 2025, arXiv:2501.19399 (s starts at 0.43, which its Fig. 1 sets)",
            factor=lambda head_dim, keys: head_dim**-0.5 * _log(keys),
            needs=("head_dim", "keys"),
            gain=0.43,
        ),
        Rule(
            name="learned",
            formula="g q·k / √d_k",
            description="One learned number per head, which starts at 1/√d_k.",
            used_by="Swin v2, one per head, there on the cosine",
            source="Liu et al. 2022, arXiv:2111.09883 §3.2",
            factor=lambda head_dim: head_dim**-0.5,
            gain=1.0,
        ),
        Rule(
            name="qk_norm",
            formula="g √d_k cos(q, k)",
            description="q and k are scaled to length 1: |logit| ≤ g √d_k whatever training does to their norms; g is learned.",
            used_by="ViT-22B, OLMo 2, Gemma 3, Qwen 3 (RMS or layer norm), nGPT (unit norm)",
            source="Henry et al. 2020, arXiv:2010.04245; Loshchilov et al. 2024, arXiv:2410.01131 (√d_k)",
            factor=lambda head_dim: head_dim**0.5,
            gain=1.0,
            unit=True,
        ),
        Rule(
            name="softcap",
            formula="c tanh(q·k / (c √d_k)), c = 50",
            description="1/√d_k, then a smooth ceiling: no logit passes 50.",
            used_by="Gemma 2 (50), Grok-1 (30)",
            source="Gemma Team 2024, arXiv:2408.00118 §2",
            factor=lambda head_dim: head_dim**-0.5,
            softcap=50.0,
        ),
    )
}
"""Every rule by name."""


@checked_options
def rule(name: str | Rule) -> Rule:
    """A scale rule by name, from the table ``attemper.RULES``.

    Args:
        name: one of the table's names; a :class:`Rule` is given back as it is.

    Example:
        >>> attemper.rule("sqrt_dk").formula
        'q·k / √d_k'
        >>> q = torch.ones(4, 64)
        >>> attemper.measure(q, q, scale=attemper.rule("dk").scale(head_dim=64)).peak      # 64 / 64
        tensor([1., 1., 1., 1.])
    """
    if isinstance(name, Rule):
        return name
    if not isinstance(name, str) or name not in RULES:
        raise InputError(f"rule(): unknown rule {name!r}. {nearest(name, RULES)}")
    return RULES[name]
