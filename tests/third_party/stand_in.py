"""What stands in for parts of a package that cannot be installed as they are."""

from __future__ import annotations

import re
from importlib import util
from pathlib import Path

import torch

_libraries: list[torch.library.Library] = []
"""They live as long as their ops."""


def load_torchvision() -> None:
    """PyPI's torchvision is built for CUDA: with names for its ops, its Python part can be imported without them."""
    spec = util.find_spec("torchvision")
    if spec is None or spec.submodule_search_locations is None:
        return
    text = (Path(spec.submodule_search_locations[0]) / "_meta_registrations.py").read_text(encoding="utf-8")
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted(set(re.findall(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"', text))):
        library.define(f"{name}(Tensor a) -> Tensor")
    _libraries.append(library)
