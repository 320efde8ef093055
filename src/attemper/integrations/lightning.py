"""LightningCallback: a watch inside the Trainer of Lightning (``lightning`` or ``pytorch_lightning``), manual optimization too.

Passes count from on_train_batch_start to on_train_batch_end; validation runs outside. A step ends with the batch after which
``trainer.global_step`` has grown: Lightning has no hook after the optimizer's step. Its number is the one that Lightning logs
losses with.
"""

from __future__ import annotations

import sys
from typing import Any

from .._files import installed
from ..errors import MissingExtra
from .loggers import as_logger
from .monitoring import MonitorCallback

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def _base() -> Any:
    """The class Callback of the package already imported, or else of the one installed."""
    for name in sorted(PACKAGES, key=lambda name: name not in sys.modules):
        module = installed("LightningCallback", PACKAGES[name])
        if module is not None:
            return module.Callback
    raise MissingExtra("LightningCallback needs Lightning. Type pip install lightning.")


class LightningCallback(MonitorCallback, _base()):  # type: ignore[misc]
    """Watch the attention of a model while Lightning trains it: ``Trainer(callbacks=[LightningCallback()])``.

    The options are those of :func:`monitor`, but for the three below.

    Args:
        every: measure steps whose number is a multiple of it; None is ``log_every_n_steps`` of the trainer.
        log: more loggers, as in ``monitor()``; the trainer's own get the numbers in any case.
        stop_on: a level of a finding that ends the training.
    """

    _steps = 0  # of the optimizer, that have ended

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.close()
        self._monitor = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._monitor is None:  # not earlier: a resumed run corrects its numbers when it fetches the first batch
            self._steps = trainer.global_step
            # DistributedDataParallel, whose ranks are joined, is around the module
            model = trainer.strategy.model if trainer.strategy.model is not None else pl_module
            loggers = [as_logger(logger) for logger in trainer.loggers]
            self._open(model, int(trainer.log_every_n_steps or 1), _number(trainer, 0), loggers)
        assert self._monitor is not None
        self._monitor.resume()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._monitor is None:
            return
        self._monitor.pause()
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            logged = {} if loss is None else {"loss": loss.detach()}
            self._monitor.optimizer = list(trainer.optimizers)
            self._monitor.step(_number(trainer, 1), **logged)
            trainer.should_stop = trainer.should_stop or self._monitor.should_stop

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: what was reported, so that a resumed run does not report it again."""
        return {"alerted": dict(self.alerted)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.alerted.update(state_dict["alerted"])


def _number(trainer: Any, stepped: int) -> int:
    """The step that Lightning logs losses with; several optimizers count as one. ``stepped``: 1 if it is not counted yet."""
    counted = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "_batches_that_stepped", None)
    return int(trainer.global_step - stepped if counted is None else counted)
