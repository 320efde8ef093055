"""LightningCallback: a watch inside the Trainer of Lightning (``lightning`` or ``pytorch_lightning``), manual optimization too.

Passes count from on_train_batch_start to on_train_batch_end; validation runs outside. A step ends with the batch after which
``trainer.global_step`` has grown: Lightning has no hook after the optimizer's step. Its number is the one that Lightning logs
losses with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .._files import installed
from ..errors import MissingExtra, checked_options
from ..watch import Record
from .monitoring import Monitor
from .numbers import HeadNumbers
from .options import MonitorOptions
from .targets import target
from .telling import Told

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def _base() -> Any:
    """The class Callback of the package that is imported already, or else of one that is installed."""
    for name in sorted(PACKAGES, key=lambda name: name not in sys.modules):
        found = installed("LightningCallback", PACKAGES[name])
        if found is not None:
            return found.Callback
    raise MissingExtra("LightningCallback needs Lightning. Type pip install lightning.")


class LightningCallback(_base()):  # type: ignore[misc]
    """Watch the attention of a model while Lightning trains it: ``Trainer(callbacks=[LightningCallback()])``.

    The options are those of :func:`monitor`. The numbers also go to the trainer's own loggers.

    Args:
        every: measure steps whose number is a multiple of it; None is ``log_every_n_steps`` of the trainer.
        log: more places for the numbers, as in ``monitor()``; the trainer's loggers get them in any case.
        path: a ``.jsonl`` file for the whole record.
        keep: how many measured steps ``record`` holds in memory.
        layers: also log three numbers of every layer, or its ``signs``.
        signs: which signs to log of every layer, or with ``heads`` of every head: ``"entropy"``, several, or ``"all"``.
        heads: also log every head: True for all, or the numbers of those of each layer, such as ``[0, 3]``.
        pictures: send an image with every n-th log; 0 for none.
        gradients: also measure |dq| and |dk|.
        clip: a logit; heads with a larger one are clipped after the optimizer's step.
        stop_on: a level of a finding that ends the training.
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
        super().__init__()
        self.options = MonitorOptions(
            "LightningCallback", every, log, path, keep, layers, pictures, gradients, clip, stop_on, signs, heads
        )
        self.told: Told = {}
        self._monitor: Monitor | None = None
        self._steps = 0  # of the optimizer, that were ended

    @property
    def record(self) -> Record:
        """What was measured in the present or the last training."""
        return Record() if self._monitor is None else self._monitor.record

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.close()
        self._monitor = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._monitor is None:  # not earlier: a resumed run corrects its numbers when it fetches the first batch
            self._open(trainer, pl_module)
        assert self._monitor is not None
        self._monitor.resume()

    def _open(self, trainer: Any, pl_module: Any) -> None:
        every = self.options.every or max(1, int(trainer.log_every_n_steps or 1))
        given = {name: getattr(self.options, name) for name in MonitorOptions.__dataclass_fields__}
        self._steps = trainer.global_step
        # DistributedDataParallel, whose ranks are joined, is around the module
        model = trainer.strategy.model if trainer.strategy.model is not None else pl_module
        self._monitor = Monitor(model, MonitorOptions(**{**given, "every": every}), _number(trainer, 0), self.told)
        self._monitor.add_targets([target(one) for one in trainer.loggers])
        self._monitor.__enter__()

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
        if self._monitor is not None:
            self._monitor.resume()
            self._monitor.__exit__(None, None, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.close()

    def close(self) -> None:
        """Detach from the model, also after an error."""
        if self._monitor is not None:
            self._monitor.close()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: what was told, so that a resumed run does not tell it again."""
        return {"told": dict(self.told)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.told.update(state_dict["told"])


def _number(trainer: Any, stepped: int) -> int:
    """The step that Lightning logs losses with; several optimizers count as one. ``stepped``: 1 if it is not counted yet."""
    counted = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "_batches_that_stepped", None)
    return int(trainer.global_step - stepped if counted is None else counted)
