"""AttemperPlugin: the watch in axolotl, by its configuration alone.

    plugins:
      - attemper.integrations.axolotl.AttemperPlugin
    attemper:                       # the options of HuggingFaceCallback
      every: 10
      path: run.jsonl

Tested with axolotl 0.19.0: its plugin manager, and the merging of its configuration. `make integrations`.
"""

from __future__ import annotations

from typing import Any

from .. import _files
from ..errors import InputError, MissingExtra
from .huggingface import HuggingFaceCallback

_base = _files.installed("AttemperPlugin", "axolotl.integrations.base")
if _base is None:
    raise MissingExtra("AttemperPlugin needs axolotl. Type pip install axolotl.")
_pydantic = _files.installed("AttemperPlugin", "pydantic")  # which axolotl needs


class AttemperArgs(_pydantic.BaseModel):  # type: ignore[misc, name-defined]
    """What the plugin adds to the configuration."""

    attemper: dict[str, Any] | None = None


class AttemperPlugin(_base.BasePlugin):  # type: ignore[misc, name-defined]
    """Adds a :class:`HuggingFaceCallback` to the trainer that axolotl makes, whichever it is; ``callback`` has its record."""

    def __init__(self) -> None:
        super().__init__()
        self.callback: HuggingFaceCallback | None = None

    def get_input_args(self) -> str:
        return f"{__name__}.{AttemperArgs.__name__}"

    def register(self, cfg: Any) -> None:
        """Refuse wrong options before a model is loaded."""
        HuggingFaceCallback(**_options(cfg))

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        self.callback = HuggingFaceCallback.attach(trainer, **_options(cfg))

    def post_train(self, cfg: Any, model: Any) -> None:
        if self.callback is not None:
            self.callback.close()


def _options(cfg: Any) -> dict[str, Any]:
    options = cfg.get("attemper")
    if options is not None and not isinstance(options, dict):
        raise InputError(
            f"AttemperPlugin: `attemper` must hold options, such as `every: 10`; got {options!r}. Leave it out for the defaults."
        )
    return dict(options or {})
