"""Weights from the files of packages: state dicts of torch, CTranslate2's binary format, ONNX with 8-bit weights."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

NPM = Path(sys.prefix) / "npm"
"""Where `make real-models` unpacks packages of npm."""
FLOATS = {0: np.float32, 4: np.float16}  # of CTranslate2; other numbers are settings
TORCH = (  # its names of a layer's parts, and those of transformers
    (r"/layer_(\d+)/", r".layers.\1."),
    ("decoder.(layers.[0-9]+).attention/layer_norm", r"decoder.\1.encoder_attn_layer_norm"),
    ("self_attention/layer_norm", "self_attn_layer_norm"),
    ("decoder.(layers.[0-9]+).attention/linear_2", r"decoder.\1.encoder_attn.out_proj"),
    ("self_attention/linear_1", "self_attn.out_proj"),
    ("ffn/layer_norm", "final_layer_norm"),
    ("ffn/linear_0", "fc1"),
    ("ffn/linear_1", "fc2"),
    ("position_encodings/encodings", "embed_positions.weight"),
    ("embeddings/weight", "embed_tokens.weight"),
    ("/gamma", ".weight"),
    ("/beta", ".bias"),
    ("/", "."),
)


class Missing(Exception):
    """A package, or a file of it, that is not installed."""


def folder(package: str) -> Path:
    """Where a package of pip or of npm is, which is found and not imported."""
    if package.startswith("@"):
        place = NPM / package
        if place.is_dir():
            return place
        raise Missing(f"{package} is not installed: make real-models, which needs npm")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise Missing(f"{package} is not installed: make real-models")
    return Path(next(iter(found.submodule_search_locations)))


def checked(path: Path, sha256: str) -> Path:
    """A file, which must be the one that was measured."""
    if not path.is_file():
        raise Missing(f"{path.name} is not in its package: make real-models")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == sha256, f"{path.name} has sha256 {found}, not {sha256}"
    return path


def state_dict(path: Path) -> dict[str, Tensor]:
    """Tensors alone: torch's reader refuses everything else. Layers of GPT-2 stored their causal mask beside the weights."""
    found = torch.load(path, map_location="cpu", weights_only=True)
    return {name: one for name, one in found.items() if one.is_floating_point() and not name.endswith("masked_bias")}


def ctranslate2(path: Path) -> dict[str, Tensor]:
    """A Whisper in CTranslate2's format, by the names that transformers has: it joins q, k and v, or k and v, in one matrix."""
    found = {}
    for name, numbers in _variables(path.read_bytes()):
        for theirs, ours in TORCH:
            name = re.sub(theirs, ours, name)
        joined = re.fullmatch(r"(.*layers\.\d+)\.(self_attention|attention)\.linear_([01])\.(weight|bias)", name)
        if joined is None:
            found[f"model.{name}"] = numbers
            continue
        start, own, number, what = joined.groups()
        attention = "self_attn" if own == "self_attention" else "encoder_attn"
        parts = "qkv" if own == "self_attention" else ("q", "kv")[int(number)]
        for part, rows in zip(parts, numbers.chunk(len(parts)), strict=True):
            if (part, what) != ("k", "bias"):  # Whisper has none: a key's bias is 0 there
                found[f"model.{start}.{attention}.{part}_proj.{what}"] = rows
    return found | {"proj_out.weight": found["model.decoder.embed_tokens.weight"]}


def _variables(content: bytes) -> Iterator[tuple[str, Tensor]]:
    place = 0

    def read(kind: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{kind}", content, place)
        place += struct.calcsize(f"<{kind}")
        return int(value)

    def text() -> str:
        nonlocal place
        length = read("H")
        place += length
        return content[place - length : place - 1].decode()

    read("I"), text(), read("I")  # the version of the format, the model and its revision
    for _ in range(read("I")):
        name, shape = text(), [read("I") for _ in range(read("B"))]
        dtype, size = read("B"), read("I")
        if dtype in FLOATS:
            numbers = np.frombuffer(content, FLOATS[dtype], size // np.dtype(FLOATS[dtype]).itemsize, place)
            yield name, torch.from_numpy(numbers.astype(np.float32)).reshape(shape)
        place += size


def onnx(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The weights of an ONNX file by their names in torch; those of 8 bits as (number − zero point) · scale.

    A matrix has a number in place of a name: its name is that of the node that multiplies by it.
    """
    import onnx as package

    graph = package.load(path).graph
    values = {one.name.replace("_merged_0", ""): package.numpy_helper.to_array(one) for one in graph.initializer}
    nodes = [*graph.node, *(node for one in graph.node for inner in one.attribute for node in inner.g.node)]
    found = {}
    for node in nodes:
        if node.op_type == "MatMulInteger":
            name = node.output[0].split("/MatMul")[0].strip("/").replace("/", ".").replace(".dense", ".o_proj")
            found[f"{prefix}{name}.weight"] = _widened(values, node.input[1]).T
        bias = node.op_type == "Mul" and "groupnorm" in node.output[0] and "Reshape" in node.input[0]
        if bias or (node.op_type == "Add" and "groupnorm" in node.output[0]):
            found[f"{prefix}groupnorm.{'weight' if bias else 'bias'}"] = values[node.input[1]].reshape(-1)
    for name in values:
        if name.endswith("_quantized") and "::" not in name:
            found[prefix + name.removesuffix("_quantized")] = _widened(values, name)
        elif name.endswith((".weight", ".bias")) and not name.startswith(("/", "onnx")):
            found[prefix + name] = values[name]
    return {name: torch.from_numpy(np.array(one, dtype=np.float32)) for name, one in found.items()}


def _widened(values: dict[str, Any], name: str) -> Any:
    name = name.replace("_merged_0", "")
    numbers, start = values[name].astype(np.float32), name.removesuffix("_quantized")
    zero, scale = values[f"{start}_zero_point"], values[f"{start}_scale"]
    # convolutions have an offset that is added behind the scale, in float
    return numbers * scale + zero if zero.dtype == np.float32 else (numbers - zero.astype(np.float32)) * scale
