"""A text as the tokens of a model's tokenizer: ids, readable tokens, which are special, and which words are unknown."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ...demo import package as transformers
from ...errors import AttemperError, InputError
from . import folder
from .model import LOADING, Loaded, quiet, reason
from .pipes import Progress
from .trial import attempt

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's token for a single byte
STEERING = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters other than white space, and direction marks."""
LOST = "\ufffd"  # decoding invalid bytes gives this


def readable(tokenizer: Any, ids: list[int]) -> list[str]:
    """Tokens without the marks of their vocabulary: Ġdog and ▁dog are dog; ##s stays, as BERT writes it.

    A character that is split over several tokens is shown in each of them with its part, ``👩 (2/4)``; bytes that are part of no
    character are shown as bytes, ``⟨F0 9F⟩``.
    """
    raw = [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]
    words = [str(tokenizer.convert_tokens_to_string([token])) for token in raw]
    parts = [_bytes(token) if LOST in word else None for token, word in zip(raw, words, strict=True)]
    return [
        token if whole is None and LOST in word else _seen(word if whole is None else whole)
        for token, word, whole in zip(raw, words, _joined(parts), strict=True)
    ]


def _seen(word: str) -> str:
    """A word without the spaces around it; white space and direction marks as visible characters."""
    bare = word.strip(" ")
    if not bare:
        return "␣"
    if not bare.strip():
        return bare.replace("\n", "↵").replace("\t", "⇥").replace("\r", "↵")
    return STEERING.sub(_code, bare) if any(unicodedata.category(letter) != "Cf" for letter in bare) else _code(bare)


def _code(letters: str | re.Match[str]) -> str:
    """Invisible characters by their code points."""
    first = letters if isinstance(letters, str) else letters[0]
    return "".join(f"⟨U+{ord(letter):04X}⟩" for letter in first)


def _joined(parts: list[bytes | None]) -> list[str | None]:
    """The text of byte tokens: neighbours that form a character together share it."""
    joined: list[str | None] = [None] * len(parts)
    start = 0
    while start < len(parts):
        group = _group(parts, start)
        if group is None:
            start += 1
            continue
        letters, end = group
        for index in range(start, end):
            joined[index] = letters if end == start + 1 else f"{_seen(letters)} ({index - start + 1}/{end - start})"
        start = end
    return joined


def _group(parts: list[bytes | None], start: int) -> tuple[str, int] | None:
    """The characters that begin at a byte token and where they end; its bytes alone if they are part of no character."""
    first = parts[start]
    if first is None:
        return None
    held = b""
    for end in range(start, len(parts)):
        part = parts[end]
        if part is None:
            break
        held += part
        try:
            return held.decode(), end + 1
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                break  # no further byte can complete it
    return f"⟨{first.hex(' ').upper()}⟩", start + 1


def _bytes(token: str) -> bytes | None:
    """The bytes of a token of a byte-level vocabulary or of a SentencePiece byte token; None if it is neither."""
    byte = BYTE.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return bytes(ALPHABET[letter] for letter in token) if all(letter in ALPHABET for letter in token) else None


def _alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones are themselves, the others are those after 255."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(rest)}


ALPHABET = _alphabet()


VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "tekken.json", "*.model", "*.spm", "vocab.*")
"""One of these files is required: without any, transformers builds a tokenizer with an empty vocabulary."""
WITHOUT_VOCABULARY = ("ByT5Tokenizer", "PerceiverTokenizer", "CanineTokenizer")
"""These need none: their tokens are bytes, or characters."""
TOKENIZER_FILES = ("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json")
"""JSON files beside the configs that transformers reads for a tokenizer."""
LONGEST = 2**17  # tokens, for a model that has no table of positions
LETTERS = 8  # in a token, at most, as a first guess
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length")


@dataclass
class Encoded:
    """A text as a batch for the model."""

    batch: dict[str, Tensor]
    text: str  # the part that was tokenized
    tokens: list[str]
    special: list[bool]
    truncated: bool = False
    notes: list[str] = field(default_factory=list)


class FolderTokenizer:
    """The tokenizer of a model, loaded from its folder when it is first needed."""

    def __init__(self, loaded: Loaded, progress: Progress = lambda words: None) -> None:
        self.loaded, self.progress = loaded, progress

    def present(self) -> bool:
        place = self.loaded.folder
        if self.loaded.tokenizer is not None or place is None:
            return self.loaded.tokenizer is not None
        if any(next(place.glob(name), None) for name in VOCABULARIES):
            return True
        config = place / "tokenizer_config.json"
        return config.is_file() and folder.read(config).get("tokenizer_class") in WITHOUT_VOCABULARY

    def encode(self, text: str, truncate: bool = False, limit: int | None = None) -> Encoded:
        """A non-empty text as a batch of one row; ``limit`` None: by the model's config and position tables."""
        limit = limit_of(self.loaded.model) if limit is None else limit
        if self.loaded.source in ("folder", "hub"):
            what = f"tokenizing the text with the tokenizer of {self.loaded.name!r}"
            attempt(lambda: self._encode(text, truncate, limit), what, self.progress)
        return self._encode(text, truncate, limit)

    def _encode(self, text: str, truncate: bool, limit: int | None) -> Encoded:
        tokenizer = self.tokenizer()
        most = LONGEST if limit is None else limit
        with quiet(), self._reported("could not tokenize the text"):
            part = _beginning(tokenizer, text, most)
            count = len(tokenizer(part)["input_ids"])
            too_long = count > most
            if too_long and not truncate:
                least = "more than " if len(part) < len(text) else ""
                has = f"has positions for {limit}" if limit is not None else f"is scanned with {most} at most"
                raise InputError(
                    f"scan: the text has {least}{count} tokens and {type(self.loaded.model).__name__} {has}. "
                    "Add --truncate to scan the first of them, or give a shorter text."
                )
            options: dict[str, Any] = {"truncation": True, "max_length": most} if too_long else {}
            fast = bool(getattr(tokenizer, "is_fast", False))
            batch = dict(tokenizer(part, return_tensors="pt", return_offsets_mapping=fast, **options))
            offsets = batch.pop("offset_mapping", None)
            ids = batch["input_ids"][0].tolist()
            self._check_ids(ids)
            if too_long and offsets is not None:
                part = part[: int(offsets.max())]
            notes = [f"the text was cut to its first {most} tokens (--truncate)."] if too_long else []
            notes += _unknown(tokenizer, ids, part, None if offsets is None else offsets[0].tolist())
            return Encoded(batch, part, readable(tokenizer, ids), _special(tokenizer, ids), too_long, notes)

    @contextmanager
    def _reported(self, happened: str) -> Iterator[None]:
        """Turn whatever an untrusted file makes a tokenizer raise into a sentence."""
        try:
            yield
        except AttemperError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # how Rust ends
                raise
            raise InputError(
                f"scan: the tokenizer of {self.loaded.name!r} {happened}: {reason(error)}. Check its files."
            ) from None

    def tokenizer(self) -> Any:
        if self.loaded.tokenizer is None:
            self.loaded.tokenizer = self._load()
        return self.loaded.tokenizer

    def _load(self) -> Any:
        place = self.loaded.folder
        if place is None or not self.present():
            where = f"the folder {str(place)!r} has no tokenizer" if place is not None else "no tokenizer was given"
            raise InputError(
                f"scan: {where}, so a text cannot be tokenized. Put tokenizer.json next to config.json, or call "
                "attemper.scan(model, {'input_ids': …}) with ids of your own."
            )
        for path in place.glob("*.json"):
            if path.name in TOKENIZER_FILES:
                folder.read(path)
        package = transformers(LOADING)
        with quiet(), self._reported("could not be loaded"):
            return package.AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)

    def _check_ids(self, ids: list[int]) -> None:
        try:
            table = getattr(self.loaded.model, "get_input_embeddings", lambda: None)()
        except NotImplementedError:  # two encoders have two tables
            table = None
        known = getattr(table, "num_embeddings", None)
        if known is not None and ids and max(ids) >= known:
            raise InputError(
                f"scan: the tokenizer gives token {max(ids)}, and the model has embeddings for {known}: they do not belong "
                "together. Put the model's own tokenizer into its folder."
            )


def _beginning(tokenizer: Any, text: str, most: int) -> str:
    """A beginning of a text with more tokens than ``most``, or all of it: tokenizing takes 60 times the text's size in memory."""
    size = LETTERS * most
    while size < len(text):
        if len(tokenizer(text[:size])["input_ids"]) > 2 * most:
            return text[:size]
        size *= 4
    return text


def limit_of(model: nn.Module, decoder: bool = False) -> int | None:
    """How many tokens a model has positions for; None if neither a config nor a table shows it."""
    config = getattr(model, "config", None)
    names = ("max_target_positions", *POSITIONS) if decoder else POSITIONS
    inner = getattr(config, "text_config", None)
    limits = [
        value
        for holder in (config, inner)
        for name in names
        if isinstance(value := getattr(holder, name, None), int) and value > 0
    ]
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings") and module.padding_idx is not None:
            # RoBERTa counts positions from the one after padding
            return int(module.num_embeddings) - int(module.padding_idx) - 1
    return min(limits[:1], default=None)


def named(tokenizer: Any, ids: object) -> tuple[list[str] | None, list[bool] | None]:
    """The tokens of a user's batch of one sequence, and which are special; None without a tokenizer."""
    if tokenizer is None or not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1:
        return None, None
    numbers = ids[0].tolist()
    return readable(tokenizer, numbers), _special(tokenizer, numbers)


def _special(tokenizer: Any, ids: list[int]) -> list[bool]:
    """Which tokens frame a text. [UNK] and [MASK] represent words."""
    frame = set(tokenizer.all_special_ids) - {
        getattr(tokenizer, "unk_token_id", None),
        getattr(tokenizer, "mask_token_id", None),
    }
    return [token in frame for token in ids]


def _unknown(tokenizer: Any, ids: list[int], text: str, offsets: list[list[int]] | None) -> list[str]:
    unknown = getattr(tokenizer, "unk_token_id", None)
    positions = [position for position, token in enumerate(ids) if token == unknown]
    if not positions or (unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id)):  # GPT-2's is its end of text
        return []
    if offsets is None:
        return [f"{len(positions)} words are not in the vocabulary and became {tokenizer.unk_token}."]
    words = dict.fromkeys(text[slice(*offsets[position])] for position in positions)
    shown = ", ".join(map(repr, list(words)[:5])) + (f" and {len(words) - 5} more" if len(words) > 5 else "")
    verb = "is not in the vocabulary and became" if len(words) == 1 else "are not in the vocabulary and became"
    return [f"{shown} {verb} {tokenizer.unk_token}."]
