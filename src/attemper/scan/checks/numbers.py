"""Numbers: whether an output is finite, and otherwise in which module NaN or infinity was born; weights that are all 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ...health import Finding
from ..unchanged import call, opened, reachable
from .declared import named_arguments, real_tokens

DEEPEST = 4  # containers in one another that are looked into
SAMPLE = 4096  # numbers of a weight that are read first
EMPTY = "a row whose scores are all −inf sees no key, and a softmax over nothing is NaN"
KEEP = (
    "Fill with torch.finfo(scores.dtype).min in place of −inf, or let such rows (padding on the left, or the first of a shifted "
    "mask) see a key."
)
RELOAD = "Go back to a checkpoint from before; look at the loss and the gradients of the step that wrote this weight."
OVERFLOW = "Look for a division by 0, a log or a root of a negative number; in float16 or bfloat16, try float32."


def all_zero(module: nn.Module) -> bool:
    """Whether a module has weights of two dimensions or more, and all of their numbers are 0."""
    weights = [
        parameter
        for parameter in module.parameters()
        if parameter.dim() > 1 and parameter.numel() and not parameter.is_meta
    ]
    return bool(weights) and not any(
        bool(some.any()) for weight in weights for some in (weight.detach().flatten()[:SAMPLE], weight.detach())
    )


def spoiled_rows(model: nn.Module, batch: Any, output: Any) -> tuple[str, int, int] | None:
    """NaN or infinity in what a model returned: which, in how many rows of real tokens, of how many; None: all are finite.

    A column that is −inf in every row is a word that the model never says.
    """
    for tensor in _tensors(output):
        rows = tensor.detach() if tensor.dim() > 1 else tensor.detach()[:, None]
        if bool(torch.isfinite(rows.sum(-1, dtype=torch.float32)).all()):
            continue
        real = real_tokens(model, batch).get((rows.shape[0], rows.shape[1])) if rows.dim() > 2 else None
        rows = rows.flatten(0, -2) if real is None else rows[real.to(rows.device)].flatten(0, -2)
        rows = rows[:, ~(rows == -torch.inf).all(0)] if len(rows) > 1 else rows
        wrong = ~torch.isfinite(rows).all(-1)
        if bool(wrong.any()):
            return ("NaN" if bool(rows.isnan().any()) else "infinity"), int(wrong.sum()), len(rows)
    return None


def birth(model: nn.Module, batch: Any, what: str, empty: Mapping[str, int]) -> Finding:
    """Run the model once more, and find the first module whose input was finite and whose output is not.

    ``what`` was seen, in words; ``empty`` says how many rows of a layer see no key.
    """
    born: list[tuple[str, str, str]] = []
    names = {id(part): name for name, part in model.named_modules()}

    def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not born and _spoiled(output) and not _spoiled((args, kwargs)):
            born.append((names[id(module)], *_cause(names[id(module)], module, args, kwargs, empty)))

    given = next(
        (name for name, value in named_arguments(model, batch).items() if _spoiled(value, infinity=False)), None
    )
    with ExitStack() as stack:
        for part in model.modules():
            stack.callback(part.register_forward_hook(look, with_kwargs=True).remove)
        call(model, batch)
    if given is not None:
        place, cause, advice = "", f"the batch has NaN in {given}", "Look at what makes the batch."
    else:
        place, cause, advice = born[0] if born else ("", "its parts are finite", OVERFLOW)
    message = f"{what}. It is born here: {cause}."
    return Finding("nan", "diverging", place, "self", None, None, None, "IEEE 754", message, advice, None)


def _cause(name: str, module: nn.Module, args: Any, kwargs: Any, empty: Mapping[str, int]) -> tuple[str, str]:
    """Why a module makes numbers that are not finite of finite ones, and what to do."""
    for weight, value in module.named_parameters():
        if _spoiled(value):
            return f"its parameter {weight} holds NaN or infinity", RELOAD
    rows = max((count for layer, count in empty.items() if _is_near(layer, name)), default=0)
    if rows:
        return f"{rows} of its rows see no key: {EMPTY}", KEEP
    sizes = [float(tensor.detach().abs().max()) for tensor in _floats((args, kwargs)) if tensor.numel()]
    largest = f", up to {max(sizes):.3g}" if sizes else ""
    return f"its input is finite{largest}, and its output is not", OVERFLOW


def _is_near(layer: str, name: str) -> bool:
    """Whether a module is a layer of attention, inside it or around it."""
    return layer == name or layer.startswith(f"{name}.") or name.startswith(f"{layer}.") or "" in (layer, name)


def _spoiled(part: Any, infinity: bool = True) -> bool:
    """Whether a tensor, or one inside, holds NaN; or infinity, if it is no mask of −inf."""
    return any(
        bool(tensor.isnan().any()) or (infinity and bool((tensor == torch.inf).any())) for tensor in _floats(part)
    )


def _floats(part: Any) -> Iterator[Tensor]:
    for _, tensor in reachable(part):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.is_nested and not tensor.is_meta:
            yield tensor


def _tensors(output: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors of an output and of what it holds, but for a cache, whose padding may be NaN."""
    if isinstance(output, Tensor):
        of_cache = depth > 1 and output.dim() > 3  # a tuple for each layer
        if output.is_floating_point() and not output.is_nested and output.numel() and output.dim() and not of_cache:
            yield output
    elif depth < DEEPEST and "Cache" not in type(output).__name__:
        output = opened(output)
        if isinstance(output, (Mapping, tuple, list)):
            for value in output.values() if isinstance(output, Mapping) else output:
                yield from _tensors(value, depth + 1)
