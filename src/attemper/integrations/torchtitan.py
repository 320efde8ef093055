"""AttentionMetrics: the watch in torchtitan, as the metrics of its trainer: ``metrics=AttentionMetrics.Config(log_freq=10)``.

torchtitan gives its metrics the optimizers and the model. It calls should_log() before each step, where the watch opens the first
time; a hook of the optimizers ends a step; log() adds these numbers to torchtitan's.

Tested with torchtitan 0.3.0: its metrics and optimizers, in the order of its trainer's step, on a CPU. `make integrations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import _files
from ..errors import MissingExtra
from .monitoring import Monitor, MonitorOptions

_metrics = _files.installed("AttentionMetrics", "torchtitan.components.metrics")
if _metrics is None:
    raise MissingExtra("AttentionMetrics needs torchtitan. Type pip install torchtitan.")


class AttentionMetrics(_metrics.MetricsProcessor):  # type: ignore[misc, name-defined]
    """torchtitan's metrics, and those of :func:`monitor`, of the steps that are both logged and measured.

    Attention is measured in torch's SDPA and ``varlen_attn``, not in ``flex_attention``. In a measured step a compiled model runs
    eagerly; a model inside a CUDA graph cannot be watched, so set ``training.disable_cuda_graphs``. With pipeline stages, the
    numbers are those of the stages of the rank that logs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_metrics.MetricsProcessor.Config):  # type: ignore[misc, name-defined]
        attention_every: int = 0
        """Measure every n-th step; 0 is log_freq."""

        attention_path: str = ""
        """A .jsonl file for the whole record, every head of every measured step; "" for none."""

        attention_layers: bool = False
        """Whether the numbers of each layer are logged too."""

        attention_clip: float = 0.0
        """Clip heads with a larger logit, in measured steps; 0 for no clip."""

    def __init__(self, config: Any, **rest: Any) -> None:
        self.monitor: Monitor | None = None
        self.attention: dict[str, Any] = {}  # the numbers of the last step that was measured, and its number
        self.options = MonitorOptions(
            "AttentionMetrics",
            config.attention_every or config.log_freq,
            lambda metrics, number: self.attention.update(step=number, metrics=metrics),
            config.attention_path or None,
            layers=config.attention_layers,
            pictures=0,
            clip=config.attention_clip or None,
        )
        super().__init__(config, **rest)

    def should_log(self, step: int) -> bool:
        """Called before each step: only here the number of a resumed step is known, after the checkpoint is loaded."""
        if self.monitor is None and self.model_parts is not None:
            model = self.model_parts[0] if len(self.model_parts) == 1 else nn.ModuleList(self.model_parts)
            self.monitor = Monitor(model, self.options, step, optimizer=list(self.optimizers)).__enter__()
            self.optimizers.register_step_post_hook(self._stepped)
        self.step_of_monitor = step
        asked: bool = super().should_log(step)
        return asked

    def _stepped(self, *optimizer: Any) -> None:
        if self.monitor is not None:
            self.monitor.step(self.step_of_monitor)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        own: dict[str, float] = {}
        if self.monitor is not None:
            self.monitor.log({"loss": global_avg_loss, "grad_norm": grad_norm}, step)
            own = self.attention["metrics"] if self.attention.get("step") == step else own
        super().log(step, global_avg_loss, global_max_loss, grad_norm, {**(extra_metrics or {}), **own})

    def close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
        super().close()
