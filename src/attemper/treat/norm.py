"""add_qk_norm() and add_temperature(): new parameters between a projection and its attention."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, checked_options
from ..vitals import Vitals
from ..watch.examine import AttentionCall, Examiner, examine, named_modules
from .finder import call, evaluating
from .finder import projections as find
from .table import PER_HEAD, LayerProjections, ProjectionPart, Projections, check_number, check_projections

Q_NORM, K_NORM, TEMPERATURE = "q_norm", "k_norm", "temperature"


class HeadNorm(nn.Module):
    """RMS norm of each head's part of a projection's output, with a gain per head and channel."""

    index: Tensor

    def __init__(self, index: Tensor, like: Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("index", index.to(like.device), persistent=False)  # (H, E): the outputs of each head
        self.gain = nn.Parameter(torch.ones(index.shape, dtype=like.dtype, device=like.device))
        self.eps = eps

    def forward(self, output: Tensor) -> Tensor:
        wide = torch.promote_types(output.dtype, torch.float32)
        part = output[..., self.index].to(wide)
        size = (part.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return _replaced(output, self.index, (part * size * self.gain.to(wide)).to(output.dtype))


class HeadTemperature(nn.Module):
    """A factor per head on its part of a projection's output."""

    index: Tensor

    def __init__(self, index: Tensor, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("index", index.to(like.device), persistent=False)
        self.gain = nn.Parameter(torch.ones(len(index), 1, dtype=like.dtype, device=like.device))

    def forward(self, output: Tensor) -> Tensor:
        return _replaced(output, self.index, output[..., self.index] * self.gain)


def _replaced(output: Tensor, index: Tensor, part: Tensor) -> Tensor:
    return output.index_copy(output.dim() - 1, index.reshape(-1), part.flatten(-2))


def _through(module: nn.Module, arguments: object, output: Tensor) -> Tensor:
    """The forward hook of a projection: its output through what was added to it."""
    for name in (Q_NORM, K_NORM, TEMPERATURE):
        added = module._modules.get(name)
        if added is not None:
            output = added(output)
    return output


@checked_options
def add_qk_norm(
    model: nn.Module, batch: Any, *, projections: Projections | None = None, eps: float = 1e-6
) -> list[nn.Parameter]:
    """Add QK-norm to a model that has none: q and k of every head are divided by their root mean square, with learned gains.

    The norm is applied to the output of the projections, before position encodings, as in Qwen3. The gains of q begin at
    values that keep the root mean square of each head's logits on ``batch``; those of k begin at 1. The model's outputs
    change, because the logits of single rows do. Call it before the optimizer is made, or add the parameters that it returns
    to it.

    Args:
        model: the model. Its projections must be modules (``nn.Linear``, GPT-2's Conv1D), of one head or of several.
        batch: what the model is called with, as in :func:`projections`; as many tokens as possible.
        projections: the result of :func:`projections`; left out, it is run on ``batch``.
        eps: added to the mean square.

    Returns:
        the new parameters, in order: they are part of ``model.parameters()`` and of its state dict.

    Example:
        >>> class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.qkv = torch.nn.Linear(16, 48)
        ...     def forward(self, x):
        ...         q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        ...         return torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> block = Block()
        >>> gains = attemper.add_qk_norm(block, torch.randn(2, 10, 16))
        >>> [name for name, _ in block.named_parameters()]
        ['qkv.weight', 'qkv.bias', 'qkv.q_norm.gain', 'qkv.k_norm.gain']
    """
    check_number(
        "add_qk_norm", "eps", eps, "a number, at least 0 and below 1", lambda n: 0 <= n < 1, "Leave it out for 1e-6"
    )
    layers = _known_projections("add_qk_norm", model, batch, projections)
    modules = _modules(model)
    for layer in layers.values():
        if not layer.splits or any(bool(part.whole.any()) for part in layer.parts):
            raise InputError(
                f"add_qk_norm(): no projection makes the keys of {layer.layer!r} alone ({layer}), so there is no output to "
                "normalise. Use attemper.qk_clip() for it."
            )
    before = _sizes(model, batch)
    homes = {  # all of them, before the first is changed
        (place, name): _outputs("add_qk_norm", layer, side, modules)
        for place, layer in layers.items()
        for side, name in (("q", Q_NORM), ("k", K_NORM))
    }
    added: list[nn.Parameter] = []
    scaled: dict[tuple[str, str], HeadNorm] = {}
    for (place, name), (module, index) in homes.items():
        norm = HeadNorm(index, _weight(module), eps)
        _attach(module, name, norm)
        added.append(norm.gain)
        if name == Q_NORM:
            scaled[place] = norm
    for place, norm in scaled.items():  # in the order that they run: a layer's logits depend on those before it
        after = _sizes(model, batch)
        ratio = (before[place] / after[place]).to(norm.gain)
        with torch.no_grad():
            norm.gain.mul_(torch.where(ratio.isfinite() & (ratio > 0), ratio, torch.ones_like(ratio))[:, None])
    find(model, batch)  # the clip scales the gains from now on
    return added


@checked_options
def add_temperature(model: nn.Module, batch: Any, *, projections: Projections | None = None) -> list[nn.Parameter]:
    """Give every head a learned temperature: a factor on its logits that begins at 1, so that no bit of the output changes.

    The factor multiplies the head's q. Use the returned parameters to give it a learning rate of its own, or no weight decay.
    :func:`qk_clip` then clips a head by this one number.

    Args:
        model: the model; its q must be made by a module (``nn.Linear``, GPT-2's Conv1D).
        batch: what the model is called with, as in :func:`projections`.
        projections: the result of :func:`projections`; left out, it is run on ``batch``.

    Returns:
        the new parameters, one of shape (heads, 1) per layer: part of ``model.parameters()`` and of its state dict.
    """
    layers = _known_projections("add_temperature", model, batch, projections)
    modules = _modules(model)
    added = []
    for module, index in [_outputs("add_temperature", layer, "q", modules) for layer in layers.values()]:
        if TEMPERATURE not in module._modules:
            temperature = HeadTemperature(index, _weight(module))
            _attach(module, TEMPERATURE, temperature)
            added.append(temperature.gain)
    find(model, batch)  # the clip scales the new parameters from now on
    return added


def _known_projections(caller: str, model: nn.Module, batch: Any, given: Projections | None) -> Projections:
    layers = find(model, batch) if given is None else given
    check_projections(caller, layers)
    for layer in layers.values():
        if layer.how != PER_HEAD or any(part.side == "gain" for part in layer.parts):
            raise InputError(
                f"{caller}(): the q and k of {layer.layer!r} cannot be scaled per head ({layer}). If the model has QK-norm, use "
                "its gains; otherwise use attemper.qk_clip()."
            )
    return layers


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for module, name in named_modules(model).items()}


def _outputs(
    caller: str, layer: LayerProjections, side: str, modules: dict[str, nn.Module]
) -> tuple[nn.Module, Tensor]:
    """The module whose output is q or k of a layer, and the outputs of each head ``(H, E)``."""
    parts = [part for part in layer.parts if part.side == side]
    homes = {part.parameter.rpartition(".")[0] for part in parts}
    weights = [part for part in parts if part.parameter.rpartition(".")[2] == "weight"]
    home = modules.get(homes.pop()) if len(homes) == 1 else None
    if home is None or len(weights) != 1 or not _projects(home, weights[0]):
        names = ", ".join(part.parameter for part in parts) or "no parameter of its own"
        if home is not None and "norm" in type(home).__name__.lower():
            raise InputError(
                f"{caller}(): {side} of {layer.layer!r} comes from {names}, the gain of a norm: the model already has QK-norm. "
                "Use attemper.qk_clip() for it."
            )
        raise InputError(
            f"{caller}(): {side} of {layer.layer!r} comes from {names}, not from a projection module of its own. For "
            "nn.MultiheadAttention use attemper.MultiHeadAttention.from_torch(module, rule='qk_norm' or 'learned')."
        )
    owner = weights[0].owner
    heads = int(owner.max()) + 1
    index = [(owner == head).nonzero().flatten() for head in range(heads)]
    if len({len(rows) for rows in index}) != 1:
        raise InputError(
            f"{caller}(): the heads of {layer.layer!r} have different sizes. Use attemper.qk_clip() for it."
        )
    return home, torch.stack(index)


def _projects(module: nn.Module, part: ProjectionPart) -> bool:
    """Whether a row of its weight is an output: nn.Linear has them along dimension 0, Conv1D along 1."""
    weight = module._parameters.get("weight")
    plain = {"Linear": 0, "Conv1D": 1}.get(type(module).__name__)
    return weight is not None and weight.dim() == 2 and plain == part.dim


def _weight(module: nn.Module) -> Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def _attach(module: nn.Module, name: str, added: nn.Module) -> None:
    """Let a projection's output pass a new module. The hook is a plain function, so that the model can be copied and pickled."""
    if name in module._modules:
        raise InputError(f"add_qk_norm(): a projection has a {name} already. Call it once.")
    if not any(hook is _through for hook in module._forward_hooks.values()):
        module.register_forward_hook(_through)
    module.add_module(name, added)


class LogitSizes(Examiner):
    """The root mean square of each head's logits, over the rows of a pass."""

    def __init__(self) -> None:
        self.squares: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> Any:
        counted = vitals.visible > 0
        if rows is not None:
            counted = counted & rows[:, None, :]
        square = (vitals.variance + vitals.mean.square()).double().masked_fill(~counted, 0.0)
        return square.sum((0, 2)), counted.double().sum((0, 2))

    def keep(self, name: str, call: AttentionCall, result: Any) -> None:
        place = (name, call.info.kind)
        square, count = self.squares.get(place, (0.0, 0.0))
        self.squares[place] = (square + result[0], count + result[1])


def _sizes(model: nn.Module, batch: Any) -> dict[tuple[str, str], Tensor]:
    sizes = LogitSizes()
    with evaluating(model), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"watch\(\): ")
        with examine(model, [sizes], caller="add_qk_norm"):
            call(model, batch, "add_qk_norm")
    return {place: (square / count.clamp(min=1)).sqrt() for place, (square, count) in sizes.squares.items()}
