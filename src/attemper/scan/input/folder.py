"""folder: what a model's folder must hold before anything in it is read by anyone else, and a sentence for what it lacks.

Weights are safetensors and nothing else. A pickle runs code when it is opened, and so do `auto_map` and an attention
implementation that names a repository of the hub: all are refused unopened.
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
"""Of attention and of experts: what torch and transformers compute by themselves, from nothing that could be fetched."""
LARGEST_JSON = 64 * 2**20  # bytes; the configs that are read here have kilobytes


def check(folder: Path) -> dict[str, Any]:
    """The config of a folder whose every file that will be read is one that may be.

    Args:
        folder: holds config.json and the weights as .safetensors, in one file or in several with an index.
    """
    _check_kinds(folder)
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"scan: {str(folder)!r} holds an adapter (PEFT), which names a model elsewhere. Merge it into its model first "
            "(merge_and_unload() of peft), save that with save_pretrained(), and give the folder of it."
        )
    if not (folder / "config.json").is_file():
        raise InputError(
            f"scan: {str(folder)!r} has no config.json, so nobody can say which model it is. "
            "Give the folder that save_pretrained() wrote."
        )
    config = read(folder / "config.json")
    for name in MAY_NAME_CODE:
        if (folder / name).is_file():
            _refuse_code(folder / name)
    weights(folder)
    return config


def stored(folder: Path) -> Stored:
    """Which tensor lies in which weight file; where there is an index, in those that it names."""
    named = read(folder / INDEX).get("weight_map", {}).values() if (folder / INDEX).is_file() else ()
    files = [path for path in weights(folder) if not named or path.name in named]
    return Stored({name: path for path in files for name in _check_header(path)})


def weights(folder: Path) -> list[Path]:
    """The weight files in the order of their names, each of them whole."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        _no_weights(folder)
    if (folder / INDEX).is_file():
        _check_index(folder)
    for path in found:
        _check_header(path)
    return found


def read(path: Path) -> dict[str, Any]:
    """A JSON object from a file that a stranger may have written."""
    if path.stat().st_size > LARGEST_JSON:
        raise InputError(f"scan: {str(path)!r} is larger than any {path.name} has reason to be. Check the file.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"scan: {str(path)!r} is not JSON: {error}. Copy it again from where it came.") from None
    if not isinstance(found, dict):
        raise InputError(f"scan: {str(path)!r} must hold a JSON object; got {type(found).__name__}.")
    return found


def foreign(config: object) -> list[str]:
    """The implementations a config asks for that need more than torch: transformers would look for them on the hub.

    Args:
        config: JSON, with configs inside of it or without.
    """
    if isinstance(config, list):
        return [name for inner in config for name in foreign(inner)]
    if not isinstance(config, dict):
        return []
    asked = [inner for key, inner in config.items() if "_implementation" in key]
    found = [name for one in asked for name in _texts(one) if name not in OWN_IMPLEMENTATIONS]
    return list(dict.fromkeys(found + [name for inner in config.values() for name in foreign(inner)]))


def refuse_pickle(path: Path) -> None:
    """Raise for a file that only a pickle reader could open; it stays closed."""
    if path.suffix.lower() in PICKLES:
        raise InputError(
            f"scan: {path.name!r} is a pickle, which can run any code when it is opened, so it was not opened. "
            "Use the model's .safetensors; where you trust the file, model.save_pretrained(folder) makes them."
        )


def _refuse_code(path: Path) -> None:
    found = read(path)
    if _mentions(found, "auto_map"):
        raise InputError(
            f"scan: {str(path)!r} has `auto_map`: the model brings code of its own, which attemper never runs. "
            "Where transformers knows the model by itself, delete auto_map in a copy of the folder; else load the model "
            "yourself and call attemper.scan(model, batch)."
        )
    kernels = [name for name in foreign(found) if "/" in name]
    if kernels:
        raise InputError(
            f"scan: {str(path)!r} asks for the implementation {kernels[0]!r}: code from the hub, which attemper never fetches or "
            "runs. Delete that line in a copy of the folder; else load the model yourself and call attemper.scan(model, batch)."
        )


def _texts(value: object) -> list[str]:
    """The texts in JSON, at any depth."""
    if isinstance(value, (dict, list)):
        return [text for inner in (value.values() if isinstance(value, dict) else value) for text in _texts(inner)]
    return [value] if isinstance(value, str) else []


def _mentions(value: object, key: str) -> bool:
    """Whether a key stands anywhere in JSON, in configs inside of configs too; json.loads bounds the depth."""
    if isinstance(value, dict):
        return bool(value.get(key)) or any(_mentions(inner, key) for inner in value.values())
    return isinstance(value, list) and any(_mentions(inner, key) for inner in value)


def _no_weights(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in PICKLES:
            refuse_pickle(path)
    raise InputError(
        f"scan: {str(folder)!r} has no .safetensors file, so there are no weights to scan. "
        "Give the folder that save_pretrained() wrote."
    )


def _check_index(folder: Path) -> None:
    parts = read(folder / INDEX).get("weight_map")
    names = sorted(set(map(str, parts.values()))) if isinstance(parts, dict) else []
    if not names:
        raise InputError(f"scan: {str(folder / INDEX)!r} has no weight_map. Copy it again from where it came.")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(
                f"scan: {INDEX} names {name!r}, which is no .safetensors file of this folder, so it was not opened."
            )
        if not (folder / name).is_file():
            raise InputError(
                f"scan: {INDEX} names {name!r}, which is not in {str(folder)!r}. Copy it there: the model is incomplete."
            )


def _check_kinds(folder: Path) -> None:
    """Refuse what would be waited for without end, or is no file where one is read."""
    for path in sorted(folder.iterdir()):
        try:
            mode = path.stat().st_mode
        except OSError:  # a link to nowhere, which is as good as not there
            continue
        if stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and path.suffix not in (".json", ".safetensors")):
            continue
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
        raise InputError(
            f"scan: {path.name!r} in {str(folder)!r} is {what}, and a model's folder holds plain files. Copy the model again "
            "from where it came."
        )


def _check_header(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            names = list(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(
            f"scan: {str(path)!r} is no whole .safetensors file: {error}. Copy it again from where it came."
        ) from None
    if not names:
        raise InputError(f"scan: {str(path)!r} holds no tensor. Copy it again from where it came.")
    return names
