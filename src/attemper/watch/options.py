"""Options: what watch() may be given, with a sentence for what it may not."""

from __future__ import annotations

from torch import nn

from ..errors import InputError
from .passes import KINDS


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise InputError(f"watch(): `model` must be a torch.nn.Module; got {kind}. Pass the model that you call.")
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise InputError(
            "watch(): nn.DataParallel runs copies of the model that cannot be named. Use DistributedDataParallel, or watch "
            "model.module on one device."
        )


def check_options(every: object, start: object, keep: object, passes: object, **flags: object) -> None:
    if not _is_whole(every, 1):
        raise InputError(f"watch(): `every` must be a whole number of steps, at least 1; got {every!r}. Use 1 for all.")
    if keep is not None and not _is_whole(keep, 1):
        raise InputError(
            f"watch(): `keep` must be a whole number of steps, at least 1; got {keep!r}. Leave it out for all."
        )
    if passes not in KINDS:
        raise InputError(
            f"watch(): `passes` must be 'training' or 'all'; got {passes!r}. Leave it out to count what trains."
        )
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(f"watch(): `{name}` must be True or False; got {flag!r}.")
    if not _is_whole(start, 0):
        raise InputError(
            f"watch(): `start` must be the number of a step, a whole number from 0 on; got {start!r}. "
            "Leave it out to begin at 0."
        )


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
