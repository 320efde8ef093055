"""NamedBatch: a model's batch by its parts, and batches with other tokens, more tokens or more items."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..checks.declared import is_published, is_real, named_arguments

TOKENS = ("decoder_input_ids", "input_ids", "inputs_embeds", "decoder_inputs_embeds")
TARGET = re.compile(r"^(tgt|trg|target|decoder)|_(tgt|trg|target)$", re.IGNORECASE)
"""Of two sequences, the name of the one whose order is time."""
OTHERS = ("token_type_ids", "position_ids", "cache_position")


class CannotRun(Exception):
    """Why an experiment decided nothing; ``needs``: what to pass so that it does, None: it does not apply to the model."""

    def __init__(self, why: str, needs: str | None = None) -> None:
        super().__init__(why)
        self.needs = needs


@dataclass
class NamedBatch:
    """The arguments of a call. ``tokens`` names the one whose order is time: (B, L) ids, or (B, L, D) numbers."""

    model: nn.Module
    batch: Any
    tokens: str
    arguments: dict[str, Any] = field(default_factory=dict)
    sequence_first: bool = False  # (L, B, …): attention runs along the first dimension
    rivals: list[str] = field(default_factory=list)  # other sequences of that length, one of which may be meant
    ordered: bool = True  # whether it is a sequence of tokens; an image or a sound is not

    @classmethod
    def of(
        cls, model: nn.Module, batch: Any, sizes: set[tuple[int, int]] | None = None, causal: Collection[int] = ()
    ) -> NamedBatch:
        """The parts of a batch. ``sizes`` are (batch, queries) of the self-attention that was seen, ``causal`` those queries of
        which the layers are causal: of two sequences, theirs is the one whose order is time."""
        arguments = named_arguments(model, batch)
        name = next((candidate for candidate in TOKENS if isinstance(arguments.get(candidate), Tensor)), None)
        first, rivals = False, []
        if name is None:
            likely = [candidate for candidate, value in arguments.items() if _may_be_tokens(candidate, value)]
            likely = likely or [name for name, value in arguments.items() if _are_frames(value, causal)]
            if not likely:
                others = [
                    candidate for candidate, value in arguments.items() if isinstance(value, Tensor) and value.dim() > 1
                ]
                if not others:
                    raise CannotRun(
                        "no argument of the model is a tensor with several dimensions", "a batch of tensors (batch, …)"
                    )
                return cls(model, batch, others[0], arguments, ordered=False)
            called = [candidate for candidate in likely if TARGET.search(candidate)] if len(likely) > 1 else []
            name = next(
                (candidate for candidate in called or likely if arguments[candidate].shape[1] in causal),
                (called or likely)[0],
            )
            shape = tuple(arguments[name].shape[:2])
            rivals = (
                []
                if called
                else [
                    candidate for candidate in likely if candidate != name and arguments[candidate].shape[:2] == shape
                ]
            )
            first = sizes is not None and shape not in sizes and shape[::-1] in sizes
        return cls(model, batch, name, arguments, first, rivals=rivals)

    @property
    def value(self) -> Tensor:
        """The tokens, (B, L, …)."""
        tokens: Tensor = self.arguments[self.tokens]
        return tokens.transpose(0, 1) if self.sequence_first else tokens

    @property
    def length(self) -> int:
        return int(self.value.shape[1])

    @property
    def items(self) -> int:
        return int(self.value.shape[0])

    @property
    def mask(self) -> str | None:
        """The argument that marks padding among the tokens."""
        for name, value in self.arguments.items():
            if name != self.tokens and is_real(name, value) is not None and value.shape == self.value.shape[:2]:
                return name
        whole = self.tokens in ("input_ids", "inputs_embeds") and self.takes("attention_mask")
        return "attention_mask" if whole and "attention_mask" not in self.arguments else None

    @property
    def real(self) -> Tensor:
        """(B, L): which tokens are not padding."""
        name = self.mask
        value = None if name is None else self.arguments.get(name)
        found = None if value is None else is_real(str(name), value)
        return self._without_padding_ids() if found is None else found

    def _without_padding_ids(self) -> Tensor:
        """(B, L): all tokens but those at the ends with the id that the model's own embedding declares to be padding."""
        ids, embeddings = self.value, [one for one in self.model.modules() if isinstance(one, nn.Embedding)]
        pads = {one.padding_idx for one in embeddings if one.padding_idx is not None}
        real = torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device)
        if len(pads) != 1 or ids.is_floating_point() or ids.dim() != 2 or is_published(self.model):
            return real
        words = (ids != pads.pop()).int()
        inside = words.cummax(1).values.bool() & words.flip(1).cummax(1).values.flip(1).bool()
        return inside if bool(inside.any(1).all()) else real

    def needs_tokens(self) -> None:
        """Raise if the input is not a sequence of tokens."""
        if not self.ordered:
            raise CannotRun(f"{self.tokens} is not a sequence of tokens")

    def other_lengths(self) -> set[int]:
        """The lengths of the other sequences among its arguments."""
        others = [
            value for name, value in self.arguments.items() if name != self.tokens and _may_be_tokens(name, value)
        ]
        return {int(value.shape[0 if self.sequence_first else 1]) for value in others}

    def takes(self, name: str) -> bool:
        """Whether the model's forward has a parameter of this name."""
        return name in inspect.signature(self.model.forward).parameters

    def with_tokens(self, tokens: Tensor, **others: Any) -> Any:
        """The batch with other tokens, (B, L, …), and other arguments, in the form in which it was given."""
        value = tokens.transpose(0, 1) if self.sequence_first else tokens
        arguments = {**self.arguments, self.tokens: value, **others}
        if isinstance(self.batch, Mapping):
            return arguments
        if isinstance(self.batch, tuple):
            if set(arguments) != set(self.arguments):
                return arguments
            return tuple(arguments.values())
        return value if set(arguments) == {self.tokens} else arguments

    def other_tokens(self, tokens: Tensor, seed: int = 0) -> Tensor:
        """Tokens of the same kind that differ everywhere: other ids of the batch, or numbers of the same size."""
        if tokens.is_floating_point():
            noise = torch.randn(
                tokens.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu"
            )
            return (noise * float(tokens.double().std())).to(tokens)
        known = self.value.unique()
        if len(known) < 2:
            only = int(known[0])
            known = known.new_tensor(
                sorted((only, only - 1 if only > 1 else only + 1))
            )  # how many words there are is unknown
        places = torch.searchsorted(known, tokens.contiguous().clamp(int(known[0]), int(known[-1])))
        return known[(places + 1 + seed) % len(known)]

    def lengthened(self, more: int, left: bool = False, placed: bool = False) -> Any:
        """The batch with some more tokens at an end, marked as padding; ``placed``: with the positions of the real ones."""
        name = self.mask
        if name is None:
            raise CannotRun("the model takes no mask of padding")
        extra = self.other_tokens(_last(self.value, more), seed=1)
        pad = getattr(getattr(self.model, "config", None), "pad_token_id", None)
        if left and isinstance(pad, int) and not extra.is_floating_point():
            extra = torch.full_like(extra, pad)  # some models count positions by it
        given = self.arguments.get(name)
        given = torch.ones(self.value.shape[:2], dtype=torch.long, device=extra.device) if given is None else given
        padding = _padding_like(name, given, more)
        others: dict[str, Any] = {name: _joined(given, padding, left)}
        length = self.length
        positions = torch.arange(length, device=extra.device).expand(self.items, -1)
        if left and (placed or "position_ids" in self.arguments):
            start = self.arguments.get("position_ids", positions).expand(self.items, -1)
            others["position_ids"] = _joined(start, torch.zeros_like(start[:, :1]).expand(-1, more), True)
        elif "position_ids" in self.arguments:
            others["position_ids"] = _joined(self.arguments["position_ids"], positions[:, -1:] + 1, False, more)
        for other, value in self.arguments.items():
            if other in others or other in (self.tokens, "cache_position"):
                continue
            if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == self.value.shape[:2]:
                others[other] = _joined(value, _last(value, more), left)
            elif isinstance(value, Tensor) and length in value.shape[1:]:
                raise CannotRun(
                    f"{other} has the length of the tokens in a dimension that is not its second",
                    "a mask (batch, length) of padding alone",
                )
        return self.with_tokens(_joined(self.value, extra, left), **others)

    def first(self, count: int) -> NamedBatch:
        """The batch with its first tokens alone, (batch, length, …)."""
        others = {
            name: value[:, :count]
            for name, value in self.arguments.items()
            if name != self.tokens and isinstance(value, Tensor) and value.shape[:2] == self.value.shape[:2]
        }
        tokens = self.value[:, :count]
        arguments = {**self.arguments, **others, self.tokens: tokens}
        return replace(self, batch=self.with_tokens(tokens, **others), arguments=arguments)

    def with_item(self) -> Any:
        """The batch with one more item, of other tokens."""
        others: dict[str, Any] = {}
        for name, value, axis in self._by_item():
            more = value.narrow(axis, 0, 1)
            more = more.flip(-1) if value.is_floating_point() and value.dim() > 2 else more
            others[name] = torch.cat([value, more], axis)
        extra = self.other_tokens(self.value[:1], seed=2)
        return self.with_tokens(torch.cat([self.value, extra], 0), **others)

    def another(self) -> Any:
        """A batch of the same shapes that holds something else, padding too."""
        others = {name: value.roll(1, axis) for name, value, axis in self._by_item()}
        tokens = self.value.roll(1, 0)
        if self.items == 1 or bool((self.value == tokens).all()):
            tokens = self.other_tokens(self.value)
            others = {
                name: value.flip(-1) if value.is_floating_point() and value.dim() > 2 else value
                for name, value in others.items()
            }
        given = self.arguments.get(self.mask or "")
        if isinstance(given, Tensor) and bool(self.real.all()):
            padded = given.clone()
            padded[:, -1:] = _padding_like(str(self.mask), given, 1)
            others[str(self.mask)] = padded
        return self.with_tokens(tokens, **others)

    def alone(self, item: int = 0) -> NamedBatch:
        """The batch without all items but one."""
        tokens = self.value[item : item + 1]
        others = {name: value.narrow(axis, item, 1) for name, value, axis in self._by_item()}
        tokens_given = tokens.transpose(0, 1) if self.sequence_first else tokens
        arguments = {**self.arguments, **others, self.tokens: tokens_given}
        return replace(self, batch=self.with_tokens(tokens, **others), arguments=arguments)

    def _by_item(self) -> Iterator[tuple[str, Tensor, int]]:
        """The other arguments that have a part for each item, and the dimension of the items in them."""
        for name, value in self.arguments.items():
            if name == self.tokens or not isinstance(value, Tensor) or value.dim() == 0:
                continue
            axis = 1 if self.sequence_first and value.dim() > 1 and value.shape[:2] != self.value.shape[:2] else 0
            if value.shape[axis] == self.items and (value.dim() > 1 or self.items > 1):
                yield name, value, axis


def _may_be_tokens(name: str, value: object) -> bool:
    if not isinstance(value, Tensor) or value.is_meta or value.dtype == torch.bool or is_real(name, value) is not None:
        return False
    if name in OTHERS or min(value.shape, default=0) == 0:
        return False
    return value.dim() == 3 if value.is_floating_point() else value.dim() == 2


def _are_frames(value: object, causal: Collection[int]) -> bool:
    """Whether numbers (batch, time, places, width) are in an order that a mask shows: it is causal, and as long as their time."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != 4 or value.is_meta:
        return False
    return value.shape[1] in causal and value.shape[2] not in causal


def _last(value: Tensor, more: int) -> Tensor:
    """The last tokens, as many as asked for."""
    times = -(-more // value.shape[1])
    return torch.cat([value] * times, 1)[:, -more:]


def _padding_like(name: str, given: Tensor, more: int) -> Tensor:
    """Entries of a mask that mark padding."""
    real = is_real(name, given)
    assert real is not None
    if not bool(real.all()):
        padded = given[~real][0]
    elif given.is_floating_point() and bool((given == 0).all()):
        padded = given.new_full((), -torch.inf)
    else:
        padded = (given == 0).to(given.dtype).flatten()[0]
    return padded.expand(given.shape[0], more)


def _joined(value: Tensor, more: Tensor, left: bool, times: int = 1) -> Tensor:
    more = torch.cat([more] * times, 1).to(value.dtype)
    more = more.expand(value.shape[0], *more.shape[1:])
    return torch.cat([more, value] if left else [value, more], 1)
