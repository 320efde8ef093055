"""watch(): measure the attention of a model's steps, from the sources of its calls to the record; detach on every exit."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import AttemperError, InputError, checked_options, guarded, internal_error
from ..kernels import check_name
from ..operation.call import Signs, check_signs
from .attach.attachment import attachment
from .attach.dynamo import COMPILED, is_compiled
from .attach.names import named_modules
from .attach.running import running
from .call import Examiner
from .compiled.find import way_of
from .compiled.instrument import instrument, tallies
from .compiled.reading import Compiled
from .observer import ONLY_OTHERS, Observer, Passes
from .options import check_model, check_numbers, check_options, check_rows, check_step, with_hooks
from .record.buffer import MOST_WAITING, to_host
from .record.jsonl import Journal
from .record.record import Record
from .record.store import check_path, to_path
from .routes.replace import Replacement
from .source import Collected, Source

KEPT = 100  # steps that are held in memory if a file has all
NOT_OPEN = "watch.step(): the watch is not open. Call it inside `with attemper.watch(model) as watch:`."
PASSING = (AttemperError, Warning)
"""What a watch raises on purpose."""


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
    keep_steps: int | None = None,
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
        keep_steps: how many of the last steps ``record`` holds in memory, with 8 bytes for every step, head and sign. None: all
            of them, or with ``path`` the last 100 of those that are in the file.
        full: follow every op of every watched pass. By default the first pass is followed in full; if all its attention went
            through functions that can be intercepted, later passes intercept only those, which costs less. What differs makes
            a pass full again, and so is the 50th and later ones up to 400 passes apart.
        examiners: objects that look at the q, k and logits of each call (``from attemper.watch.examine import Examiner``);
            for extensions such as ``scan``.

    Returns:
        a context manager. ``record`` holds the steps that have ended, ``step()`` ends one, ``pause()`` and ``resume()`` leave
        passes out, ``log(numbers)`` keeps a loss beside the rows, ``rows(valid_tokens)`` takes a boolean ``(B, L)`` that
        marks the real queries if no mask shows them.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> with attemper.watch(model) as watch:
        ...     output = model(torch.randn(1, 5, 16))
        >>> watch.record.layers
        ['self_attn']
    """
    check_model(model)
    check_options(every, start, keep_steps, passes, examiners, gradients=gradients, replace=replace, full=full)
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
    observer = Observer(model, names, kernel, gradients, full, examiners, Passes(passes), start)
    return Watch(observer, sources_of(observer, replace), every, inner, journal, keep_steps)


def sources_of(observer: Observer, replace: bool) -> list[Source]:
    """The sources of a watch's calls. With `replace`, a compiled model is instrumented, and stays so."""
    model = observer.model
    if not (observer.wants_gradients or observer.wants_full):  # these need ops, which a compiled graph hides
        modules, is_instrumented = named_modules(model), bool(tallies(model))
        if replace and not is_instrumented and any(map(is_compiled, modules)) and "interface" in map(way_of, modules):
            instrument(model)
            is_instrumented = True
        if is_instrumented:
            return [Compiled(observer)]
    return [Replacement(model, observer.signs), Followed(observer)] if replace else [Followed(observer)]


class Followed(Source):
    """The calls of modules while they run, from their ops or from functions that are intercepted."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.depth = sys.maxsize  # how many modules ran when the watch was opened
        self.looked = False  # whether the model was looked at since `stop`, for what is compiled

    def open(self) -> None:
        attachment.forget_ended()
        self.depth = len(running.frames)

    def start(self) -> None:
        if not self.looked and any(map(is_compiled, self.observer.modules)):
            self.observer.warn(COMPILED)
        self.looked = True
        attachment.add(self.observer)

    def pause(self) -> None:
        attachment.remove(self.observer)

    def stop(self) -> None:
        self.looked = False
        self.pause()

    def collect(self, goes_on: bool) -> None:
        attachment.forget_ended()
        self.observer.settle(goes_on)

    def close(self) -> None:
        attachment.closed(self.observer, self.depth)


class Watch:
    """A watch of one model; made by :func:`watch`, used in a ``with`` statement."""

    def __init__(
        self,
        observer: Observer,
        sources: Sequence[Source],
        every: int,
        optimizer: Optimizer | None,
        journal: Journal | None,
        keep_steps: int | None,
    ) -> None:
        self.model, self.observer, self.sources = observer.model, observer, sources
        self.every, self.optimizer = every, optimizer
        self._journal, self._keep_steps = journal, keep_steps
        others = "keep_steps= sets how many are kept"
        others = f"attemper.Record.read({str(journal.path)!r}) has all steps" if journal else others
        self._forgotten = f"only the last {keep_steps or KEPT} steps are in memory; {others}."
        self._open, self._measuring, self._paused = False, False, False  # measuring: this step is one to measure
        self._ends = ExitStack()  # what is undone when the watch closes
        self._lock = threading.RLock()  # another thread may read the record, which takes over what a step left
        self._ended: deque[tuple[int, list[Collected]]] = deque()  # steps whose calls are on their way from a device

    @property
    def record(self) -> Record:
        """What was measured up to the last step that ended; with ``keep_steps``, the last steps of it, and a note."""
        with self._lock:
            self._take_over()
            return self.observer.record

    @property
    def unmeasured(self) -> int:
        """How many attention calls could not be measured; the notes of the record hold the reasons."""
        return self.observer.unmeasured

    def rows(self, valid_tokens: Tensor | None) -> None:
        """Mark the real queries of the coming passes, if no mask shows them.

        Args:
            valid_tokens: boolean ``(B, L)``, True for a real token; used for calls with L queries until the next ``rows()``.
                None: as masks show it.
        """
        for source in self.sources:
            if source.refuses_rows:
                raise InputError(source.refuses_rows)
        check_rows(valid_tokens)
        self.observer.given_rows = valid_tokens

    def step(self, number: int | None = None) -> None:
        """End the current step, and measure the next one if it is due.

        Args:
            number: the step that ends, as the trainer counts it; the next one is ``number + 1``. None: one after the last.
        """
        observer = self.observer
        try:
            if not self._open:
                raise InputError(NOT_OPEN)
            if number is not None:
                check_step(number)
                observer.step = number
            if self._measuring:
                with self._lock:
                    self._ended.append((observer.step, self._collect(goes_on=True)))
                    self._take_over(0 if self._journal is not None or observer.ranks.groups else MOST_WAITING)
        except PASSING:
            raise
        except Exception as error:
            self._failed(error)
        observer.step += 1
        observer.steps_ended += 1
        due = observer.step % self.every == 0
        if due is not self._measuring:
            with guarded(self._failed, PASSING):
                (self._attach if due else self._detach)()

    def pause(self) -> None:
        """Detach from the model until ``resume()``: passes in between are not measured. The step goes on after it."""
        if self._open and self._measuring and not self._paused:
            for source in self.sources:
                source.pause()
            self.observer.ranks.detach()
        self._paused = True

    def resume(self) -> None:
        """Go on after ``pause()``."""
        was_paused, self._paused = self._paused, False
        if self._open and self._measuring and was_paused:
            self._start()

    def log(self, numbers: Mapping[str, float], step: int | None = None) -> None:
        """Keep numbers of the training, such as its loss, in ``record.logged``; the file has them from the next rows on.

        Args:
            numbers: plain numbers by their names; NaN and infinity are kept.
            step: the step that they belong to; None is the current one.
        """
        checked, at = check_numbers(numbers), self.observer.step if step is None else step
        check_step(at, "watch.log")
        self.observer.record.logged.setdefault(at, {}).update(checked)
        if self._journal is not None and self.observer.ranks.first:
            self._journal.log(at, checked)

    def __enter__(self) -> Watch:
        if self._open:
            raise InputError("watch(): this watch is open already. Make another with attemper.watch(model).")
        self._open = True
        with guarded(self._failed, PASSING), ExitStack() as failed:
            failed.callback(self._close)
            self._begin()
            failed.pop_all()
        return self

    def _begin(self) -> None:
        observer, journal, ends = self.observer, self._journal, self._ends
        ends.callback(observer.close)
        observer.open()
        if journal is not None:
            ends.callback(journal.close)
            if observer.ranks.first:
                journal.open(observer.warn)
        for sentence in observer.ranks.sentences:
            observer.warn(sentence)
        for source in self.sources:
            ends.callback(source.close)
            source.open()
        if self.optimizer is not None:
            ends.callback(self.optimizer.register_step_post_hook(self._optimizer_stepped).remove)
        ends.callback(self._detach)
        if observer.step % self.every == 0:
            self._attach()

    def _optimizer_stepped(self, *_: object) -> None:
        with guarded(self._failed, PASSING):
            self.step()

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        was_measuring, ended_well = self._measuring, error_type is None
        with guarded(self._failed, PASSING), self._lock, ExitStack() as end:
            end.callback(self._close)
            if self._open:  # not if it could not be opened
                self._end_block(ended_well)
        with guarded(self._failed, PASSING):
            if ended_well:
                self.observer.check_end(was_measuring, self.every)

    def _end_block(self, ended_well: bool) -> None:
        observer = self.observer
        self._take_over()
        for calls in self._collect(ended_well):
            calls.take_over()
        observer.drop_unfinished(ended_well and self.optimizer is not None and observer.steps_ended > 0)
        # if this rank fails, others may not get here; if it does not, they wait for it, whether it has rows or not
        join = ended_well and bool(observer.ranks.groups)
        if self._measuring and (observer.sums.layers or join):
            self._close_step(observer.step, join)
            observer.step += 1  # the end of the block ends it

    def _close(self) -> None:
        self._open, self._paused = False, False
        self._ends.close()  # in reverse order, each of them whatever became of the others

    def _attach(self) -> None:
        self._measuring = True
        if not self._paused:
            self._start()

    def _start(self) -> None:
        for source in self.sources:
            source.start()
        self.observer.ranks.attach()

    def _detach(self) -> None:
        self._measuring = False
        for source in self.sources:
            source.stop()
        self.observer.ranks.detach()

    def _failed(self, error: Exception) -> None:
        """An exception in attemper's own code: what was measured of this step is not to be trusted."""
        self.observer.add_unmeasured("", internal_error(error))
        self.observer.forget_step()
        for source in self.sources:
            source.forget()

    def _collect(self, goes_on: bool) -> list[Collected]:
        collected = [source.collect(goes_on) for source in self.sources]
        return [calls for calls in collected if calls is not None]

    def _take_over(self, most: int = 0) -> None:
        """Close the steps whose calls have arrived, and wait for others until no more than so many are missing."""
        while self._ended and (len(self._ended) > most or all(calls.is_done for calls in self._ended[0][1])):
            number, collected = self._ended.popleft()
            for calls in collected:
                calls.take_over()
            if self.observer.passes.left_out and not self.observer.sums.layers:
                self.observer.warn(ONLY_OTHERS)
            self._close_step(number, join=True)

    def _close_step(self, number: int, join: bool) -> None:
        observer, journal = self.observer, self._journal
        record, ranks = observer.record, observer.ranks
        entries, info = observer.sums.close(number)
        observer.passes.end_step()
        whole = ranks.join(number, entries, observer.warn) if join and ranks.groups else None
        if whole is not None or not ranks.groups:
            observer.check_calls()  # if other ranks have calls, an error on this one would end them too
        entries = entries if whole is None else whole
        observer.note_gradients(entries)
        if journal is not None and ranks.first:
            entries = to_host(entries)
        record._add(entries, info)
        if journal is not None and ranks.first:
            journal.append(entries, info, [note for note in record.notes if note != self._forgotten])
            if journal.waiting:
                return  # rows that are not in the file stay in the record
        in_file = journal is not None and (ranks.first or whole is not None)
        keep = KEPT if self._keep_steps is None and in_file else self._keep_steps
        if keep is not None and record._forget(keep):
            observer.note(self._forgotten)
