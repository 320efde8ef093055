"""Patches: which tokens are which patches of an image, and the image itself, scaled down.

A vision model cuts its image with one convolution whose windows do not overlap. Its tokens are then the patches, row by row,
after a few tokens of its own ([class], registers).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...watch.examine import is_in
from ..document import DenseMap, Patches, SmallImage, TopMap
from ..input.batch import Input

FRONT = 8  # most tokens before the patches: a class token, a distilled one, four registers
PIXELS = 88  # of the longer side: three bytes each make 31 kB of base64


def add_patches(attention: Sequence[DenseMap | TopMap], model: nn.Module, inputs: Sequence[Input]) -> None:
    """Set ``patches`` of every attention map that is over patches: where they begin, and how many there are."""
    cut = _patch_convolution(model)
    if cut is None:
        return
    name, layer = cut
    tower = _tower(name, [entry.layer for entry in attention])
    for entry in attention:
        pixels = pixels_of(inputs[entry.input])
        if pixels is None or not is_in(entry.layer, tower) or entry.queries != entry.keys:
            continue
        rows, columns = (size // step for size, step in zip(pixels.shape[-2:], layer.kernel_size, strict=True))
        first = entry.keys - rows * columns
        if rows * columns > 1 and 0 <= first <= FRONT:
            entry.patches = Patches(rows=rows, columns=columns, first=first)


def images(attention: Sequence[DenseMap | TopMap], inputs: Sequence[Input]) -> list[SmallImage]:
    """The document's ``images``: those whose patches are shown, as bytes of red, green and blue."""
    pictures = []
    for number in sorted({entry.input for entry in attention if entry.patches is not None}):
        pixels = _seen(inputs[number])
        shrink = min(1.0, PIXELS / max(pixels.shape[1:]))
        size = tuple(max(1, round(side * shrink)) for side in pixels.shape[1:])
        small = F.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]
        data = (small.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous().cpu()
        coded = base64.b64encode(data.numpy().tobytes()).decode()
        pictures.append(SmallImage(input=number, width=size[1], height=size[0], data=coded))
    return pictures


def _patch_convolution(model: nn.Module) -> tuple[str, nn.Conv2d] | None:
    """The name and the module of the first convolution, if its windows do not overlap."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d):
            whole = (
                layer.kernel_size == layer.stride and layer.padding in ((0, 0), "valid") and layer.kernel_size[0] > 1
            )
            return (name, layer) if whole else None
    return None


def _tower(name: str, layers: Sequence[str]) -> str:
    """The smallest module that has both the convolution and some of the layers, such as the image encoder of CLIP."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:end])
        if any(is_in(layer, prefix) for layer in layers):
            return prefix
    return ""


def pixels_of(given: Input) -> Tensor | None:
    """The image in an input, (C, H, W); None if there is none."""
    batch = given.batch
    if isinstance(batch, Mapping):
        batch = batch.get("pixel_values", ())
    elif isinstance(batch, tuple) and batch:
        batch = batch[0]
    usable = isinstance(batch, Tensor) and batch.dim() == 4 and batch.shape[1] in (1, 3) and batch.is_floating_point()
    return batch[0] if usable and isinstance(batch, Tensor) else None


def _seen(image_input: Input) -> Tensor:
    """The image before normalisation, (3, H, W), 0 to 1; for a user's batch, scaled from its minimum to its maximum."""
    pixels = image_input.pixels
    if pixels is None:
        given = pixels_of(image_input)
        assert given is not None  # or it would have no patches
        pixels = given.detach().float().nan_to_num(0.0)
        low, high = torch.aminmax(pixels)
        pixels = (pixels - low) / (high - low).clamp(min=1e-12)
    return pixels.float().expand(3, -1, -1)
