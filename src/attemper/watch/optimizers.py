"""Optimizers: the one whose step really changes weights, inside of those that trainers wrap around it."""

from __future__ import annotations

from torch.optim import Optimizer

from ..errors import InputError

INNER = ("optimizer", "optim", "_optimizer")  # accelerate's word, and those of torch's own wrappers


def with_hooks(optimizer: object) -> Optimizer:
    """The first optimizer, from the outside in, that calls hooks after its step.

    accelerate's is an Optimizer that never ran ``Optimizer.__init__``: it has no hooks, and its step may skip the real one.
    """
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"watch(): `optimizer` must be a torch.optim.Optimizer; got {type(optimizer).__name__}. "
            "Leave it out and call watch.step() after each step."
        )
    found: Optimizer | None = optimizer
    while found is not None:
        try:
            found.register_step_post_hook(lambda *_: None).remove()
            return found
        except AttributeError:
            parts = [getattr(found, name, None) for name in INNER]
            found = next((part for part in parts if isinstance(part, Optimizer) and part is not found), None)
    raise InputError(
        f"watch(): `optimizer` is a {type(optimizer).__name__} that calls no hooks and holds no torch.optim.Optimizer that does. "
        "Leave it out and call watch.step() after each step."
    )
