"""Folder: checks of a model's folder before transformers reads anything in it.

Weights must be safetensors. A pickle runs code when it is opened, and so do `auto_map` and an attention implementation that
names a repository of the hub: all are refused unopened.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from ...errors import InputError
from .checkpoint import Stored

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
POINTER = b"version https://git-lfs.github.com/spec/"  # how a file begins that stands for one in Git LFS
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
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        _no_weights(folder)
    if (folder / INDEX).is_file():
        _check_index(folder)
    for path in found:
        _check_header(path)
    return found


def read(path: Path) -> dict[str, Any]:
    """A JSON object from an untrusted file."""
    if path.stat().st_size > LARGEST_JSON:
        raise InputError(f"scan: {str(path)!r} is too large for a {path.name}. Check the file.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"scan: {str(path)!r} is not JSON: {error}. Copy it again from its source.") from None
    level, depth = [found] if isinstance(found, (dict, list)) else [], 0
    while level:
        inner = [one for each in level for one in (each.values() if isinstance(each, dict) else each)]
        level, depth = [one for one in inner if isinstance(one, (dict, list))], depth + 1
        if depth > DEEPEST_JSON:
            raise InputError(
                f"scan: {str(path)!r} is nested more than {DEEPEST_JSON} levels deep, as no {path.name} is. Copy it "
                "again from its source."
            )
    if not isinstance(found, dict):
        raise InputError(
            f"scan: {str(path)!r} must hold a JSON object; got {type(found).__name__}. Copy it again from its source."
        )
    return found


def foreign(config: object) -> list[str]:
    """The implementations in a config, at any depth, that need more than torch: transformers would look for them on the hub."""
    if isinstance(config, list):
        return [name for inner in config for name in foreign(inner)]
    if not isinstance(config, dict):
        return []
    asked = [inner for key, inner in config.items() if "_implementation" in key]
    found = [name for one in asked for name in _texts(one) if name not in OWN_IMPLEMENTATIONS]
    return list(dict.fromkeys(found + [name for inner in config.values() for name in foreign(inner)]))


def refuse_pickle(path: Path) -> None:
    """Raise for a pickle file, unopened."""
    if path.suffix.lower() in PICKLES:
        raise InputError(
            f"scan: {path.name!r} is a pickle, which can run any code when it is opened, so it was not opened. "
            "Use the model's .safetensors; if you trust the file, load it and call model.save_pretrained(folder)."
        )


def _refuse_code(path: Path) -> None:
    found = read(path)
    if _mentions(found, "auto_map"):
        raise InputError(
            f"scan: {str(path)!r} has `auto_map`: the model comes with its own code, which attemper never runs. "
            "If transformers has this model built in, delete auto_map in a copy of the folder; otherwise load the model "
            "yourself and call attemper.scan(model, batch)."
        )
    kernels = [name for name in foreign(found) if "/" in name]
    if kernels:
        raise InputError(
            f"scan: {str(path)!r} asks for the implementation {kernels[0]!r}: code from the hub, which attemper never "
            "downloads or runs. Delete that line in a copy of the folder, or load the model yourself and call "
            "attemper.scan(model, batch)."
        )


def _texts(value: object) -> list[str]:
    """The texts in JSON, at any depth."""
    if isinstance(value, (dict, list)):
        return [text for inner in (value.values() if isinstance(value, dict) else value) for text in _texts(inner)]
    return [value] if isinstance(value, str) else []


def _mentions(value: object, key: str) -> bool:
    """Whether a key occurs anywhere in JSON, at any depth; json.loads bounds the depth."""
    if isinstance(value, dict):
        return bool(value.get(key)) or any(_mentions(inner, key) for inner in value.values())
    return isinstance(value, list) and any(_mentions(inner, key) for inner in value)


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
    """Raise for what a clone without Git LFS has in place of a large file."""
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
