"""A model's folder, checked before transformers reads it; and whether its weights fit its config, by size and by name.

Weights must be safetensors. A pickle runs code when it is opened, and so do `auto_map` and an attention implementation that
names a repository of the hub: all are refused unopened.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
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

        tensors: dict[str, Tensor] = {}
        for path in sorted(set(self.places.values())):
            with safe_open(str(path), framework="pt") as file:
                tensors |= {names[name]: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors


def check_sizes(config: object, stored: Stored) -> None:
    """Refuse a config that has far more layers than the files have tensors, before lists of that length are built."""
    for name, value in config.items() if isinstance(config, dict) else ():
        numbers = [
            number for number in (value if isinstance(value, list) else [value]) if isinstance(number, (int, float))
        ]
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
    """Raise while a model is built, as soon as it is far larger than its files: before the memory is allocated."""
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
    names = {name: name for name in stored.places}
    best = sum(name in wanted for name in names)
    for start in range(shared + 1):
        stripped = {name: ".".join(parts[start:]) for name, parts in split.items()}
        score = sum(name in wanted for name in stripped.values())
        if score > best and len(set(stripped.values())) == len(stripped):
            names, best = stripped, score
    return None if all(name == other for name, other in names.items()) else names


def vital(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The parameters that attention depends on: those of embeddings and of layers with attention; no task head, no pooler."""
    modules = dict(model.named_modules())
    blocks = {_block(name) for name, module in modules.items() if name and traits(module).attends}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def counts(name: str) -> bool:
        parts = name.split(".")
        around = [".".join(parts[:end]) for end in range(1, len(parts))]
        embeds = any(EMBEDS.search(type(modules[outer]).__name__) for outer in around if outer in modules)
        return embeds or any(outer in blocks for outer in around)

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
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[: number + 1])


PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
INDEX = "model.safetensors.index.json"
MAY_NAME_CODE = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)
OWN_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
"""Implementations of attention and experts that torch and transformers have built in: nothing is downloaded for them."""
LARGEST_JSON = 64 * 2**20  # bytes; configs have kilobytes
DEEPEST_JSON = 64  # levels; transformers and torch recurse into what they read
POINTER = b"version https://git-lfs.github.com/spec/"  # the first bytes of a Git LFS pointer
LARGE_FILES = (".json", ".safetensors", ".model", ".spm", ".txt")


def check(folder: Path) -> dict[str, Any]:
    """The config of a folder, after every file that will be read has been checked.

    The weights are .safetensors, in one file or in several with an index.
    """
    _check_plain_files(folder)
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"scan: {str(folder)!r} holds an adapter (PEFT), not a whole model. Merge it into its model first "
            "(merge_and_unload() of peft), save that with save_pretrained(), and give the folder of it."
        )
    if not (folder / "config.json").is_file():
        raise InputError(
            f"scan: {str(folder)!r} has no config.json, so its model is not known. "
            "Give the folder that save_pretrained() wrote."
        )
    config = read(folder / "config.json")
    for name in MAY_NAME_CODE:
        if (folder / name).is_file():
            _refuse_code(folder / name)
    weights(folder)
    return config


def stored(folder: Path) -> Stored:
    """Which tensor is in which weight file; if there is an index, only in those that it names."""
    named = read(folder / INDEX).get("weight_map", {}).values() if (folder / INDEX).is_file() else ()
    files = [path for path in weights(folder) if not named or path.name in named]
    return Stored({name: path for path in files for name in _check_header(path)})


def weights(folder: Path) -> list[Path]:
    """The weight files in the order of their names; each must be complete."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        _no_weights(folder)
    if (folder / INDEX).is_file():
        _check_index(folder)
    for path in files:
        _check_header(path)
    return files


def read(path: Path) -> dict[str, Any]:
    """A JSON object from an untrusted file."""
    if path.stat().st_size > LARGEST_JSON:
        raise InputError(f"scan: {str(path)!r} is too large for a {path.name}. Check the file.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"scan: {str(path)!r} is not JSON: {error}. Copy it again from its source.") from None
    level, depth = [content] if isinstance(content, (dict, list)) else [], 0
    while level:
        inner = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        level, depth = [part for part in inner if isinstance(part, (dict, list))], depth + 1
        if depth > DEEPEST_JSON:
            raise InputError(
                f"scan: {str(path)!r} is nested more than {DEEPEST_JSON} levels deep, as no {path.name} is. Copy it "
                "again from its source."
            )
    if not isinstance(content, dict):
        raise InputError(
            f"scan: {str(path)!r} must hold a JSON object; got {type(content).__name__}. Copy it again from its source."
        )
    return content


def foreign(config: object) -> list[str]:
    """The implementations in a config, at any depth, that need more than torch: transformers would look for them on the hub."""
    asked = [inner for key, inner in _items(config) if "_implementation" in key]
    names = [name for value in asked for _, name in [("", value), *_items(value)] if isinstance(name, str)]
    return [name for name in dict.fromkeys(names) if name not in OWN_IMPLEMENTATIONS]


def refuse_pickle(path: Path) -> None:
    """Raise for a pickle file, unopened."""
    if path.suffix.lower() in PICKLES:
        raise InputError(
            f"scan: {path.name!r} is a pickle, which can run any code when it is opened, so it was not opened. "
            "Use the model's .safetensors; if you trust the file, load it and call model.save_pretrained(folder)."
        )


def _refuse_code(path: Path) -> None:
    config = read(path)
    if any(key == "auto_map" and code for key, code in _items(config)):
        raise InputError(
            f"scan: {str(path)!r} has `auto_map`: the model comes with its own code, which attemper never runs. "
            "If transformers has this model built in, delete auto_map in a copy of the folder; otherwise load the model "
            "yourself and call attemper.scan(model, batch)."
        )
    kernels = [name for name in foreign(config) if "/" in name]
    if kernels:
        raise InputError(
            f"scan: {str(path)!r} asks for the implementation {kernels[0]!r}: code from the hub, which attemper never "
            "downloads or runs. Delete that line in a copy of the folder, or load the model yourself and call "
            "attemper.scan(model, batch)."
        )


def _items(value: object) -> Iterator[tuple[str, Any]]:
    """The keys and values in JSON, at any depth, which `read` bounds; entries of lists have no key."""
    parts = [("", part) for part in value] if isinstance(value, list) else []
    for key, inner in value.items() if isinstance(value, dict) else parts:
        yield key, inner
        yield from _items(inner)


def _no_weights(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        refuse_pickle(path)
    raise InputError(
        f"scan: {str(folder)!r} has no .safetensors file, so there are no weights to scan. "
        "Give the folder that save_pretrained() wrote."
    )


def _check_index(folder: Path) -> None:
    parts = read(folder / INDEX).get("weight_map")
    names = sorted(set(map(str, parts.values()))) if isinstance(parts, dict) else []
    if not names:
        raise InputError(f"scan: {str(folder / INDEX)!r} has no weight_map. Copy it again from its source.")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(
                f"scan: {INDEX} names {name!r}, which is not a .safetensors file in this folder, so it was not opened. "
                "Convert the weights to safetensors, or scan a model object: attemper.scan(model, batch)."
            )
        if not (folder / name).is_file():
            raise InputError(
                f"scan: {INDEX} names {name!r}, which is not in {str(folder)!r}. Copy it there: the model is incomplete."
            )


def _check_plain_files(folder: Path) -> None:
    """Refuse pipes and devices, which could block forever, and folders with the name of a file."""
    for path in sorted(folder.iterdir()):
        try:
            mode = path.stat().st_mode
        except OSError:  # a broken link
            continue
        if stat.S_ISREG(mode) and path.suffix in LARGE_FILES:
            _refuse_pointer(path)
        if stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and path.suffix not in (".json", ".safetensors")):
            continue
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
        raise InputError(
            f"scan: {path.name!r} in {str(folder)!r} is {what}, but a model's folder must hold plain files. Copy the model again "
            "from its source."
        )


def _refuse_pointer(path: Path) -> None:
    """Refuse the pointer that a clone without Git LFS has in place of a large file."""
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise InputError(
                f"scan: {str(path)!r} is a pointer of Git LFS, not the file: the folder was cloned without its large files. Type "
                f"git lfs install, then git -C {str(path.parent)!r} lfs pull."
            )


def _check_header(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            names = list(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(
            f"scan: {str(path)!r} is not a complete .safetensors file: {error}. Copy it again from its source."
        ) from None
    if not names:
        raise InputError(f"scan: {str(path)!r} holds no tensor. Copy it again from its source.")
    return names
