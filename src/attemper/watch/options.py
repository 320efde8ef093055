"""Options: checks the arguments of watch(), and finds the optimizer whose step changes the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import InputError
from .observer import COUNTED

INNER = ("optimizer", "optim", "_optimizer")  # attributes of accelerate's wrapper, and of torch's own wrappers


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise InputError(f"watch(): `model` must be a torch.nn.Module; got {got}. Pass the model that you call.")
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise InputError(
            "watch(): nn.DataParallel runs unnamed copies of the model. Use DistributedDataParallel, or watch "
            "model.module on one device."
        )


def check_options(
    every: object, start: object, keep_steps: object, passes: object, examiners: object, **flags: object
) -> None:
    if not _is_whole(every, 1):
        raise InputError(f"watch(): `every` must be a whole number of steps, at least 1; got {every!r}. Use 1 for all.")
    if keep_steps is not None and not _is_whole(keep_steps, 1):
        raise InputError(
            f"watch(): `keep_steps` must be a whole number of steps, at least 1; got {keep_steps!r}. Leave it out for all."
        )
    if passes not in COUNTED:
        raise InputError(
            f"watch(): `passes` must be 'training' or 'all'; got {passes!r}. Leave it out to count what trains."
        )
    if not isinstance(examiners, Sequence) or not all(
        hasattr(examiner, "look") and hasattr(examiner, "keep") for examiner in examiners
    ):
        raise InputError(
            f"watch(): `examiners` must be objects with look() and keep(); got {examiners!r}. Leave it out."
        )
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(f"watch(): `{name}` must be True or False; got {flag!r}. Use {name}=True.")
    if not _is_whole(start, 0):
        raise InputError(
            f"watch(): `start` must be the number of a step, a whole number from 0 on; got {start!r}. "
            "Leave it out to begin at 0."
        )


def check_step(number: object, where: str = "watch.step") -> None:
    if not _is_whole(number, 0):
        raise InputError(
            f"{where}(): the step must be a whole number from 0 on; got {number!r}. Leave it out to count by one."
        )


def check_rows(valid_tokens: object) -> None:
    if valid_tokens is None or (
        isinstance(valid_tokens, Tensor) and valid_tokens.dtype == torch.bool and valid_tokens.dim() == 2
    ):
        return
    got = (
        f"{valid_tokens.dtype} of shape {tuple(valid_tokens.shape)}"
        if isinstance(valid_tokens, Tensor)
        else type(valid_tokens).__name__
    )
    raise InputError(
        f"watch.rows(): `valid_tokens` must be a boolean tensor (B, L), True for a real token; got {got}. "
        "Use attention_mask.bool()."
    )


def check_numbers(numbers: object) -> dict[str, float]:
    """What watch.log() was given, as plain floats."""
    if not isinstance(numbers, Mapping):
        raise InputError(
            f"watch.log(): `numbers` must be a dict of names and numbers; got {type(numbers).__name__}. "
            "Use watch.log({'loss': loss})."
        )
    checked = {}
    for name, number in numbers.items():
        try:
            checked[str(name)] = float(number.detach() if isinstance(number, Tensor) else number)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"watch.log(): {str(name)!r} must be one number; got {type(number).__name__}. Leave it out, or take its mean."
            ) from None
    return checked


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def with_hooks(optimizer: object) -> Optimizer:
    """The outermost optimizer that calls hooks after its step; wrappers of trainers may not.

    accelerate's wrapper never ran ``Optimizer.__init__``: it has no hooks, and its step may skip the real one.
    """
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"watch(): `optimizer` must be a torch.optim.Optimizer; got {type(optimizer).__name__}. "
            "Leave it out and call watch.step() after each step."
        )
    inner: Optimizer | None = optimizer
    while inner is not None:
        try:
            inner.register_step_post_hook(lambda *_: None).remove()
            return inner
        except AttributeError:
            parts = [getattr(inner, name, None) for name in INNER]
            inner = next((part for part in parts if isinstance(part, Optimizer) and part is not inner), None)
    raise InputError(
        f"watch(): `optimizer` is a {type(optimizer).__name__} that is not, and does not wrap, a "
        "torch.optim.Optimizer with step hooks. Leave it out and call watch.step() after each step."
    )
