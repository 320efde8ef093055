"""Media: an image or a sound as the input of a model, from a file, or generated if none is given.

An image goes through transformers' image processor if the folder describes one, a sound through its feature extractor. Without
one, or if its result does not fit the model, the image is resized and normalised here; a note says that it was not used.
"""

from __future__ import annotations

import warnings
import wave
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._files import load
from ...demo import package as transformers
from ...errors import InputError
from . import folder
from .model import LOADING, Loaded, quiet, reason

RATE = 16_000
LARGEST = 2**28  # numbers of an image
FASTEST = 2**20  # samples per second; a larger rate in a folder is not believed
LONGEST = 2**26  # numbers of a sound
SAMPLE_IMAGE = "no --image was given: an image of a disc on a gradient was generated."
SAMPLE_SOUND = "no --audio was given: one second of a rising tone was generated."


def image_batch(loaded: Loaded, path: str | None) -> tuple[dict[str, Tensor], Tensor, list[str]]:
    """``pixel_values`` (1, C, H, W) from a file or a generated picture, the same before normalisation, and notes."""
    config = getattr(loaded.model, "config", None)
    config = getattr(config, "vision_config", None) or config
    size, channels = getattr(config, "image_size", None) or 224, int(getattr(config, "num_channels", 3))
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    if not 0 < int(height) * int(width) * channels <= LARGEST:
        raise InputError(
            f"scan: config.json says that an image has {height} × {width} pixels of {channels} channels, which is too large. "
            "Correct it."
        )
    shape = (channels, int(height), int(width))
    pixels = _disc() if path is None else _read_image(Path(path))
    setting, notes = _preprocessor(loaded), [SAMPLE_IMAGE] if path is None else []
    done = None
    if setting:
        # only where the config fixes the size of an image must the processor's result have it
        done = _processed(loaded, setting, pixels, shape, fixed=getattr(config, "image_size", None) is not None)
        if isinstance(done, str):
            notes.append(f"the image processor of the folder was not used: {done}.")
    if done is None or isinstance(done, str):
        done = _by_hand(setting, pixels, shape)
    batch, picture = done
    if path is not None:
        notes.append(f"{Path(path).name!r} was resized to {batch.shape[-2]} × {batch.shape[-1]} pixels.")
    return {"pixel_values": batch}, picture, notes


def _processed(
    loaded: Loaded, setting: dict[str, Any], pixels: Tensor, shape: tuple[int, int, int], fixed: bool
) -> tuple[Tensor, Tensor] | str:
    """The output of transformers' image processor, with normalisation and without; or why it was not used."""
    long, short = max(pixels.shape[1:]), min(pixels.shape[1:])
    sizes = [size for name, value in setting.items() if name.endswith("size") for size in _whole_numbers(value)]
    if sizes and max(sizes) ** 2 * shape[0] * long // short > LARGEST:
        return f"preprocessor_config.json asks for {max(sizes)} pixels along a side, which is too large"
    try:
        from PIL import Image

        with quiet():
            processor = transformers(LOADING).AutoImageProcessor.from_pretrained(
                loaded.folder, local_files_only=True, trust_remote_code=False
            )
            image = Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).numpy())
            processed, plain = (
                processor(images=image, return_tensors="pt", **options)["pixel_values"]
                for options in ({}, {"do_normalize": False})
            )
    except Exception as error:  # an untrusted file can raise anything
        return reason(error)
    given = tuple(processed.shape)
    if len(given) != 4 or given[:2] != (1, shape[0]) or (fixed and given[1:] != shape):
        return f"it makes {' × '.join(map(str, given[1:]))} numbers, and the model takes {' × '.join(map(str, shape))}"
    return processed, plain[0].float() / max(1.0, float(plain.max()))


def _whole_numbers(value: Any) -> list[int]:
    """The whole numbers of a setting: 224, [224, 224] or {"height": 224, "width": 224}."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return [number for number in values if isinstance(number, int)]


def _by_hand(setting: dict[str, Any], pixels: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """The pixels resized, and normalised by the folder's mean and standard deviation, or 0.5 and 0.5; and without that."""
    resized = F.interpolate(pixels[None], shape[1:], mode="bilinear", antialias=True)
    if shape[0] != 3:
        resized = resized.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    if not setting.get("do_normalize", True):
        return resized, resized[0]
    mean, std = (_channels(setting, f"image_{name}", shape[0]) for name in ("mean", "std"))
    return (resized - mean) / std, resized[0]


def sound_batch(loaded: Loaded, path: str | None) -> tuple[dict[str, Tensor], list[str]]:
    """The model's audio input from a WAV file or a generated tone, and notes."""
    setting = _preprocessor(loaded)
    rate = setting.get("sampling_rate", RATE)
    rate = rate if isinstance(rate, int) and 0 < rate <= FASTEST else RATE
    wave_form, notes = (_tone(rate), [SAMPLE_SOUND]) if path is None else (_read_wave(Path(path), rate), [])
    name = str(getattr(loaded.model, "main_input_name", "input_values"))
    extractor = _extractor(loaded, bool(setting))
    if extractor is None:
        if name != "input_values":
            raise InputError(
                f"scan: {type(loaded.model).__name__} needs {name}, and its folder has no preprocessor_config.json for "
                "that. Put it there, or call attemper.scan(model, batch)."
            )
        normal = (wave_form - wave_form.mean()) / (wave_form.std() + 1e-7)
        return {name: normal[None]}, notes
    features = extractor(wave_form.numpy(), sampling_rate=rate, return_tensors="pt")[name]
    frames = 2 * int(getattr(loaded.model.config, "max_source_positions", 0) or 0)
    if name == "input_features" and frames:
        features = F.pad(features, (0, max(0, frames - features.shape[-1])))[..., :frames]
    return {name: features}, notes


def _preprocessor(loaded: Loaded) -> dict[str, Any]:
    path = None if loaded.folder is None else loaded.folder / "preprocessor_config.json"
    return folder.read(path) if path is not None and path.is_file() else {}


def _extractor(loaded: Loaded, described: bool) -> Any:
    """transformers' feature extractor: the one the folder describes, or Whisper's for a Whisper."""
    package = transformers(LOADING)
    config: Any = getattr(loaded.model, "config", None)
    with quiet():
        if described:
            try:
                return package.AutoFeatureExtractor.from_pretrained(
                    loaded.folder, local_files_only=True, trust_remote_code=False
                )
            except Exception as error:  # an untrusted file can raise anything
                raise InputError(
                    f"scan: preprocessor_config.json of {loaded.name!r} could not be used: {reason(error)}. Check it."
                ) from None
        if getattr(config, "model_type", None) == "whisper":
            return package.WhisperFeatureExtractor(feature_size=config.num_mel_bins)
    return None


def _channels(setting: dict[str, Any], name: str, channels: int) -> Tensor:
    values = setting.get(name)
    if not isinstance(values, list) or len(values) not in (1, channels):
        values = [0.5]
    try:
        return torch.tensor([float(value) for value in values], device="cpu").view(1, -1, 1, 1)
    except (TypeError, ValueError):
        raise InputError(
            f"scan: {name} of preprocessor_config.json must be numbers; got {values!r}. Correct that file."
        ) from None


def _disc() -> Tensor:
    """A disc on a gradient, (3, 256, 256), 0 to 1."""
    side = torch.linspace(0, 1, 256, device="cpu")
    y, x = torch.meshgrid(side, side, indexing="ij")
    inside = (x - 0.4) ** 2 + (y - 0.45) ** 2 < 0.06
    return torch.stack([torch.where(inside, 0.9, x), torch.where(inside, 0.3, y), torch.where(inside, 0.2, 1 - x)])


def _tone(rate: int) -> Tensor:
    """One second that rises from 200 to 2,000 Hz, in three swells."""
    time = torch.arange(rate, device="cpu") / rate
    return 0.5 * torch.sin(2 * torch.pi * (200 * time + 900 * time**2)) * torch.sin(3 * torch.pi * time).abs()


def _check_plain(option: str, path: Path) -> None:
    """Refuse a pipe or a device, which could block forever."""
    if path.exists() and not path.is_file():
        raise InputError(f"scan: {option} {str(path)!r} is not a plain file. Give one.")


def _read_image(path: Path) -> Tensor:
    import numpy

    image = load("scan: reading an image", "PIL.Image", "hf")
    _check_plain("--image", path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image.DecompressionBombWarning)
            with image.open(path) as picture:
                pixels = numpy.array(picture.convert("RGB"))
    except (image.DecompressionBombError, image.DecompressionBombWarning):  # nothing was decompressed yet
        raise InputError(
            f"scan: --image {str(path)!r} says that it has more than {image.MAX_IMAGE_PIXELS:,} pixels, which would take "
            "gigabytes to decompress. Make it smaller first."
        ) from None
    except Exception as error:  # an untrusted file can raise anything
        raise InputError(
            f"scan: --image {str(path)!r} could not be read as an image: {reason(error)}. Give a PNG or JPEG."
        ) from None
    return torch.from_numpy(pixels).permute(2, 0, 1) / 255


def _check_size(path: Path, width: int, rate: int, numbers: int) -> None:
    if width > 4:
        raise InputError(
            f"scan: --audio {str(path)!r} has samples of {8 * width} bits. Convert it to a 16-bit PCM .wav file."
        )
    if numbers > LONGEST:
        raise InputError(
            f"scan: --audio {str(path)!r} would be {numbers:,} samples, by its {rate:,} samples per second; at most {LONGEST:,} "
            "are read. Cut it, or correct its header."
        )


def _read_wave(path: Path, rate: int) -> Tensor:
    _check_plain("--audio", path)
    try:
        with wave.open(str(path), "rb") as file:
            width, channels, has = file.getsampwidth(), file.getnchannels(), max(1, file.getframerate())
            # a header may name more frames than there are, or a rate from which one frame becomes millions
            frames = min(file.getnframes(), path.stat().st_size // (width * channels))
            _check_size(path, width, has, max(frames * channels, frames * rate // has))
            raw = bytearray(file.readframes(frames))
    except (OSError, EOFError, wave.Error) as error:
        raise InputError(
            f"scan: --audio {str(path)!r} could not be read as WAV: {error or 'it ends early'}. Convert it to a PCM .wav file."
        ) from None
    raw = raw[: len(raw) // (width * channels) * (width * channels)]
    if not raw:
        raise InputError(f"scan: --audio {str(path)!r} has no samples. Give a WAV file of at least a second.")
    if width == 1:
        samples = torch.frombuffer(raw, dtype=torch.uint8).float() / 128 - 1
    elif width == 3:
        parts = torch.frombuffer(raw, dtype=torch.uint8).view(-1, 3).int()
        whole = parts[:, 0] | parts[:, 1] << 8 | parts[:, 2] << 16
        samples = torch.where(whole >= 2**23, whole - 2**24, whole).float() / 2**23
    else:
        samples = torch.frombuffer(raw, dtype={2: torch.int16, 4: torch.int32}[width]).float() / 2.0 ** (8 * width - 1)
    mono = samples.view(-1, channels).mean(1)
    if has != rate:
        mono = F.interpolate(mono[None, None], max(1, round(len(mono) * rate / has)), mode="linear")[0, 0]
    return mono
