"""Checkpoint: whether the weights in a folder are those of the model that its config describes, by size and by name."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as registering

from ..._display import plural
from ...errors import InputError
from ...watch.examine import traits

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What DDP, torch.compile, FSDP and activation checkpointing put into the names of the weights they wrap."""

STACKED = re.compile(r"(^|_)(layers?|blocks?|depths?)$")
EMBEDS = re.compile(r"embed", re.IGNORECASE)
MOST_LABELS = 10**6
PER_BYTE, SPARE = 8, 2**24
"""The most numbers a model has for each byte of its files (one bit each), and in addition."""


@dataclass(frozen=True)
class Stored:
    """From the headers of the weight files: which tensor is in which file."""

    places: dict[str, Path]

    @property
    def bytes(self) -> int:
        return sum(os.stat(path).st_size for path in set(self.places.values()))

    @property
    def layers(self) -> int:
        """How many layers the longest stack has, by the numbers in the names."""
        return 1 + max((int(part) for name in self.places for part in name.split(".") if part.isdecimal()), default=-1)

    def tensors(self, names: dict[str, str]) -> dict[str, Tensor]:
        """The tensors under other names."""
        from safetensors import safe_open

        found: dict[str, Tensor] = {}
        for path in sorted(set(self.places.values())):
            with safe_open(str(path), framework="pt") as file:
                found |= {names[name]: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return found


def check_sizes(config: object, stored: Stored) -> None:
    """Refuse a config with more layers than the files have tensors, before lists of that length are built."""
    for name, value in config.items() if isinstance(config, dict) else ():
        numbers = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, (int, float))]
        most = max(numbers, default=0)
        if STACKED.search(str(name)) and most > 4 * len(stored.places) + 64:
            raise InputError(
                f"scan: config.json says that {name} is {most:.10g}, and the weights have {plural(stored.layers, 'layer')} "
                f"({len(stored.places)} tensors in all). Correct config.json, or copy it again from its source."
            )
        if name == "num_labels" and most > MOST_LABELS:
            raise InputError(f"scan: config.json says that num_labels is {most:.10g}, which is too large. Correct it.")
        for part in value if isinstance(value, list) else [value]:
            check_sizes(part, stored)


@contextmanager
def bounded(stored: Stored) -> Iterator[None]:
    """While a model is built: raise as soon as it is far larger than its files, before the memory is allocated."""
    most, counted = PER_BYTE * stored.bytes + SPARE, 0

    def count(owner: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal counted
        counted += 0 if tensor is None else max(tensor.numel(), 2**10)  # an empty tensor takes memory too
        if counted > most:
            raise InputError(
                f"scan: config.json describes a model of over {counted:,} numbers, and the files have {stored.bytes:,} bytes: "
                f"they do not belong together (reached in {type(owner).__name__}.{name}). Correct the sizes in config.json, or "
                "copy it again from its source."
            )

    hooks = [
        registering.register_module_parameter_registration_hook(count),
        registering.register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def renamed(stored: Stored, model: Any) -> dict[str, str] | None:
    """The names of the stored tensors without the prefixes of wrappers or an outer module; None if that does not help."""
    base = f"{getattr(model, 'base_model_prefix', '')}."
    wanted = set(model.state_dict())
    wanted |= {name.removeprefix(base) for name in wanted} | {base + name for name in wanted}
    split = {name: [part for part in name.split(".") if part not in WRAPPERS] for name in stored.places}
    ends = zip(min(split.values()), max(split.values()), strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], ends))
    found = {name: name for name in stored.places}
    best = sum(name in wanted for name in found)
    for start in range(shared + 1):
        stripped = {name: ".".join(parts[start:]) for name, parts in split.items()}
        score = sum(name in wanted for name in stripped.values())
        if score > best and len(set(stripped.values())) == len(stripped):
            found, best = stripped, score
    return None if all(name == other for name, other in found.items()) else found


def vital(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Which of some parameters attention depends on: embeddings, and all of the layers with attention; no head, no pooler."""
    modules = dict(model.named_modules())
    blocks = {_block(name) for name, module in modules.items() if name and traits(module).attends}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def counts(name: str) -> bool:
        parts = name.split(".")
        around = [".".join(parts[:end]) for end in range(1, len(parts))]
        embeds = any(EMBEDS.search(type(modules[one]).__name__) for one in around if one in modules)
        return embeds or any(one in blocks for one in around)

    return [name for name in names if name in parameters and counts(name)]


def attends(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Which of some parameters are in attention modules: the projections of q, k and v among them."""
    inside = [f"{name}." for name, module in model.named_modules() if name and traits(module).attends]
    return [name for name in names if name.startswith(tuple(inside))] if inside else []


def some(names: Sequence[str], count: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def _block(name: str) -> str:
    """A layer's name up to its number: encoder.layer.0 of encoder.layer.0.attention.self."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[: number + 1])
