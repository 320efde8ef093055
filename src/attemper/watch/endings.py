"""Endings: what is checked, and said, when a step or the block of a watch ends."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING

from ..errors import AttemperError, InputError
from .attach.gradients import NO_GRADIENTS
from .attach.modes import reason_of
from .call import AttentionCall, NoAttentionCall
from .passes import FAILED, UNFINISHED
from .record.entry import Entry
from .record.jsonl import Journal
from .routes.handwritten.layout import all_heads

if TYPE_CHECKING:
    from .routes.exchanged import Exchange
    from .session import Watch

FOLLOWS = (
    "it follows torch's scaled_dot_product_attention, nn.MultiheadAttention and nn.TransformerEncoderLayer, the Hugging Face "
    "attention interface, and attention written by hand as product, softmax, product. For other attention, call "
    "attemper.measure(query, key) inside the model"
)


EXCHANGED = (
    "{layer}: ranks exchange tensors around its attention ({op}), so that its heads, or the rows or keys of them, are those of "
    "this rank{calls}. record.facts[layer, kind].local is True for every such layer."
)


def note_part(watch: Watch, layer: str, call: AttentionCall) -> None:
    """Note a layer that runs a part of its heads on this rank."""
    named = all_heads(call.frames) if watch._ranks is not None and watch._ranks.many else None
    heads = call.facts.heads
    if watch._ranks is not None and named is not None and named > heads and named % heads == 0:
        watch._ranks.split = True
        watch._sums.local.add(layer)
        watch._warn(f"{watch._title(layer)}: {heads} of its {named} heads run on this rank, counted from 0.")


def note_exchange(watch: Watch, layer: str, exchange: Exchange) -> None:
    """The ranks of a layer exchange tensors while it runs. That is said once, unless all its rows are whole and added."""
    if watch._ranks is None or watch._ranks.makes_whole(exchange):
        return
    calls = f", and its {exchange.calls} calls are measured one by one" if exchange.calls > 1 else ""
    if not (watch._sums.local or watch._ranks.tensor_parallel):  # which is said at the start
        watch._warn(EXCHANGED.format(layer=watch._title(layer), op=exchange.op, calls=calls))
    watch._sums.local.add(layer)


@contextmanager
def surviving(watch: Watch) -> Iterator[None]:
    """Note an exception in attemper's own code, and go on without this step. Errors that say what to do pass."""
    try:
        yield
    except (AttemperError, Warning):
        raise
    except Exception as error:
        watch.add_unmeasured("", reason_of(error))
        watch._drop_step()


def drop_failed(watch: Watch, here: bool = False) -> None:
    """Forget passes that raised, in this thread or in all: the step goes on without them."""
    if watch._sums.drop_failed((get_ident(),) if here else None):
        watch._note(FAILED)


def settle(watch: Watch, goes_on: bool) -> None:
    """Decide what counts of the passes that did not end: a step ends now. Those that raised do not if the training goes on."""
    # passes that are all that a block has may have been stopped on purpose, by an exception
    if goes_on and (watch._sums.layers or watch._steps_ended):
        drop_failed(watch)
    watch._sums.settle()


def forgotten(kept: int, journal: Journal | None) -> str:
    """The note that a record holds only the last steps."""
    others = "keep= sets how many are kept"
    others = f"attemper.Record.read({str(journal.path)!r}) has all steps" if journal else others
    return f"only the last {kept} steps are in memory; {others}."


def drop_unfinished(watch: Watch, ended_well: bool) -> None:
    """Forget evaluation after the last step. Training passes before an error are kept: they may show what went wrong."""
    settle(watch, goes_on=ended_well)
    unfinished = watch._passes.unfinished(ended_well and watch.optimizer is not None and watch._steps_ended > 0)
    if unfinished:
        watch._note(UNFINISHED)
    for name in unfinished:
        watch._sums.drop(name)


def note_gradients(watch: Watch, entries: list[Entry]) -> None:
    """Note the layers of a step whose gradients were not measured, the first time."""
    for layer, failure in watch._sums.failures.items():
        watch._warn(f"{watch._title(layer)}: gradients could not be measured: {failure}.")
    layers = [watch._title(entry.layer) for entry in entries if entry.gradients is None]
    if layers and watch.wants_gradients:
        named = ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
        named = "any layer" if len(layers) == len(entries) else named
        if named not in watch._without_gradients:
            watch._without_gradients.add(named)
            watch._note(NO_GRADIENTS.format(step=entries[0].step, layers=named))


def check_calls(watch: Watch) -> None:
    """Raise if passes counted, and no attention call was found in them."""
    if watch._passes.counted and not watch._sums.calls and not watch._unmeasured:
        raise NoAttentionCall(f"{watch.caller}(): found no attention call in {watch._title('')}; {FOLLOWS}.")


def check_end(watch: Watch, was_measuring: bool, ended_well: bool) -> None:
    """Raise or warn if a block that ended well measured nothing, or not what was asked for."""
    if not ended_well:
        return
    if was_measuring:
        check_calls(watch)
    if not watch._passes.begun and not watch._unmeasured:
        raise InputError(
            f"watch(): {type(watch.model).__name__} was not called inside the block. Call model(…), "
            "and not model.forward(…)."
        )
    if watch.every > 1 and not watch._steps_ended and watch._passes.counted > 1:
        warnings.warn(
            f"watch(): every={watch.every}, but no step ended, so all {watch._passes.counted} passes count as one. "
            "Call watch.step() after each step, or give watch() the optimizer.",
            stacklevel=4,
        )
