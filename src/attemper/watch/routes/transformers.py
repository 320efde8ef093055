"""The route of the Hugging Face attention interface: the function in use is wrapped, and still computes the output.

The ops inside it are followed and show what is computed; the wrapper adds what was declared (scale, window, softcap,
key/value heads). If no op can be followed (a kernel from outside torch), the call is measured from its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...operation.biases import answers_for_torch
from ..attach.modes import without_modes
from ..attach.running import Frame, Pass, running
from ..call import AttentionCall, CallInfo
from . import packed
from .exchanged import collectives_so_far
from .handwritten.op_names import FLEX
from .kind import kind_of
from .versions import hand_out, modeling

EXCHANGED = (
    "attn_implementation={implementation!r} exchanges tensors with other ranks inside (context parallelism), so that its "
    "arguments are a part of what it attends to; watch one process without that"
)

Begin = Callable[[AttentionCall], Callable[[tuple[Frame, ...]], None]]
Unmeasured = Callable[[tuple[Frame, ...], str], None]
Failed = Callable[[Exception], None]


class Interfaced:
    """One call of the interface: its arguments, and whether an op inside it was followed."""

    def __init__(self, implementation: str | None, module: Any, key: Tensor, options: dict[str, Any]) -> None:
        self.implementation, self.kv_heads = implementation or "eager", key.shape[1]
        asked = options.get("is_causal")
        self.causal = bool(getattr(module, "is_causal", False) if asked is None else asked)
        self.options = options
        self.followed = False

    @property
    def signature(self) -> tuple[Any, ...]:
        """All that `complete` reads."""
        options = self.options
        window = options.get("sliding_window")
        declared = _number(options.get("scaling")), _number(options.get("softcap"))
        return self.implementation, self.kv_heads, self.causal, *declared, window if window is None else str(window)

    def complete(self, info: CallInfo) -> CallInfo:
        """The info of an op inside, with what only the interface has."""
        self.followed = True
        return replace(
            info,
            kv_heads=self.kv_heads,
            causal=info.causal or (self.causal and info.kind == "self"),  # the mask may hold it
            declared=_number(self.options.get("scaling")),
            softcap=_number(self.options.get("softcap")),
            window=self.options.get("sliding_window"),
            implementation=self.implementation,
        )


class Interface:
    """Wraps what models get from the attention interface."""

    def __init__(
        self, begin: Begin, unmeasured: Unmeasured, fall_back: Callable[[Pass], None], failed: Failed, give_up: Failed
    ) -> None:
        self.begin, self.unmeasured, self.fall_back = begin, unmeasured, fall_back
        self.failed, self.give_up = failed, give_up
        self.undo: Callable[[], None] | None = None
        self.wrapped: dict[tuple[int, str | None], Callable[..., Any]] = {}  # by the id of what they wrap

    def install(self) -> None:
        """Only if transformers is loaded; there is no model of it otherwise."""
        if self.undo is None and modeling() is not None:
            self.undo = hand_out(self.wrapped_of, self.give_up)

    def wrapped_of(self, function: Callable[..., Any], implementation: str | None) -> Callable[..., Any]:
        """What a model calls in place of an attention function."""
        key = (id(function), implementation)
        wrapper = self.wrapped.get(key)
        if wrapper is None:
            wrapper = self.wrapped[key] = self.wrap(function, implementation)
        return wrapper

    def uninstall(self) -> None:
        if self.undo is not None:
            self.undo()
            self.undo = None
            self.wrapped.clear()

    def wrap(self, function: Callable[..., Any], implementation: str | None) -> Callable[..., Any]:
        measures_itself = getattr(function, "measures_itself", None)
        # flex needs torch.compile: run eagerly, as the rest is in a measured step, it would store n × n
        run = compiling()(function) if implementation == FLEX else function

        def measuring(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
            current = running.current
            if current is None:
                return function(module, query, key, value, *rest, **options)
            before, interfaced = current.interfaced, None
            collectives: object = None
            try:
                if measures_itself is None or not measures_itself(module):
                    self.expect(module, implementation)
                    current.interfaced = interfaced = Interfaced(implementation, module, key, options)
                    collectives = collectives_so_far()
            except Exception as error:
                self.give_up(error)
            try:
                out = run(module, query, key, value, *rest, **options)
                if interfaced is not None and not interfaced.followed:
                    mask = rest[0] if rest else options.get("attention_mask")  # models pass it by position or by name
                    try:
                        if collectives_so_far() == collectives:
                            self.from_arguments(module, query, key, mask, options, interfaced)
                        else:
                            reason = EXCHANGED.format(implementation=implementation or "eager")
                            self.unmeasured(tuple(running.frames), reason)
                    except Exception as error:
                        self.failed(error)
            finally:
                current.interfaced = before
            return out

        return measuring

    def expect(self, module: Any, implementation: str | None) -> None:
        """Turn an intercepted pass into a full one, before the function runs, unless a full pass saw the same call."""
        current = running.current
        if current is None or current.intercepted is None:
            return
        expected = current.intercepted.expected(module) if running.frames[-1].module is module else None
        if expected is None or expected.implementation != (implementation or "eager"):
            self.fall_back(current)
        else:
            current.planned = expected.sequences

    def from_arguments(
        self, module: Any, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any], interfaced: Interfaced
    ) -> None:
        """Measure a call that no op showed, or warn that it cannot be measured."""
        frames = tuple(running.frames)
        call = refusal(mask, options) or read(frames, module, query, key, mask, options, interfaced.implementation)
        if isinstance(call, str):
            eager = interfaced.implementation == "eager"
            way_out = "" if eager else ". model.set_attn_implementation('eager') shows its scores"
            self.unmeasured(frames, f"attn_implementation={interfaced.implementation!r} with {call}{way_out}")
            return
        call.softcap = _number(options.get("softcap"))
        call.take_sink(options.get("s_aux"))
        self.begin(call)(frames)


def read(
    frames: tuple[Frame, ...],
    module: Any,
    query: Tensor,
    key: Tensor,
    mask: Any,
    options: dict[str, Any],
    implementation: str,
) -> AttentionCall | str:
    """A call by its arguments, or what in them cannot be measured."""
    rows, keys = query.shape[2], key.shape[2]
    flash = isinstance(mask, Tensor) and mask.dim() == 2
    causal, window = False, None
    if mask is None or flash:  # else the mask holds both
        causal, window = is_causal(module, query, options), options.get("sliding_window")
    scale = _number(options.get("scaling"))
    documents = packed.spans_of(implementation, mask, options, query, key)
    if isinstance(documents, str):
        return documents
    if documents is not None:
        if options.get("position_bias") is not None:
            return "packed documents and a position_bias"
        tensors = query, key
        return packed.packed_call(
            "interface", frames, tensors, documents, packed.in_one_row, scale=scale, causal=causal, window=window
        )
    if flash:  # flash attention's (B, Lk), nonzero = a real token
        mask = mask.bool()[:, None, None, :]
    if type(mask).__name__ == "BlockMask":
        mask = dense(mask, query, key)
    mask = with_bias(mask, options.get("position_bias"))
    aligned = causal or rows == 1  # at the last key
    if window is not None and not aligned and rows != keys:
        return packed.OTHER_KEYS
    kind = kind_of(frames, query, key, (rows, keys))
    info = CallInfo.of("interface", kind, query, key, scale=scale, causal=causal, mask=mask)
    call = AttentionCall(info, frames, query, key, mask=mask, causal="lower_right" if aligned else False, scale=scale)
    call.window = window
    return call


def refusal(mask: object, options: dict[str, Any]) -> str | None:
    """What in these arguments neither the measurement nor attemper's kernels support."""
    if options.get("cache") is not None:
        return "a paged cache"
    if type(mask).__name__ == "BlockMask":
        return None
    if mask is not None and (answers_for_torch(mask) or not (isinstance(mask, Tensor) and mask.dim() in (2, 4))):
        return f"a {type(mask).__name__} as its mask"
    return None


@contextmanager
def compiling() -> Iterator[None]:
    """Let Dynamo compile, without any mode."""
    with without_modes(), torch.compiler.set_stance("default"):
        yield


def dense(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """A flex attention's BlockMask as booleans, for all pairs of a query and a key."""
    from torch.nn.attention.flex_attention import create_mask

    with without_modes():
        return create_mask(mask.mask_mod, query.shape[0], 1, query.shape[2], key.shape[2], device=str(query.device))


def is_causal(module: Any, query: Tensor, options: dict[str, Any]) -> bool:
    """The interface's rule for a call without a mask: causal if the call or the module asks for it, but not for one query."""
    asked = options.get("is_causal")
    return query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if asked is None else asked)


def with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """A position bias and a mask as one additive mask."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
