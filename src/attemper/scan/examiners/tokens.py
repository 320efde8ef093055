"""Tokens: which tokens a token attends to, head by head, and for each of them the head that gives it most."""

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
OTHERS = 256  # other queries whose weights are averaged, at most; spread over the text


def find_token(asked: str, tokens: Sequence[str]) -> int:
    """The position of a token in a sequence.

    Args:
        asked: its text, as the tokenizer has it or without its marks, in any case; ``"it:2"`` is the second one of that text,
            and a plain number is a position (so ``"7:1"`` is the first token that reads 7).
        tokens: the sequence, as the tokenizer has it.

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
    for wanted, there in ((text, tokens), (text, plain), (text.casefold(), [word.casefold() for word in plain])):
        found = [place for place, token in enumerate(there) if token == wanted]
        if len(found) >= number:
            return found[number - 1]
        if found:
            raise InputError(
                f"--token: {text!r} occurs {len(found)} times, at {', '.join(map(str, found))}; got {asked!r}. "
                f"Type {text}:{len(found)} for the last."
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
        made = ""
        for end in range(start, len(tokens)):
            made += word_of(tokens[end]).casefold()
            if made == word.casefold():
                return list(tokens[start : end + 1])
            if len(made) >= len(word):
                break
    return []


def _named(tokens: Sequence[str]) -> str:
    more = f" … ({len(tokens)} in all)" if len(tokens) > SHOWN else ""
    return f"The tokens are: {' '.join(map(word_of, tokens[:SHOWN]))}{more}."


class TokenWeights:
    """An examiner that keeps one query's weights over all tokens, in every self-attention over these tokens.

    Beside them it keeps what other queries give the same tokens on average: a head in which every token attends to one token says
    nothing about the token asked for.

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
        rest = [place for place in range(len(tokens)) if place != self.position and not self.special[place]]
        self._rest = rest[:: -(-len(rest) // OTHERS)] if rest else []
        self.clear()

    def clear(self) -> None:
        """Forget what was kept, before the model runs again."""
        self._sums: dict[tuple[str, str], tuple[Tensor, int]] = {}  # a layer that runs several times is averaged

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> Tensor | None:
        """The weights of the query and the mean of others, (2, H, tokens); None where the call is not over these tokens."""
        before, after = call.sink_columns
        keys = call.facts.keys - before - after
        now = self.current is None or self.current.items.inputs == (self.input,)
        here = now and call.facts.kind == "self" and call.in_order and self.item < call.facts.batch
        if not here or not call.facts.queries == keys == len(self.tokens):
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

    def keep(self, name: str, call: AttentionCall, found: Tensor | None) -> None:
        if found is not None:
            total, count = self._sums.get((name, call.facts.kind), (torch.zeros_like(found), 0))
            self._sums[name, call.facts.kind] = (total + found, count + 1)

    def result(self) -> TokenAttention:
        """The document's ``token``."""
        heads = [
            TokenHead(layer=layer, kind=kind, head=head, weights=own, others=others)
            for (layer, kind), (total, count) in self._sums.items()
            for head, (own, others) in enumerate((total / count).transpose(0, 1).tolist())
        ]
        targets = [self._target(place, heads) for place in range(len(self.tokens))] if heads else []
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

    def _target(self, place: int, heads: Sequence[TokenHead]) -> Target:
        """A token, and the head that gives it the most weight."""
        best = max(heads, key=lambda row: row.weights[place] or 0.0)
        return Target(
            layer=best.layer,
            kind=best.kind,
            head=best.head,
            token=self.tokens[place],
            position=place,
            weight=best.weights[place] or 0.0,
            special=self.special[place],
            others=None if best.others is None or math.isnan(best.others[place] or 0.0) else best.others[place],
        )
