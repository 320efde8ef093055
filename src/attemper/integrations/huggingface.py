"""HuggingFaceCallback: a watch inside transformers.Trainer, and what is built on it (trl, axolotl, sentence-transformers).

Passes count between on_step_begin and on_step_end; evaluation, saving and logging run outside. Steps have the numbers of
``state.global_step``, which the loss is logged with.
"""

from __future__ import annotations

import contextlib
from dataclasses import fields
from typing import Any

from .. import _files
from ..watch.examine import Ranks, are_many
from .loggers import Logger, as_logger, logger, open_runs
from .monitoring import MonitorCallback

_callbacks = _files.load("HuggingFaceCallback", "transformers.trainer_callback", "hf")
RECORDED = ("loss", "eval_loss", "grad_norm", "learning_rate")  # numbers of the trainer that go into the record


class HuggingFaceCallback(MonitorCallback, _callbacks.TrainerCallback, _callbacks.ExportableState):  # type: ignore[misc, name-defined]
    """Watch the attention of a model while ``transformers.Trainer`` trains it: ``Trainer(…, callbacks=[HuggingFaceCallback()])``.

    The options are those of :func:`monitor`, but for the three below. If the training ends in an error, transformers does not
    tell its callbacks: use ``with HuggingFaceCallback(…) as callback:`` around it, or call ``callback.close()``; otherwise the
    watch ends when the trainer is deleted or trains again. No head is clipped after a step that a scaler skipped.

    Args:
        every: measure steps whose number is a multiple of it; None is ``logging_steps`` of the trainer.
        log: as in ``monitor()``. None: the runs of W&B, trackio and MLflow that are open when the training begins.
        stop_on: a level of a finding that ends the training, after a checkpoint.
    """

    _trainer: Any = None  # set by `attach`

    @classmethod
    def attach(cls, trainer: Any, **options: Any) -> HuggingFaceCallback:
        """Add a callback to a trainer. It watches the wrapped model, so that the ranks of a distributed run are joined.

        The trainer's TensorBoard writer gets the numbers too.

        Args:
            trainer: a ``transformers.Trainer``.
            options: those of the class.
        """
        callback = cls(**options)
        trainer.add_callback(callback)
        callback._trainer = trainer
        return callback

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        self.close()
        watched = model if self._trainer is None else self._trainer.model_wrapped
        every = int(getattr(state, "logging_steps", 0) or 1)
        monitor = self._open(watched, every, state.global_step + 1, self._other_loggers())
        if self._trainer is None and are_many() and _is_inside(watched, args):
            logger.warning(
                "attemper: transformers hands callbacks the model inside DistributedDataParallel, so the numbers are rank 0's. "
                "Use HuggingFaceCallback.attach(trainer, …) to join all ranks."
            )
        monitor.pause()

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
        numbers = {name: logs[name] for name in RECORDED if isinstance((logs or {}).get(name), (int, float))}
        if self._monitor is not None and numbers:
            self._monitor.log(numbers, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._end()

    def __enter__(self) -> HuggingFaceCallback:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self.close()

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the options that are plain data, and what was reported."""
        names = [field.name for field in fields(self.options) if field.name not in ("where", "log")]
        path = None if self.options.path is None else str(self.options.path)
        plain = {name: getattr(self.options, name) for name in names} | {"path": path}
        return {"args": plain, "attributes": {"alerted": self.alerted}}

    def _other_loggers(self) -> list[Logger]:
        """The loggers besides ``log``."""
        callbacks = [] if self._trainer is None else self._trainer.callback_handler.callbacks
        loggers = [
            as_logger(callback.tb_writer) for callback in callbacks if getattr(callback, "tb_writer", None) is not None
        ]
        if self.options.log is None:
            loggers += open_runs()
        if self.options.log is None and not loggers and self.options.path is None:
            logger.warning(
                "attemper: HuggingFaceCallback() found no open run, so no numbers are logged; alerts are shown here. Give it "
                "log=, such as a function (metrics, step), or path='run.jsonl'. For the trainer's TensorBoard, use "
                "HuggingFaceCallback.attach(trainer) instead."
            )
        return loggers


def _is_inside(model: Any, args: Any) -> bool:
    """Whether a wrapper around the model may join the ranks; with tensor parallelism and DeepSpeed none does."""
    ranks = Ranks(model)
    return not ranks.groups and not ranks.tensor_parallel and not getattr(args, "deepspeed", None)
