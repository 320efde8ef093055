"""monitor(): a watch that logs, warns, clips and stops, for a loop of your own; both callbacks are built on it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import distributed, nn

from ..errors import InputError, checked_options, nearest
from ..health import LEVELS, Finding
from ..treat import Finder, qk_clip
from ..treat.table import parameters_of
from ..treat.write import check_whole
from ..watch import Record, Watch, watch
from ..watch.examine import Examiner, Ranks, are_many, check_path, to_path
from .alerting import Alerted, check_formed, grouped, new_findings
from .loggers import Logger, Loggers, as_logger, logger
from .numbers import PREFIX, HeadNumbers, absent_heads, check_signs, numbers, picture

STOPS = LEVELS[LEVELS.index("note") :]


@dataclass
class MonitorOptions:
    """The options of a monitor; ``where`` is the function that the user called, for errors."""

    where: str
    every: int | None = None
    log: Any = None
    path: str | Path | None = None
    keep_steps: int = 100
    layers: bool = False
    signs: str | Iterable[str] | None = None
    heads: HeadNumbers = False
    pictures: int = 10
    gradients: bool = False
    clip: float | None = None
    stop_on: str | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            self._whole("every", self.every, 1, "Leave it out for the default")
        self._whole("keep_steps", self.keep_steps, 1, "Leave it out for 100")
        self._whole("pictures", self.pictures, 0, "Use 0 for none")
        if not isinstance(self.gradients, bool):
            raise InputError(f"{self.where}(): `gradients` must be True or False; got {self.gradients!r}.")
        self.logged = check_signs(self.where, self.layers, self.signs, self.heads, self.gradients)
        # lists: an iterator can be read only once, and a checkpoint of transformers keeps lists
        self.signs = None if self.signs is None else list(self.logged.signs)
        self.heads = True if self.logged.heads is None else sorted(self.logged.heads)
        if self.clip is not None and not (_is_number(self.clip) and 0 < self.clip < math.inf):
            raise InputError(
                f"{self.where}(): `clip` must be a logit above 0, such as 100; got {self.clip!r}. Leave it out for no clip."
            )
        if self.stop_on is not None and self.stop_on not in STOPS:
            raise InputError(
                f"{self.where}(): `stop_on` must be a level of a finding; got {self.stop_on!r}. {nearest(self.stop_on, STOPS)}"
            )
        if self.path is not None:
            check_path(self.where, to_path(self.where, self.path), (".jsonl",))
        self.logger: Logger | None = None if self.log is None else as_logger(self.log, self.where)

    def _whole(self, name: str, value: object, least: int, otherwise: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(
                f"{self.where}(): `{name}` must be a whole number, at least {least}; got {value!r}. {otherwise}."
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_monitored: weakref.WeakSet[nn.Module] = weakref.WeakSet()
MANY = 10_000  # with more, W&B's pages become slow, by its documentation
FEWER = "So many make a logger's pages slow: name fewer signs= or heads=, or write them to a file with path= for attemper report."
NOT_JOINED = (
    "{where}(): `stop_on` needs the rows of all ranks, but this model is neither a DistributedDataParallel nor sharded by "
    "fully_shard, so ranks would stop at different steps. Leave it out; with DistributedDataParallel in transformers, use "
    "HuggingFaceCallback.attach(trainer, …)."
)


@checked_options
def monitor(
    model: nn.Module,
    *,
    every: int = 10,
    log: Any = None,
    path: str | Path | None = None,
    keep_steps: int = 100,
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
        keep_steps: how many measured steps ``record`` holds in memory.
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
        "monitor", every, log, path, keep_steps, layers, signs, heads, pictures, gradients, clip, stop_on
    )
    return Monitor(model, options, start, optimizer=optimizer)


class Monitor:
    """A watch that logs; made by :func:`monitor`, or by a callback."""

    def __init__(
        self,
        model: nn.Module,
        options: MonitorOptions,
        start: int,
        alerted: Alerted | None = None,
        optimizer: Any = None,
    ) -> None:
        self.model, self.options, self.optimizer = model, options, optimizer
        self.every = options.every or 1
        self.alerted: Alerted = {} if alerted is None else alerted
        self.should_stop = False
        self.reason = ""  # the finding that stopped it
        # examines the first measured pass, and is then released
        self._finder = None if options.clip is None else Finder(model)
        self._examiners: list[Examiner] = [] if self._finder is None else [self._finder]
        self._watch: Watch = watch(
            model,
            every=self.every,
            path=options.path,
            keep_steps=options.keep_steps,
            gradients=options.gradients,
            start=start,
            examiners=self._examiners,
        )
        self._reasons: set[str] = set()  # why heads were not clipped, as reported
        self._clips = True  # until qk_clip cannot judge this model
        self._number, self._logs, self._open, self._measured = start, 0, False, False
        self._loggers = Loggers([] if options.logger is None else [options.logger])

    @property
    def record(self) -> Record:
        """The last ``keep_steps`` steps that were measured."""
        return self._watch.record

    def add_loggers(self, loggers: list[Logger]) -> None:
        """Log to these too, such as the loggers of a trainer."""
        self._loggers.given += loggers

    def __enter__(self) -> Monitor:
        if self.model in _monitored:
            raise InputError(
                f"{self.options.where}(): this model has a monitor already. Use one callback or one monitor(); "
                "its log= takes a list."
            )
        if self.options.stop_on is not None and are_many() and not Ranks(self.model).groups:
            raise InputError(NOT_JOINED.format(where=self.options.where))
        if self._finder is not None:  # before the training, not at its first large logit
            caller = f"{self.options.where}(clip={self.options.clip:g})"
            check_whole(caller, self.model, parameters_of(self.model))
        self._watch.__enter__()
        if self._finder is not None:
            self._finder.__enter__()
        _monitored.add(self.model)
        self._open = True
        return self

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        if self._open:
            self._open = False
            _monitored.discard(self.model)
            self._release()
            if error_type is None and not self._measured:
                logger.warning(
                    "attemper: no step was measured: every=%d, but the last step was %d.", self.every, self._number - 1
                )
                error_type = InputError  # the watch must not raise and end a training that went well
            self._watch.__exit__(error_type, error, trace)

    def _release(self) -> None:
        if self._finder is not None:
            self._finder.__exit__()
            self._examiners.clear()  # passes are cheaper without it

    def close(self) -> None:
        """Detach, as after an error: training passes since the last step stay in the record, and nothing is raised."""
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
        """End a step; if it was measured, log it, report new findings, and clip.

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
            self._report(rows, at, may_clip)

    def _report(self, rows: Record, step: int, may_clip: bool) -> None:
        findings = check_formed(rows, self.alerted)
        metrics = numbers(rows, findings, self.options.logged)
        if self.options.clip is not None:
            metrics[f"{PREFIX}/clipped"] = float(self._clip(rows) if may_clip else 0)
        self._judge(findings)
        if distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0:
            return
        self._loggers.log(metrics, step)
        if not self._logs and len(metrics) > MANY:
            logger.warning("attemper: %d numbers are logged of each measured step. %s", len(metrics), FEWER)
        if not self._logs and (absent := absent_heads(rows, self.options.logged)):
            logger.warning("attemper: %s", absent)
        for alert in grouped(new_findings(findings, self.alerted), step):
            logger.warning("%s. %s", alert.title, alert.text)
            self._loggers.alert(alert, step)
        if self.options.pictures and self._logs % self.options.pictures == 0 and "peak" in rows.signs:
            self._loggers.image(f"{PREFIX}/heads/peak", picture(rows), step)
        self._logs += 1

    def _judge(self, findings: list[Finding]) -> None:
        """Set ``should_stop`` by the worst finding, which is the first."""
        stop = self.options.stop_on
        if stop is not None and findings and LEVELS.index(findings[0].level) >= LEVELS.index(stop):
            if not self.should_stop:
                logger.warning("attemper: the training should stop: %s %s", findings[0].message, findings[0].advice)
            self.should_stop, self.reason = True, findings[0].message

    def _clip(self, rows: Record) -> int:
        """Clip heads above the limit, and return how many. Each reason for leaving a head alone is reported once."""
        assert self.options.clip is not None
        assert self._finder is not None
        if not self._clips:
            return 0
        if self._finder.projections is None:
            self._finder.finish()
        projections = self._finder.projections
        try:
            clip = qk_clip(self.model, rows, self.options.clip, projections=projections, optimizer=self.optimizer)
        except InputError as error:  # on every rank; a training goes on without its clip
            self._release()
            self._clips = False
            logger.warning("attemper: no head is clipped from step %d on: %s", rows.steps[-1], error)
            return 0
        if projections is not None:
            if self._examiners and not any(layer.how for layer in projections.values()):
                why = next(iter(projections.values())).why
                self._reasons.add(str(why))
                logger.warning("attemper: clip=%g has no effect on this model: %s.", self.options.clip, why)
            self._release()
        for skipped in clip.skipped:
            if skipped.reason not in self._reasons:
                self._reasons.add(skipped.reason)
                logger.warning("attemper: %s was not clipped at step %d: %s.", skipped.layer, clip.step, skipped.reason)
        return len(clip)


class MonitorCallback:
    """The base of both callbacks: options, a monitor for each training, and what was reported in all of them."""

    @checked_options
    def __init__(
        self,
        every: int | None = None,
        log: Any = None,
        path: str | Path | None = None,
        keep_steps: int = 100,
        layers: bool = False,
        signs: str | Iterable[str] | None = None,
        heads: HeadNumbers = False,
        pictures: int = 10,
        gradients: bool = False,
        clip: float | None = None,
        stop_on: str | None = None,
    ) -> None:
        where = type(self).__name__
        self.options = MonitorOptions(
            where, every, log, path, keep_steps, layers, signs, heads, pictures, gradients, clip, stop_on
        )
        self.alerted: Alerted = {}
        self._monitor: Monitor | None = None

    @property
    def record(self) -> Record:
        """The record of the current or the last training."""
        return Record() if self._monitor is None else self._monitor.record

    def close(self) -> None:
        """Detach from the model, also after an error."""
        if self._monitor is not None:
            self._monitor.close()

    def _open(self, model: nn.Module, every: int, start: int, loggers: list[Logger]) -> Monitor:
        self._monitor = Monitor(
            model, replace(self.options, every=self.options.every or max(1, every)), start, self.alerted
        )
        self._monitor.add_loggers(loggers)
        return self._monitor.__enter__()

    def _end(self) -> None:
        """End a training that went well."""
        if self._monitor is not None:
            self._monitor.resume()
            self._monitor.__exit__(None, None, None)
