"""A text, an image or a sound as one batch for the model, with its description for the document."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from ...demo import SENTENCE
from ...errors import InputError
from ..document import AboutInput
from .media import image_batch, sound_batch
from .model import Loaded
from .pipes import Progress
from .text import FolderTokenizer, limit_of

MODALITIES = {"input_ids": "text", "pixel_values": "image", "input_features": "audio", "input_values": "audio"}
STARTS = 8  # tokens for a decoder when no tokenizer can make any


@dataclass
class Input:
    """One batch for the model, and where it comes from."""

    batch: Mapping[str, Any] | tuple[Any, ...] | Tensor
    modality: str = "batch"  # "text", "image", "audio" or "batch"
    text: str | None = None
    tokens: list[str] | None = None  # of the first sequence, as readable text
    special: list[bool] | None = None
    generated: bool = False
    truncated: bool = False
    notes: list[str] = field(default_factory=list)
    pixels: Tensor | None = None  # of an image before normalisation, (C, H, W), 0 to 1

    @property
    def length(self) -> int | None:
        """How many tokens, if known."""
        if self.tokens is not None:
            return len(self.tokens)
        ids = self.batch.get("input_ids") if isinstance(self.batch, Mapping) else self.batch
        if isinstance(ids, Tensor) and ids.dim() >= 1 and not ids.is_floating_point():
            return int(ids.shape[-1])
        return None

    def about(self) -> AboutInput:
        """The document's entry in ``inputs``."""
        return AboutInput(**{field.name: getattr(self, field.name) for field in fields(AboutInput)})


def make(
    loaded: Loaded,
    *,
    texts: Sequence[str] = (),
    images: Sequence[str] = (),
    sounds: Sequence[str] = (),
    truncate: bool = False,
    progress: Progress = lambda words: None,
) -> list[Input]:
    """One input per text, image or sound; the default sentence or a generated sample if none is given.

    ``truncate`` cuts a text that is longer than the model's positions, instead of raising an error.
    """
    check_texts(texts)
    model = loaded.model
    main = MODALITIES.get(str(getattr(model, "main_input_name", "input_ids")), "text")
    both = _is_dual(model)
    _check_wanted(model, main, both, texts, images, sounds)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if main == "text" and not both:
        inputs = [_text(FolderTokenizer(loaded, progress), text, truncate) for text in texts or (loaded.sample,)]
    elif main == "audio":
        inputs = [_sound(FolderTokenizer(loaded, progress), sound, texts, truncate) for sound in sounds or (None,)]
    else:
        inputs = [
            _image(FolderTokenizer(loaded, progress), image, texts, truncate, both) for image in images or (None,)
        ]
    for given in inputs:
        assert isinstance(given.batch, dict)
        given.batch = {name: value.to(device) for name, value in _fitting(model, given.batch).items()}
        if "use_cache" in inspect.signature(model.forward).parameters:
            given.batch["use_cache"] = False  # the keys are not needed again
    return inputs


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model with its batch: keywords, positions, or one tensor."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def check_texts(texts: Sequence[str]) -> None:
    """Raise for an empty text, before a model is loaded."""
    if not all(text.strip() for text in texts):
        raise InputError('scan: a text must hold at least one word; got an empty one. Type --text "…".')


def _is_dual(model: nn.Module) -> bool:
    """Whether a model has a text encoder and an image encoder and needs both inputs (CLIP)."""
    names = inspect.signature(model.forward).parameters
    generates = getattr(model, "can_generate", lambda: False)()
    return {"input_ids", "pixel_values"} <= set(names) and not generates


def _check_wanted(
    model: nn.Module, main: str, both: bool, texts: Sequence[str], images: Sequence[str], sounds: Sequence[str]
) -> None:
    takes = {"text", "image"} if both else {main} | ({"text"} if _decodes(model) else set())
    for option, given, medium in (
        ("--text", texts, "text"),
        ("--image", images, "image"),
        ("--audio", sounds, "audio"),
    ):
        if given and medium not in takes:
            raise InputError(
                f"scan: {type(model).__name__} takes {' and '.join(sorted(takes))}, so {option} cannot be used. Leave it out, or "
                "call attemper.scan(model, batch) with a batch of your own."
            )
    if len(texts) > 1 and (both or main != "text"):
        raise InputError(f"scan: {type(model).__name__} takes one text with each {main}; got {len(texts)}. Give one.")


def _decodes(model: nn.Module) -> bool:
    return "decoder_input_ids" in inspect.signature(model.forward).parameters


def _fitting(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that forward() takes: a tokenizer may return token types for a model that has none."""
    names = inspect.signature(model.forward).parameters
    fitting = {name: value for name, value in batch.items() if name in names or name in ("input_ids", "attention_mask")}
    first = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {name: value.to(first) if value.is_floating_point() else value for name, value in fitting.items()}


def _text(tokenizer: FolderTokenizer, text: str, truncate: bool) -> Input:
    encoded = tokenizer.encode(text, truncate)
    text_input = Input(**vars(encoded), modality="text")
    if _decodes(tokenizer.loaded.model):
        encoded.batch["decoder_input_ids"] = _behind_start(tokenizer.loaded, encoded.batch["input_ids"])
        text_input.notes.append("the decoder was given its start token and the same text.")
    return text_input


def _sound(tokenizer: FolderTokenizer, path: str | None, texts: Sequence[str], truncate: bool) -> Input:
    loaded = tokenizer.loaded
    batch, notes = sound_batch(loaded, path)
    sound_input = Input(batch, "audio", generated=path is None, notes=notes)
    if _decodes(loaded.model):
        if tokenizer.present():
            encoded = tokenizer.encode(texts[0] if texts else SENTENCE, truncate, limit_of(loaded.model, decoder=True))
            batch["decoder_input_ids"] = _behind_start(loaded, encoded.batch["input_ids"])
            sound_input.text = encoded.text
            sound_input.notes += [*encoded.notes, f"the decoder was given the text {sound_input.text!r}."]
        else:
            batch["decoder_input_ids"] = torch.full((1, STARTS), _start(loaded), device="cpu")
            sound_input.notes.append(
                f"the folder has no tokenizer: the decoder was given its start token {STARTS} times."
            )
    return sound_input


def _image(tokenizer: FolderTokenizer, path: str | None, texts: Sequence[str], truncate: bool, both: bool) -> Input:
    batch, pixels, notes = image_batch(tokenizer.loaded, path)
    image_input = Input(batch, "image", generated=path is None, notes=notes, pixels=pixels)
    if both:
        encoded = tokenizer.encode(texts[0] if texts else SENTENCE, truncate)
        batch |= encoded.batch
        image_input.text, image_input.truncated = encoded.text, encoded.truncated
        image_input.notes += [*encoded.notes, f"the text encoder was given {encoded.text!r}."]
    return image_input


def _behind_start(loaded: Loaded, ids: Tensor) -> Tensor:
    """A decoder's input for a text: its start token first; the last token is dropped if there is no position for it."""
    limit = limit_of(loaded.model, decoder=True)
    return torch.cat([ids.new_full((1, 1), _start(loaded)), ids], 1)[:, :limit]


def _start(loaded: Loaded) -> int:
    """The token a decoder starts from."""
    for holder in (getattr(loaded.model, "generation_config", None), getattr(loaded.model, "config", None)):
        for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
            number = getattr(holder, name, None)
            if isinstance(number, int):
                return number
    return 0
