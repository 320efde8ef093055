"""Loggers: where numbers, alerts and images go. A logger is recognised by its methods and never imported."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from .. import _files
from ..errors import InputError, checked_options
from ..watch.examine import check_path, to_path
from .alerting import Alert

logger = logging.getLogger("attemper")
PATIENCE = 3  # failures in a row
ACCEPTED = (
    "a function (metrics, step), a run of W&B or trackio, the modules wandb, trackio or mlflow, a SummaryWriter, a logger of "
    "Lightning, a path ending in .jsonl, or a list of these"
)


class Logger:
    """Something with ``log(metrics, step)``, ``alert()`` and ``image()``; this class itself logs to a function."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self.given(dict(metrics), step)

    def alert(self, alert: Alert, step: int) -> None:
        """Most loggers have no alerts; monitor() writes each to Python's logging as well."""

    def image(self, name: str, pixels: Any, step: int) -> None:
        """Most loggers take images; a function and a file do not."""


@checked_options
def as_logger(given: Any, where: str = "as_logger") -> Logger:
    """What ``log=`` of a callback takes, as an object with ``log(metrics, step)``, ``alert()`` and ``image()``.

    Args:
        given: a function ``(metrics, step)``, a run of W&B or trackio, the modules ``wandb``, ``trackio`` or ``mlflow``, a
            ``SummaryWriter``, a logger of Lightning, an object with ``log(metrics, step)``, ``track()`` (Aim) or
            ``report_scalar()`` (ClearML), a path ending in ``.jsonl``, or a list of these.
        where: the function that the user called, for errors.

    Example:
        >>> seen = []
        >>> attemper.integrations.as_logger(lambda metrics, step: seen.append((step, metrics))).log({"attemper/peak": 3.0}, 7)
        >>> seen
        [(7, {'attemper/peak': 3.0})]
    """
    if isinstance(given, Logger):
        return given
    if isinstance(given, (list, tuple)):
        return Loggers(as_logger(single, where) for single in given)
    if isinstance(given, (str, os.PathLike)):
        path = to_path(where, given)
        check_path(where, path, (".jsonl",), "given" if where == "as_logger" else "log")
        return LinesLogger(path)
    package = (given.__name__ if isinstance(given, ModuleType) else type(given).__module__).split(".")[0]
    for fits, kind in (
        (package == "wandb" and hasattr(given, "log"), WandbLogger),
        (package == "trackio" and hasattr(given, "log"), TrackioLogger),
        (hasattr(given, "log_metrics"), MetricsLogger),
        (hasattr(given, "add_scalar"), TensorBoardLogger),
        (hasattr(given, "report_scalar"), ClearmlLogger),
        (hasattr(given, "track"), AimLogger),
    ):
        if fits:
            return kind(given)
    call = given.log if callable(getattr(given, "log", None)) else given
    if not callable(call) or isinstance(given, type):
        raise InputError(f"{where}(): `log` must be {ACCEPTED}; got {type(given).__name__} {given!r}.")
    return Logger(call)


def open_runs() -> list[Logger]:
    """The open runs of W&B, trackio and MLflow, as far as these are imported."""
    loggers: list[Logger] = []
    wandb, trackio, mlflow = (sys.modules.get(name) for name in ("wandb", "trackio", "mlflow"))
    if getattr(wandb, "run", None) is not None:
        loggers.append(WandbLogger(wandb))
    current = getattr(getattr(trackio, "context_vars", None), "current_run", None)
    if current is not None and current.get() is not None:
        loggers.append(TrackioLogger(trackio))
    if mlflow is not None and hasattr(mlflow, "active_run") and mlflow.active_run() is not None:
        loggers.append(MetricsLogger(mlflow))
    return loggers


class LinesLogger(Logger):
    """A file of JSON lines: ``{"step": 10, "attemper/peak": 12.5, …}``, and alerts between them."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._append({"step": step, **metrics})

    def alert(self, alert: Alert, step: int) -> None:
        self._append({"step": step, "alert": alert.title, "level": alert.level, "text": alert.text})

    def _append(self, line: dict[str, Any]) -> None:
        file = _files.open_lines(self.given)
        try:
            _files.lock(file)
            _files.append(file, f"{json.dumps(_files.finite(line), ensure_ascii=False)}\n".encode())
        finally:
            os.close(file)


class WandbLogger(Logger):
    """W&B. It drops steps behind its own counter, so none is passed: ``attemper/step`` is the axis."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self.defined = False

    def _run(self) -> Any:
        run = self.given.run if isinstance(self.given, ModuleType) else self.given
        if run is None:
            raise InputError("log: wandb has no open run. Call wandb.init() before the training begins.")
        return run

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        run = self._run()
        if not self.defined and hasattr(run, "define_metric"):
            run.define_metric("attemper/step", hidden=True)
            run.define_metric("attemper/*", step_metric="attemper/step")
            self.defined = True
        run.log({**metrics, "attemper/step": step})

    def alert(self, alert: Alert, step: int) -> None:
        self._run().alert(title=alert.title, text=alert.text, level="ERROR" if alert.severity == "error" else "WARN")

    def image(self, name: str, pixels: Any, step: int) -> None:
        if (image := _member("wandb", "Image")) is not None:
            self.log({name: image(pixels)}, step)


class TrackioLogger(Logger):
    """trackio: a module or a run."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self.given.log(dict(metrics), step=step)

    def alert(self, alert: Alert, step: int) -> None:
        levels = _member("trackio", "AlertLevel")
        if levels is not None and hasattr(self.given, "alert"):
            level = levels.ERROR if alert.severity == "error" else levels.WARN
            self.given.alert(title=alert.title, text=alert.text, level=level)

    def image(self, name: str, pixels: Any, step: int) -> None:
        if (image := _member("trackio", "Image")) is not None:
            self.given.log({name: image(pixels)}, step=step)


class TensorBoardLogger(Logger):
    """A SummaryWriter of torch or tensorboardX."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        for name, number in metrics.items():
            self.given.add_scalar(name, number, step)

    def alert(self, alert: Alert, step: int) -> None:
        self.given.add_text("attemper/alerts", f"**{alert.title}**  \n{alert.text}", step)

    def image(self, name: str, pixels: Any, step: int) -> None:
        self.given.add_image(name, pixels, step, dataformats="HWC")


class MetricsLogger(Logger):
    """What has ``log_metrics(metrics, step=)``: the module mlflow, a logger of Lightning, an experiment of Comet."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        name = self.given.__name__ if isinstance(self.given, ModuleType) else type(self.given).__name__
        if "mlflow" in name.lower():  # its store has a file for each name, and peak/<layer> cannot be in the file peak
            metrics = {name.replace("/", ".").replace(".", "/", 1): number for name, number in metrics.items()}
        self.given.log_metrics(dict(metrics), step=step)

    def alert(self, alert: Alert, step: int) -> None:
        inner = self._inner()
        if inner is not None:
            inner.alert(alert, step)

    def image(self, name: str, pixels: Any, step: int) -> None:
        inner, own = self._inner(), getattr(self.given, "log_image", None)
        if own is not None and isinstance(self.given, ModuleType):
            own(pixels, key=name.replace("/", "."), step=step)
        elif own is not None and inner is not None:  # Lightning's for W&B, which keeps its own axis
            own(key=name, images=[pixels], step=step)
        elif inner is not None:
            inner.image(name, pixels, step)

    def _inner(self) -> Logger | None:
        """The run behind a logger of Lightning, if it takes images and alerts."""
        experiment = None if isinstance(self.given, ModuleType) else getattr(self.given, "experiment", None)
        if experiment is None or hasattr(experiment, "log_metrics"):
            return None
        try:
            return as_logger(experiment)
        except InputError:
            return None


class AimLogger(Logger):
    """A run of Aim."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        for name, number in metrics.items():
            self.given.track(number, name=name, step=step)


class ClearmlLogger(Logger):
    """A logger of ClearML."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        for name, number in metrics.items():
            title, _, series = name.rpartition("/")
            self.given.report_scalar(title or name, series, number, step)


class Loggers(Logger):
    """Several loggers, whose errors do not end a training: each kind is reported once, and three in a row drop the logger."""

    def __init__(self, given: Iterable[Logger]) -> None:
        super().__init__(list(given))
        self.failures, self.reported = Counter[Logger](), set[tuple[Logger, str]]()

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        for logger in self.given:
            if self._succeeds(step, logger, logger.log, metrics, step):
                self.failures[logger] = 0

    def alert(self, alert: Alert, step: int) -> None:
        for logger in self.given:
            self._succeeds(step, logger, logger.alert, alert, step)

    def image(self, name: str, pixels: Any, step: int) -> None:
        for logger in self.given:
            self._succeeds(step, logger, logger.image, name, pixels, step)

    def _succeeds(self, step: int, target: Logger, method: Callable[..., None], *arguments: Any) -> bool:
        if self.failures[target] >= PATIENCE:
            return False
        try:
            method(*arguments)
            return True
        except Exception as error:  # whatever a logger raises, the training goes on
            self.failures[target] += 1
            kind, name = type(error).__name__, getattr(target.given, "__name__", type(target).__name__)
            if (target, kind) not in self.reported:
                self.reported.add((target, kind))
                logger.warning("attemper: %s failed at step %d: %s: %s. The training goes on.", name, step, kind, error)
            if self.failures[target] == PATIENCE:
                logger.warning("attemper: %s failed %d times in a row and is no longer used.", name, PATIENCE)
            return False


def _member(package: str, name: str) -> Any:
    """A member of a package, if that is imported and has it; else None."""
    return getattr(sys.modules.get(package), name, None)
