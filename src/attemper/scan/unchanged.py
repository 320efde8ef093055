"""Run a model and leave everything as it was: its buffers and attributes, the batch, and every random state.

converted()     a copy of a model in another dtype
evaluating()    evaluation mode without gradients; modes and random states are as before afterwards
call()          one forward on a copy of the batch; what it changed in the model is put back
opened()        an object that a model returned, as a dict of its attributes
Held            a snapshot of what a forward may change in a model or a batch
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from .input.batch import call as call_model

HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)
"""Attributes of a module that a watch changes and restores itself."""
PARTS = ("_parameters", "_buffers", "_modules")
ATOMS = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, str, bytes, int, float, complex, type(None))
SHARED = (list, dict, set, Tensor)
MOST = 100_000  # objects that are looked at


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module is in the mode it was in, and so is every random state."""
    before = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), random_states():
            yield
    finally:
        for part, training in before:
            part.training = training


@contextmanager
def random_states() -> Iterator[None]:
    """Afterwards the random states of Python, NumPy and torch, on every device, are as they were."""
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)


def seed(number: int) -> None:
    """Set every random state."""
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def call(model: nn.Module, batch: Any) -> Any:
    """What the model returns for a copy of the batch; its buffers and attributes are put back afterwards."""
    held = Held(model)
    try:
        return call_model(model, copied(batch))
    finally:
        held.restore()


def opened(output: Any) -> Any:
    """An object that a model returned, such as a dataclass, as a dict of its attributes; a container or a tensor as it is."""
    if isinstance(output, (*ATOMS, Tensor, nn.Module, Mapping, tuple, list)) or not hasattr(output, "__dict__"):
        return output
    return dict(vars(output))


def converted(model: nn.Module, dtype: torch.dtype, tables: bool = True) -> nn.Module:
    """A copy of a model with its floating-point numbers in a dtype; no second copy of them is made on the way.

    Without ``tables``, embeddings share their weight with the model, and convert the rows that they return.
    """
    known: dict[int, Any] = {}
    shared = set() if tables else {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    shared -= {
        id(parameter)
        for part in model.modules()
        if not isinstance(part, nn.Embedding)
        for parameter in part.parameters(recurse=False)
    }
    for part in (*model.parameters(), *model.buffers()):
        if id(part) in shared:
            known[id(part)] = part
            continue
        new = part.detach().to(dtype) if part.is_floating_point() else part.detach().clone()
        known[id(part)] = nn.Parameter(new, part.requires_grad) if isinstance(part, nn.Parameter) else new
    made = copy.deepcopy(model, known)
    for module in made.modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in shared:
            module.register_forward_hook(lambda _, args, output: output.to(dtype))
    return made


def copied(batch: Any) -> Any:
    """A deep copy of a batch, caches included; a tensor that occurs twice stays one tensor."""
    tensors = [part for _, part in reachable(batch) if isinstance(part, Tensor)]
    # a deep copy refuses a tensor that has a graph
    known = {id(part): part.detach().clone() for part in tensors if part.grad_fn is not None}
    try:
        return copy.deepcopy(batch, known)
    except (RuntimeError, TypeError, NotImplementedError, AttributeError, ValueError):
        return batch  # it holds what cannot be copied, such as a lock


def reachable(root: object) -> Iterator[tuple[str, Any]]:
    """Every object inside a model or a batch, once, with its name; weights too."""
    seen: dict[int, object] = {}
    classes: set[type] = set()
    waiting: deque[tuple[str, object]] = deque([("", root)])
    while waiting and len(seen) < MOST:
        name, value = waiting.popleft()
        if isinstance(value, ATOMS) or id(value) in seen:
            continue
        seen[id(value)] = value
        yield name, value
        parts = list(_inside(value))
        if isinstance(value, nn.Module) and type(value) not in classes:
            classes.add(type(value))
            parts += _of_class(type(value)).items()
        waiting.extend((f"{name}.{inner}" if name else str(inner), part) for inner, part in parts)


def _inside(value: Any) -> Iterable[tuple[object, object]]:
    if isinstance(value, Tensor):
        return ()
    if isinstance(value, torch.jit.ScriptModule):
        return list(value.named_buffers())
    if isinstance(value, nn.Module):
        dicts = [vars(value).get(part, {}) for part in PARTS]
        own = {name: part for name, part in vars(value).items() if name not in HOOKS and name not in PARTS}
        return [item for some in (own, *dicts) for item in some.items()]
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(enumerate(value))
    return list(getattr(value, "__dict__", {}).items())


def _of_class(cls: type) -> dict[str, Any]:
    """Containers and tensors that all modules of a class share: its attributes, and defaults of its functions."""
    attributes: dict[str, Any] = {}
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for name, value in vars(base).items():
            if isinstance(value, SHARED) and not name.startswith("__"):
                attributes.setdefault(name, value)
            elif isinstance(value, FunctionType):
                defaults = *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
                attributes |= {
                    f"{name}(default {n})": default for n, default in enumerate(defaults) if isinstance(default, SHARED)
                }
    return attributes


class Held:
    """A snapshot of what a forward may change in a model or a batch: everything but the values of parameters."""

    def __init__(self, root: object) -> None:
        self.saved: list[tuple[Callable[[], list[str]], Callable[[], object]]] = []
        self.alive: list[object] = []  # so that no id is reused
        for name, value in reachable(root):
            self.alive.append(value)
            self._hold(name, value)

    def changed(self) -> list[str]:
        """The names of what differs now."""
        return list(dict.fromkeys(name for differing, _ in self.saved for name in differing()))

    def restore(self) -> None:
        """Put back what differs."""
        for differing, put_back in self.saved:
            if differing():
                put_back()

    def _hold(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                self._hold_numbers(name, value)
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._save(name, lambda: torch.equal(value.get_state(), state), lambda: value.set_state(state))
        elif isinstance(value, torch.jit.ScriptModule):
            return  # reachable() yields its buffers
        elif isinstance(value, nn.Module):
            if isinstance(value, LazyModuleMixin) and value.has_uninitialized_params():
                return  # its first forward makes it another module
            for part in PARTS:
                self._hold_names(name, vars(value).get(part, {}))
            self._hold_names(name, vars(value))
            if isinstance(value, nn.Embedding) and value.max_norm is not None:  # it shrinks its rows as it reads them
                self._hold_numbers(f"{name}.weight", value.weight.data)
        elif isinstance(value, MutableMapping):
            self._hold_names(name, value)
        elif isinstance(value, (list, deque)):
            items = list(value)
            self._save(name, lambda: _are(value, items), lambda: _refill(value, value.extend, items))
        elif isinstance(value, set):
            members = set(value)
            self._save(name, lambda: value == members, lambda: _refill(value, value.update, members))
        elif not isinstance(value, (Mapping, tuple, frozenset)) and hasattr(value, "__dict__"):
            self._hold_names(name, vars(value))

    def _save(self, name: str, same: Callable[[], bool], put_back: Callable[[], object]) -> None:
        self.saved.append((lambda: [] if same() else [name], put_back))

    def _hold_numbers(self, name: str, tensor: Tensor) -> None:
        if type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_meta:
            before = tensor.detach().clone()
            self._save(name, lambda: _equal(tensor, before), lambda: tensor.detach().copy_(before))

    def _hold_names(self, name: str, mapping: MutableMapping[Any, Any]) -> None:
        before = {key: part for key, part in mapping.items() if key not in HOOKS}
        absent = object()

        def differing() -> list[str]:
            new = [key for key in mapping if key not in before and key not in HOOKS]
            other = [key for key, part in before.items() if mapping.get(key, absent) is not part]
            return [f"{name}.{key}" if name else str(key) for key in (*new, *other)]

        def put_back() -> None:
            for key in [key for key in mapping if key not in before and key not in HOOKS]:
                del mapping[key]
            mapping.update(before)

        self.saved.append((differing, put_back))


def _refill(container: Any, fill: Callable[[Any], object], items: Any) -> None:
    container.clear()
    fill(items)


def _are(some: Any, items: list[Any]) -> bool:
    return len(some) == len(items) and all(a is b for a, b in zip(some, items, strict=True))


def _equal(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape or torch.equal(tensor, other):
        return tensor.shape == other.shape
    return tensor.is_floating_point() and bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())
