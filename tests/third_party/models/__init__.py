"""The models, by package: each is built small, from a seed, without a download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from third_party.check import Model

PACKAGES: dict[str, list[Model]] = {}


def model(package: str, layers: int, heads: int | dict[str, int], **more: Any) -> Callable[..., Any]:
    """Adds a model to its package: the decorated function builds it, and its name is the model's."""

    def add(build: Callable[..., Any]) -> Callable[..., Any]:
        PACKAGES.setdefault(package, []).append(Model(build.__name__, build, layers, heads, **more))
        return build

    return add


def image(size: int = 24, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size)


def tokens(length: int = 11, vocabulary: int = 99) -> Tensor:
    return torch.randint(5, vocabulary, (2, length))


from . import hugging_face, images, language, others  # noqa: E402, F401 (they add their models)
