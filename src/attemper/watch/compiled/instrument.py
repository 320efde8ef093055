"""instrument(): prepares a model so that a watch reads its vitals while it runs compiled."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..._torch_private import mark_static
from ...errors import InputError, checked_options
from ...operation.call_hooks import KIND, TALLY, begin_target, end_target, target_of
from ...operation.tally import GRADES, KINDS, WIDTH, surviving, use_native_ops
from ..attach.names import named_modules
from ..routes.kind import kind_by_name
from ..routes.registered import INSTRUMENT, REPLACED, register
from ..routes.replace import check_known
from ..routes.versions import modeling
from .find import heads_of, way_of

HANDLES = "attemper_hooks"


class Instruments:
    """What :func:`instrument` added to a model; ``layers`` are the names of the modules, ``remove()`` takes it off."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before: list[tuple[Any, Any]] = []  # configs, and the implementation that each had

    @property
    def layers(self) -> list[str]:
        return [name for module, name in named_modules(self.model).items() if TALLY in module.__dict__]

    def remove(self) -> None:
        """Take the tallies off, and let a Hugging Face model attend as before. A compiled model compiles again."""
        for module in named_modules(self.model):
            for handle in module.__dict__.pop(HANDLES, ()):
                handle.remove()
            module.__dict__.pop(TALLY, None)
            module.__dict__.pop(KIND, None)
        for config, implementation in self.before:
            config._attn_implementation_internal = implementation

    def __repr__(self) -> str:
        return f"Instruments({type(self.model).__name__}; {len(self.layers)} layers)"


@checked_options
def instrument(model: nn.Module) -> Instruments:
    """Prepare a model so that ``watch(model)`` measures it while it runs compiled, also as CUDA graphs.

    Every attention call from then on adds its vitals, summed by head, to a small tensor of its module. This is an op of the
    compiled graph, which runs whether a watch is open or not: a watch only reads the tensors when a step ends, so watching breaks
    no graph and compiles nothing again. Call it once, after ``model.to(device)`` and before the first compiled pass. Nothing is
    added to the state dict.

    A Hugging Face model attends by attemper's kernels from then on; outputs are equal up to rounding. So do, as always,
    :class:`MultiHeadAttention` and modules whose own code calls :func:`attention`, :func:`sdpa` or :func:`cosine_attention`.

    Args:
        model: a Hugging Face model that uses the attention interface, a model built on attemper, or one that contains such.

    Returns:
        ``layers``, the names of the modules that are measured, and ``remove()``.

    Example:
        >>> model = attemper.MultiHeadAttention(16, 2, batch_first=True)
        >>> attemper.instrument(model).layers
        ['']
        >>> with attemper.watch(model) as watch:
        ...     output = model(torch.randn(1, 5, 16), need_weights=False)
        >>> [row["rows"] for row in watch.record.to_dicts()]
        [5.0, 5.0]
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"instrument(): `model` must be a torch.nn.Module; got {type(model).__name__}. Pass the model that you call."
        )
    use_native_ops()
    instruments = Instruments(model)
    names = named_modules(model)
    ways = {module: way for module in names if (way := way_of(module)) is not None}
    left_out = [names[module] or type(module).__name__ for module, way in ways.items() if way == "torch"]
    inside = _switch(model, instruments) if "interface" in ways.values() else set()
    for module, way in ways.items():
        if way in ("module", "own") or (way == "interface" and module in inside):
            _add_tally(module, names[module])
        if way == "own" and HANDLES not in module.__dict__:
            module.__dict__[HANDLES] = (
                module.register_forward_pre_hook(surviving(_begin)),
                module.register_forward_hook(surviving(_end), always_call=True),
            )
    if not instruments.layers:
        raise InputError(
            f"instrument(): found no attention in {type(model).__name__} that can be measured in a compiled graph: a Hugging "
            "Face model that uses the attention interface, attemper.MultiHeadAttention, or a module whose own code calls "
            "attemper.attention. Leave instrument out: attemper.watch(model) then runs watched steps eagerly."
        )
    if left_out:
        warnings.warn(
            f"instrument(): {', '.join(left_out[:3])}{' and others' if len(left_out) > 3 else ''} will not be measured: torch's "
            "own attention is computed there. Use attemper.sdpa or attemper.MultiHeadAttention.from_torch(module).",
            stacklevel=2,
        )
    return instruments


def _add_tally(module: nn.Module, name: str) -> None:
    near = next(module.parameters(), None)
    device = torch.device("cpu") if near is None else near.device
    heads, before = heads_of(module), module.__dict__.get(TALLY)
    if before is not None and before.device == device and before.shape[2] >= heads:
        return
    # not a buffer: model.half() would round it, DistributedDataParallel would overwrite it with the first rank's
    tally = torch.zeros((len(KINDS), GRADES, heads, WIDTH), dtype=torch.float64, device=device)
    mark_static(tally)
    module.__dict__[TALLY] = tally
    cross = getattr(module, "is_cross_attention", False)
    module.__dict__[KIND] = "cross" if cross else kind_by_name(name, type(module).__name__) or ""


def _switch(model: nn.Module, instruments: Instruments) -> set[nn.Module]:
    """Let the Hugging Face models inside attend by attemper's kernels; returns the modules of those that do."""
    library = modeling()
    inside: set[nn.Module] = set()
    if library is None:
        return inside
    register(INSTRUMENT)
    for part in named_modules(model):
        if not isinstance(part, library.PreTrainedModel) or part in inside:
            continue
        check_known(INSTRUMENT, part)
        configs = list({id(each.config): each.config for each in part.modules() if hasattr(each, "config")}.values())
        before = [(config, config._attn_implementation_internal) for config in configs]
        part.set_attn_implementation(REPLACED)
        used = [config for config, implementation in before if implementation is not None]
        if any(config._attn_implementation != REPLACED for config in used):
            for config, implementation in before:
                config._attn_implementation_internal = implementation
            continue
        instruments.before += [pair for pair in before if pair[1] != REPLACED]
        inside.update(part.modules())
    return inside


def _begin(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    target = target_of(module, "attemper")
    if target is not None:
        begin_target(target)


def _end(module: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
    tally = getattr(module, TALLY, None)
    if tally is not None:
        end_target(tally)


def tallies(model: nn.Module) -> dict[str, Tensor]:
    """The tally of each layer that has one."""
    return {name: module.__dict__[TALLY] for module, name in named_modules(model).items() if TALLY in module.__dict__}
