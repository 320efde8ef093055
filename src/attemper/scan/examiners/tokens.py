"""Which tokens a token attends to, head by head, and for each of them the head that gives it most."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import InputError
from ...vitals import Vitals
from ...watch.examine import AttentionCall, chunks, weights_of_rows
from ..document import Target, TokenAttention, TokenHead
from .items import CurrentInput

PIECE = re.compile(r"^(?:##|[Ġ▁])|</w>$| \(\d+/\d+\)$")
"""Marks of tokenizers: BERT's ##, GPT-2's Ġ, SentencePiece's ▁, CLIP's </w>, and the part of a split character."""

COUNTED = re.compile(r"(.+):([1-9]\d*)")
SHOWN = 60  # tokens named in an error
OTHERS = 256  # average over at most so many other queries, spread over the text


def find_token(asked: str, tokens: Sequence[str]) -> int:
    """The position of a token in a sequence.

    Args:
        asked: its text, with the tokenizer's marks or without, in upper or lower case; ``"it:2"`` is the second token with that
            text, and a plain number is a position (so ``"7:1"`` is the first token that reads 7).
        tokens: the sequence, with the tokenizer's marks.

    Example:
        >>> from attemper.scan.examiners.tokens import find_token
        >>> find_token("it", ["[CLS]", "was", "Ġit", "##it"])
        2
    """
    if asked.isdecimal():
        if int(asked) < len(tokens):
            return int(asked)
        raise InputError(
            f"--token: `{asked}` must be a position from 0 to {len(tokens) - 1}; got {asked}. {_named(tokens)} "
            f"For the text {asked!r} type {asked}:1."
        )
    counted = COUNTED.fullmatch(asked) if asked not in tokens else None
    text, number = (counted[1], int(counted[2])) if counted else (asked, 1)
    plain = [word_of(token) for token in tokens]
    # exactly, else without marks, else in any case
    for wanted, words in ((text, tokens), (text, plain), (text.casefold(), [word.casefold() for word in plain])):
        positions = [index for index, token in enumerate(words) if token == wanted]
        if len(positions) >= number:
            return positions[number - 1]
        if positions:
            raise InputError(
                f"--token: {text!r} occurs {len(positions)} times, at {', '.join(map(str, positions))}; got {asked!r}. "
                f"Type {text}:{len(positions)} for the last."
            )
    pieces = _pieces(text, tokens)
    split = f" It is made of {' + '.join(map(repr, pieces))}: ask for one of them." if pieces else ""
    raise InputError(f"--token: {text!r} is not a token of the text.{split} {_named(tokens)}")


def word_of(token: str) -> str:
    """A token without the marks of its tokenizer."""
    return PIECE.sub("", token)


def _pieces(word: str, tokens: Sequence[str]) -> list[str]:
    """Consecutive tokens that form a word together; none if there are none."""
    for start in range(len(tokens)):
        joined = ""
        for end in range(start, len(tokens)):
            joined += word_of(tokens[end]).casefold()
            if joined == word.casefold():
                return list(tokens[start : end + 1])
            if len(joined) >= len(word):
                break
    return []


def _named(tokens: Sequence[str]) -> str:
    more = f" … ({len(tokens)} in all)" if len(tokens) > SHOWN else ""
    return f"The tokens are: {' '.join(map(word_of, tokens[:SHOWN]))}{more}."


class TokenWeights:
    """An examiner that keeps one query's weights over all tokens, in every self-attention over these tokens.

    It also keeps the mean weight that other queries give the same tokens: a head in which every token attends to one token says
    nothing about the chosen token.

    ``best`` is the largest weight on another token, without special tokens and the two neighbours: heads that attend to these do
    so in any sentence. ``strongest`` leaves nothing out. A token that no head gives any weight is not a target: a mask hides it,
    as a causal mask hides later tokens.
    """

    def __init__(
        self,
        asked: str,
        tokens: Sequence[str],
        special: Sequence[bool] | None = None,
        number: int = 0,
        item: int = 0,
        current: CurrentInput | None = None,
    ) -> None:
        self.asked, self.tokens = asked, list(tokens)
        self.special = list(special) if special is not None else [False] * len(tokens)
        self.position = find_token(asked, tokens)
        self.input, self.item, self.current = number, item, current
        rest = [index for index in range(len(tokens)) if index != self.position and not self.special[index]]
        self._rest = rest[:: -(-len(rest) // OTHERS)] if rest else []
        self.clear()

    def clear(self) -> None:
        """Forget the weights, before the model runs again."""
        self._sums: dict[tuple[str, str], tuple[Tensor, int]] = {}  # a layer that runs several times is averaged

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> Tensor | None:
        """The weights of the query and the mean of others, (2, H, tokens); None where the call is not over these tokens."""
        before, after = call.sink_columns
        keys = call.info.keys - before - after
        this_input = self.current is None or self.current.items.inputs == (self.input,)
        fits = this_input and call.info.kind == "self" and call.in_order and self.item < call.info.batch
        if not fits or not call.info.queries == keys == len(self.tokens):
            return None
        own = self._weights(call, vitals, torch.tensor([self.position], device="cpu"))[:, 0]
        total, count = torch.zeros_like(own), torch.zeros_like(own)
        for part in chunks(call, torch.tensor(self._rest, dtype=torch.long, device="cpu")):
            weights = self._weights(call, vitals, part)  # (H, R, tokens)
            seen = (weights > 0) & (part.unsqueeze(-1) != torch.arange(keys, device="cpu"))
            total += weights.where(seen, 0.0).sum(1)
            count += seen.sum(1)
        return torch.stack([own, total / count])  # NaN where no other query sees a token

    def _weights(self, call: AttentionCall, vitals: Vitals, rows: Tensor) -> Tensor:
        """The weights of some rows of this item over its tokens, (H, R, tokens)."""
        before, _ = call.sink_columns
        weights = weights_of_rows(call, vitals, rows.to(vitals.lse.device), self.item)[0]
        return weights[..., before : before + len(self.tokens)].double().cpu()

    def keep(self, name: str, call: AttentionCall, weights: Tensor | None) -> None:
        if weights is not None:
            total, count = self._sums.get((name, call.info.kind), (torch.zeros_like(weights), 0))
            self._sums[name, call.info.kind] = (total + weights, count + 1)

    def result(self) -> TokenAttention:
        """The document's ``token``."""
        heads = [
            TokenHead(layer=layer, kind=kind, head=head, weights=own, others=others)
            for (layer, kind), (total, count) in self._sums.items()
            for head, (own, others) in enumerate((total / count).transpose(0, 1).tolist())
        ]
        targets = [self._target(index, heads) for index in range(len(self.tokens))] if heads else []
        targets = [target for target in targets if target.weight > 0]
        chosen = [target for target in targets if not target.special and abs(target.position - self.position) > 1]
        return TokenAttention(
            asked=self.asked,
            token=self.tokens[self.position],
            input=self.input,
            position=self.position,
            heads=heads,
            targets=targets,
            best=max(chosen, key=lambda target: target.weight, default=None),
            strongest=max(targets, key=lambda target: target.weight, default=None),
        )

    def _target(self, position: int, heads: Sequence[TokenHead]) -> Target:
        """A token, and the head that gives it the most weight."""
        best = max(heads, key=lambda row: row.weights[position] or 0.0)
        return Target(
            layer=best.layer,
            kind=best.kind,
            head=best.head,
            token=self.tokens[position],
            position=position,
            weight=best.weights[position] or 0.0,
            special=self.special[position],
            others=None if best.others is None or math.isnan(best.others[position] or 0.0) else best.others[position],
        )
