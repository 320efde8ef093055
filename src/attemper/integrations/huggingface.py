"""HuggingFaceCallback: a watch inside transformers.Trainer, and what is built on it (trl, axolotl, sentence-transformers).

Passes count between on_step_begin and on_step_end; evaluation, saving and logging run outside. Steps have the numbers of
``state.global_step``, which the loss is logged with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import _files
from ..errors import checked_options
from ..watch import Record
from ..watch.examine import Ranks, are_many
from .monitoring import Monitor
from .numbers import HeadNumbers
from .options import MonitorOptions
from .targets import LogTarget, logger, open_runs, target
from .telling import Told

_callbacks = _files.load("HuggingFaceCallback", "transformers.trainer_callback", "hf")
KEPT = ("loss", "eval_loss", "grad_norm", "learning_rate")  # of what the trainer logs


class HuggingFaceCallback(_callbacks.TrainerCallback, _callbacks.ExportableState):  # type: ignore[misc, name-defined]
    """Watch the attention of a model while ``transformers.Trainer`` trains it: ``Trainer(…, callbacks=[HuggingFaceCallback()])``.

    The options are those of :func:`monitor`. If the training ends in an error, transformers does not tell its callbacks: use
    ``with HuggingFaceCallback(…) as callback:`` around it, or call ``callback.close()``; otherwise the watch ends when the
    trainer is deleted or trains again.

    Args:
        every: measure steps whose number is a multiple of it; None is ``logging_steps`` of the trainer.
        log: as in ``monitor()``. None: the runs of W&B, trackio and MLflow that are open when the training begins.
        path: a ``.jsonl`` file for the whole record.
        keep: how many measured steps ``record`` holds in memory.
        layers: also log three numbers of every layer, or its ``signs``.
        signs: which signs to log of every layer, or with ``heads`` of every head: ``"entropy"``, several, or ``"all"``.
        heads: also log every head: True for all, or the numbers of those of each layer, such as ``[0, 3]``.
        pictures: send an image with every n-th log; 0 for none.
        gradients: also measure |dq| and |dk|.
        clip: a logit; heads with a larger one are clipped after the optimizer's step, unless a scaler skipped that step.
        stop_on: a level of a finding that ends the training, after a checkpoint.
    """

    @checked_options
    def __init__(
        self,
        every: int | None = None,
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
    ) -> None:
        self.options = MonitorOptions(
            "HuggingFaceCallback", every, log, path, keep, layers, pictures, gradients, clip, stop_on, signs, heads
        )
        self.told: Told = {}
        self._monitor: Monitor | None = None
        self._trainer: Any = None

    @classmethod
    def attach(cls, trainer: Any, **options: Any) -> HuggingFaceCallback:
        """Make a callback and add it to a trainer. It then watches the model as it is wrapped, so that ranks are joined.

        The trainer's TensorBoard writer gets the numbers too.

        Args:
            trainer: a ``transformers.Trainer``.
            options: those of the class.
        """
        callback = cls(**options)
        trainer.add_callback(callback)
        callback._trainer = trainer
        return callback

    @property
    def record(self) -> Record:
        """What was measured in the present or the last training."""
        return Record() if self._monitor is None else self._monitor.record

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        self.close()
        watched = model if self._trainer is None else self._trainer.model_wrapped
        every = self.options.every or max(1, int(getattr(state, "logging_steps", 0) or 1))
        options = MonitorOptions(**{**self._given(), "every": every})
        self._monitor = Monitor(watched, options, state.global_step + 1, self.told)
        self._monitor.add_targets(self._found())
        self._monitor.__enter__()
        if self._trainer is None and are_many() and _is_inside(watched, args):
            logger.warning(
                "attemper: a callback is given the model inside DistributedDataParallel, so that numbers are those of rank 0. "
                "Use HuggingFaceCallback.attach(trainer, …) to join all ranks."
            )
        self._monitor.pause()

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self._monitor is not None:
            self._monitor.resume()

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **rest: Any) -> None:
        if self._monitor is None:
            return
        self._monitor.pause()
        self._monitor.optimizer = optimizer
        self._monitor.step(state.global_step, may_clip=not getattr(optimizer, "step_was_skipped", False))
        if self._monitor.should_stop:
            control.should_training_stop = control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        found = {name: logs[name] for name in KEPT if isinstance((logs or {}).get(name), (int, float))}
        if self._monitor is not None and found:
            self._monitor.log(found, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self._monitor is not None:
            self._monitor.resume()
            self._monitor.__exit__(None, None, None)

    def close(self) -> None:
        """Detach from the model, also after an error."""
        if self._monitor is not None:
            self._monitor.close()

    def __enter__(self) -> HuggingFaceCallback:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self.close()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the options that are plain, and what was told."""
        plain = {name: value for name, value in self._given().items() if name not in ("where", "log")}
        plain["path"] = None if self.options.path is None else str(self.options.path)
        return {"args": plain, "attributes": {"told": self.told}}

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in MonitorOptions.__dataclass_fields__}

    def _found(self) -> list[LogTarget]:
        """Where numbers go besides ``log``."""
        writers = [] if self._trainer is None else self._trainer.callback_handler.callbacks
        found = [target(one.tb_writer) for one in writers if getattr(one, "tb_writer", None) is not None]
        if self.options.log is None:
            found += open_runs()
        if self.options.log is None and not found and self.options.path is None:
            logger.warning(
                "attemper: HuggingFaceCallback() found no open run, so numbers go nowhere; alerts are shown here. Give it "
                "log=, such as a function (metrics, step), or path='run.jsonl'. For the trainer's TensorBoard, use "
                "HuggingFaceCallback.attach(trainer) instead."
            )
        return found


def _is_inside(model: Any, args: Any) -> bool:
    """Whether a wrapper around the model may hold the ranks; with tensor parallelism and DeepSpeed there is none that does."""
    ranks = Ranks(model)
    return not ranks.groups and not ranks.tensor_parallel and not getattr(args, "deepspeed", None)
