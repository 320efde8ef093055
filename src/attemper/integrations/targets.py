"""Targets: where numbers, alerts and images go. One protocol, ``log(metrics, step)``; loggers are recognised by their methods.

No logger is imported: what a user passes is there already. A target that raises is reported, and left out after three failures in
a row; a training goes on.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import _files
from ..errors import InputError, checked_options
from ..watch.examine import check_path, to_path
from .telling import Alert

logger = logging.getLogger("attemper")
PATIENCE = 3  # failures in a row
FITS = (
    "a function (metrics, step), a run of W&B or trackio, the modules wandb, trackio or mlflow, a SummaryWriter, a logger of "
    "Lightning, a path ending in .jsonl, or a list of these"
)


class LogTarget:
    """A place for numbers. Alerts and images are shown where the logger has a way to show them."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def alert(self, alert: Alert, step: int) -> None:
        """Most loggers have no alerts; monitor() writes each to Python's logging as well."""

    def image(self, name: str, pixels: Any, step: int) -> None:
        """Most loggers take images; a function and a file do not."""


@checked_options
def target(given: Any, where: str = "target") -> LogTarget:
    """What fits ``log=`` of a callback, as an object with ``log(metrics, step)``, ``alert()`` and ``image()``.

    Args:
        given: a function ``(metrics, step)``, a run of W&B or trackio, the modules ``wandb``, ``trackio`` or ``mlflow``, a
            ``SummaryWriter``, a logger of Lightning, an object with ``log(metrics, step)``, ``track()`` (Aim) or
            ``report_scalar()`` (ClearML), a path ending in ``.jsonl``, or a list of these.
        where: what the user called, for errors.

    Example:
        >>> seen = []
        >>> attemper.integrations.target(lambda metrics, step: seen.append((step, metrics))).log({"attemper/peak": 3.0}, 7)
        >>> seen
        [(7, {'attemper/peak': 3.0})]
    """
    if isinstance(given, LogTarget):
        return given
    if isinstance(given, (list, tuple)):
        return SeveralTargets([GuardedTarget(target(one, where)) for one in given])
    if isinstance(given, (str, os.PathLike)):
        path = to_path(where, given)
        check_path(where, path, (".jsonl",), "given" if where == "target" else "log")
        return LinesTarget(path)
    home = (given.__name__ if isinstance(given, ModuleType) else type(given).__module__).split(".")[0]
    for fits, make in (
        (home == "wandb" and hasattr(given, "log"), WandbTarget),
        (home == "trackio" and hasattr(given, "log"), TrackioTarget),
        (hasattr(given, "log_metrics"), MetricsTarget),
        (hasattr(given, "add_scalar"), TensorBoardTarget),
        (hasattr(given, "report_scalar"), ClearmlTarget),
        (hasattr(given, "track"), AimTarget),
    ):
        if fits:
            return make(given)
    call = given.log if callable(getattr(given, "log", None)) else given
    if not callable(call) or isinstance(given, type):
        raise InputError(f"{where}(): `log` must be {FITS}; got {type(given).__name__} {given!r}.")
    return FunctionTarget(call)


def open_runs() -> list[LogTarget]:
    """The runs that are open in loggers already imported: W&B, trackio, MLflow."""
    found: list[LogTarget] = []
    wandb, trackio, mlflow = (sys.modules.get(name) for name in ("wandb", "trackio", "mlflow"))
    if getattr(wandb, "run", None) is not None:
        found.append(WandbTarget(wandb))
    current = getattr(getattr(trackio, "context_vars", None), "current_run", None)
    if current is not None and current.get() is not None:
        found.append(TrackioTarget(trackio))
    if mlflow is not None and hasattr(mlflow, "active_run") and mlflow.active_run() is not None:
        found.append(MetricsTarget(mlflow))
    return found


class FunctionTarget(LogTarget):
    """A function of the metrics and the step."""

    def __init__(self, call: Callable[[dict[str, float], int], object]) -> None:
        self.call = call

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.call(dict(metrics), step)


class LinesTarget(LogTarget):
    """A file of JSON lines: ``{"step": 10, "attemper/peak": 12.5, …}``, and alerts between them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._append({"step": step, **metrics})

    def alert(self, alert: Alert, step: int) -> None:
        self._append({"step": step, "alert": alert.title, "level": alert.level, "text": alert.text})

    def _append(self, line: dict[str, Any]) -> None:
        file = _files.open_lines(self.path)
        try:
            _files.lock(file)
            _files.append(file, f"{json.dumps(_files.finite(line), ensure_ascii=False)}\n".encode())
        finally:
            os.close(file)


class WandbTarget(LogTarget):
    """W&B. No ``step`` is passed: it drops what is behind its own counter. ``attemper/step`` is the axis instead."""

    def __init__(self, given: Any) -> None:
        self.given, self.defined = given, False

    def _run(self) -> Any:
        run = self.given.run if isinstance(self.given, ModuleType) else self.given
        if run is None:
            raise InputError("log: there is no run of wandb. Call wandb.init() before the training begins.")
        return run

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        run = self._run()
        if not self.defined and hasattr(run, "define_metric"):
            run.define_metric("attemper/step", hidden=True)
            run.define_metric("attemper/*", step_metric="attemper/step")
            self.defined = True
        run.log({**metrics, "attemper/step": step})

    def alert(self, alert: Alert, step: int) -> None:
        level = "ERROR" if alert.severity == "error" else "WARN"
        self._run().alert(title=alert.title, text=alert.text, level=level)

    def image(self, name: str, pixels: Any, step: int) -> None:
        make = getattr(sys.modules.get("wandb"), "Image", None)
        if make is not None:
            self.log({name: make(pixels)}, step)


class TrackioTarget(LogTarget):
    """trackio: a module or a run."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.given.log(dict(metrics), step=step)

    def alert(self, alert: Alert, step: int) -> None:
        levels = getattr(sys.modules.get("trackio"), "AlertLevel", None)
        if levels is not None and hasattr(self.given, "alert"):
            level = levels.ERROR if alert.severity == "error" else levels.WARN
            self.given.alert(title=alert.title, text=alert.text, level=level)

    def image(self, name: str, pixels: Any, step: int) -> None:
        make = getattr(sys.modules.get("trackio"), "Image", None)
        if make is not None:
            self.given.log({name: make(pixels)}, step=step)


class TensorBoardTarget(LogTarget):
    """A SummaryWriter of torch or tensorboardX."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, number in metrics.items():
            self.writer.add_scalar(name, number, step)

    def alert(self, alert: Alert, step: int) -> None:
        self.writer.add_text("attemper/alerts", f"**{alert.title}**  \n{alert.text}", step)

    def image(self, name: str, pixels: Any, step: int) -> None:
        self.writer.add_image(name, pixels, step, dataformats="HWC")


class MetricsTarget(LogTarget):
    """What has ``log_metrics(metrics, step=)``: the module mlflow, a logger of Lightning, an experiment of Comet."""

    def __init__(self, given: Any) -> None:
        self.given = given
        name = given.__name__ if isinstance(given, ModuleType) else type(given).__name__
        # its store has a file for each name, and peak/<layer> cannot be in the file peak
        self.files = "mlflow" in name.lower()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self.files:
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

    def _inner(self) -> LogTarget | None:
        """The run behind a logger of Lightning, if it takes images and alerts."""
        experiment = None if isinstance(self.given, ModuleType) else getattr(self.given, "experiment", None)
        if experiment is None or hasattr(experiment, "log_metrics"):
            return None
        try:
            return target(experiment)
        except InputError:
            return None


class AimTarget(LogTarget):
    """A run of Aim."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, number in metrics.items():
            self.run.track(number, name=name, step=step)


class ClearmlTarget(LogTarget):
    """A logger of ClearML."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, number in metrics.items():
            title, _, series = name.rpartition("/")
            self.given.report_scalar(title or name, series, number, step)


class SeveralTargets(LogTarget):
    """Several places, each guarded by itself."""

    def __init__(self, targets: Sequence[LogTarget]) -> None:
        self.targets = targets

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for one in self.targets:
            one.log(metrics, step)

    def alert(self, alert: Alert, step: int) -> None:
        for one in self.targets:
            one.alert(alert, step)

    def image(self, name: str, pixels: Any, step: int) -> None:
        for one in self.targets:
            one.image(name, pixels, step)


class GuardedTarget(LogTarget):
    """A target whose errors do not reach a training: each kind is reported once; after three in a row it is left out."""

    def __init__(self, inner: LogTarget) -> None:
        self.inner, self.failures, self.said = inner, 0, set[str]()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._try(lambda: self.inner.log(metrics, step), step):
            self.failures = 0

    def alert(self, alert: Alert, step: int) -> None:
        self._try(lambda: self.inner.alert(alert, step), step)

    def image(self, name: str, pixels: Any, step: int) -> None:
        self._try(lambda: self.inner.image(name, pixels, step), step)

    def _try(self, call: Callable[[], None], step: int) -> bool:
        if self.failures >= PATIENCE:
            return False
        try:
            call()
            return True
        except Exception as error:  # whatever a logger raises, the training goes on
            self.failures += 1
            kind, name = type(error).__name__, type(self.inner).__name__
            if kind not in self.said:
                self.said.add(kind)
                logger.warning("attemper: %s failed at step %d: %s: %s. The training goes on.", name, step, kind, error)
            if self.failures == PATIENCE:
                logger.warning("attemper: %s failed %d times in a row and is left out from now on.", name, PATIENCE)
            return False
