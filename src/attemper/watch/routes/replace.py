"""replace=True: attemper's kernels replace a Hugging Face model's own attention, so that vitals need no second pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...errors import InputError
from ...operation.call_hooks import call_hooks
from ...operation.run import Execution
from ...operation.run import attend as attend_by_attemper
from ...vitals import Vitals
from ..attach.attachment import attachment
from ..attach.measuring import is_captured, rows_of, sums_of_all_rows
from ..attach.modes import without_modes
from ..attach.running import Pass, running
from ..call import AttentionCall, CallInfo, Documents
from ..source import Source
from .kind import kind_of
from .packed import LENGTHS, spans, with_documents
from .registered import ATTENDING, CALLER, OTHERWISE, REPLACED, read_arguments, register, weights_asked
from .sdpa import unreadable
from .versions import modeling

KNOWN = ("transformers.integrations.", "attemper.")  # where the attention functions are that attemper can replace

Alter = Callable[[Tensor, Vitals], Tensor]


def check_known(caller: str, model: nn.Module) -> None:
    """Raise if a Hugging Face model attends by a function that is not transformers' own, which may be context parallel."""
    table = modeling().ALL_ATTENTION_FUNCTIONS  # type: ignore[union-attr]
    for part in model.modules():
        name = getattr(getattr(part, "config", None), "_attn_implementation", None)
        module = sys.modules.get(type(part).__module__)  # a model may have a table of its own
        function = getattr(module, "ALL_ATTENTION_FUNCTIONS", table).get(name)
        # not __module__, which functools.wraps copies
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if function is not None and not home.startswith(KNOWN):
            raise InputError(
                f"{caller}: {type(model).__name__} attends by {getattr(function, '__qualname__', type(function).__name__)} "
                f"(attn_implementation={name!r}), which is none of transformers' attention functions. What it does beyond them, "
                f"such as context parallelism, would be lost. {OTHERWISE[caller]}"
            )


def is_replaced(model: nn.Module) -> bool:
    """Whether a watch with ``replace=True``, or a floor, computes the attention of a model now."""
    return any(id(part.config) in ATTENDING for part in model.modules() if hasattr(part, "config"))


class Replacement(Source):
    """Switches a Hugging Face model to attemper's kernels and back; the calls that they compute, while these count.

    ``alter`` is given the output and the vitals of every call, and returns the output. ``caller`` begins the sentences of errors.
    """

    def __init__(
        self, model: nn.Module, signs: tuple[str, ...], alter: Alter | None = None, caller: str = CALLER
    ) -> None:
        library = modeling()
        if library is None or not isinstance(model, library.PreTrainedModel):
            raise InputError(
                f"{caller} needs a Hugging Face model that uses the attention interface; "
                f"got {type(model).__name__}. Leave it out: the model's own attention is then measured."
            )
        register(caller)
        self.counts = False
        self.attend = attend_with(lambda: self.counts, signs, alter, caller)
        self.configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
        self.model, self.caller = model, caller
        self.before: list[tuple[Any, Any]] = []  # configs, and the implementation that each had

    def open(self) -> None:
        check_known(self.caller, self.model)
        self.before = [(config, config._attn_implementation_internal) for config in self.configs.values()]
        for key in self.configs:
            ATTENDING.setdefault(key, []).append(self.attend)
        used = [config for config, implementation in self.before if implementation is not None]
        self.model.set_attn_implementation(REPLACED)
        stayed = [config for config in used if config._attn_implementation != REPLACED]
        if stayed:
            self.close()
            raise InputError(
                f"{self.caller}: {type(self.model).__name__} kept attn_implementation="
                f"{stayed[0]._attn_implementation!r}; it does not take its attention from the interface. {OTHERWISE[self.caller]}"
            )

    def start(self) -> None:
        self.counts = True

    def pause(self) -> None:
        self.counts = False

    def close(self) -> None:
        """Restore the model. The name stays registered: a copy of the model that was made meanwhile may use it."""
        for config, implementation in self.before:
            config._attn_implementation_internal = implementation
        self.before = []
        for key in self.configs:
            attending = ATTENDING.get(key, [])
            if self.attend in attending:
                attending.remove(self.attend)
            if not attending:
                ATTENDING.pop(key, None)


class without_call_hook_and_modes(without_modes):  # noqa: N801 (used as a function)
    """Hide what runs inside from dispatch modes and from the call hook of attemper's operation: the route itself reports it."""

    __slots__ = ("call_hook",)

    def __enter__(self) -> None:
        self.call_hook, call_hooks.current = call_hooks.current, None
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        call_hooks.current = self.call_hook


def _info_of(query: Tensor, key: Tensor, asked: dict[str, Any], options: dict[str, Any]) -> CallInfo:
    """The info of a call with these options of ``attention()``, and of transformers."""
    kind = kind_of(running.frames, query, key, (query.shape[2], key.shape[2]))
    rest = {"declared": asked["scale"], "window": options.get("sliding_window"), "implementation": REPLACED}
    known = {name: asked[name] for name in ("mask", "scale", "softcap", "dropout")}
    return CallInfo.of("replaced", kind, query, key, causal=bool(asked["causal"]), **known, **rest)


def _counts_by_sums(
    current: Pass, info: CallInfo, query: Tensor, key: Tensor, asked: dict[str, Any], vitals: Vitals
) -> bool:
    """Count a call of which its watch needs only the sums, and whose rows all count; False for any other."""
    module = id(running.frames[-1].module)
    only = current.wants_only_sums(attachment.observers, module)
    if only is None or info.kind == "cross" or is_captured(query) or unreadable(query, key) is not None:
        return False
    if not (asked["mask"] is asked["documents"] is asked["sink"] is None):
        return False
    rows_of(current, info, query, key, None)
    current.add_sums(info, sums_of_all_rows(vitals, only, query.device.type), only, module)
    return True


def attend_with(
    watching: Callable[[], bool], signs: tuple[str, ...], alter: Alter | None = None, caller: str = CALLER
) -> Callable[..., Any]:
    """The function that transformers calls in place of its own: attention on attemper's kernels, vitals on watched steps."""
    # a loss may hold the vitals that `alter` is given
    execution = Execution(detached=alter is None)

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        keys = key.shape[2]
        key, value, asked = read_arguments(module, query, key, value, attention_mask, dropout, scaling, options, caller)
        current = running.current if watching() else None  # None: this call is not measured
        if current is not None:
            attachment.interface.expect(module, REPLACED)
            info = _info_of(query, key, asked, options)
        if current is None:
            asks = () if alter is None else signs
            output, vitals = attend_by_attemper("attention", query, key, value, asks, execution, **asked)
        else:
            with without_call_hook_and_modes():
                output, vitals = attend_by_attemper("attention", query, key, value, signs, execution, **asked)
        if alter is not None:
            output = alter(output, vitals)
        if current is not None and not _counts_by_sums(current, info, query, key, asked, vitals):
            frames = tuple(running.frames)
            call = AttentionCall(info, frames, query, key, None, asked["mask"], asked["causal"], asked["scale"])
            call.softcap, call.vitals = asked["softcap"], vitals
            call.take_sink(asked["sink"])
            reason = unreadable(query, key)
            if reason is None and asked["documents"] is not None:
                documents = spans(options[LENGTHS[0]], options[LENGTHS[1]], (query.shape[2], key.shape[2]))
                if isinstance(documents, str):
                    reason = documents
                elif documents:
                    with_documents(call, Documents(documents, (query, key), _as_it_is))
            if reason is None:
                attachment.take(call, current)
            else:  # signs are summed by their addresses
                attachment.unmeasured(frames, f"attention on {reason}")
        return output.transpose(1, 2).contiguous(), weights_asked(query, key, keys, asked, options)

    return attend


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
