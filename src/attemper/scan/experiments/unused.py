"""unused: one pass backward shows which weights of an attention module no output depends on."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..._display import plural
from ..checks.declared import has_experts, is_published
from ..input.batch import call
from ..unchanged import Held, copied, random_states, seed
from .reach import tensors_of
from .runner import widened, woken
from .subject import CannotRun
from .tiled import tiled
from .trial import Answer, Moved, Trial

SHOWN = 3
PART = (
    "Look for heads of k and v that are never read (k[:, :1] for all queries), and for a part of a fused projection that is "
    "taken twice (q, k = qkv[0], qkv[0])."
)
THROWN = (
    "Look for a result that is thrown away: x = layer(x), not y = layer(x). A decoder reads what its encoder returns, not its "
    "input."
)
NUMBER = re.compile(r"\d+")
PLACES = re.compile(r"pos_|_pos|position|places|\bwpe\b", re.IGNORECASE)
GAINS = re.compile(r"weight|scale|gamma|gain", re.IGNORECASE)


def unused(trial: Trial) -> Answer:
    """Whether the output depends on every weight of the attention modules, and on every table of positions."""
    model = trial.runner.judge
    asked = wanted(trial, model)
    if not asked:
        return Answer(f"its attention modules are published, or have no weights: {type(model).__name__}", skipped=True)
    without, parts, shared = _without_gradient(trial, model, asked)
    if shared:
        layer = next(place for weight, place in asked.items() if weight.startswith(f"{shared[0]}."))
        return trial.fault("projection_shared", Moved(layer, 0.0, 0), projection=shared[0])
    if len(without) == len(asked):
        raise CannotRun("no gradient reaches the weights: forward() runs under torch.no_grad()")
    idle = {place for place in asked.values() if place} - {name for name, _ in trial.checks.layers}
    lost = _lost(trial, model, asked, without, idle)
    if lost is not None:
        names = f"The weights of {lost}"
        what = "have no effect on the output: what this layer returns is not used"
        return trial.fault("weight_unused", Moved(lost, 0.0, 0), names=names, what=what, advice=THROWN)
    without = {name: layer for name, layer in without.items() if _some_count(layer, asked, without, idle)}
    for name, (start, stop) in {} if without else parts.items():
        whole, some = {name: slice(None)}, {name: slice(start, stop)}  # over a single key no row of q and k matters
        if not _matters(trial, model, some) and _matters(trial, model, whole):
            names = f"Rows {start} to {stop - 1} of {name}, of {len(dict(model.named_parameters())[name])},"
            what = "have no effect on the output"
            return trial.fault("weight_unused", Moved(asked[name], 0.0, 0), names=names, what=what, advice=PART)
    if not without:
        return Answer(f"the output depends on all {len(asked)} weights of the attention modules")
    layer = next(iter(without.values()))
    if layer in idle and trial.checks.layers:
        what = "have no effect on the output: this layer never ran"
        names = f"The weights of {layer}"
        advice = "Look at the loop over the layers: self.layers[0](x) for layer(x) runs the first one for all."
        return trial.fault("weight_unused", Moved(layer, 0.0, 0), names=names, what=what, advice=advice)
    here = [name for name, place in without.items() if place == layer]
    more = len(without) - len(here[:SHOWN])
    names = ", ".join(here[:SHOWN]) + (f" and {plural(more, 'other weight')}" if more else "")
    several = len(here) > 1 or more
    if _matters(trial, model, {here[0]: slice(None)}):
        what = "get no gradient, although they change the output: they never learn"
        what = what if several else "gets no gradient, although it changes the output: it never learns"
        advice = "Look for a detach(), a .data, a torch.no_grad() or a new torch.tensor(…) between it and the output."
        return trial.fault("weight_unused", Moved(layer, 0.0, 0), names=names, what=what, advice=advice)
    what = "have no effect on the output" if several else "has no effect on the output"
    return trial.fault("weight_unused", Moved(layer, 0.0, 0), names=names, what=what)


def wanted(trial: Trial, model: nn.Module) -> dict[str, str]:
    """The weights that should count, and the layer they belong to: projections, norms and gains of attention modules that are
    not published, and tables of positions. A bias of keys has no effect by definition: a softmax removes it."""
    modules = dict(model.named_modules())
    layers = [name for name, _ in trial.checks.layers if name in modules and name]
    layers += [name for name in modules if name not in layers and _is_one_of(name, layers, modules)]
    layers = [name for name in layers if not _is_known(modules[name])]
    names_of: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not parameter.is_floating_point() or parameter.is_meta:
            continue
        holder, _, last = name.rpartition(".")
        if "bias" in last or (parameter.dim() < 2 and not GAINS.search(last)):
            continue
        layer = next((candidate for candidate in layers if name.startswith(f"{candidate}.")), None)
        if layer is not None:
            names_of[name] = layer
        elif (not trial.checks.layers and not is_published(model)) or (
            PLACES.search(name)
            and not is_published(model)
            and not _is_known(modules.get(holder.rpartition(".")[0], model))
        ):  # attention that was not recognised may be anywhere
            names_of[name] = ""
    return names_of


def _is_one_of(name: str, layers: list[str], modules: dict[str, nn.Module]) -> bool:
    """Whether a module that never ran is of the class of a layer, and has its name but for a number."""
    alike = [one for one in layers if NUMBER.sub("#", one) == NUMBER.sub("#", name)]
    return bool(alike) and type(modules[alike[0]]) is type(modules[name])


def _is_known(module: nn.Module) -> bool:
    return is_published(module) or type(module).__module__.split(".")[0] == "attemper"


def _lost(trial: Trial, model: nn.Module, asked: dict[str, str], without: dict[str, str], idle: set[str]) -> str | None:
    """The first layer that ran, and of which no weight has an effect; None: there is none. A frozen one gets no gradient."""
    for layer in [name for name, _ in trial.checks.layers if name not in idle]:
        weights = {name: slice(None) for name, place in asked.items() if place == layer}
        if weights and all(name in without for name in weights):
            return None if _matters(trial, model, weights) else layer
    return None


def _rows_without(gradient: Tensor, least: int) -> tuple[int, int] | None:
    """The first rows of a projection's weight, as many as a head is wide or more, whose gradient is 0 while others' is not."""
    counts = (gradient != 0).flatten(1).any(1).tolist()
    start = 0
    for row, moves in enumerate([*counts, True]):
        if moves:
            if row - start >= max(least, 2) and any(counts):
                return start, row
            start = row + 1
    return None


def _some_count(layer: str, asked: dict[str, str], without: dict[str, str], idle: set[str]) -> bool:
    """Whether a layer's other weights count, or it never ran: a layer of which none does is one that is not asked for."""
    return layer in idle or not layer or any(place == layer and name not in without for name, place in asked.items())


@contextmanager
def counted(model: nn.Module, found: dict[str, int]) -> Iterator[None]:
    """While the model runs, count how often each projection runs on the tensor that it was given last."""
    given: dict[str, weakref.ref[Tensor]] = {}
    handles = []

    def look(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], Tensor):
                again = name in given and given[name]() is args[0]
                found[name] = found[name] + 1 if again else 1
                given[name] = weakref.ref(args[0])

        return hook

    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            handles.append(module.register_forward_pre_hook(look(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without_gradient(
    trial: Trial, model: nn.Module, asked: dict[str, str]
) -> tuple[dict[str, str], dict[str, tuple[int, int]], list[str]]:
    """The weights that are not part of the graph of the output, or behind a softmax over one number; of others, rows that get no
    gradient, from one to before another; and shared projections."""
    parameters = dict(model.named_parameters())
    batch = tiled(trial.subject, 1).batch
    shared: dict[str, int] = {}
    trial.runner.take()
    with torch.enable_grad(), random_states(), restored(model), woken(model), counted(model, shared):
        seed(0)
        output = call(model, copied(batch if model is trial.subject.model else widened(batch)))
        parts = [part for part in tensors_of(output) if part.requires_grad]
        if not parts:
            raise CannotRun("no gradient reaches the weights: forward() runs under torch.no_grad()")
        whole = torch.stack([part.double().square().sum() for part in parts]).sum()
        found = torch.autograd.grad(whole, [parameters[name] for name in asked], allow_unused=True)
    seen = bool(trial.checks.layers)  # otherwise a gradient of 0 shows a softmax over one number, and parts may be idle
    without = {
        name: layer
        for (name, layer), one in zip(asked.items(), found, strict=True)
        if (one is None if seen else one is not None and not bool(one.any()))
    }
    owners = {name.rpartition(".")[0] for name, layer in asked.items() if layer}
    widths = {name: reading.width for (name, _), readings in trial.checks.layers.items() for reading in readings}
    modules = dict(model.named_modules())
    idle_rows: dict[str, tuple[int, int]] = {}
    for (name, layer), one in zip(asked.items(), found, strict=True):
        projects = isinstance(modules.get(name.rpartition(".")[0]), nn.Linear) or name.endswith("in_proj_weight")
        if one is not None and layer in widths and projects and has_experts(model) is None:
            rows = _rows_without(one, widths[layer])
            if rows is not None:
                idle_rows[name] = rows
    return without, idle_rows, [name for name, times in shared.items() if times == len("qkv") and name in owners]


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Afterwards the buffers and attributes of a model are as they were."""
    held = Held(model)
    try:
        yield
    finally:
        held.restore()


def _matters(trial: Trial, model: nn.Module, rows: dict[str, slice]) -> bool:
    """Whether a number of the output moves with rows of weights that get no gradient."""
    parameters = dict(model.named_parameters())
    before = {name: parameters[name].detach().clone() for name in rows}
    draws = torch.Generator().manual_seed(6)
    _, output = trial.outputs(trial.subject.batch, trial.lengths)
    try:
        with torch.no_grad():
            for name, some in rows.items():
                part = parameters[name][some]
                size = float(part.abs().max()) or 0.1
                part.add_(torch.randn(part.shape, generator=draws, device="cpu").to(part) * size)
        _, moved = trial.outputs(trial.subject.batch, trial.lengths)
    finally:
        with torch.no_grad():
            for name, numbers in before.items():
                parameters[name].copy_(numbers)
    return any(
        one.shape != two.shape or not torch.equal(one.nan_to_num(), two.nan_to_num())
        for one, two in zip(tensors_of(output), tensors_of(moved), strict=False)
    )
