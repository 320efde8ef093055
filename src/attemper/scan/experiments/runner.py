"""Runner: run a model and keep some rows of what its layers return; model, batch and random states stay as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..checks.declared import named_arguments
from ..input.batch import call
from ..unchanged import Held, converted, copied, opened, random_states, seed
from .subject import CannotRun

LayerRows = dict[str, Tensor]
"""By layer, and "" for the model itself: (B, R, …), the chosen rows of what it returned."""
POOLED = "(pooled)"
"""The key of an output of the model, (B, 1, …), that has one row per item and none per token."""
LARGEST_COPY = 2**29  # parameters of a model that is copied to float32: 2 GiB
MOST = 20  # forward passes
FEW = 96  # rows of a long input that are kept at its start, its end and between
HALVES = {torch.float16, torch.bfloat16}


class Runner:
    """Runs ``judge`` and counts the passes: the model, or a float32 copy of a half-precision model that is not too large."""

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        self.model, self.layers = model, list(layers)
        self.passes = 0
        self.seed = 0  # of every random state, before a pass
        self.draws = False  # whether a pass drew random numbers
        self.in_place: list[str] = []  # what the first pass changed of its batch
        self.axes: dict[str, int] = {}  # by layer: the dimension of the tokens in what it returns
        self.keeps_state = False  # whether a pass sees the state that the previous pass left
        self.judge = self._judge()

    @property
    def exact(self) -> bool:
        """Whether the judge runs in float32 or wider."""
        return not HALVES & {parameter.dtype for parameter in self.judge.parameters()}

    def _judge(self) -> nn.Module:
        parameters = list(self.model.parameters())
        known = {parameter.dtype for parameter in parameters}
        if not known & HALVES or not known <= {*HALVES, torch.float32, torch.float64}:
            return self.model
        if sum(parameter.numel() for parameter in parameters) > LARGEST_COPY:
            return self.model
        try:
            return converted(self.model, torch.float32)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError, ValueError):
            return self.model

    def take(self) -> None:
        """Count one more pass."""
        if self.passes >= MOST:
            raise CannotRun(
                f"the {MOST} forward passes of a scan were used up before it", "attemper.testing, one by one"
            )
        self.passes += 1

    def __call__(self, batch: Any, lengths: Mapping[int, Tensor]) -> LayerRows:
        """The rows of a pass of the judge."""
        return self.outputs(batch, lengths)[0]

    @contextmanager
    def keeping_state(self) -> Iterator[Held]:
        """Within, a pass sees what the previous one left in buffers and attributes; afterwards they are put back."""
        held, self.keeps_state = Held(self.judge), True
        try:
            yield held
        finally:
            self.keeps_state = False
            held.restore()

    def with_other_rounding(self, batch: Any, lengths: Mapping[int, Tensor]) -> LayerRows:
        """The rows of a pass in which the input, and what each module returns, move by one unit of rounding, up or down."""
        draws = torch.Generator().manual_seed(0)

        def move(given: Any) -> Any:
            if isinstance(given, (tuple, list, dict)):
                return _each(move, given)
            if not isinstance(given, Tensor) or not given.is_floating_point() or given.is_nested or not given.dim():
                return given
            signs = torch.randint(0, 2, given.shape[-1:], generator=draws, device="cpu").to(given) * 2 - 1
            return given * (1 + signs * torch.finfo(given.dtype).eps)

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return move(output) if isinstance(output, Tensor) else None

        with ExitStack() as stack:
            for module in self.judge.modules():
                stack.callback(module.register_forward_hook(hook).remove)
            return self(move(copied(batch)), lengths)

    def outputs(self, batch: Any, lengths: Mapping[int, Tensor], counted: bool = True) -> tuple[LayerRows, Any]:
        """The rows of a pass of the judge, and what it returned. ``counted``: False for a part of a pass that is counted."""
        if counted:
            self.take()
        rows_of: LayerRows = {}
        modules = dict(self.judge.named_modules())

        def keep(name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                rows = self._rows(name, output, lengths)
                if rows is not None:
                    rows_of[name] = rows

            return hook

        given = copied(batch if self.judge is self.model else widened(batch))
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(random_states())
            seed(self.seed)
            if not self.keeps_state:
                stack.callback(Held(self.judge).restore)
            if self.judge is not self.model:  # for masks that a forward makes
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float32)
            for name in dict.fromkeys(self.layers):
                if name in modules and name:
                    stack.callback(modules[name].register_forward_hook(keep(name)).remove)
            held = Held(named_arguments(self.model, given)) if self.passes == 1 else None
            states = _torch_states()
            output = call(self.judge, given)
            self.draws |= not all(map(torch.equal, states, _torch_states()))
        if held is not None:
            self.in_place = held.changed()
        rows = self._rows("", output, lengths)
        if rows is not None:
            rows_of[""] = rows
        elif pooled := _tensors(output):
            rows_of[POOLED] = pooled[0].detach()[:, None].clone()
        return rows_of, output

    def _rows(self, name: str, output: Any, lengths: Mapping[int, Tensor]) -> Tensor | None:
        """(B, R, …) of the first tensor of an output with one of these lengths, in the dimension of the first pass."""
        for tensor in _tensors(output):
            for axis in [self.axes[name]] if name in self.axes else (1, 0, 2):
                if tensor.dim() > max(axis, 1) and tensor.shape[axis] in lengths:
                    self.axes.setdefault(name, axis)
                    rows = tensor.detach().index_select(axis, lengths[tensor.shape[axis]].to(tensor.device))
                    return rows.movedim(axis, 1).clone()
        return None


def _torch_states() -> list[Tensor]:
    """The states of torch's generators, on every device that is in use."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


@contextmanager
def woken(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """For a while, give weights that are all 0 small random numbers: a gate that is still closed hides what depends on what."""
    draws = torch.Generator().manual_seed(5)
    asleep = [one for one in model.parameters() if one.is_floating_point() and not one.is_meta and not bool(one.any())]
    with torch.no_grad():
        for one in asleep:
            one.copy_(torch.randn(one.shape, generator=draws, device="cpu") * 0.05)
    try:
        yield asleep
    finally:
        with torch.no_grad():
            for one in asleep:
                one.zero_()


def widened(batch: Any) -> Any:
    """A batch with its floating-point numbers in float32."""
    if isinstance(batch, Tensor):
        return batch.float() if batch.dtype in HALVES else batch
    return _each(widened, batch)


def _each(function: Callable[[Any], Any], batch: Any) -> Any:
    """A container with the function applied to what it holds; anything else as it is."""
    if isinstance(batch, Mapping):
        return {name: function(value) for name, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(function(value) for value in batch)
    return batch


def chosen(length: int) -> Tensor:
    """The rows of an input to keep: all if they are few, otherwise the first, the last, and some between."""
    if length <= 3 * FEW:
        return torch.arange(length, device="cpu")
    middle = torch.linspace(0, length - 1, FEW, device="cpu").long()
    return torch.cat(
        [torch.arange(FEW, device="cpu"), middle, torch.arange(length - FEW, length, device="cpu")]
    ).unique()


def _tensors(output: Any) -> list[Tensor]:
    output = opened(output)
    if isinstance(output, Tensor):
        return [output] if _is_numbers(output) else []
    values = list(output.values()) if isinstance(output, Mapping) else output
    if not isinstance(values, (tuple, list)):
        return []
    tensors = [value for value in values if _is_numbers(value)]
    return tensors or (_tensors(values[0]) if values else [])


def _is_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_nested and value.is_floating_point() and value.dim() > 1
