"""monitor(): a watch that logs, warns, clips and stops; for a loop of your own, and behind both callbacks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import distributed, nn

from .. import health
from ..errors import InputError, checked_options
from ..health import LEVELS, Finding
from ..treat import Finder, qk_clip
from ..treat.table import parameters_of
from ..treat.write import check_whole
from ..watch import Record, Watch, watch
from ..watch.examine import Examiner, Ranks, are_many
from .heatmap import picture
from .numbers import PREFIX, HeadNumbers, absent_heads, numbers
from .options import MonitorOptions
from .targets import GuardedTarget, LogTarget, SeveralTargets, logger
from .telling import Told, begun, grouped, news

_monitored: weakref.WeakSet[nn.Module] = weakref.WeakSet()
MANY = 10_000  # up to here W&B calls the number of metrics good for its pages
FEWER = (
    "Pages of loggers become slow: name fewer signs= or heads=, or keep them in a file with path= for attemper report."
)
NOT_JOINED = (
    "{where}(): `stop_on` needs the rows of all ranks, and this model is neither a DistributedDataParallel nor sharded by "
    "fully_shard, so that ranks would stop at different steps. Leave it out; with DistributedDataParallel in transformers, use "
    "HuggingFaceCallback.attach(trainer, …)."
)


@checked_options
def monitor(
    model: nn.Module,
    *,
    every: int = 10,
    log: Any = None,
    path: str | Path | None = None,
    keep: int = 100,
    layers: bool = False,
    signs: str | Iterable[str] | None = None,
    heads: HeadNumbers = False,
    pictures: int = 10,
    gradients: bool = False,
    clip: float | None = None,
    stop_on: str | None = None,
    start: int = 0,
    optimizer: Any = None,
) -> Monitor:
    """Watch a model in a training loop of your own: log its attention, warn, and on request clip and stop.

    ``with attemper.integrations.monitor(model, log=run) as monitor:`` around the loop, and ``monitor.step(loss=loss)`` after
    each step of the optimizer. For ``transformers.Trainer`` and Lightning there are callbacks with the same options.

    Args:
        model: as in ``watch()``; in a distributed run the wrapped model, on every rank.
        every: measure and log steps 0, every, 2·every, …
        log: where the numbers of :func:`summary` go: a function ``(metrics, step)``, a run of W&B or trackio, the module
            ``mlflow``, a ``SummaryWriter``, a path ending in ``.jsonl``, or a list of these.
        path: a ``.jsonl`` file for the whole record, every head of every measured step; ``attemper report`` shows it.
        keep: how many measured steps ``record`` holds in memory.
        layers: also log the peak, the evenness and the logit std of every layer, or its ``signs``.
        signs: which signs to log of every layer, or with ``heads`` of every head, as in :func:`summary`: ``"entropy"``.
        heads: also log every head: True for all, or the numbers of those of each layer, such as ``[0, 3]``.
        pictures: send an image of all heads' peaks with every n-th log, if the logger takes images; 0 for none.
        gradients: also measure |dq| and |dk|.
        clip: a logit. After a measured step, heads with a larger one are clipped by ``attemper.qk_clip``.
        stop_on: a level of a finding, such as ``"critical"``: from there on, ``monitor.should_stop`` is True.
        start: the number of the first step, for a run that is resumed.
        optimizer: for ``clip``, if the optimizer holds copies of the weights.

    Example:
        >>> seen = {}
        >>> model = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 16)
        >>> with attemper.integrations.monitor(model, every=2, log=lambda metrics, step: seen.update({step: metrics})) as monitor:
        ...     for _ in range(3):
        ...         loss = model(x, x, x)[0].square().mean()
        ...         monitor.step(loss=loss)
        >>> list(seen)
        [0, 2]
    """
    options = MonitorOptions(
        "monitor", every, log, path, keep, layers, pictures, gradients, clip, stop_on, signs, heads
    )
    return Monitor(model, options, start, optimizer=optimizer)


class Monitor:
    """A watch that logs; made by :func:`monitor`, or by a callback."""

    def __init__(
        self, model: nn.Module, options: MonitorOptions, start: int, told: Told | None = None, optimizer: Any = None
    ) -> None:
        self.model, self.options, self.optimizer = model, options, optimizer
        self.every = options.every or 1
        self.told: Told = {} if told is None else told
        self.should_stop = False
        self.reason = ""  # the finding that stopped it
        # it looks at the first pass that is measured, and is let go then
        self._finder = None if options.clip is None else Finder(model)
        self._examiners: list[Examiner] = [] if self._finder is None else [self._finder]
        self._watch: Watch = watch(
            model,
            every=self.every,
            path=options.path,
            keep=options.keep,
            gradients=options.gradients,
            start=start,
            examiners=self._examiners,
        )
        self._reasons: set[str] = set()  # why heads were not clipped, as told
        self._clips = True  # until qk_clip cannot judge this model
        self._number, self._logs, self._open, self._measured = start, 0, False, False
        self._target: LogTarget = SeveralTargets([] if options.target is None else [_guarded(options.target)])

    @property
    def record(self) -> Record:
        """The last ``keep`` steps that were measured."""
        return self._watch.record

    def add_targets(self, targets: list[LogTarget]) -> None:
        """More places for the numbers: those that a trainer has."""
        assert isinstance(self._target, SeveralTargets)
        self._target = SeveralTargets([*self._target.targets, *map(_guarded, targets)])

    def __enter__(self) -> Monitor:
        if self.model in _monitored:
            raise InputError(
                f"{self.options.where}(): this model has a monitor already. Use one callback or one monitor(); "
                "its log= takes a list."
            )
        if self.options.stop_on is not None and are_many() and not Ranks(self.model).groups:
            raise InputError(NOT_JOINED.format(where=self.options.where))
        if self._finder is not None:  # now, and not at the first large logit
            caller = f"{self.options.where}(clip={self.options.clip:g})"
            check_whole(caller, self.model, parameters_of(self.model))
        self._watch.__enter__()
        if self._finder is not None:
            self._finder.__enter__()
        _monitored.add(self.model)
        self._open = True
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._open = False
            _monitored.discard(self.model)
            self._release()
            if error_type is None and not self._measured:
                logger.warning(
                    "attemper: no step was measured: every=%d, and the last step was %d.", self.every, self._number - 1
                )
                error_type = InputError  # a training that went well is not ended by an error of its watch
            self._watch.__exit__(error_type, error, trace)

    def _release(self) -> None:
        if self._finder is not None:
            self._finder.__exit__()
            self._examiners.clear()  # the watch looks less closely from now on

    def close(self) -> None:
        """Detach, as after an error: training passes since the last step are kept, and nothing is raised."""
        self.__exit__(InputError, None, None)

    def pause(self) -> None:
        """Leave passes out until ``resume()``: evaluation, generation."""
        self._watch.pause()

    def resume(self) -> None:
        """Go on after ``pause()``."""
        self._watch.resume()

    def log(self, logged: Mapping[str, float], step: int) -> None:
        """Keep numbers of the trainer, such as its loss, in the record."""
        self._watch.log(logged, step)

    def step(self, number: int | None = None, *, may_clip: bool = True, **logged: Any) -> None:
        """End a step; if it was measured: log it, tell what is new, clip.

        Args:
            number: the step that ends, as the trainer counts it; None: one after the last.
            may_clip: False if the optimizer skipped the step.
            logged: numbers of the step for the record, such as ``loss=loss``. They are read if the step was measured.
        """
        at = self._number if number is None else number
        due = at % self.every == 0
        if due and logged:
            self._watch.log(logged, at)
        self._watch.step(number)
        self._number = at + 1
        if not due:
            return
        self._measured = True
        rows = self._watch.record.filter(steps=at)
        if len(rows):
            self._tell(rows, at, may_clip)

    def _tell(self, rows: Record, step: int, may_clip: bool) -> None:
        findings = health.check(rows)
        metrics = numbers(rows, findings, self.options.logged)
        if self.options.clip is not None:
            metrics[f"{PREFIX}/clipped"] = float(self._clip(rows) if may_clip else 0)
        findings = begun(findings, rows, self.told)
        self._judge(findings)
        if distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0:
            return
        self._target.log(metrics, step)
        if not self._logs and len(metrics) > MANY:
            logger.warning("attemper: %d numbers are logged of each measured step. %s", len(metrics), FEWER)
        if not self._logs and (absent := absent_heads(rows, self.options.logged)):
            logger.warning("attemper: %s", absent)
        for alert in grouped(news(findings, self.told), step):
            logger.warning("%s. %s", alert.title, alert.text)
            self._target.alert(alert, step)
        if self.options.pictures and self._logs % self.options.pictures == 0 and "peak" in rows.signs:
            self._target.image(f"{PREFIX}/heads/peak", picture(rows), step)
        self._logs += 1

    def _judge(self, findings: list[Finding]) -> None:
        """Findings come with the worst first."""
        stop = self.options.stop_on
        if stop is not None and findings and LEVELS.index(findings[0].level) >= LEVELS.index(stop):
            if not self.should_stop:
                logger.warning("attemper: the training should stop: %s %s", findings[0].says, findings[0].todo)
            self.should_stop, self.reason = True, findings[0].says

    def _clip(self, rows: Record) -> int:
        """Clip heads above the limit; how many. Why a head is left alone is told once."""
        assert self.options.clip is not None
        assert self._finder is not None
        if not self._clips:
            return 0
        if self._finder.projections is None:
            self._finder.finish()
        found = self._finder.projections
        try:
            clip = qk_clip(self.model, rows, self.options.clip, projections=found, optimizer=self.optimizer)
        except InputError as error:  # on every rank; a training goes on without its clip
            self._release()
            self._clips = False
            logger.warning("attemper: no head is clipped from step %d on: %s", rows.steps[-1], error)
            return 0
        if found is not None:
            if self._examiners and not any(layer.how for layer in found.values()):
                why = next(iter(found.values())).why
                self._reasons.add(str(why))
                logger.warning("attemper: clip=%g has no effect on this model: %s.", self.options.clip, why)
            self._release()
        for one in clip.skipped:
            if one.reason not in self._reasons:
                self._reasons.add(one.reason)
                logger.warning("attemper: %s was not clipped at step %d: %s.", one.layer, clip.step, one.reason)
        return len(clip)


def _guarded(one: LogTarget) -> LogTarget:
    return one if isinstance(one, SeveralTargets | GuardedTarget) else GuardedTarget(one)
