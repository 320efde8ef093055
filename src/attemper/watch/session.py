"""watch(): attach to a model, measure every n-th step, detach on every exit."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import InputError, checked_options
from ..kernels import check_name
from ..operation.checks import Signs, check_signs
from . import endings
from .attach.attachment import attachment
from .attach.dynamo import COMPILED, in_compiled, is_compiled
from .attach.names import named_modules
from .attach.running import running
from .call import AttentionCall, Examiner, Looked, Summary
from .options import check_model, check_numbers, check_open, check_options, check_rows, check_step, with_hooks
from .passes import LEFT_OUT, ONLY_OTHERS, Passes, is_dry
from .record.jsonl import Journal
from .record.ranks import Ranks
from .record.record import Record
from .record.store import check_path, to_path
from .record.sums import StepAccumulator
from .record.transfer import to_host
from .routes.replace import Replacement, attend_with

KEPT = 100  # steps that are held in memory if a file has all


@checked_options
def watch(
    model: nn.Module,
    *,
    every: int = 1,
    optimizer: Optimizer | None = None,
    gradients: bool = False,
    path: str | Path | None = None,
    signs: Signs = "all",
    kernel: str = "auto",
    replace: bool = False,
    start: int = 0,
    passes: str = "training",
    keep: int | None = None,
    full: bool = False,
    examiners: Sequence[Examiner] = (),
) -> Watch:
    """Measure every attention call of a model while it runs, without changing it.

    ``with attemper.watch(model) as watch:`` around a forward pass or a training loop; ``watch.record`` then has the vitals per
    step, layer and head. The model's own functions compute its outputs and gradients, which are bit-identical in eager mode.
    A step ends with ``watch.step()``, or with the step of ``optimizer``. Padded queries are left out: in self-attention those
    whose own key is hidden from every query, in cross-attention those of the self-attention before it.

    Args:
        model: any module; its layers are named as in ``model.named_modules()``, without the wrappers of ``torch.compile`` and
            DistributedDataParallel. In a distributed run, watch the wrapped model, or the one that ``fully_shard`` sharded, on
            every rank: rows are added over its ranks. If these hold different heads, each keeps its own rows, with a warning.
        every: measure steps 0, every, 2·every, …; in between nothing is attached.
        optimizer: its ``step()`` ends a step of the watch; otherwise call ``watch.step()``. If it wraps another optimizer, as
            accelerate's does, the inner one ends the step: a step that the wrapper skips is not counted.
        gradients: also measure the root mean square and the median of |dq| and |dk| in the backward.
        path: a ``.jsonl`` file to append each watched step to, safe against a kill and a full disk. Rank 0 writes, or the first
            rank of the DistributedDataParallel's process group. ``Record.read(path)`` reads all of it.
        signs: as in ``attention()``.
        kernel: as in ``attention()``.
        replace: let attemper's kernels compute a Hugging Face model's attention, with the vitals from the same pass.
            Outputs are then equal up to rounding.
        start: the number of the first step, for a run that is resumed.
        passes: ``"training"``: evaluation does not count in the steps around it. Once a pass ran with gradients, passes without
            gradients are left out; in a step with passes in training mode, so are those in evaluation mode. If no pass has
            gradients, all count. Passes after the last step count as one more step, unless they ran in evaluation mode after
            steps in training mode, or ``optimizer`` ended the steps. ``"all"``: every pass counts.
        keep: how many of the last steps ``record`` holds in memory, with 8 bytes for every step, head and sign. None: all of
            them, or with ``path`` the last 100 of those that are in the file.
        full: follow every op of every watched pass. By default the first pass is followed in full; if all its attention went
            through functions that can be intercepted, later passes intercept only those, which costs less. What differs makes
            a pass full again, and so is the 50th and later ones up to 400 passes apart.
        examiners: objects that look at the q, k and logits of each call (``from attemper.watch.examine import Examiner``);
            for extensions such as ``scan``.

    Returns:
        a context manager. ``record`` holds the steps that have ended, ``step()`` ends one, ``pause()`` and ``resume()`` leave
        passes out, ``log(numbers)`` keeps a loss beside the rows, ``rows(keep)`` takes a boolean ``(B, L)`` that marks the real
        queries if no mask shows them.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> with attemper.watch(model) as watch:
        ...     output = model(torch.randn(1, 5, 16))
        >>> watch.record.layers
        ['self_attn']
    """
    check_model(model)
    check_options(every, start, keep, passes, examiners, gradients=gradients, replace=replace, full=full)
    names = check_signs("watch", signs)
    if not names:
        raise InputError("watch(): `signs` must name at least one sign; got none. Leave it out for all.")
    check_name("watch", kernel)
    journal = None
    if path is not None:
        file = to_path("watch", path)
        check_path("watch", file, (".jsonl",))
        journal = Journal(file)
    inner = None if optimizer is None else with_hooks(optimizer)
    from .compiled.reading import class_of_watch  # it is a subclass of what is below

    made = class_of_watch(model, replace, by_ops=gradients or full or bool(examiners))
    replace = replace and made is Watch
    return made(model, every, inner, gradients, journal, names, kernel, replace, start, passes, keep, full, examiners)


class Watch:
    """A watch of one model; made by :func:`watch`, used in a ``with`` statement."""

    def __init__(
        self,
        model: nn.Module,
        every: int,
        optimizer: Optimizer | None,
        gradients: bool,
        journal: Journal | None,
        signs: tuple[str, ...],
        kernel: str,
        replace: bool,
        start: int,
        passes: str,
        keep: int | None,
        full: bool,
        examiners: Sequence[Examiner],
    ) -> None:
        self.model, self.every, self.optimizer = model, every, optimizer
        self.signs, self.kernel = signs, kernel
        self.modules: tuple[nn.Module, ...] = ()
        self.names: dict[int, str] = {}
        self.given_rows: Tensor | None = None
        self.full, self.examiners = full, examiners
        self.caller = "watch"  # the function that the user called, for errors
        self._sums, self._record = StepAccumulator(gradients), Record()
        self._journal, self._keep = journal, keep
        self._tail = endings.forgotten(keep or KEPT, journal)
        self._ranks: Ranks | None = None  # while the watch is open
        self._without_gradients: set[str] = set()  # layers whose missing gradients were noted
        self._step, self._steps_ended, self._passes = start, 0, Passes(passes)
        self._open, self._measuring, self._paused = False, False, False  # measuring: this step is one to measure
        self._depth, self._unmeasured = 0, 0  # unmeasured: calls that were found and not measured
        self._optimizer_hook: Any = None
        self._replacement = None
        if replace:
            attend = attend_with(self._connected, signs, attachment.take)
            self._replacement = Replacement(model, attend)

    @property
    def record(self) -> Record:
        """What was measured up to the last step that ended; with ``keep``, the last steps of it, and a note."""
        return self._record

    @property
    def unmeasured(self) -> int:
        """How many attention calls could not be measured; the notes of the record hold the reasons."""
        return self._unmeasured

    def rows(self, keep: Tensor | None) -> None:
        """Mark the real queries of the coming passes, if no mask shows them.

        Args:
            keep: boolean ``(B, L)``, True for a real token; used for calls with L queries until the next call of ``rows()``.
                None: as masks show it.
        """
        check_rows(keep)
        self.given_rows = keep

    def step(self, number: int | None = None) -> None:
        """End the current step, and measure the next one if it is due.

        Args:
            number: the step that ends, as the trainer counts it; the next one is ``number + 1``. None: one after the last.
        """
        with endings.surviving(self):
            check_open(self._open)
            if number is not None:
                check_step(number)
                self._step = number
            attachment.forget_ended()
            if self._measuring:
                endings.settle(self, goes_on=True)
                if self._passes.left_out and not self._sums.layers:
                    self._warn(ONLY_OTHERS)
                self._close_step(join=True)
        self._step += 1
        self._steps_ended += 1
        due = self._step % self.every == 0
        with endings.surviving(self):
            if due and not self._measuring:
                self._attach()
            elif self._measuring and not due:
                self._detach()

    def pause(self) -> None:
        """Detach from the model until ``resume()``: passes in between are not measured. The step goes on after it."""
        if self._open and self._connected():
            self._disconnect()
        self._paused = True

    def resume(self) -> None:
        """Go on after ``pause()``."""
        was_paused, self._paused = self._paused, False
        if self._open and self._measuring and was_paused:
            self._connect()

    def log(self, numbers: Mapping[str, float], step: int | None = None) -> None:
        """Keep numbers of the training, such as its loss, in ``record.logged``; the file has them from the next rows on.

        Args:
            numbers: plain numbers by their names; NaN and infinity are kept.
            step: the step that they belong to; None is the current one.
        """
        found, at = check_numbers(numbers), self._step if step is None else step
        check_step(at, "watch.log")
        self._record.logged.setdefault(at, {}).update(found)
        if self._journal is not None and (self._ranks is None or self._ranks.first):
            self._journal.log(at, found)

    def __enter__(self) -> Watch:
        if self._open:
            raise InputError("watch(): this watch is open already. Make another with attemper.watch(model).")
        self._open, self._steps_ended = True, 0
        with endings.surviving(self), ExitStack() as failed:
            failed.callback(self._close)
            self._begin()
            failed.pop_all()
        return self

    def _begin(self) -> None:
        attachment.forget_ended()
        self._passes.begin()
        named = named_modules(self.model)
        self.modules, self.names = tuple(named), {id(module): name for module, name in named.items()}
        self._depth = len(running.frames)
        self._ranks = Ranks(self.model)
        if self._journal is not None and self._ranks.first:
            self._journal.open(self._warn)
        for sentence in self._ranks.sentences:
            self._warn(sentence)
        if self._replacement is not None:
            self._replacement.install()
        if self.optimizer is not None:
            self._optimizer_hook = self.optimizer.register_step_post_hook(
                endings.surviving(self)(lambda *_: self.step())
            )
        if self._step % self.every == 0:
            self._attach()

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        was_measuring, ended_well = self._measuring, error_type is None
        with endings.surviving(self), ExitStack() as end:
            end.callback(self._close)
            endings.drop_unfinished(self, ended_well)
            # if this rank fails, others may not get here; if it does not, they wait for it, whether it has rows or not
            join = ended_well and self._ranks is not None and bool(self._ranks.groups)
            if was_measuring and (self._sums.layers or join):
                self._close_step(join)
                self._step += 1  # the end of the block ends it
        with endings.surviving(self):
            endings.check_end(self, was_measuring, ended_well)

    def _close(self) -> None:
        self._open = False
        with ExitStack() as ends:  # in reverse order, each of them whatever became of the others
            if self._journal is not None:
                ends.callback(self._journal.close)
            if self._replacement is not None:
                ends.callback(self._replacement.uninstall)
            if self._optimizer_hook is not None:
                ends.callback(self._optimizer_hook.remove)
            ends.callback(attachment.closed, self, self._depth)
            if self._measuring:
                ends.callback(self._detach)
        self.modules, self.names, self._paused, self._optimizer_hook = (), {}, False, None

    def _attach(self) -> None:
        self._measuring = True
        if any(map(is_compiled, self.modules)):
            self._warn(COMPILED)
        if not self._paused:
            self._connect()

    def _detach(self) -> None:
        self._measuring = False
        if not self._paused:
            self._disconnect()

    def _connected(self) -> bool:
        return self._measuring and not self._paused

    def _connect(self) -> None:
        attachment.add(self)
        if self._ranks is not None:
            self._ranks.attach()

    def _disconnect(self) -> None:
        attachment.remove(self)
        if self._ranks is not None:
            self._ranks.detach()

    def pass_began(self, module: nn.Module) -> bool:
        """Whether the pass that begins counts."""
        if is_dry():
            return False
        worse = self._passes.take(module, self.names[id(module)])
        if worse is None or worse:
            self._note(LEFT_OUT)
        if worse is None:
            return False
        endings.drop_failed(self, here=True)
        for name in worse:  # the earlier passes of this step were evaluation
            self._sums.drop(name)
        if in_compiled():
            self._warn(COMPILED)
        return True

    def add_call(self, name: str, call: AttentionCall, summary: Summary, looked: Looked) -> None:
        self._sums.add(name, call.facts, summary, call)
        endings.note_part(self, name, call)
        for examiner, part, found in looked:
            examiner.keep(name, part, found)

    def add_unmeasured(self, name: str, reason: str) -> None:
        self._unmeasured += 1
        self._warn(f"{self._title(name)}: not measured: {reason}.")

    def add_note(self, name: str, reason: str) -> None:
        """Note what may be attention and was not measured, or what is uncertain about a call."""
        self._note(f"{self._title(name)}: {reason}.")

    def add_lost(self, name: str, reason: str) -> None:
        """Warn of attention that a light pass may have missed."""
        self._warn(f"{self._title(name)}: step {self._step}: {reason}.")

    @property
    def wants_full(self) -> bool:
        return self.full or bool(self.examiners)

    @property
    def wants_gradients(self) -> bool:
        return self._sums.wants_gradients

    @property
    def wants_traces(self) -> bool:
        return any(getattr(examiner, "traces", False) for examiner in self.examiners)

    def _title(self, name: str) -> str:
        """The name of a layer for a sentence: the model itself has the name of its class, not that of a wrapper."""
        return name or [type(module).__name__ for module, named in named_modules(self.model).items() if not named][-1]

    def _note(self, sentence: str) -> bool:
        """Keep a sentence in the notes, once; whether it is new."""
        if sentence in self._record.notes:
            return False
        self._record.notes.append(sentence)
        return True

    def _warn(self, sentence: str) -> None:
        if self._note(sentence):
            warnings.warn(f"watch(): {sentence}", stacklevel=2)

    def _drop_step(self) -> None:
        """Begin the step anew: what was measured of it is not to be trusted."""
        self._sums = StepAccumulator(self._sums.wants_gradients)

    def _close_step(self, join: bool) -> None:
        entries, facts = self._sums.close(self._step)
        self._passes.end_step()
        whole, alone = None, self._ranks is None or not self._ranks.groups
        if join and self._ranks is not None:
            whole = self._ranks.join(self._step, entries, self._warn)
        if whole is not None or alone:
            endings.check_calls(self)  # if other ranks have calls, an error on this one would end them too
        entries = entries if whole is None else whole
        endings.note_gradients(self, entries)
        writes = self._journal is not None and self._ranks is not None and self._ranks.first
        entries = to_host(entries) if writes else entries
        self._record._add(entries, facts)
        if self._journal is not None and writes:
            self._journal.append(entries, facts, [note for note in self._record.notes if note != self._tail])
            if self._journal.waiting:
                return  # rows that are not in the file stay in the record
        in_file = writes or (self._journal is not None and whole is not None)
        keep = KEPT if self._keep is None and in_file else self._keep
        if keep is not None and self._record._forget(keep):
            self._note(self._tail)
