"""Tokens as readable text, also those that hold only some of the bytes of a character."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's token for a single byte
STEERING = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters other than white space, and direction marks."""
LOST = "\ufffd"  # what decoding gives for invalid bytes


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
    found = letters if isinstance(letters, str) else letters[0]
    return "".join(f"⟨U+{ord(letter):04X}⟩" for letter in found)


def _joined(parts: list[bytes | None]) -> list[str | None]:
    """The text of byte tokens: neighbours that form a character together share it."""
    found: list[str | None] = [None] * len(parts)
    start = 0
    while start < len(parts):
        group = _group(parts, start)
        if group is None:
            start += 1
            continue
        letters, end = group
        for place in range(start, end):
            found[place] = letters if end == start + 1 else f"{_seen(letters)} ({place - start + 1}/{end - start})"
        start = end
    return found


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
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(rest)}


ALPHABET = _alphabet()
