"""replace=True: attemper's kernels replace a Hugging Face model's own attention, so that vitals need no second pass.

One name is registered in two tables for all models. Without the second, the mask table, transformers would silently pass no mask.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import attention, attention_again, attention_with_detached_signs
from ...errors import AttemperError, InputError
from ...operation.listen import listening
from ...vitals import SIGNS, Vitals
from ..attach.again import count_rows, only_watch
from ..attach.attachment import attachment
from ..attach.measuring import unfolded
from ..attach.modes import reason_of, without_modes
from ..attach.running import Pass, running
from ..call import AttentionCall, Facts
from .kind import kind_of
from .packed import LENGTHS, within_documents
from .sdpa import unreadable
from .transformers import is_causal, refusal, with_bias
from .versions import check_switchable, modeling

REPLACED, CALLER, FLOOR, INSTRUMENT = "attemper", "watch(): replace=True", "floor()", "instrument()"
MOST_FACTS = 64  # of different calls, that are kept
PLAIN_TYPES = {type(None), bool, int, float}
KNOWN = ("transformers.integrations.", "attemper.")  # where the attention functions are that attemper can replace
OTHERWISE = {
    CALLER: "Leave replace out: the model's own attention is then measured.",
    FLOOR: "Use attemper.qk_clip() instead, which changes no attention function.",
    INSTRUMENT: "Leave instrument out: attemper.watch(model) then runs watched steps eagerly.",
}


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


class Replacement:
    """Switches a model to attemper's kernels and back. ``caller`` begins the sentences of its errors."""

    def __init__(self, model: nn.Module, attend: Callable[..., Any], caller: str = CALLER) -> None:
        library = modeling()
        if library is None or not isinstance(model, library.PreTrainedModel):
            raise InputError(
                f"{caller} needs a Hugging Face model that uses the attention interface; "
                f"got {type(model).__name__}. Leave it out: the model's own attention is then measured."
            )
        check_switchable(caller, OTHERWISE[caller])
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface._global_mapping[REPLACED] = attend_by_config
        AttentionMaskInterface._global_mapping[REPLACED] = sdpa_mask
        self.attend = attend
        self.configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
        self.model, self.caller = model, caller
        self.before: list[tuple[Any, Any]] = []  # configs, and the implementation that each had

    def install(self) -> None:
        check_known(self.caller, self.model)
        self.before = [(config, config._attn_implementation_internal) for config in self.configs.values()]
        for key in self.configs:
            ATTENDING.setdefault(key, []).append(self.attend)
        used = [config for config, implementation in self.before if implementation is not None]
        self.model.set_attn_implementation(REPLACED)
        stayed = [config for config in used if config._attn_implementation != REPLACED]
        if stayed:
            self.uninstall()
            raise InputError(
                f"{self.caller}: {type(self.model).__name__} kept attn_implementation="
                f"{stayed[0]._attn_implementation!r}; it does not take its attention from the interface. {OTHERWISE[self.caller]}"
            )

    def uninstall(self) -> None:
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


class without_listener_and_modes(without_modes):  # noqa: N801 (used as a function)
    """Hide what runs inside from dispatch modes and from the listener of attemper's operation: the route itself reports it."""

    __slots__ = ("listener",)

    def __enter__(self) -> None:
        self.listener, listening.listener = listening.listener, None
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        listening.listener = self.listener


def read_arguments(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    options: dict[str, Any],
    caller: str = CALLER,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys, values and the options of ``attention()``, from what transformers gives to an attention function."""
    reason = refusal(attention_mask, options)
    if query.shape[0] > 1 and options.get(LENGTHS[0]) is not None:
        reason = f"{LENGTHS[0]} over the items of a batch"
    if reason is not None:
        raise InputError(f"{caller} cannot compute {type(module).__name__} with {reason}. {OTHERWISE[caller]}")
    causal = attention_mask is None and is_causal(module, query, options)
    within = within_documents(attention_mask, options, query, key, causal)
    if within is not None:
        attention_mask, causal = within, False
    elif attention_mask is None and causal and key.shape[2] > query.shape[2]:
        # a static cache that is being filled: the keys after the queries are not computed yet
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    mask = with_bias(attention_mask, options.get("position_bias"))
    asked = {"mask": mask, "causal": causal, "scale": scaling, "softcap": options.get("softcap"), "dropout": dropout}
    return key, value, asked


class KnownFacts:
    """The facts of calls, by all that they depend on."""

    def __init__(self) -> None:
        self.known: dict[Any, Facts] = {}

    def of(self, kind: str, query: Tensor, key: Tensor, asked: dict[str, Any], options: dict[str, Any]) -> Facts:
        """The facts of a call with these options of ``attention()``, and of transformers."""
        window = options.get("sliding_window")
        given = (asked["mask"] is None, window, asked["causal"], asked["scale"], asked["softcap"], asked["dropout"])
        plain = {*map(type, given)} <= PLAIN_TYPES  # a learned scale has another value in each step
        place = (kind, query.shape, key.shape, query.dtype, *given)
        found = self.known.get(place) if plain else None
        if found is None:
            rest = {"declared": asked["scale"], "window": window, "implementation": REPLACED}
            found = Facts.of("replaced", kind, query, key, **asked, **rest)
            if len(self.known) >= MOST_FACTS:
                self.known.clear()
            if plain:
                self.known[place] = found
        return found


def attend_again_and_count(
    current: Pass, facts: Facts, query: Tensor, key: Tensor, value: Tensor, asked: dict[str, Any]
) -> Tensor | None:
    """The output of a call like an earlier one on a GPU, which is counted; None if it needs more than its rows."""
    only = only_watch(attachment, facts, query, current)
    if only is None:
        return None
    with without_listener_and_modes():
        found = attention_again(query, key, value, **asked)
    if found is None:
        return None
    output, rows = found
    count_rows(facts, query, key, unfolded(query, rows), only, current)
    return output


def attend_with(
    watching: Callable[[], bool],
    signs: tuple[str, ...],
    report: Callable[[AttentionCall, Pass], None],
    alter: Callable[[Tensor, Vitals], Tensor] | None = None,
    caller: str = CALLER,
) -> Callable[..., Any]:
    """The function that transformers calls in place of its own: attention on attemper's kernels, vitals on watched steps.

    ``alter`` is given the output and the vitals of every call, and returns the output.
    """

    known = KnownFacts()

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        key, value, asked = read_arguments(module, query, key, value, attention_mask, dropout, scaling, options, caller)
        current = running.current if watching() else None  # None: this call is not measured
        if current is not None:
            attachment.interface.expect(module, REPLACED)
            kind = kind_of(running.frames, query, key, (query.shape[2], key.shape[2]))
            facts = known.of(kind, query, key, asked, options)
            if current.light is not None and asked["mask"] is None and alter is None and signs == SIGNS:
                output = attend_again_and_count(current, facts, query, key, value, asked)
                if output is not None:
                    return output.transpose(1, 2).contiguous(), None
        # a loss may hold the vitals that `alter` is given
        run = attention_with_detached_signs if alter is None else attention
        asks = current is not None or alter is not None
        with nullcontext() if current is None else without_listener_and_modes():
            output, vitals = run(query, key, value, signs=signs if asks else (), **asked)
        if alter is not None:
            output = alter(output, vitals)
        if current is not None:
            frames = tuple(running.frames)
            call = AttentionCall(facts, frames, query, key, None, asked["mask"], asked["causal"], asked["scale"])
            call.softcap, call.vitals = asked["softcap"], vitals
            reason = unreadable(query, key)
            if reason is None:
                report(call, current)
            else:  # signs are summed by their addresses
                attachment.unmeasured(frames, f"attention on {reason}")
        return output.transpose(1, 2).contiguous(), None

    return attend


ATTENDING: dict[int, list[Callable[..., Any]]] = {}
"""What replaces the attention of models, by the id of a config; the last of each is used."""
unwatched = attend_with(lambda: False, (), lambda call, current: None)
"""Attention on attemper's kernels, for a copy of a replaced model."""


def attend_by_config(module: nn.Module, *args: Any, **options: Any) -> Any:
    """What transformers calls: it has one table of attention functions for all models, and several may be replaced."""
    try:
        config, found = getattr(module, "config", None), [unwatched]
        if config is not None:
            found = ATTENDING.get(id(config), found)
        elif ATTENDING:
            found = list(ATTENDING.values())[-1]  # nothing shows whose module it is
        return found[-1](module, *args, **options)
    except AttemperError:
        raise  # it says what attemper's kernels cannot compute
    except Exception as error:
        if running.current is not None:
            attachment.give_up(error, module)
        else:
            reason = reason_of(error)
            with suppress(Warning):
                warnings.warn(f"{type(module).__name__}: {reason}. transformers' own attention runs.", stacklevel=2)
        return attend_by_transformers(module, *args, **options)


attend_by_config.measures_itself = True  # type: ignore[attr-defined]


def attend_by_transformers(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Any:
    """transformers' own attention, on the mask that it makes for SDPA: by SDPA or, which alone has a softcap, eager."""
    causal = attention_mask is None and is_causal(module, query, options)
    within = within_documents(attention_mask, options, query, key, causal)  # neither reads offsets
    attention_mask = attention_mask if within is None else within
    if options.get("softcap") is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if attention_mask is None and is_causal(module, query, options):
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = query.new_zeros(()).masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    eager = next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))
    return eager(module, query, key, value, attention_mask, **options)
