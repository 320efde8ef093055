"""entropy_floor(): a loss for rows of attention that look at too few keys. floor(): its gradient, whatever the loss."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..attention import attention
from ..errors import InputError, checked_options, guarded_call, internal_error
from ..heads import SATURABLE_KEYS
from ..operation.biases import answers_for_torch, causal_bias
from ..vitals import Vitals
from ..watch.examine import FLOOR, Replacement, is_replaced
from .table import check_model, check_number

SIGNS = ("visible", "entropy")
UNUSED = (
    "floor(): no attention call of {model} went through torch's scaled_dot_product_attention, so that no gradient was added. For "
    "attention of your own, compute it with attemper.attention() and add attemper.entropy_floor(vitals) to the loss."
)


@checked_options
def entropy_floor(vitals: Vitals | Iterable[Vitals], floor: float = 0.1) -> Tensor:
    """A loss that is 0 while attention is even enough: the mean of ``relu(floor - evenness)²`` over rows.

    Evenness is the entropy of a row as a share of its maximum, from 0 (one key has all weight) to 1. Rows that see fewer than 8
    keys do not count. Add it to the loss, times a weight of 1 or so: docs/treat.md has what weights did.

    Args:
        vitals: what :func:`attention` measured, with ``visible`` and ``entropy``; or of several calls, whose rows count alike.
        floor: the evenness below which a row costs something, between 0 and 1.

    Example:
        >>> q = torch.randn(1, 2, 16, 8, requires_grad=True)
        >>> vitals = attemper.attention(q, 30 * q, q).vitals
        >>> bool(attemper.entropy_floor(vitals, floor=0.5) > 0)
        True
    """
    _check_floor("entropy_floor", floor)
    calls = [vitals] if isinstance(vitals, Vitals) else list(vitals) if isinstance(vitals, Iterable) else None
    if not calls or not all(isinstance(call, Vitals) for call in calls):
        raise InputError(
            "entropy_floor(): `vitals` must be the vitals of a call, or several of them; got "
            f"{'none' if calls == [] else type(vitals).__name__}. Pass attemper.attention(…).vitals."
        )
    sums, counts = zip(*(_below(call, floor) for call in calls), strict=True)
    return torch.stack(sums).sum() / torch.stack(counts).sum().clamp(min=1)


def _below(vitals: Vitals, floor: float) -> tuple[Tensor, Tensor]:
    """The sum over rows, and their number. On a CPU it has no graph if no row is below the floor."""
    counted = vitals.visible >= SATURABLE_KEYS
    entropy = vitals.entropy
    if entropy.device.type == "cpu" and not bool((counted & (vitals.evenness.detach() < floor)).any()):
        entropy = entropy.detach()
    most = vitals.visible.clamp(min=2).to(entropy.dtype).log()
    short = (floor - entropy / most).clamp(min=0).masked_fill(~counted, 0.0)
    return short.square().sum(), counted.sum().to(entropy.dtype)


def _check_floor(caller: str, floor: object) -> None:
    check_number(caller, "floor", floor, "a number between 0 and 1", lambda n: 0 < n < 1, "Use 0.1 for a low floor")


class AddedGradient(torch.autograd.Function):
    """The output unchanged; in the backward, ``term`` gets the gradient that it would get as a term of the loss."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, term: Tensor, floor: EntropyFloor) -> Tensor:
        ctx.floor, ctx.like = floor, term.detach()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], torch.ones_like(ctx.like) * ctx.floor.loss_gradient, None


class EntropyFloor:
    """A floor under the entropy of a model's attention; made by :func:`floor`, used in a ``with`` statement."""

    replacing: ClassVar[EntropyFloor | None] = None  # the floor whose function transformers calls

    def __init__(self, model: nn.Module, floor: float, weight: float, scale: float | None) -> None:
        self.model, self.floor, self.weight, self.scale = model, floor, weight, scale
        self.calls = 0  # to which a gradient was added
        self._trained = False  # whether a pass with gradients ran
        self._seen: Tensor | float = 1.0  # the gradient of the model's own loss in the current backward
        self._handles: list[RemovableHandle] = []
        self._replacement: Replacement | None = None
        self._mode: TorchFunctionMode | None = None
        # a compiled graph would keep the loss's gradient of its first step as a constant
        self._added: Callable[[Tensor, Vitals], Tensor] = torch.compiler.disable(self._add)
        library = sys.modules.get("transformers.modeling_utils")
        if library is not None and isinstance(model, library.PreTrainedModel):
            if is_replaced(model):
                raise InputError(
                    "floor(): a watch with replace=True, or another floor, computes this model's attention already. Close it "
                    "first, or watch without replace."
                )
            self._replacement = Replacement(model, SIGNS, self.add, FLOOR)

    @property
    def loss_gradient(self) -> Tensor | float:
        """The gradient that a term of the loss gets: ``scale``, or that of the model's own loss."""
        return self._seen if self.scale is None else self.scale

    def add(self, output: Tensor, vitals: Vitals) -> Tensor:
        """The output, with the floor's gradient attached, outside of any compiled graph."""
        return self._added(output, vitals)

    def _add(self, output: Tensor, vitals: Vitals) -> Tensor:
        if not output.requires_grad or not torch.is_grad_enabled():
            return output
        self.calls += 1
        term = entropy_floor(vitals, self.floor)
        return AddedGradient.apply(output, self.weight * term, self) if term.requires_grad else output

    def __enter__(self) -> EntropyFloor:
        if self._handles:
            raise InputError("floor(): this floor is open already. Make another with attemper.floor(model).")
        if self._replacement is not None:
            if EntropyFloor.replacing is not None:
                raise InputError(
                    "floor(): another floor is open for a Hugging Face model, and transformers has one table of attention "
                    "functions for all of them. Close that floor first."
                )
            self._replacement.open()
            EntropyFloor.replacing = self
        else:
            self._handles.append(self.model.register_forward_pre_hook(guarded_call(self._begin, self._failed)))
        self._handles.append(self.model.register_forward_hook(guarded_call(self._end, self._failed), always_call=True))
        self.calls, self._trained = 0, False
        return self

    def __exit__(self, error_type: object, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._leave()
        if self._replacement is not None:
            self._replacement.close()
            EntropyFloor.replacing = None
        if error_type is None and self._trained and not self.calls:
            warnings.warn(UNUSED.format(model=type(self.model).__name__), stacklevel=2)

    def _failed(self, error: Exception, *_: object) -> None:
        """An error of attemper's own does not end the training: the floor is off until the next pass."""
        self._leave()
        warnings.warn(f"floor(): this pass got no floor: {internal_error(error)}.", stacklevel=3)

    def _begin(self, module: nn.Module, arguments: object) -> None:
        self._leave()
        self._mode = FloorMode(self)
        self._mode.__enter__()

    def _end(self, module: nn.Module, arguments: object, output: Any) -> None:
        self._leave()
        if not torch.is_grad_enabled():
            return
        self._trained = True
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.requires_grad and not loss.dim():
            # the trainer divides this loss by its accumulation steps and multiplies it by its loss scale
            loss.register_hook(guarded_call(self._see, self._failed))
        else:
            self._seen = 1.0

    def _see(self, gradient: Tensor) -> None:
        self._seen = gradient.detach()

    def _leave(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None


class FloorMode(TorchFunctionMode):
    """Computes torch's scaled_dot_product_attention with attemper's kernels, while a model with a floor runs."""

    def __init__(self, floor: EntropyFloor) -> None:
        super().__init__()
        self.floor = floor
        self.attend = guarded_call(self._attend, _call_failed, otherwise=scaled_dot_product_attention)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is multi_head_attention_forward:
            return self.within(func, args, kwargs or {})
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self.attend(*args, **(kwargs or {}))

    def within(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run nn.MultiheadAttention's function, which arrives as a whole, with attention replaced inside it."""
        before = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = self.attend
        try:
            return func(*args, **kwargs)
        finally:
            functional.scaled_dot_product_attention = before

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attention as torch's function takes it, with the floor's gradient attached."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
        given |= dict(zip(names, args, strict=False)) | kwargs
        if answers_for_torch(given["attn_mask"]) and causal_bias(given["attn_mask"]) is None:
            return scaled_dot_product_attention(*args, **kwargs)  # only its class knows what it means
        options: dict[str, Any] = {"mask": given["attn_mask"], "causal": given["is_causal"], "scale": given["scale"]}
        output, vitals = attention(
            given["query"], given["key"], given["value"], **options, dropout=given["dropout_p"], signs=SIGNS
        )
        return self.floor.add(output, vitals)


def _call_failed(error: Exception, *_: object) -> None:
    warnings.warn(f"floor(): this call got no floor: {internal_error(error)}.", stacklevel=3)


@checked_options
def floor(model: nn.Module, floor: float = 0.1, weight: float = 1.0, *, scale: float | None = None) -> EntropyFloor:
    """Keep a model's attention from collapsing while it trains, whatever trains it: no loss is touched.

    Inside ``with attemper.floor(model):`` attemper's kernels compute the attention of a Hugging Face model, or of a model that
    calls torch's ``scaled_dot_product_attention``. Outputs are equal up to rounding. In the backward every call adds the
    gradient of ``weight * entropy_floor(vitals, floor)``, as if the sum of these over all calls had been added to the loss.

    If the model returns a loss (``output.loss``), the added gradient is multiplied by the gradient that this loss gets:
    division by accumulation steps and a loss scale are then accounted for. Otherwise pass them as ``scale``.

    Args:
        model: the model that is trained, without the wrapper of a trainer.
        floor: the evenness below which a row of attention costs something, between 0 and 1.
        weight: of the term in the loss, above 0. A tenth of the default did not keep logits down in our runs (docs/treat.md).
        scale: what the loss of a micro-batch is multiplied by: 1 / accumulation steps, times a loss scale. None: as the
            model's own loss shows it, or 1. It can be set between steps: ``floored.scale = …``.

    Returns:
        a context manager; ``calls`` counts the attention calls that got a gradient.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> with attemper.floor(model, floor=0.9) as floored:
        ...     model(torch.randn(2, 12, 16)).sum().backward()
        >>> floored.calls
        1
    """
    check_model("floor", model)
    _check_floor("floor", floor)
    for name, value in (("weight", weight), ("scale", 1.0 if scale is None else scale)):
        check_number(
            "floor", name, value, "a finite number above 0", lambda n: 0 < n < math.inf, "Leave it out for its default"
        )
    return EntropyFloor(model, float(floor), float(weight), scale)
