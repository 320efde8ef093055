"""Runner: runs a model, or a copy of it in float64, and keeps some rows of what its layers return. The model is not changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..input.batch import call
from .subject import CannotRun

LayerRows = dict[str, Tensor]
"""By layer, and "" for the model itself: (B, R, …), the chosen rows of what it returned."""
POOLED = "(pooled)"
"""In place of a layer: what the model returned, (B, 1, …), if that has one row per item and none per token."""
LARGEST_COPY = 2**29  # parameters of a model that is copied to float64: 4 GiB
MOST = 12  # forward passes
FEW = 96  # rows that are kept of a long input, at each of three places


class Runner:
    """Counts its passes. ``judge`` is a copy in float64, or in the model's own dtype if that fails; None: the model itself."""

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        self.model, self.layers = model, list(layers)
        self.passes = 0
        self.axes: dict[str, int] = {}  # by layer: the dimension of the tokens in what it returns
        self.exact = False  # whether the judge runs in float64
        self.judge = self._copied()

    def _copied(self) -> nn.Module:
        if sum(parameter.numel() for parameter in self.model.parameters()) > LARGEST_COPY:
            return self.model
        try:
            judge = copy.deepcopy(self.model)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError, ValueError):
            return self.model
        known = {p.dtype for p in self.model.parameters()}
        self.exact = known <= {torch.float16, torch.bfloat16, torch.float32, torch.float64}
        return judge.double() if self.exact else judge

    def take(self) -> None:
        """Count one more pass."""
        if self.passes >= MOST:
            raise CannotRun(f"{MOST} forward passes were made before it, which is the most")
        self.passes += 1

    def give_up_float64(self) -> None:
        """The copy in float64 cannot run: judge by one in the model's own dtype."""
        self.exact = False
        self.judge = copy.deepcopy(self.model)

    def with_other_rounding(self, batch: Any, lengths: Mapping[int, Tensor]) -> LayerRows:
        """The rows of a pass in which every weight is moved by one unit of rounding, up or down."""
        known = [parameter for parameter in self.judge.parameters() if parameter.is_floating_point()]
        before = [parameter.detach().clone() for parameter in known]
        draws = torch.Generator().manual_seed(0)
        try:
            with torch.no_grad():
                for parameter in known:
                    signs = (
                        torch.randint(0, 2, parameter.shape, generator=draws, dtype=torch.int8, device="cpu").to(
                            parameter
                        )
                        * 2
                        - 1
                    )
                    parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)
            return self(batch, lengths)
        finally:
            with torch.no_grad():
                for parameter, old in zip(known, before, strict=True):
                    parameter.copy_(old)

    def own(self, batch: Any, lengths: Mapping[int, Tensor]) -> LayerRows:
        """The rows of a pass of the model in its own dtype."""
        return self._run(self.model, batch, lengths)[0]

    def __call__(self, batch: Any, lengths: Mapping[int, Tensor]) -> LayerRows:
        """The rows of a pass of the judge."""
        return self.outputs(batch, lengths)[0]

    def outputs(self, batch: Any, lengths: Mapping[int, Tensor]) -> tuple[LayerRows, Any]:
        """The rows of a pass of the judge, and what it returned."""
        return self._run(self.judge, widened(batch) if self.exact else batch, lengths)

    def _run(self, model: nn.Module, batch: Any, lengths: Mapping[int, Tensor]) -> tuple[LayerRows, Any]:
        self.take()
        found: LayerRows = {}
        modules = dict(model.named_modules())

        def keep(name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                rows = self._rows(name, output, lengths)
                if rows is not None:
                    found[name] = rows

            return hook

        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
            stack.enter_context(torch.random.fork_rng(devices))
            stack.callback(_restore, [(buffer, buffer.clone()) for buffer in self.model.buffers()])
            torch.manual_seed(0)
            if model is self.judge and self.exact:  # for masks that a forward makes
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float64)
            for name in dict.fromkeys(self.layers):
                if name in modules and name:
                    stack.callback(modules[name].register_forward_hook(keep(name)).remove)
            output = call(model, batch)
        rows = self._rows("", output, lengths)
        if rows is not None:
            found[""] = rows
        elif pooled := _tensors(output):
            found[POOLED] = pooled[0].detach()[:, None].clone()
        return found, output

    def _rows(self, name: str, output: Any, lengths: Mapping[int, Tensor]) -> Tensor | None:
        """(B, R, …) of the first tensor of an output with one of these lengths, in the dimension of the first pass."""
        for tensor in _tensors(output):
            for axis in [self.axes[name]] if name in self.axes else (1, 0, 2):
                if tensor.dim() > max(axis, 1) and tensor.shape[axis] in lengths:
                    self.axes.setdefault(name, axis)
                    kept = tensor.detach().index_select(axis, lengths[tensor.shape[axis]].to(tensor.device))
                    return kept.movedim(axis, 1).clone()
        return None


def _restore(buffers: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, before in buffers:
        if buffer.shape == before.shape and not torch.equal(buffer, before):
            buffer.copy_(before)


def widened(batch: Any) -> Any:
    """A batch with its floating-point numbers in float64."""
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {name: widened(value) for name, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(widened(value) for value in batch)
    return batch


def chosen(length: int) -> Tensor:
    """Which rows of an input are kept: all if they are few, otherwise the first, the last, and some between."""
    if length <= 3 * FEW:
        return torch.arange(length, device="cpu")
    middle = torch.linspace(0, length - 1, FEW, device="cpu").long()
    return torch.cat(
        [torch.arange(FEW, device="cpu"), middle, torch.arange(length - FEW, length, device="cpu")]
    ).unique()


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if _is_numbers(output) else []
    values = list(output.values()) if isinstance(output, Mapping) else output
    if not isinstance(values, (tuple, list)):
        return []
    found = [value for value in values if _is_numbers(value)]
    return found or (_tensors(values[0]) if values else [])


def _is_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_nested and value.is_floating_point() and value.dim() > 1
