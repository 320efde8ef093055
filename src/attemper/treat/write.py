"""Write: multiply rows of parameters in place, wherever a training keeps them: shards, half precision, masters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..watch.examine import are_many, cut_over_heads

FROZEN = "{name} is frozen (requires_grad=False), so that its rows are not scaled"
QUANTISED = "{name} is stored as {dtype}, whose rows cannot be scaled in place"
NOT_WHOLE = {
    "FullyShardedDataParallel": (
        "{caller}: the model is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters have no rows. Use "
        "fully_shard (FSDP2); with accelerate set fsdp_version: 2."
    ),
    "ZeRO": (
        "{caller}: {name} belongs to DeepSpeed ZeRO, which keeps the weights elsewhere and would undo the change. Train with "
        "FSDP2 (fully_shard) or DistributedDataParallel."
    ),
    "empty": (
        "{caller}: {name} has no elements on this rank, so that its rows are not here to find or to scale: something keeps the "
        "weights elsewhere, as DeepSpeed ZeRO-3 does. Train with FSDP2 (fully_shard) or DistributedDataParallel."
    ),
    "tensor parallel": (
        "{caller}: parallelize_module cuts {name} over ranks (tensor parallel), so that each rank runs other heads and the rows "
        "of a head are not known. Nothing was changed. Use FSDP2 (fully_shard) or DistributedDataParallel without it, or a "
        "model with QK-norm, whose logits are bounded."
    ),
}


def check_whole(caller: str, model: nn.Module, parameters: dict[str, Tensor]) -> None:
    """Refuse sharding that leaves no rows to scale; gather nothing. ``caller`` is the call, as a user writes it."""
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise InputError(NOT_WHOLE["FullyShardedDataParallel"].format(caller=caller))
    for name, parameter in parameters.items():
        if hasattr(parameter, "ds_id") or getattr(parameter, "_hp_mapping", None) is not None:
            raise InputError(NOT_WHOLE["ZeRO"].format(caller=caller, name=name))
    cut = cut_over_heads(model) if are_many() else None
    if cut is not None:
        raise InputError(NOT_WHOLE["tensor parallel"].format(caller=caller, name=cut))


def check_there(caller: str, name: str, parameter: Tensor) -> None:
    """Refuse a parameter without elements on this rank."""
    if not parameter.numel():
        raise InputError(NOT_WHOLE["empty"].format(caller=caller, name=name))


def reshard(model: nn.Module) -> None:
    """Make FSDP2 modules hold their shards again: the optimizer steps those, not gathered copies."""
    for module in model.modules():
        gather: Any = getattr(module, "reshard", None)
        if type(module).__name__.startswith("FSDP") and callable(gather):
            gather()


def unscalable(name: str, parameter: Tensor) -> str | None:
    """Why rows of a parameter cannot be scaled."""
    if not parameter.is_floating_point() or parameter.element_size() < 2:
        return QUANTISED.format(name=name, dtype=str(parameter.dtype).removeprefix("torch."))
    if not parameter.requires_grad:
        return FROZEN.format(name=name)
    return None


class Copies(NamedTuple):
    """A parameter, and what an optimizer keeps of it."""

    parameter: Tensor
    masters: list[Tensor]
    averages: list[Tensor]

    @classmethod
    def of(cls, parameter: Tensor, optimizers: Sequence[Any], parameters: Sequence[Tensor]) -> Copies:
        masters = [tensor for optimizer in optimizers for tensor in masters_of(parameter, optimizer, parameters)]
        return cls(
            parameter, masters, [tensor for optimizer in optimizers for tensor in _averages(parameter, optimizer)]
        )


def scale_rows(copies: Copies, dim: int, factor: Tensor, offset: float) -> None:
    """Multiply ``parameter + offset`` by a factor per row of one dimension, in place; its other copies follow.

    Rows whose factor is 1 keep their bits. Half precision is multiplied in float32 and rounded once.
    """
    parameter, masters, averages = copies
    with torch.no_grad():
        for copy in (*masters, *averages):
            _multiply(copy, dim, factor, offset)
        if masters:
            parameter.copy_(masters[0])
        else:
            _multiply(parameter, dim, factor, offset)


def _multiply(tensor: Tensor, dim: int, factor: Tensor, offset: float) -> None:
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    rows = rows_like(factor, dim, tensor)
    if tensor.dtype != wide:
        values = tensor.to(wide)
        tensor.copy_(_scaled(values, rows, offset))
    elif offset:
        tensor.copy_(_scaled(tensor, rows, offset))
    else:
        tensor.mul_(rows)


def _scaled(values: Tensor, rows: Tensor, offset: float) -> Tensor:
    # γ(w + 1) − 1 as a change of w, so that a factor of 1 changes no bit
    return values + (rows - 1) * (values + offset) if offset else values * rows


def rows_like(factor: Tensor, dim: int, tensor: Tensor) -> Tensor:
    """A factor per row, to multiply a tensor by: in float32 or wider, on its device.

    For a DTensor every rank has all of them, so that the product is exact wherever a shard begins.
    """
    shape = [1] * tensor.dim()
    if shape:
        shape[dim] = -1
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    rows = factor.to(tensor.device, wide).view(shape)
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return rows
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(rows, mesh, [Replicate()] * mesh.ndim, run_check=False)


def unwrapped(caller: str, optimizer: object) -> list[Any]:
    """The optimizers that hold states: wrappers of trainers nest, and some hold several."""
    if optimizer is None:
        return []
    several = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    inner_optimizers = []
    for wrapped in several:
        seen: set[int] = set()
        while id(wrapped) not in seen:
            seen.add(id(wrapped))
            inner = next(
                (getattr(wrapped, word) for word in ("optimizer", "_optimizer") if hasattr(wrapped, word)), None
            )
            if inner is None or isinstance(inner, str):
                break
            wrapped = inner
        if not hasattr(wrapped, "param_groups") or not hasattr(wrapped, "state"):
            raise InputError(
                f"{caller}(): `optimizer` must be a torch.optim.Optimizer; got {type(wrapped).__name__}. Pass the optimizer of "
                "the training, or leave it out if it holds no copies of the weights."
            )
        inner_optimizers.append(wrapped)
    return inner_optimizers


def masters_of(parameter: Tensor, optimizer: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the weight in a wider dtype, from which the next step writes it: recognised by value, not by name.

    ``parameters`` are those of the model, in order: an optimizer may hold masters in their place.
    """
    if parameter.element_size() >= 4:
        return []  # it is its own master
    state = optimizer.state.get(parameter, {})
    own = [
        tensor for tensor in (*state.values(), getattr(parameter, "main_param", None)) if _is_master(tensor, parameter)
    ]
    held = [other for group in optimizer.param_groups for other in group["params"]]
    if own or any(other is parameter for other in held):
        return own
    masters = [other for other in held if _is_master(other, parameter)]
    if len(masters) > 1:  # weights that are still equal, such as gains of 1: by their order
        trained = [tensor for tensor in parameters if tensor.requires_grad]
        place = next((place for place, tensor in enumerate(trained) if tensor is parameter), None)
        masters = [held[place]] if place is not None and len(held) == len(trained) else []
        if not masters or not _is_master(masters[0], parameter):
            raise InputError(
                "qk_clip(): the optimizer holds several float32 copies that are equal to one weight, in another order than the "
                "model's parameters. Make the optimizer of model.parameters(), in their order."
            )
    return masters


def _is_master(other: object, parameter: Tensor) -> bool:
    if not isinstance(other, Tensor) or other.shape != parameter.shape or not other.is_floating_point():
        return False
    wider = other.element_size() > parameter.element_size()
    return wider and bool((other.detach().to(parameter.dtype) == parameter).all())


def _averages(parameter: Tensor, optimizer: Any) -> Iterator[Tensor]:
    """ScheduleFree's z: the weight is an interpolation between z and an average, so that both must shrink."""
    z = optimizer.state.get(parameter, {}).get("z")
    if isinstance(z, Tensor) and z.shape == parameter.shape:
        yield z
